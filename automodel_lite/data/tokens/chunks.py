"""Documents to token rows, a chunk of some hundred at a time: rendered, tokenized, masked and
checked, here or in as many processes as there are cores.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.context import BaseContext
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from automodel_lite.columns import COLUMNS, IGNORE_INDEX, Column, declared_columns
from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.cache import short_hash
from automodel_lite.data.document import Document, is_compared
from automodel_lite.data.reading.documents import DocumentSet
from automodel_lite.data.reading.readers import Placed, placed
from automodel_lite.data.tokens.decisions import DecisionStyle, numbered
from automodel_lite.data.tokens.encode import Encoder, Remarks, Renderer
from automodel_lite.data.tokens.findings import Chunk, Findings, check_rows
from automodel_lite.data.tokens.token_rows import ALONE, RowCounts, flatten, next_token_labels
from automodel_lite.errors import ConfigError, DataError, DroppedError

CHUNK_DOCUMENTS = 512
# a process takes about 2 s to start, in which it tokenizes about that many
MIN_DOCUMENTS_PER_PROCESS = 20_000
# a socket has a path of at most 107 bytes, of which multiprocessing takes about 32
MOST_SOCKET_FOLDER_BYTES = 70


@dataclass(frozen=True)
class TokenizeJob:
    """How the documents of a set are tokenized."""

    tokenizer: PreTrainedTokenizerFast
    settings: TokenizeConfig = field(default_factory=TokenizeConfig)
    tree: str = "auto"  # packed_sequence.tree: which rows may share their beginning
    most_tokens: int | None = None  # of a pack, which no tree exceeds; None = any
    separates: bool = False  # rows of a tree share no label, as the loss takes them whole
    mismatches: bool = False  # judged answers come with those of other rows, as the loss asks for
    decisions: DecisionStyle = field(default_factory=DecisionStyle)
    scores: bool = False  # a document has one label, for a score head
    reads_images: ClassVar[bool] = False

    def renderer(self) -> Renderer:
        """Makes what renders documents; a subclass's own reads more than text."""
        settings = self.settings
        kwargs = settings.template_kwargs
        return Renderer(
            self.tokenizer,
            settings.train_on,
            kwargs,
            self.mismatches,
            self.decisions,
            self.scores,
        )

    def encoder(self) -> Encoder:
        """Makes what tokenizes renderings."""
        return Encoder(self.tokenizer)


def tokenize_chunks(rows: DocumentSet, job: TokenizeJob, documents: range) -> Iterator[Chunk]:
    """Yields the chunks of some documents of `rows`, from a chunk's first on, in order,
    whatever the number of processes.

    Small sets are tokenized here, where the tokenizer's own threads use all cores; large ones in
    processes of one thread each, which render chat templates (Python) on all cores too.
    """
    ranges = [
        range(start, min(start + CHUNK_DOCUMENTS, documents.stop))
        for start in range(documents.start, documents.stop, CHUNK_DOCUMENTS)
    ]
    num_proc = job.settings.num_proc or min(
        len(os.sched_getaffinity(0)), len(documents) // MIN_DOCUMENTS_PER_PROCESS
    )
    if num_proc <= 1:
        tokenizer = DocumentTokenizer(job)
        yield from (tokenizer.chunk(placed(rows, wanted), wanted.start) for wanted in ranges)
        return
    pool = ProcessPoolExecutor(num_proc, _process_context(), _start_process, (rows, job, COLUMNS))
    try:
        submitted = (pool.submit(_chunk_in_process, wanted) for wanted in ranges)
        pending = deque(islice(submitted, 4 * num_proc))
        while pending:
            yield pending.popleft().result()
            pending.extend(islice(submitted, 1))
    except BrokenProcessPool as error:
        raise ConfigError(
            f"tokenize.num_proc={num_proc}: a worker was killed, probably out of memory: lower "
            "tokenize.num_proc."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _process_context() -> BaseContext:
    """Processes of a fork server, which has imported what each new interpreter takes 4 CPU-s for.
    Its socket is in the folder for temporary files: where that path is too long for one, new
    interpreters.
    """
    fits_socket = len(os.fsencode(tempfile.gettempdir())) <= MOST_SOCKET_FOLDER_BYTES
    context = get_context("forkserver" if fits_socket else "spawn")
    context.set_forkserver_preload(["__main__", __name__])
    return context


@dataclass(frozen=True)
class BadRow:
    """A document that cannot be trained on."""

    place: str  # train.jsonl:17
    why: DataError  # names the place
    is_dropped: bool  # left out and counted, whatever tokenize.on_bad_row says


@dataclass
class _Gathered:
    """What the documents of a chunk became, as lists that grow together."""

    num_rows: list[int] = field(default_factory=list)  # of each document, 0 of a bad one
    rows: list[Any] = field(default_factory=list)  # given token rows, or renderings
    groups: list[int] = field(default_factory=list)  # of each row
    num_split: int = 0
    errors: list[str] = field(default_factory=list)
    num_noted: Counter[str] = field(default_factory=Counter)
    first_noted: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)  # column or key -> its first place

    def add_bad(self, bad: BadRow) -> None:
        self.errors.append(bad.why.left_out())
        self.num_rows.append(0)

    def add(
        self, place: str, document: Document, rows: list[Any], group: int, remarks: Remarks | None
    ) -> None:
        """Adds the rows of one document; remarks are of what was rendered, None of given ids."""
        self.num_rows.append(len(rows))
        self.rows += rows
        self.groups += [group] * len(rows)
        unused = list(remarks.unused) if remarks else []
        if is_compared(document) and document.get("group") is not None:
            unused.append("group")  # compared with each other, and with no third
        for name in unused:
            self.unused.setdefault(name, place)
        if remarks is None:
            return
        # More rows than answers: the template rewrites earlier turns.
        num_answers = len(document.get("documents", [document])) + is_compared(document)
        self.num_split += len(rows) > num_answers
        for kind, what in remarks.noted.items():
            if what:
                self.num_noted[kind] += 1
                self.first_noted.setdefault(kind, f"{place}: {what}")

    def found(self) -> Findings:
        """Returns the counts, and the first example of each."""
        counts = RowCounts(
            len(self.num_rows),
            num_bad=len(self.errors),
            num_split_chats=self.num_split,
        )
        return Findings(
            counts,
            first_error="".join(self.errors[:1]),
            num_noted=dict(self.num_noted),
            first_noted=self.first_noted,
            unused=self.unused,
        )


class DocumentTokenizer:
    """Makes token rows of documents, a chunk of them at a time: of files, of streams and of lists
    alike.
    """

    def __init__(self, job: TokenizeJob):
        self._settings = job.settings
        self._scores = job.scores
        self._renderer = job.renderer()
        self._encoder = job.encoder()
        self._vocab_size = len(job.tokenizer)

    def chunk(self, documents: Iterable[Placed], first: int = 0) -> Chunk:
        """Returns the token rows of some documents, which are number `first` and following of their
        set.

        Raises DataError: a bad row, unless they are skipped.
        """
        gathered = self._gather(documents, first)
        rows = gathered.rows
        if rows and isinstance(rows[0], dict):
            # given token ids: no document of a set is text beside them
            flat = flatten([{name: d[name] for name in COLUMNS if name in d} for d in rows])
            columns = flat.columns
            lengths = flat.lengths
        else:
            columns, lengths = self._encoder.encode(rows)
        is_shared = not set(gathered.groups) <= {ALONE}
        groups = np.array(gathered.groups, np.int64) if is_shared else None
        stop_ids = self._renderer.stop_ids
        return check_rows(columns, lengths, gathered.num_rows, stop_ids, gathered.found(), groups)

    def _gather(self, documents: Iterable[Placed], first: int) -> _Gathered:
        """Returns the rows and renderings of some documents, before those without a label are left
        out.
        """
        gathered = _Gathered()
        with stall_report() as places:
            for number, (place, document) in enumerate(documents, start=first):
                places[-1] = place
                rows = self._rows_or_bad(place, document, number)
                if isinstance(rows, BadRow):
                    if self._settings.on_bad_row == "error" and not rows.is_dropped:
                        raise rows.why
                    gathered.add_bad(rows)
                    continue
                assert not isinstance(document, DataError)
                is_given = "input_ids" in document.get("documents", [document])[0]
                remarks = None if is_given else self._renderer.remarks(document, rows)
                group = _group_of(document, number, len(rows))
                gathered.add(place, document, rows, group, remarks)
        return gathered

    def _rows_or_bad(
        self, place: str, document: Document | DataError, number: int
    ) -> list[Any] | BadRow:
        """Returns the token rows that a document brings, or else its renderings; or why there are
        none.
        """
        # An error of reading has named its place; one of rendering knows what is wrong alone.
        if isinstance(document, DataError):
            return BadRow(place, document, isinstance(document, DroppedError))
        try:
            return self._rows_of(document, number)
        except DataError as error:
            named = error.at(place)
            named.__cause__ = error
            return BadRow(place, named, isinstance(error, DroppedError))

    def _rows_of(self, document: Document, number: int) -> list[Any]:
        """Returns the token rows that a document brings, or else its renderings; raises DataError
        for one that is bad in any part.
        """
        parts = document.get("documents", [document])
        if "input_ids" not in parts[0]:
            return [numbered(x, number) for x in self._renderer.renderings(document)]
        if self._scores:
            raise ConfigError(
                "the rows are token ids, and a score head learns the label of a text or a chat",
                key="dataset.path",
                cure="bring the texts, dataset.format=labeled",
            )
        given = [_given_tokens(x, self._settings.train_on, self._vocab_size) for x in parts]
        return [_with_row(row, number, document.get("group")) for row in given]


STALL_S = 20.0  # a chat takes a template some 0.0002 s


@contextmanager
def stall_report() -> Iterator[list[str]]:
    """Names the row, the last in the list, that a chat template stays with: templates may loop for
    ever.
    """
    places = [""]
    is_over = threading.Event()

    def watch() -> None:
        seen = ""
        while not is_over.wait(STALL_S):
            if places[-1] == seen:
                print(
                    f"WARNING: {seen} has been with the chat template for {STALL_S:.0f} s: does "
                    "the template (tokenizer.chat_template) contain nested loops?",
                    file=sys.stderr,
                    flush=True,
                )
            seen = places[-1]

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield places
    finally:
        is_over.set()


def _with_row(document: Document, number: int, group: object) -> Document:
    """Adds which row it is and of which group, where the loss asks for it and the row brings its
    columns: at labels alone, so that rows may still share their beginning.
    """
    own = declared_columns()
    if not any(name in document for name in own):
        return document
    is_label = document["labels"] != IGNORE_INDEX
    of_group = 0 if group is None else 1 + int(short_hash(str(group)), 16) % 2**61
    added = {}
    for name in own:
        column = COLUMNS[name]
        known = {"number": number + 1, "group": of_group, "value": document.get(name)}
        if (value := known.get(column.of_row)) is not None:
            added[name] = np.where(is_label, value, column.padding).astype(column.stored)
    return document | added


def _group_of(document: Document, number: int, num_rows: int) -> int:
    """Whose rows are those of document `number`: a group that it names, or its own where they are
    several. Rows of a given pack are of any sources.
    """
    named = document.get("group")
    if named is not None and not is_compared(document):
        # far beyond the numbers of documents
        return int(short_hash(str(named)), 16) % 2**61 + 2**61
    is_given = "input_ids" in document.get("documents", [document])[0]
    return ALONE if is_given or num_rows == 1 else number


def _given_tokens(document: Document, train_on: str, vocab_size: int) -> Document:
    """Checks token ids that were given, and gives them labels where all is trained on."""
    input_ids = document["input_ids"]
    if len(input_ids) and not 0 <= input_ids.min() <= input_ids.max() < vocab_size:
        raise DataError(
            f"column input_ids holds ids from {input_ids.min()} to {input_ids.max()}, and the "
            f"tokenizer has ids from 0 to {vocab_size - 1}: they were made with another tokenizer: "
            "set tokenizer.path to it."
        )
    if train_on == "all":
        length = len(input_ids)
        labels = next_token_labels(input_ids, np.ones(length, bool), np.array([length]))
        return document | {"labels": labels}
    if document["labels"] is None:
        raise DataError("has input_ids without labels: set train_on=all to train on every token.")
    return document


_worker: tuple[DocumentSet, DocumentTokenizer]


def _start_process(rows: DocumentSet, job: TokenizeJob, columns: Mapping[str, Column]) -> None:
    global _worker
    COLUMNS.update(columns)  # a process that has not imported the loss
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker = rows, DocumentTokenizer(job)


def _leave_with_parent() -> None:
    """Ends a process whose parent was killed: it would wait for work for ever."""
    parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


def _chunk_in_process(wanted: range) -> Chunk:
    rows, tokenizer = _worker
    return tokenizer.chunk(placed(rows, wanted), wanted.start)
