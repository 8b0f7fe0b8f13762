"""The work of tokenizing, a thousand documents at a time, here or in as many processes as there are cores.

Documents to token rows, once: rendered, tokenized, masked, checked, counted and kept in the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from automodel_lite.config.components import build_with
from automodel_lite.config.schema import Config, TokenizeConfig
from automodel_lite.data.cache import (
    CacheEntry,
    Key,
    build_once,
    cache_root,
    entry_folder,
    find_damage,
    short_hash,
)
from automodel_lite.data.reading.documents import Document, Documents, DocumentSet
from automodel_lite.data.tokens.encode import Encoder, Renderer, Rendering
from automodel_lite.data.tokens.findings import Chunk, Findings, check_rows, check_set
from automodel_lite.data.tokens.token_rows import (
    CONTENT_HASH,
    RowCounts,
    RowDataset,
    Rows,
    RowsWriter,
    TokenizedData,
    TokenRows,
    flatten,
    load_rows,
    next_token_labels,
)
from automodel_lite.data.tokens.trees import ALONE, load_trees, write_trees
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.progress import Progress
from automodel_lite.thd import COLUMNS, IGNORE_INDEX

CHUNK_DOCUMENTS = 512
MIN_DOCUMENTS_PER_PROCESS = 20_000  # a process takes about 2 s to start, in which it tokenizes about that many
MOST_SOCKET_FOLDER_BYTES = 70  # a socket has a path of at most 107 bytes, of which multiprocessing takes about 32


@dataclass(frozen=True)
class Job:
    """How the documents of a set are tokenized."""

    tokenizer: PreTrainedTokenizerFast
    settings: TokenizeConfig = field(default_factory=TokenizeConfig)
    tree: str = "auto"  # packed_sequence.tree: which rows may share their beginning
    most_tokens: int | None = None  # of a pack, which no tree exceeds; None = any

    def documents(self, rows: DocumentSet) -> range:
        """Those of the shard, or all."""
        shard, num_shards = self.settings.shard, self.settings.num_shards
        if shard is None:
            return range(len(rows))
        return range(len(rows) * shard // num_shards, len(rows) * (shard + 1) // num_shards)

    def renderer(self) -> Renderer:
        return Renderer(self.tokenizer, self.settings.train_on, self.settings.template_kwargs)


def tokenize_chunks(rows: DocumentSet, job: Job) -> Iterator[Chunk]:
    """Yields the chunks of `rows` in order, whatever the number of processes.

    Small sets are tokenized here, where the tokenizer's own threads use all cores; large ones in processes of one
    thread each, which render chat templates (Python) on all cores too.
    """
    all_wanted = job.documents(rows)
    ranges = [all_wanted[start : start + CHUNK_DOCUMENTS] for start in range(0, len(all_wanted), CHUNK_DOCUMENTS)]
    num_proc = job.settings.num_proc or min(num_cores(), len(all_wanted) // MIN_DOCUMENTS_PER_PROCESS)
    if num_proc <= 1:
        yield from _chunks_in_threads(rows, DocumentTokenizer(job), ranges)
        return
    pool = ProcessPoolExecutor(num_proc, _process_context(), _start_process, (rows, job))
    try:
        waiting = iter(ranges)
        pending = deque(pool.submit(_chunk_in_process, wanted) for wanted in islice(waiting, 4 * num_proc))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(_chunk_in_process, wanted) for wanted in islice(waiting, 1))
    except BrokenProcessPool as error:
        raise ConfigError(
            f"tokenize.num_proc={num_proc}: a worker was killed, probably out of memory: lower tokenize.num_proc."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _process_context() -> BaseContext:
    """Processes of a fork server, which has imported what each new interpreter takes 4 CPU-s for. Its socket is in the
    folder for temporary files: where that path is too long for one, new interpreters.
    """
    if len(os.fsencode(tempfile.gettempdir())) > MOST_SOCKET_FOLDER_BYTES:
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["__main__", __name__])
    return context


def _chunks_in_threads(rows: DocumentSet, worker: DocumentTokenizer, ranges: Sequence[range]) -> Iterator[Chunk]:
    """Renders a chunk (Python) while the one before it is tokenized (Rust, outside the interpreter's lock)."""
    with ThreadPoolExecutor(1) as encoder:
        pending: Future[Chunk] | None = None
        for wanted in ranges:
            rendered = worker.render(placed(rows, wanted), wanted.start)
            if pending is not None:
                yield pending.result()
            pending = encoder.submit(worker.encode, rendered)
        if pending is not None:
            yield pending.result()


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


Placed = tuple[str, Document | DataError]
"""A document, or the error that reading it raised, and its place."""


def placed(rows: DocumentSet, wanted: range) -> Iterator[Placed]:
    """Yields some documents of a set with their places."""
    for index in wanted:
        try:
            yield rows.where(index), rows[index]
        except DataError as error:
            yield rows.where(index), error


@dataclass
class Rendered:
    """What was read of some documents: renderings, or token ids that were given.

    num_rows   rows that each document becomes, before those without a label are left out
    """

    num_rows: list[int] = field(default_factory=list)
    renderings: list[Rendering] = field(default_factory=list)
    tokens: list[Document] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # of each rendering, or document of tokens
    found: Findings = field(default_factory=Findings)


class DocumentTokenizer:
    """Makes token rows of documents, a chunk of them at a time: of files, of streams and of lists alike."""

    def __init__(self, job: Job):
        self._job = job
        self._renderer = job.renderer()
        self._encoder = Encoder(job.tokenizer)
        self._vocab_size = len(job.tokenizer)

    def chunk(self, documents: Iterable[Placed], first: int = 0) -> Chunk:
        """Returns the token rows of some documents, which are number `first` and following of their set."""
        return self.encode(self.render(documents, first))

    def render(self, documents: Iterable[Placed], first: int = 0) -> Rendered:
        """Reads and renders documents.

        Raises:
            DataError: a bad row, unless they are skipped.
        """
        rendered = Rendered()
        errors, num_split, num_special, special = [], 0, 0, ""
        with StallReport() as stall:
            for number, (place, document) in enumerate(documents, start=first):
                stall.place = place
                num_rows = 0
                try:
                    if isinstance(document, DataError):
                        raise document
                    num_rows = self._render(document, rendered)
                    is_tokens = "input_ids" in document
                    rendered.groups += [_group(document, number)] * (1 if is_tokens else max(1, num_rows))
                    is_split = not is_tokens and num_rows > len(document.get("documents", [document]))
                    num_split += is_split and not rendered.renderings[-1].answer
                    if token := self._renderer.special_in(document):
                        num_special, special = num_special + 1, special or f"{place}: {token}"
                except DataError as error:
                    named = error if error is document else DataError(f"{place}: {error}")
                    if self._job.settings.on_bad_row == "error":
                        raise named from error
                    errors.append(str(named))
                rendered.num_rows.append(num_rows)
        counts = RowCounts(len(rendered.num_rows), num_bad=len(errors), num_split_chats=num_split)
        counts = replace(counts, num_with_special_tokens=num_special)
        rendered.found = Findings(counts, first_error=next(iter(errors), ""), first_special=special)
        return rendered

    def _render(self, document: Document, rendered: Rendered) -> int:
        """Adds a document to what was rendered; returns the number of its rows."""
        if "input_ids" in document:
            rendered.tokens.append(_given_tokens(document, self._job.settings.train_on, self._vocab_size))
            return len(document["lengths"])
        renderings = self._renderer.renderings(document)
        rendered.renderings += renderings
        return len(renderings)

    def encode(self, rendered: Rendered) -> Chunk:
        """Tokenizes what was rendered."""
        if rendered.tokens:
            given = flatten({name: d[name] for name in COLUMNS if name in d} for d in rendered.tokens)
            columns = dict(given.columns)
            lengths = np.array([n for document in rendered.tokens for n in document["lengths"]], np.int64)
        else:
            encoded = self._encoder.encode(rendered.renderings)
            columns, lengths = {"input_ids": encoded.input_ids, "labels": encoded.labels}, encoded.lengths
            answers = np.array([rendering.answer for rendering in rendered.renderings], np.int8)
            if answers.any():
                columns["answers"] = np.where(encoded.labels == IGNORE_INDEX, 0, answers.repeat(lengths))
        groups = np.array(rendered.groups, np.int64)
        if rendered.tokens:  # what was packed before holds documents of any sources
            groups = groups.repeat([len(document["lengths"]) for document in rendered.tokens])
        return check_rows(columns, lengths, rendered.num_rows, self._renderer.stop_ids, rendered.found, groups)


def _group(document: Document, index: int) -> int:
    """The number of a document, or of what its column `group` names, far beyond those of documents."""
    if document.get("group") is None:
        return index if len(document.get("lengths", [1])) == 1 else ALONE
    return int(short_hash(str(document["group"])), 16) % 2**61 + 2**61


STALL_S = 20.0  # a chat takes a template some 0.0002 s


class StallReport:
    """Says which row a chat template is at when it stays there: templates may hold loops that never end."""

    def __init__(self) -> None:
        self.place = ""
        self._seen = ""
        self._stop = threading.Event()

    def __enter__(self) -> StallReport:
        self._timer = threading.Timer(STALL_S, self._look)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._timer.cancel()

    def _look(self) -> None:
        """Compares the place with the one of the look before."""
        while not self._stop.is_set():
            if self.place == self._seen:
                print(
                    f"WARNING: {self.place} has been with the chat template for {STALL_S:.0f} s: does the template "
                    "(tokenizer.chat_template) contain nested loops?",
                    file=sys.stderr,
                    flush=True,
                )
            self._seen = self.place
            self._stop.wait(STALL_S)


def _given_tokens(document: Document, train_on: str, vocab_size: int) -> Document:
    """Checks token ids that were given, and gives them labels where all is trained on."""
    input_ids = document["input_ids"]
    if len(input_ids) and not 0 <= input_ids.min() <= input_ids.max() < vocab_size:
        raise DataError(
            f"column input_ids holds ids from {input_ids.min()} to {input_ids.max()}, and the tokenizer has ids from 0 "
            f"to {vocab_size - 1}: they were made with another tokenizer: set tokenizer.path to it."
        )
    if train_on == "all":
        lengths = np.array(document["lengths"], np.int64)
        return {**document, "labels": next_token_labels(input_ids, np.ones(len(input_ids), bool), lengths)}
    if document["labels"] is None:
        raise DataError("has input_ids without labels: set train_on=all to train on every token.")
    return document


_worker: tuple[DocumentSet, DocumentTokenizer]


def _start_process(rows: DocumentSet, job: Job) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = rows, DocumentTokenizer(job)


def _chunk_in_process(wanted: range) -> Chunk:
    rows, tokenizer = _worker
    return tokenizer.chunk(placed(rows, wanted), wanted.start)


def job_of(config: Config, documents: Documents, tree: str = "off", most_tokens: int | None = None) -> Job:
    """The job of a run, whose tokenizer may be trained on its documents; `tree` and `most_tokens` are the packer's."""
    tokenizer = build_with(config.tokenizer, documents=documents, cache_dir=config.cache_dir)
    return Job(tokenizer, config.tokenize, tree, most_tokens)


RULES_VERSION = "5"  # of rendering, masking and files; raised when the same input gives other rows, or other files


def tokenize_documents(documents: Documents, job: Job, cache_dir: str | Path | None = None) -> TokenizedData:
    """Tokenizes a dataset, or takes it from the cache; any number of processes may call it at once.

    The datasets of a mixture are tokenized one by one, then mixed; a memory-mapped corpus is taken as it is. The shards
    that `tokenize_shard` left are put together. cache_dir: default `$AUTOMODEL_LITE_CACHE`, else
    `~/.cache/automodel_lite`.

    Raises:
        DataError: a bad row (names file, line and column), or a set in which nothing, or everything, is trained on, or
            whose answers do not end on a trained stop token (shows an example).
        ConfigError: a shard is missing (names its number).
    """
    if job.settings.shard is not None:
        raise ConfigError(f"tokenize.shard={job.settings.shard} is only for recipes/prepare_data.py: remove it.")
    return _tokenize(documents, job, cache_root(cache_dir))


def tokenize_shard(
    documents: Documents, job: Job, cache_dir: str | Path | None = None
) -> tuple[tuple[str, ...], list[int]]:
    """Tokenizes the job's shard of every set into the cache: notes to print, and the shards that are still missing.

    Any number of tasks on any hosts may do so at once, and again: what is there is not made a second time.
    """
    root = cache_root(cache_dir)
    sets = list(_sets_of(documents, job, root))
    entries = {
        f"{one.identity.partition('(')[0]} {one.name}": one.tokenized(job.settings.shard)
        for one in sets
        if not one.folder().is_dir()
    }
    missing = {
        shard for one in sets for shard in range(job.settings.num_shards) if not one.folder(shard).is_dir()
    }  # all are done
    done = all(one.folder().is_dir() for one in sets)  # asked last: shards go when they are joined
    return _notes(entries), [] if done else sorted(missing)


def tokenize_in_memory(rows: DocumentSet, job: Job) -> TokenRows:
    """Token rows of a set that need no cache; checked as those of a file are."""
    chunks = list(tokenize_chunks(rows, job))
    check_set("train", "messages", sum((chunk.found for chunk in chunks), Findings()), job.settings, job.tokenizer)
    columns = flatten(chunk.columns for chunk in chunks).columns
    lengths = np.concatenate([chunk.lengths for chunk in chunks])
    return TokenRows(columns, np.concatenate([[0], np.cumsum(lengths)]))


def tokenize_validation(
    stream: Documents, job: Job, cache_dir: str | Path | None = None
) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """The validation sets of a stream, which are tokenized beforehand as any others, and notes to print."""
    root = cache_root(cache_dir)
    sets = {
        name: _Set(name, f"{stream.identity} val", stream.kind, rows, job, root) for name, rows in stream.val.items()
    }
    entries = {name: one.tokenized() for name, one in sets.items()}
    return {name: load_trees(entry.folder, job.most_tokens) for name, entry in entries.items()}, _notes(entries)


def _tokenize(documents: Documents, job: Job, cache_dir: Path) -> TokenizedData:
    if isinstance(documents, RowDataset):
        datasets = {name: _tokenize(dataset, job, cache_dir) for name, dataset in documents.datasets.items()}
        return documents.tokenized(datasets, len(job.tokenizer))
    entries = {one.name: one.tokenized() for one in _sets_of(documents, job, cache_dir)}
    rows = {name: load_trees(entry.folder, job.most_tokens) for name, entry in entries.items()}
    return TokenizedData(
        train=rows["train"],
        val={name.removeprefix("val/"): of_set for name, of_set in rows.items() if name != "train"},
        counts={name: _read_counts(entry) for name, entry in entries.items()},
        notes=(*_notes(entries), *(f"{name}: {of_set.note}" for name, of_set in rows.items() if of_set.note)),
        fingerprint=(entries["train"].folder / CONTENT_HASH).read_text()[:16],
    )


def _sets_of(documents: Documents, job: Job, cache_dir: Path) -> Iterator[_Set]:
    """What is to be tokenized: the training documents and every validation set, of each dataset of a mixture."""
    if isinstance(documents, RowDataset):
        for dataset in documents.datasets.values():
            yield from _sets_of(dataset, job, cache_dir)
        return
    sets = {"train": documents.train} | {f"val/{name}": rows for name, rows in documents.val.items()}
    for name, rows in sets.items():
        yield _Set(name, documents.identity, documents.kind, rows, job, cache_dir)


@dataclass(frozen=True)
class _Set:
    """One set of documents, tokenized whole or in shards: every shard is an entry of the cache until all are joined."""

    name: str
    identity: str
    kind: str
    rows: DocumentSet
    job: Job
    cache_dir: Path

    def folder(self, shard: int | None = None) -> Path:
        """Where the set, or a shard of it, is or will be."""
        return entry_folder(self.cache_dir, *self._entry(shard))

    def _entry(self, shard: int | None) -> tuple[str, str, Key]:
        name, key = f"{self.identity.split('(')[0]}-{self.name}", _key(self.identity, self.job) | {"set": self.name}
        if shard is None:
            return "tokens", name, key
        return "tokens", f"{name}-part", key | {"part": f"{shard} of {self.job.settings.num_shards}"}

    def tokenized(self, shard: int | None = None) -> CacheEntry:
        """The entry of the set, or of a shard of it; tokenizes, or joins, what is not there."""
        if shard is not None or self.job.settings.num_shards == 1:
            return build_once(self.cache_dir, *self._entry(shard), self._tokenize)
        entry = build_once(self.cache_dir, *self._entry(None), self._join)
        for joined in map(self.folder, range(self.job.settings.num_shards)):
            shutil.rmtree(joined, ignore_errors=True)
        return entry

    def _tokenize(self, folder: Path) -> None:
        """Writes rows and findings; a shard is judged where it is joined."""
        writer, found = RowsWriter(folder), Findings()
        with Progress(f"tokenizing {self.name}", len(self.job.documents(self.rows)), "documents") as progress:
            for chunk in tokenize_chunks(self.rows, self.job):
                progress.add(chunk.found.counts.num_documents)
                writer.append(chunk.columns, chunk.lengths, chunk.groups)
                found += chunk.found
        writer.close()
        if self.job.settings.shard is None:
            self._check(found)
            found += Findings(write_trees(folder, self.job.tree))
        found.save(folder)

    def _join(self, folder: Path) -> None:
        shards = list(map(self.folder, range(self.job.settings.num_shards)))
        missing = [str(number) for number, shard in enumerate(shards) if find_damage(shard) is not None]
        if missing:
            tasks = ",".join(missing)
            raise ConfigError(
                f"tokenize.num_shards={len(shards)}: {self.name} lacks shard {tasks} in cache_dir="
                f"{self.cache_dir}: run this task of the array again (sbatch --array={tasks}), or "
                f"recipes/prepare_data.py with tokenize.shard={missing[0]}."
            )
        writer = RowsWriter(folder)
        for shard in shards:
            writer.append_rows(load_rows(shard))
        writer.close()
        found = sum(map(Findings.load, shards), Findings())
        self._check(found)
        found += Findings(write_trees(folder, self.job.tree))
        found.save(folder)

    def _check(self, found: Findings) -> None:
        check_set(self.name, self.kind, found, self.job.settings, self.job.tokenizer)


def _notes(entries: Mapping[str, CacheEntry]) -> tuple[str, ...]:
    found = {name: Findings.load(entry.folder) for name, entry in entries.items()}
    lines = [f"{name}: {found[name].counts} · cache: {entry.note}" for name, entry in entries.items()]
    return (*lines, *(note for name in entries for note in special_note(name, found[name])))


def special_note(name: str, found: Findings) -> list[str]:
    """Returns a note on special tokens that stand in the text of documents, where a template writes its own."""
    if not (num := found.counts.num_with_special_tokens):
        return []
    return [
        f"NOTE: {name}: {num:,} documents have special tokens in their text, which become real ones (first: "
        f"{found.first_special})"
    ]


def _key(identity: str, job: Job) -> Key:
    template, settings = job.tokenizer.chat_template, job.settings
    return {
        "dataset": identity,
        "tokenizer": short_hash(job.tokenizer.backend_tokenizer.to_str()),
        "tokenizer.special_tokens": json.dumps(job.tokenizer.special_tokens_map, sort_keys=True, default=str),
        "tokenizer.chat_template": short_hash(json.dumps(template, sort_keys=True)),
        "template_kwargs": json.dumps(dict(settings.template_kwargs), sort_keys=True, default=str),
        "train_on": settings.train_on,
        "on_bad_row": settings.on_bad_row,
        "max_bad_frac": str(settings.max_bad_frac),
        "tree": job.tree,
        "rules": RULES_VERSION,
        "columns": " ".join(f"{name}:{column.stored}" for name, column in COLUMNS.items()),
    }


def _read_counts(entry: CacheEntry) -> RowCounts:
    return Findings.load(entry.folder).counts
