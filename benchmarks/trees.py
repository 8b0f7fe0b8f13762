"""Rows that begin alike, against the same rows as trees: the step's time and tokens, in turns in one process.

    OMP_NUM_THREADS=1 python benchmarks/trees.py [--models qwen3 qwen3_next] [--layers 4] [--turns 5]
    python benchmarks/trees.py --plan 1000000      lengths of so many chats, packed as rows and as trees
    python benchmarks/trees.py --traffic           bytes that gathered keys move, against one call per depth

A step is forward and backward of the sum of the losses. `share` is the arithmetic of the tokens, rows over trees, of
what does not depend on the path; attention and states along a path do, so the measured ratio may be on either side.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3NextConfig

from automodel_lite import install_attention
from automodel_lite.data.packing.packs import lay_out_packs, packed_sequence_thd_collater
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.data.tokens.trees import grow_trees
from automodel_lite.thd import IGNORE_INDEX, ThdBatch, to_thd

VOCAB = 2048
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
STATES = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
Row = dict[str, np.ndarray]


def row(parts: list[tuple[np.ndarray, bool]]) -> Row:
    """Tokens, and whether they are learned."""
    ids = np.concatenate([part for part, _ in parts]).astype(np.int32)
    learned = np.concatenate([np.full(len(part), is_learned) for part, is_learned in parts])
    labels = np.full(len(ids), IGNORE_INDEX, np.int32)
    labels[:-1] = np.where(learned[1:], ids[1:], IGNORE_INDEX)
    return {"input_ids": ids, "labels": labels}


def cases(rng: np.random.Generator) -> dict[str, list[Row]]:
    def text(length: int) -> np.ndarray:
        return rng.integers(3, VOCAB, length)

    chat, history = [], []
    for _ in range(10):  # question, thoughts, answer; earlier thoughts are dropped
        question, thoughts, answer = text(60), text(120), text(60)
        chat.append(row([*history, (question, False), (thoughts, True), (answer, True)]))
        history += [(question, False), (answer, False)]
    agent, history = [], [(text(300), False)]
    for _ in range(16):  # an action, and what came of it
        action = text(40)
        agent.append(row([*history, (action, True)]))
        history += [(action, False), (text(80), False)]
    prompt = text(600)
    pair = [row([(prompt, False), (text(length), True)]) for length in (150, 200)]
    return {"reasoning chat, 10 turns": chat, "agent, 16 steps": agent, "preference pair": pair}


def batch_of(rows: list[Row]) -> ThdBatch:
    flat = flatten(rows)
    packs = lay_out_packs(flat, flat.offsets[:-1], flat.lengths, np.array([len(rows)]), flat.num_tokens)
    return to_thd(packed_sequence_thd_collater(packs))


def build(name: str, layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    base = {**SIZES, "vocab_size": VOCAB, "num_hidden_layers": layers}
    if name == "qwen3":
        config = Qwen3Config(**base)
    else:
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
        dense = {"mlp_only_layers": list(range(layers)), "layer_types": kinds}
        config = Qwen3NextConfig(**base, **STATES, **dense)
    model = AutoModelForCausalLM.from_config(config).train()
    install_attention(model)
    return model


def step(model: torch.nn.Module, batch: ThdBatch) -> tuple[float, float]:
    """Seconds and loss."""
    model.zero_grad()
    start = time.process_time()
    hidden = model.model(**batch.model_inputs()).last_hidden_state[0]
    logits = model.lm_head(hidden[batch.label_rows])  # only labeled rows meet the head, as in training
    weights = batch.columns.get("loss_weights", torch.ones(len(batch.labels)))[batch.label_rows]
    loss = (F.cross_entropy(logits, batch.labels[batch.label_rows], reduction="none") * weights).sum()
    loss.backward()
    return time.process_time() - start, loss.item()


def compare(name: str, layers: int, turns: int) -> None:
    model = build(name, layers)
    for case, rows in cases(np.random.default_rng(0)).items():
        contestants = [batch_of(rows), batch_of(grow_trees(rows))]
        losses = [step(model, batch)[1] for batch in contestants]
        times = [[step(model, batch)[0] for batch in contestants] for _ in range(turns)]
        ratio = statistics.median(a / b for a, b in times)
        tokens = [batch.num_tokens for batch in contestants]
        print(
            f"{name:12s} {case:26s} {tokens[0]:6,} -> {tokens[1]:5,} tokens  share {tokens[0] / tokens[1]:.2f}  "
            f"measured {ratio:.2f}  loss differs {abs(losses[0] / losses[1] - 1):.0e}",
            flush=True,
        )


def plan(num_chats: int) -> None:
    rng = np.random.default_rng(0)
    turns = rng.integers(1, 11, num_chats)
    own, shared = 60 + 120 + 60, 120
    trees = own * turns + (turns - 1)
    rows = np.repeat(np.zeros(1, np.int64), turns.sum())
    rows[:] = own + shared * (np.arange(len(rows)) - (turns.cumsum() - turns).repeat(turns))
    for name, lengths in (("rows", rows), ("trees", trees)):
        start = time.process_time()
        made = plan_packs(lengths, 8192)
        print(
            f"{name}: {len(lengths):,} of {lengths.sum():,} tokens, {len(made):,} packs, {time.process_time() - start:.1f} CPU-s"
        )


def traffic() -> None:
    """Bytes of keys, values, queries and outputs of a layer (bf16; Llama-3-8B's heads), forward and backward."""
    num_q, num_kv, dim = 32, 8, 128
    kv, q = 2 * num_kv * dim * 2, num_q * dim * 2
    for case, rows in cases(np.random.default_rng(0)).items():
        batch = batch_of(grow_trees(rows))
        segments = batch.attention.segments
        num_q_tokens, num_k_tokens = int(segments.cu_q[-1]), int(segments.cu_k[-1])
        # gathered: keys written, read by the kernel, their gradients written and added up
        gathered = num_k_tokens * kv * 4
        depth = max_depth(batch)
        # per depth: queries, outputs and fp32 sums read and written at each depth, keys where they lie
        by_depth = depth * num_q_tokens * (2 * q + 4 * num_q * dim * 2) + 2 * num_q_tokens * kv
        print(
            f"{case:26s} keys gathered {gathered / 2**20:7.1f} MiB, one call per depth ({depth}) {by_depth / 2**20:7.1f} MiB"
        )


def max_depth(batch: ThdBatch) -> int:
    """Most runs of the stream on any path."""
    tree = batch.attention.tree
    assert tree is not None
    paths = tree.paths.split(batch.attention.segments.cu_k.diff().tolist())
    return max(int((path.diff() != 1).sum()) + 1 for path in paths)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3", "qwen3_next"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--plan", type=int)
    parser.add_argument("--traffic", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.plan:
        plan(arguments.plan)
    elif arguments.traffic:
        traffic()
    else:
        for model_name in arguments.models:
            compare(model_name, arguments.layers, arguments.turns)
