"""The work of tokenising, a thousand documents at a time, here or in as many processes as there are cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from automodel_lite.datasets.chat import Sample, TrainOn
from automodel_lite.datasets.documents import Document, DocumentRows
from automodel_lite.datasets.encode import bare_backend, encode
from automodel_lite.datasets.render import SampleRenderer, document_samples
from automodel_lite.datasets.row_checks import Chunk, check_rows
from automodel_lite.datasets.token_rows import ID_DTYPE, next_token_labels
from automodel_lite.errors import DataError

OnBadRow = Literal["error", "skip"]
CHUNK_DOCUMENTS = 1024
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
        worker = ChunkTokenizer(rows, job)
        yield from map(worker.chunk, ranges)
        return
    pool = ProcessPoolExecutor(num_proc, get_context("spawn"), _start_process, (rows, job))
    try:
        pending = [pool.submit(_chunk_in_process, wanted) for wanted in ranges[: 4 * num_proc]]
        for position in range(len(ranges)):
            yield pending[position].result()
            pending[position].cancel()
            if position + 4 * num_proc < len(ranges):
                pending.append(pool.submit(_chunk_in_process, ranges[position + 4 * num_proc]))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


class ChunkTokenizer:
    """Tokenises ranges of the documents of one set."""

    def __init__(self, rows: DocumentRows, job: Job):
        self._rows = rows
        self._job = job
        self._renderer = SampleRenderer(job.tokenizer, job.train_on, dict(job.template_kwargs))
        self._backend = bare_backend(job.tokenizer)

    def chunk(self, wanted: range) -> Chunk:
        samples: list[Sample] = []
        tokens: list[Document] = []
        num_bad = num_split = 0
        first_error: DataError | None = None
        for index in wanted:
            try:
                document = self._rows[index]
                if "input_ids" in document:
                    tokens.append(document)
                    continue
                rendered = document_samples(self._renderer, document, self._rows.where(index))
            except DataError as error:
                if self._job.on_bad_row == "error":
                    raise
                num_bad, first_error = num_bad + 1, first_error or error
                continue
            samples += rendered
            num_split += len(rendered) > 1
        rows = _token_rows(tokens) if tokens else _sample_rows(self._backend, samples)
        return check_rows(
            *rows,
            stop_ids=self._renderer.stop_ids,
            num_documents=len(wanted),
            num_bad=num_bad,
            num_split_chats=num_split,
            first_error=str(first_error or ""),
        )


def _sample_rows(backend: Any, samples: list[Sample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    encoded = encode(backend, samples)
    offsets = np.concatenate([[0], np.cumsum(encoded.lengths)])
    return encoded.input_ids, next_token_labels(encoded.input_ids, encoded.trained, offsets), encoded.lengths


def _token_rows(documents: list[Document]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    input_ids, labels = (
        np.concatenate([np.asarray(document[name], ID_DTYPE) for document in documents])
        for name in ("input_ids", "labels")
    )
    return input_ids, labels, np.array([len(document["input_ids"]) for document in documents], np.int64)


_worker: ChunkTokenizer


def _start_process(rows: DocumentRows, job: Job) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = ChunkTokenizer(rows, job)


def _chunk_in_process(wanted: range) -> Chunk:
    return _worker.chunk(wanted)
