"""Rows that begin alike, against the same rows as trees: the step's time and tokens, in turns in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.trees [--turns 5]
    python -m benchmarks.trees --plan 1000000      so many chats: trees made of some, lengths packed as rows and as trees
    python -m benchmarks.trees --memory            of a step of an 8B model on 8 GPUs, a plain pack against packs of trees

A step is forward and backward of the sum of the losses. `share` is the FLOPs of the rows over those of the trees, by
the cost model that counts a run's TFLOP/s: layers per token, the head per labeled token (as many in both), attention
per query and key.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

from automodel_lite import install_attention
from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.data.packing.packs import join_packs, lay_out_packs
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.extras.plan.simulation import layer_pattern, simulate_by_layers
from automodel_lite.models.flops import cost_model, model_size
from automodel_lite.parallel.mesh import mesh_shape
from automodel_lite.parts.trees import grow_trees
from automodel_lite.telemetry.metrics import visible_pairs
from automodel_lite.thd import IGNORE_INDEX, ThdBatch, to_thd
from automodel_lite.training.plan import build_parts
from benchmarks.turns import ratio, take_turns

VOCAB = 2048
MADE_CHATS = 500
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
    return {"chat": chat, "agent": agent, "pair": pair}  # 10 turns of a reasoning chat, 16 steps


def batch_of(rows: list[Row]) -> ThdBatch:
    flat = flatten(rows)
    packs = lay_out_packs(
        flat, flat.offsets[:-1], flat.lengths, np.array([len(rows)]), flat.num_tokens
    )
    return to_thd(join_packs(packs))


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    base = {**SIZES, "vocab_size": VOCAB, "num_hidden_layers": 4}
    if name == "qwen3":
        config = Qwen3Config(**base)
    else:
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        config = Qwen3_5TextConfig(**base, **STATES, layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config).train()
    install_attention(model)
    return model


def step(model: torch.nn.Module, batch: ThdBatch) -> float:
    """Returns the loss."""
    model.zero_grad()
    hidden = model.model(**batch.model_inputs()).last_hidden_state[0]
    # only labeled rows meet the head, as in training
    logits = model.lm_head(hidden[batch.label_rows])
    weights = batch.columns.get("loss_weights", torch.ones(len(batch.labels)))[batch.label_rows]
    losses = F.cross_entropy(logits, batch.labels[batch.label_rows], reduction="none")
    loss = (losses * weights).sum()
    loss.backward()
    return loss.item()


def flops(model: torch.nn.Module, batch: ThdBatch) -> float:
    costs, head = cost_model(model.config), 6.0 * model_size(model.config).head_weights
    of_layers = (costs.per_token - head) * batch.num_tokens + costs.per_pair * visible_pairs(
        batch, costs
    )
    return of_layers + head * len(batch.label_rows)


def compare(name: str, turns: int) -> None:
    model = build(name)
    for case, rows in cases(np.random.default_rng(0)).items():
        of_rows, of_trees = batch_of(rows), batch_of(grow_trees(rows))
        ways = {"rows": partial(step, model, of_rows), "trees": partial(step, model, of_trees)}
        times, losses = take_turns(ways, turns)
        share = flops(model, of_rows) / flops(model, of_trees)
        print(
            f"{name:8s} {case:6s} {of_rows.num_tokens:6,} -> {of_trees.num_tokens:5,} tokens  "
            f"share {share:.2f}  measured {ratio(times['rows'], times['trees'])}  "
            f"loss differs {abs(losses['rows'] / losses['trees'] - 1):.0e}",
            flush=True,
        )


def plan(num_chats: int) -> None:
    rng = np.random.default_rng(0)
    turns = rng.integers(1, 11, num_chats)
    own, shared = 60 + 120 + 60, 120
    trees = own * turns + (turns - 1)
    rows = np.repeat(np.zeros(1, np.int64), turns.sum())
    rows[:] = own + shared * (np.arange(len(rows)) - (turns.cumsum() - turns).repeat(turns))
    chats = [cases(rng)["chat"] for _ in range(MADE_CHATS)]
    start = time.process_time()
    for chat in chats:
        grow_trees(chat)
    each = (time.process_time() - start) / MADE_CHATS
    print(f"trees made of chats of 10 turns, 7,800 tokens: {each * 1e3:.2f} CPU-ms per chat")
    for name, lengths in (("rows", rows), ("trees", trees)):
        start = time.process_time()
        made = plan_packs(lengths, 8192)
        print(
            f"{name}: {len(lengths):,} of {lengths.sum():,} tokens, {len(made):,} packs, {time.process_time() - start:.1f} CPU-s"
        )


MEMORY_TOKENS = 32768


def memory() -> None:
    """Bytes of one rank, simulated: packs of the same number of tokens, of plain documents and of each kind of tree."""
    trees = cases(np.random.default_rng(0))
    for how in ("full", "none"):
        overrides = [
            f"packed_sequence.packed_sequence_size={MEMORY_TOKENS}",
            f"training.activation_checkpointing={how}",
        ]
        settings = [*overrides, "dataset.path=any", "name=memory", "training.micro_batch_size=1"]
        parts = build_parts(
            replace(check_config(compose_config("llama3_1_8b", settings)), attention={})
        )
        config = parts.model.resolve_model_config({"vocab_size": 8192})
        plain = None
        for case in (None, *trees):
            batch = full_of(trees[case]) if case else None
            found = simulate_by_layers(
                parts, config, mesh_shape(parts.mesh, 8), layer_pattern(config), batch
            )
            plain = plain or found
            paths = MEMORY_TOKENS if batch is None else int(batch.attention.segments.cu_k[-1])
            print(
                f"recompute {how}: {case or 'plain'}, {MEMORY_TOKENS:,} tokens, {paths:,} keys: {found.peak / 2**30:.1f} GiB, "
                f"{found.peak / plain.peak:.3f} x",
                flush=True,
            )


def full_of(rows: list[Row]) -> ThdBatch:
    """A pack of MEMORY_TOKENS that trees of such rows fill, the last of them cut off."""
    trees = grow_trees(rows)
    parts = trees * -(-MEMORY_TOKENS // sum(len(tree["input_ids"]) for tree in trees))
    flat = flatten(parts)
    lengths = np.diff(np.minimum(flat.offsets, MEMORY_TOKENS))
    lengths = lengths[lengths > 0]
    packs = lay_out_packs(
        flat, flat.offsets[: len(lengths)], lengths, np.array([len(lengths)]), MEMORY_TOKENS
    )
    batch = to_thd(join_packs(packs))
    labels = batch.input_ids.fill_(0)  # all of them, as in the simulation of plain packs
    return replace(batch, labels=labels, label_rows=torch.arange(MEMORY_TOKENS), columns={})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--plan", type=int)
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.plan:
        plan(arguments.plan)
    elif arguments.memory:
        memory()
    else:
        for model_name in ("qwen3", "qwen3_5"):
            compare(model_name, arguments.turns)
