"""A small sample of the packs that training would read, for recipes/verify.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from automodel_lite.config.schema import Config
from automodel_lite.data.pack_order import epoch_order
from automodel_lite.data.packing.packs import EMPTY_PACK, PackedDataset, TokenArrays
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.prepare import StreamedData, prepare_data
from automodel_lite.data.token_rows import IndexedRows
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parallel.mesh import MeshShape

LARGEST_PACK_TOKENS = {"cpu": 512, "cuda": 4096}
PACKS_A_RANK = 2
LEAST_PACKS = 4

Pack = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """Packs as the loader gives them, and the documents in them."""

    packs: list[Pack]
    documents: TokenArrays
    tokenizer: PreTrainedTokenizerFast
    pack_size: int
    training_size: int  # packed_sequence.packed_sequence_size of the run
    slot_multiple: int

    @property
    def num_documents(self) -> int:
        return len(self.documents.offsets) - 1

    def each_document(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and labels, int64, without padding."""
        inside = [slice(start, stop) for start, stop in pairwise(self.documents.offsets.tolist())]
        for tokens in inside:
            ids, labels = self.documents.input_ids[tokens], self.documents.labels[tokens]
            yield torch.from_numpy(ids), torch.from_numpy(labels)

    @property
    def description(self) -> str:
        """One line for the screen."""
        text = f"{self.num_documents} documents in {len(self.packs)} packs of {self.pack_size}"
        if self.pack_size < self.training_size:
            text += f" (training packs {self.training_size}; longer documents are cut here)"
        return text

    def packed_otherwise(self) -> list[Pack]:
        """The same documents in other company and order, in packs half as large again."""
        size = -(-self.pack_size * 3 // 2 // self.slot_multiple) * self.slot_multiple
        lengths = np.diff(self.documents.offsets)
        plan = plan_packs(lengths, size, strategy="worst_fit", slot_multiple=self.slot_multiple)
        packs = PackedDataset(self.documents, plan)
        return [packs[i] for i in reversed(range(len(packs)))]


def draw_sample(config: Config, shape: MeshShape) -> Sample:
    """The first packs of the first epoch's order; smaller ones than training's when those are large.

    The number of packs is a multiple of the data-parallel ranks; a last rank that runs short gets an empty pack, as in
    training.
    """
    training_size: int = config.packed_sequence["packed_sequence_size"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    multiple = config.packed_sequence.get("slot_multiple") or (2 * shape.cp if shape.cp > 1 else 1)
    size = min(training_size, LARGEST_PACK_TOKENS[device] // multiple * multiple)
    smaller = {"packed_sequence_size": size, "overlong": "truncate", "drop_long_samples": None}
    if size < training_size:
        config = replace(config, packed_sequence={**config.packed_sequence, **smaller})
    data = prepare_data(config, shape)
    if isinstance(data, StreamedData):
        raise ConfigError("dataset.path is a stream: verify with a file of some of its documents.")
    packs = data.packs_of(0)
    num_packs = max(LEAST_PACKS, PACKS_A_RANK * shape.dp)
    order = epoch_order(len(packs), config.seed, 0, config.dataloader.shuffle)[:num_packs].tolist()
    order += [EMPTY_PACK] * (-len(order) % shape.dp)
    rows = [packs[i] for i in order]
    documents = _documents(rows)
    _check_against_source(documents, packs, order)
    return Sample(rows, documents, data.tokenizer, size, training_size, multiple)


def _documents(packs: list[Pack]) -> TokenArrays:
    """What lies in the packs, document by document."""
    ids, labels, lengths = [], [], [0]
    for pack in packs:
        for start, length in _places(pack):
            ids.append(np.asarray(pack["input_ids"][start : start + length]))
            labels.append(np.asarray(pack["labels"][start : start + length]))
            lengths.append(length)
    return TokenArrays(np.concatenate(ids), np.concatenate(labels), np.cumsum(lengths))


def _check_against_source(documents: TokenArrays, packs: PackedDataset, order: list[int]) -> None:
    """Raises DataError when a document in the packs is not, token by token, the row that the plan put there."""
    plan, found = packs.plan, 0
    for pack in order:
        if pack == EMPTY_PACK:
            continue
        for place in range(int(plan.offsets[pack]), int(plan.offsets[pack + 1])):
            row = _row(packs.rows, int(plan.doc_ids[place]))
            start = int(plan.starts[place]) if plan.starts is not None else 0
            stop = int(plan.stops[place]) if plan.stops is not None else len(row[0])
            inside = slice(int(documents.offsets[found]), int(documents.offsets[found + 1]))
            for packed, source in zip((documents.input_ids[inside], documents.labels[inside]), row):
                if not np.array_equal(packed, np.asarray(source[start:stop])):
                    raise DataError(
                        f"pack {pack} does not hold document {int(plan.doc_ids[place])} as it is in the data."
                    )
            found += 1


def _row(rows: Any, index: int) -> tuple[np.ndarray, np.ndarray]:
    """ids and labels of one document."""
    if isinstance(rows, IndexedRows):
        row = rows[index]
        return row["input_ids"], row["labels"]
    inside = slice(int(rows.offsets[index]), int(rows.offsets[index + 1]))
    return rows.input_ids[inside], rows.labels[inside]


def _places(pack: Pack) -> Iterator[tuple[int, int]]:
    """(start, length) of each document of a pack; a row without packing is one."""
    if "seq_lens" not in pack:
        yield 0, int(sum(pack["attention_mask"]))
        return
    start = 0
    for length, slot in zip(pack["seq_lens"], pack["seq_lens_padded"]):
        if length:
            yield start, length
        start += slot
