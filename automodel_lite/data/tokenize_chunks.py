"""The work of tokenising, a thousand documents at a time, here or in as many processes as there are cores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from automodel_lite.data.chat import Sample, TrainOn
from automodel_lite.data.documents import Document, DocumentRows
from automodel_lite.data.encode import Encoder
from automodel_lite.data.render import SampleRenderer
from automodel_lite.data.row_checks import Chunk, check_rows
from automodel_lite.data.token_rows import next_token_labels
from automodel_lite.errors import ConfigError, DataError

OnBadRow = Literal["error", "skip"]
CHUNK_DOCUMENTS = 512
MIN_DOCUMENTS_PER_PROCESS = 20_000  # a process takes about 2 s to start, in which it tokenises about that many


@dataclass(frozen=True)
class Job:
    """How the documents of a set are tokenised."""

    tokenizer: PreTrainedTokenizerFast
    train_on: TrainOn = "assistant"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_bad_row: OnBadRow = "error"
    max_bad_frac: float = 0.05
    num_proc: int | None = None  # None: all cores for large sets


def tokenize_chunks(rows: DocumentRows, job: Job) -> Iterator[Chunk]:
    """Yields the chunks of `rows` in order, whatever the number of processes.

    Small sets are tokenised here, where the tokenizer's own threads use all cores; large ones in processes of one
    thread each, which render chat templates (Python) on all cores too.
    """
    ranges = [range(start, min(start + CHUNK_DOCUMENTS, len(rows))) for start in range(0, len(rows), CHUNK_DOCUMENTS)]
    num_proc = job.num_proc or min(num_cores(), len(rows) // MIN_DOCUMENTS_PER_PROCESS)
    if num_proc <= 1:
        yield from _chunks_in_threads(ChunkTokenizer(rows, job), ranges)
        return
    pool = ProcessPoolExecutor(num_proc, get_context("spawn"), _start_process, (rows, job))
    try:
        waiting = iter(ranges)
        pending = deque(pool.submit(_chunk_in_process, wanted) for wanted in islice(waiting, 4 * num_proc))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(_chunk_in_process, wanted) for wanted in islice(waiting, 1))
    except BrokenProcessPool as error:
        raise ConfigError(
            f"tokenize.num_proc={num_proc}: a process died without a word, most likely for want of memory: set fewer."
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _chunks_in_threads(worker: ChunkTokenizer, ranges: Sequence[range]) -> Iterator[Chunk]:
    """Renders a chunk (Python) while the one before it is tokenised (Rust, outside of the interpreter's lock)."""
    with ThreadPoolExecutor(1) as encoder:
        pending: Future[Chunk] | None = None
        for wanted in ranges:
            rendered = worker.render(wanted)
            if pending is not None:
                yield pending.result()
            pending = encoder.submit(worker.encode, rendered)
        if pending is not None:
            yield pending.result()


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass
class Rendered:
    """Some documents, read and rendered: samples of text, or token ids that were given."""

    num_documents: int
    samples: list[Sample] = field(default_factory=list)
    tokens: list[Document] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_split_chats: int = 0


class ChunkTokenizer:
    """Tokenises ranges of the documents of one set."""

    def __init__(self, rows: DocumentRows, job: Job):
        self._rows = rows
        self._job = job
        self._renderer = SampleRenderer(job.tokenizer, job.train_on, dict(job.template_kwargs))
        self._encoder = Encoder(job.tokenizer)
        self._vocab_size = len(job.tokenizer)

    def chunk(self, wanted: range) -> Chunk:
        return self.encode(self.render(wanted))

    def render(self, wanted: range) -> Rendered:
        """Reads and renders documents.

        Raises:
            DataError: a bad row, unless they are skipped.
        """
        rendered = Rendered(num_documents=len(wanted))
        for index in wanted:
            try:
                document = self._rows[index]
                samples = self._samples(document, index, rendered)
            except DataError as error:
                if self._job.on_bad_row == "error":
                    raise
                rendered.errors.append(str(error))
                continue
            rendered.samples += samples
            rendered.num_split_chats += len(samples) > 1
        return rendered

    def _samples(self, document: Document, index: int, rendered: Rendered) -> list[Sample]:
        try:
            if "input_ids" in document:
                rendered.tokens.append(_given_tokens(document, self._job.train_on, self._vocab_size))
                return []
            return self._renderer.samples(document)
        except DataError as error:
            raise DataError(f"{self._rows.where(index)}: {error}") from error

    def encode(self, rendered: Rendered) -> Chunk:
        rows = _token_rows(rendered.tokens) if rendered.tokens else _sample_rows(self._encoder, rendered.samples)
        return check_rows(
            *rows,
            stop_ids=self._renderer.stop_ids,
            num_documents=rendered.num_documents,
            num_bad=len(rendered.errors),
            num_split_chats=rendered.num_split_chats,
            first_error=next(iter(rendered.errors), ""),
        )


def _sample_rows(encoder: Encoder, samples: list[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    encoded = encoder.encode(samples)
    offsets = np.concatenate([[0], np.cumsum(encoded.lengths)])
    return encoded.input_ids, next_token_labels(encoded.input_ids, encoded.trained, offsets), encoded.lengths


def _token_rows(documents: list[Document]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    input_ids, labels = (np.concatenate([document[name] for document in documents]) for name in ("input_ids", "labels"))
    return input_ids, labels, np.array([n for document in documents for n in document["lengths"]], np.int64)


def _given_tokens(document: Document, train_on: TrainOn, vocab_size: int) -> Document:
    """Checks token ids that were given, and gives them labels where all is trained on."""
    input_ids = document["input_ids"]
    if len(input_ids) and not 0 <= input_ids.min() <= input_ids.max() < vocab_size:
        raise DataError(
            f"column input_ids holds ids from {input_ids.min()} to {input_ids.max()}, and the tokenizer has ids from 0 "
            f"to {vocab_size - 1}: they were made with another tokenizer: set tokenizer.path to it."
        )
    if train_on == "all":
        offsets = np.concatenate([[0], np.cumsum(document["lengths"])])
        return {**document, "labels": next_token_labels(input_ids, np.ones(len(input_ids), bool), offsets)}
    if document["labels"] is None:
        raise DataError("has input_ids without labels: set train_on=all to train on every token.")
    return document


_worker: ChunkTokenizer


def _start_process(rows: DocumentRows, job: Job) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = ChunkTokenizer(rows, job)


def _chunk_in_process(wanted: range) -> Chunk:
    return _worker.chunk(wanted)
