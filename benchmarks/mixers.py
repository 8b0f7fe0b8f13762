"""Packed documents in a hybrid model with the reference mixers, against the same model as transformers runs it.

    python -m benchmarks.mixers
    python -m benchmarks.mixers --families nemotron_h lfm2 --tokens 4096 --spread 1.5

Two rivals, without anything of ours: `sorted`, the same documents as padded rows of nearly one length, and `uniform`,
as many tokens in documents of one length without padding: what it would cost if packing were free. Forward and
backward, fp32, CPU; CPU seconds per real token of the best of several rounds, taken in turns. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.data.packing.packs import join_packs
from automodel_lite.thd import IGNORE_INDEX, ThdBatch, to_thd
from benchmarks.turns import take_turns

VOCAB = 512
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
}
THREE_TO_ONE = ["linear_attention"] * 3 + ["full_attention"]
FAMILIES = {
    "qwen3_5_text": {
        "layer_types": THREE_TO_ONE,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "nemotron_h": {
        "layer_types": THREE_TO_ONE,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 32,
        "n_groups": 1,
        "chunk_size": 64,
    },
    "lfm2": {"layer_types": ["conv"] * 3 + ["full_attention"]},
    "jamba": {
        "num_experts": 1,
        "attn_layer_period": 4,
        "attn_layer_offset": 3,
        "use_mamba_kernels": False,
    },
}

POOL = 64
"""Packs whose documents are sorted together; a few of their batches are timed."""

Rows = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--tokens", type=int, default=4096, help="of a pack and of a padded batch")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument(
        "--spread", type=float, default=1.0, help="standard deviation of the lengths' logarithm"
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    packs = [
        mixed_lengths(arguments.tokens, arguments.spread, seed) for seed in range(arguments.batches)
    ]
    lengths = [length for pack in packs for length in pack]
    pool = [
        n for seed in range(POOL) for n in mixed_lengths(arguments.tokens, arguments.spread, seed)
    ]
    padded = sorted_rows(pool, arguments.tokens)[
        POOL // arguments.batches // 2 :: POOL // arguments.batches
    ]
    fill = statistics.mean(float(mask.float().mean()) for _, mask in padded)
    print(
        f"{len(packs)} packs of {arguments.tokens} tokens: {len(lengths)} documents of {min(lengths)} to {max(lengths)}, "
        f"mean {round(statistics.mean(lengths))}; {len(padded)} batches of sorted rows, filled to {fill:.1%}"
    )
    for family in arguments.families:
        ours, *rivals = microseconds(family, packs, padded, arguments.rounds)
        ratios = "   ".join(
            f"{name} {rival / ours:.2f} x" for name, rival in zip(("sorted", "uniform"), rivals)
        )
        print(f"{family:14s} packed {ours:6.1f} us per token; time of   {ratios}", flush=True)


def mixed_lengths(num_tokens: int, spread: float, seed: int) -> list[int]:
    """Log-normal, as chats are: most are short, a few are long; they sum up to `num_tokens`."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        length = int((torch.randn((), generator=generator) * spread + 5).exp()) + 8
        lengths.append(min(length, num_tokens - sum(lengths)))
    return lengths


def microseconds(
    family: str, packs: list[list[int]], padded: list[Rows], rounds: int
) -> list[float]:
    """Per real token: ours, sorted and uniform rows, the best round of each."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **BASE | FAMILIES[family])
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    ours = copy.deepcopy(plain)
    install(ours, ReferenceAttention())
    mean = round(statistics.mean(length for pack in packs for length in pack))
    uniform = torch.randint(1, VOCAB, (sum(packs[0]) // mean, mean))
    steps: list[list[Callable[[], None]]] = [
        [partial(packed_step, ours, packed_batch(pack)) for pack in packs],
        [partial(padded_step, plain, *rows) for rows in padded],
        [partial(padded_step, plain, uniform, None)] * len(packs),
    ]
    tokens = (
        sum(map(sum, packs)),
        sum(int(mask.sum()) for _, mask in padded),
        uniform.numel() * len(packs),
    )
    ways = {str(number): partial(run_all, its_steps) for number, its_steps in enumerate(steps)}
    times, _ = take_turns(ways, rounds)
    return [min(of_way) / n * 1e6 for of_way, n in zip(times.values(), tokens)]


def sorted_rows(lengths: list[int], tokens: int) -> list[Rows]:
    """Ids and attention mask of right-padded batches, each of about `tokens` real tokens of nearly one length."""
    batches: list[list[int]] = [[]]
    for length in sorted(lengths):
        if batches[-1] and sum(batches[-1]) + length > tokens:
            batches.append([])
        batches[-1].append(length)
    made = []
    for batch in batches:
        mask = (torch.arange(max(batch)) < torch.tensor(batch)[:, None]).long()
        made.append((torch.randint(1, VOCAB, mask.shape) * mask, mask))
    return made


def packed_batch(lengths: list[int]) -> ThdBatch:
    ids = torch.randint(1, VOCAB, (sum(lengths),)).tolist()
    row = {
        "input_ids": ids,
        "labels": [*ids[1:], IGNORE_INDEX],
        "position_ids": [i for length in lengths for i in range(length)],
        "seq_lens": lengths,
        "seq_lens_padded": lengths,
    }
    return to_thd(join_packs([row]))


def padded_step(model: PreTrainedModel, rows: torch.Tensor, mask: torch.Tensor | None) -> None:
    logits = model(input_ids=rows, attention_mask=mask, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), rows.flatten()).backward()


def packed_step(model: PreTrainedModel, batch: ThdBatch) -> None:
    F.cross_entropy(model(**batch.model_inputs()).logits[0], batch.labels).backward()


def run_all(steps: list[Callable[[], None]]) -> None:
    for step in steps:
        step()


if __name__ == "__main__":
    main()
