"""A stream of documents as token rows, a few documents at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from automodel_lite.data.chat import Sample
from automodel_lite.data.documents import Document
from automodel_lite.data.encode import Encoder
from automodel_lite.data.render import SampleRenderer
from automodel_lite.data.streaming import StreamingDataset
from automodel_lite.data.token_rows import next_token_labels
from automodel_lite.data.tokenize_chunks import Job
from automodel_lite.errors import DataError
from automodel_lite.thd import IGNORE_INDEX

AHEAD_DOCUMENTS = 16  # tokenised at once; never part of the position
MIN_JUDGED_DOCUMENTS = 200  # before the cap on bad rows counts
Row = dict[str, np.ndarray]


@dataclass(frozen=True)
class TokenStream:
    """Reads shards of a stream as rows; picklable, so that workers can read it."""

    dataset: StreamingDataset
    job: Job

    def read(self, shard: int, start: int) -> Iterator[list[Row]]:
        """The rows of every document of a shard but the first `start`: one, several (chats whose template rewrites
        earlier turns) or none (nothing is trained on, or a bad row that is skipped).

        Raises:
            DataError: a bad row with `on_bad_row=error`, or more unusable documents than `max_bad_frac`.
        """
        num_read = num_unusable = 0
        documents = self.dataset.read(shard, start)
        while chunk := list(islice(documents, AHEAD_DOCUMENTS)):
            for rows in self._rows([self._samples(place, document) for place, document in chunk]):
                num_read, num_unusable = num_read + 1, num_unusable + (not rows)
                yield rows
            if num_read >= MIN_JUDGED_DOCUMENTS and num_unusable > self.job.max_bad_frac * num_read:
                raise DataError(
                    f"{self.dataset.stream.name}, shard {shard}: {num_unusable:,} of {num_read:,} documents are bad, "
                    f"empty or without a trained token; max_bad_frac={self.job.max_bad_frac} allows "
                    f"{int(self.job.max_bad_frac * num_read):,}."
                )

    @cached_property
    def _renderer(self) -> SampleRenderer:
        return SampleRenderer(self.job.tokenizer, self.job.train_on, dict(self.job.template_kwargs))

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self.job.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "job": self.job}

    def _samples(self, place: str, document: Document | DataError) -> list[Sample]:
        try:
            if isinstance(document, DataError):
                raise document
            return self._renderer.samples(document)
        except DataError as error:
            if self.job.on_bad_row == "error":
                raise error if error is document else DataError(f"{place}: {error}") from error
            return []

    def _rows(self, samples: list[list[Sample]]) -> Iterator[list[Row]]:
        encoded = self._encoder.encode([sample for of_document in samples for sample in of_document])
        offsets = np.concatenate([[0], np.cumsum(encoded.lengths)])
        labels = next_token_labels(encoded.input_ids, encoded.trained, offsets)
        row = 0
        for of_document in samples:
            parts = [slice(offsets[i], offsets[i + 1]) for i in range(row, row + len(of_document))]
            row += len(of_document)
            yield [
                {"input_ids": encoded.input_ids[part], "labels": labels[part]}
                for part in parts
                if (labels[part] != IGNORE_INDEX).any()
            ]
