"""Packs with images against padded batches of plain transformers, on the same rows: CPU time per token, in turns.

    OMP_NUM_THREADS=1 python -m benchmarks.images [--rows 64] [--turns 5] [--batch 8] [--frozen-tower]

A model in the shape of Qwen3-VL (all of it trained, or the language model alone) meets chats of long-tailed lengths
with no, one or two images of mixed sizes. Padded: rows in batches of `--batch`, in their order, right-padded to the
longest, transformers' own sdpa, cross-entropy of the logits. Packed: the same rows in packs of at most 2,048
tokens. A turn is forward and backward of all rows; both must give the same loss. Decoding of images is not part of it.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.images.axes import rope_shifts
from automodel_lite.parts.images.tower import PackedImages
from automodel_lite.thd import ThdBatch
from benchmarks.image_families import image_stream, random_image
from benchmarks.turns import ratio, take_turns

VOCAB, IMAGE, START, END = 4096, 4, 5, 6
PATCH, MERGE = 16, 2
PACK_TOKENS = 2048
SIDES = [64, 96, 128, 192, 256, 384, 512]


@dataclass
class Row:
    ids: Tensor
    labels: Tensor
    record: dict[str, Tensor]
    num_rows: int


def config() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 4, 4]}
    return Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": rope,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 256,
            "patch_size": PATCH,
            "deepstack_visual_indexes": [1, 3],
        },
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=7,
        tie_word_embeddings=True,
    )


def rows(count: int) -> list[Row]:
    """Chats with a question, of which every second has images, and an answer that is trained."""
    name = IMAGE_PROCESSOR_MAPPING_NAMES["qwen3_vl"]["pil"]
    limits = {"shortest_edge": 64 * 64, "longest_edge": 512 * 512}
    processor = get_image_processor_class_from_name(name)(patch_size=PATCH, size=limits)
    rng, made = random.Random(0), []
    for _ in range(count):
        images = [
            random_image(rng, (rng.choice(SIDES), rng.choice(SIDES)))
            for _ in range(rng.choice([0, 1, 1, 2]))
        ]
        record: dict[str, Tensor] = {}
        ids: list[int] = []
        num_rows = 0
        if images:
            record = dict(processor(images=images, return_tensors="pt"))
            for grid in record["image_grid_thw"]:
                tokens = int(grid.prod()) // MERGE**2
                ids += [START, *[IMAGE] * tokens, END]
                num_rows += tokens
        ids += [rng.randrange(8, VOCAB) for _ in range(10 + min(int(rng.expovariate(1 / 40)), 300))]
        num_asked = len(ids)
        ids += [rng.randrange(8, VOCAB) for _ in range(10 + min(int(rng.expovariate(1 / 80)), 500))]
        tokens_of_row = torch.tensor(ids)
        labels = torch.full_like(tokens_of_row, IGNORE_INDEX)
        labels[num_asked - 1 : -1] = tokens_of_row[num_asked:]
        made.append(Row(tokens_of_row, labels, record, num_rows))
    return made


def joined(chosen: list[Row]) -> dict[str, Tensor]:
    records = [row.record for row in chosen if row.record]
    return {name: torch.cat([record[name] for record in records]) for name in records[0]}


def padded(chosen: list[Row]) -> dict[str, Any]:
    """A batch as a processor and a collator make it."""
    longest = max(len(row.ids) for row in chosen)

    def fill(tensors: list[Tensor], value: int) -> Tensor:
        return torch.stack([F.pad(x, (0, longest - len(x)), value=value) for x in tensors])

    ids = fill([row.ids for row in chosen], 0)
    batch = {
        "input_ids": ids,
        "attention_mask": fill([torch.ones_like(row.ids) for row in chosen], 0),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "labels": fill([row.labels for row in chosen], IGNORE_INDEX),
    }
    return batch | (joined(chosen) if any(row.record for row in chosen) else {})


def packed(chosen: list[Row], rule: Any) -> ThdBatch:
    shifts = []
    for row in chosen:
        shift = torch.zeros_like(row.ids)
        if row.record:
            grids = [{"image_grid_thw": row.record["image_grid_thw"]}]
            ids_of_row = row.ids.numpy()
            shift = torch.from_numpy(rope_shifts(rule, ids_of_row, ids_of_row == IMAGE, grids))
        shifts.append(shift)
    num_rows = sum(row.num_rows for row in chosen)
    types = [(row.ids == IMAGE).long() for row in chosen]
    columns = {
        "input_ids": [row.ids for row in chosen],
        "labels": [row.labels for row in chosen],
        "image": types,
        "rope_shift": shifts,
    }
    places = torch.arange(num_rows)
    return image_stream(columns, PackedImages(joined(chosen), num_rows, places, torch.cat(types)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--frozen-tower", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    plain = Qwen3VLForConditionalGeneration._from_config(config(), attn_implementation="sdpa")
    plain.model.visual.requires_grad_(not arguments.frozen_tower)
    own = copy.deepcopy(plain)
    install(own, ReferenceAttention())
    model = LossModel(own, FusedLinearCrossEntropy())
    made = rows(arguments.rows)
    of_batch = arguments.batch
    batches = [padded(made[i : i + of_batch]) for i in range(0, len(made), of_batch)]
    plan = plan_packs(np.array([len(row.ids) for row in made]), PACK_TOKENS, strategy="best_fit")
    packs = np.split(plan.doc_ids, plan.offsets[1:-1])
    streams = [packed([made[i] for i in pack], own.model.get_rope_index) for pack in packs]

    def padded_loss(batch: dict[str, Any]) -> Tensor:
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        logits = plain(**inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    def of_all(loss_of: Callable[[Any], Tensor], batches: list[Any]) -> float:
        total = 0.0
        for batch in batches:
            loss = loss_of(batch)
            loss.backward()
            total += loss.item()
        return total

    ways = {
        "padded": partial(of_all, padded_loss, batches),
        "packed": partial(of_all, lambda stream: model(stream).sum, streams),
    }
    tokens = sum(len(row.ids) for row in made)
    slots = sum(batch["input_ids"].numel() for batch in batches)
    of_images = sum(row.num_rows for row in made)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}: {len(made)} rows, {tokens:,} tokens, "
        f"{of_images / tokens:.0%} of images; padded to {slots:,} ({tokens / slots:.0%} filled)"
    )
    times, losses = take_turns(ways, arguments.turns)
    gap = abs(losses["packed"] - losses["padded"]) / losses["padded"]
    assert gap < 1e-5, gap
    for name, seconds in times.items():
        speed = tokens / statistics.median(seconds)
        print(f"{name}: {speed:,.0f} tokens per CPU-s; packed is {ratio(seconds, times['packed'])}")
    print(f"losses differ by {gap:.0e}")


if __name__ == "__main__":
    main()
