"""What contestants without our code train: token rows, and the Hugging Face model as it is."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.job import PACK_TOKENS, Job

Rows = dict[str, list[list[int]]]  # input_ids, completion_mask: a list for each document


def read_rows(job: Job) -> Rows:
    rows: Rows = json.loads((Path(job.folder) / "rows.json").read_text())
    return rows


def documents_per_step(rows: Rows) -> int:
    """Returns how many have the tokens of a pack."""
    return round(PACK_TOKENS / statistics.mean(map(len, rows["input_ids"])))


def llama(job: Job) -> Any:
    """The Hugging Face model, which knows nothing of our kernels: fp32, SDPA."""
    kind = AutoModelForCausalLM
    if job.pretrained:
        return kind.from_pretrained(job.pretrained, dtype=torch.float32, use_cache=False).train()
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **job.model_settings(), use_cache=False)
    return kind.from_config(config, attn_implementation="sdpa").train()


class CountingCollator:
    """Counts the real tokens of every batch, in the order they are made, which is the order of the steps."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.tokens_of_step: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        self.tokens_of_step.append(sum(len(row["input_ids"]) for row in rows))
        return self.collator(rows)
