"""Rows that begin alike, against the same rows as trees: the step's time and tokens, in turns in one process.

    OMP_NUM_THREADS=1 python -m benchmarks.trees [--turns 5]

A step is forward and backward of the sum of the losses. `share` is the FLOPs of the rows over those of the trees, by
the cost model that counts a run's TFLOP/s: layers per token, the head per labeled token (as many in both), attention
per query and key.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from automodel_lite import install_attention
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.packing.packs import join_packs, lay_out_packs
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.data.tokens.trees import grow_trees
from automodel_lite.models.flops import cost_model, model_size
from automodel_lite.telemetry.metrics import visible_pairs
from automodel_lite.thd import ThdBatch, to_thd
from benchmarks.turns import ratio, take_turns

VOCAB = 2048
SIZES = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
STATES = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MODELS = {"qwen3": SIZES, "qwen3_5_text": SIZES | STATES}
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
    config = AutoConfig.for_model(name, **MODELS[name])
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for model_name in MODELS:
        compare(model_name, arguments.turns)
