"""What packing costs a hybrid model on the reference way: packed documents of mixed lengths against separate ones.

    python benchmarks/mixers.py
    python benchmarks/mixers.py --families nemotron_h lfm2 --tokens 4096

The rival is the same model as transformers runs it on the same number of tokens in documents of one length, a batch
without padding and without anything of ours: what it would cost if packing were free. Forward and backward, fp32, CPU;
CPU seconds of the best of several rounds, taken in turns. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.data.packing.packs import packed_sequence_thd_collater
from automodel_lite.thd import IGNORE_INDEX, ThdBatch, to_thd

VOCAB = 512
BASE = {
    **{"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192, "pad_token_id": 0},
}
THREE_TO_ONE = ["linear_attention"] * 3 + ["full_attention"]
FAMILIES = {
    "qwen3_5_text": {
        "layer_types": THREE_TO_ONE,
        **{"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 32},
        **{"linear_value_head_dim": 32},
    },
    "nemotron_h": {
        "layer_types": THREE_TO_ONE,
        **{"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 32, "n_groups": 1, "chunk_size": 64},
    },
    "lfm2": {"layer_types": ["conv"] * 3 + ["full_attention"]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    lengths = mixed_lengths(arguments.tokens)
    mean = round(statistics.mean(lengths))
    print(f"{arguments.tokens} tokens in {len(lengths)} documents of {min(lengths)} to {max(lengths)}, mean {mean}")
    for family in arguments.families:
        rival, packed = seconds(family, lengths, arguments.rounds)
        print(f"{family:14s} separate, one length {rival:6.2f} s   packed {packed:6.2f} s   ratio {packed / rival:.2f}")


def mixed_lengths(num_tokens: int) -> list[int]:
    """Log-normal, as chats are: most are short, a few are long; they sum up to `num_tokens`."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        length = int((torch.randn((), generator=generator) + 5).exp()) + 8
        lengths.append(min(length, num_tokens - sum(lengths)))
    return lengths


def seconds(family: str, lengths: list[int], rounds: int) -> tuple[float, float]:
    """Of the rival and of ours, the best round of each."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **BASE | FAMILIES[family])
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    ours = copy.deepcopy(plain)
    install(ours, ReferenceAttention())
    length = round(statistics.mean(lengths))
    rows = torch.randint(1, VOCAB, (sum(lengths) // length, length))
    batch = packed_batch(lengths)
    timed = {"rival": lambda: separate_step(plain, rows), "ours": lambda: packed_step(ours, batch)}
    best = {name: float("inf") for name in timed}
    for number in range(rounds + 1):
        for name, step in timed.items():
            elapsed = time_of(step)
            if number:
                best[name] = min(best[name], elapsed)
    return best["rival"] * sum(lengths) / rows.numel(), best["ours"]


def packed_batch(lengths: list[int]) -> ThdBatch:
    ids = torch.randint(1, VOCAB, (sum(lengths),)).tolist()
    row = {
        "input_ids": ids,
        "labels": [*ids[1:], IGNORE_INDEX],
        "position_ids": [i for length in lengths for i in range(length)],
        "seq_lens": lengths,
        "seq_lens_padded": lengths,
    }
    return to_thd(packed_sequence_thd_collater([row]))


def separate_step(model: PreTrainedModel, rows: torch.Tensor) -> None:
    logits = model(input_ids=rows, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), rows.flatten()).backward()


def packed_step(model: PreTrainedModel, batch: ThdBatch) -> None:
    F.cross_entropy(model(**batch.model_inputs()).logits[0], batch.labels).backward()


def time_of(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


if __name__ == "__main__":
    main()
