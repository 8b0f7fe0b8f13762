"""TRL on the same model and documents, as its users would tune it: flex_attention's packed mask, and Liger's kernels."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.gpu.documents import SEED, lengths
from benchmarks.gpu.steps import wait
from benchmarks.gpu.variant import SHAPES


def trl(device: str, is_tiny: bool = False, liger: bool = False) -> dict[str, Any]:
    """SFTTrainer, packed; tokens of documents per second in the second half of its steps."""
    from benchmarks.peers.trl import fine_tune

    is_cuda = device == "cuda"
    shape, pack, steps = (SHAPES["tiny"], 256, 4) if is_tiny else (SHAPES["1b"], 8192, 24)
    source = lengths("chat", pack)
    rng = np.random.default_rng(SEED)
    rows = [rng.integers(3, shape["vocab_size"], next(source)) for _ in range(steps * pack // 200)]
    marks: list[float] = []

    def step_done() -> None:
        wait(device)
        marks.append(time.perf_counter())

    torch.manual_seed(SEED)
    # flex has no backward on a CPU
    attention = "flex_attention" if is_cuda else "sdpa"
    # TRL wants a tokenizer; the data has ids
    words = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))
    special = {"pad_token": "<end>", "eos_token": "<end>"}
    with tempfile.TemporaryDirectory() as folder:
        tokens = fine_tune(
            LlamaForCausalLM(LlamaConfig(**shape, attn_implementation=attention)),
            {"input_ids": [row.tolist() for row in rows]},
            PreTrainedTokenizerFast(tokenizer_object=words, **special),
            step_done,
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=steps,
            learning_rate=1e-5,
            packing=True,
            max_length=pack,
            bf16=is_cuda,
            use_cpu=not is_cuda,
            use_liger_kernel=liger,
        )
    half = len(marks) // 2  # the first half warms up
    rate = sum(tokens[half : len(marks)]) / (marks[-1] - marks[half - 1])
    return {"verdict": "pass", "tokens_per_s": rate, "attention": attention}
