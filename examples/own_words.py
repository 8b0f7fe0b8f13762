"""Distillation on a model's own words: the student answers, and its teachers score the answers.

    python examples/own_words.py              (three tiny Llamas, on a CPU, in a minute)
    torchrun --nproc-per-node 2 examples/own_words.py mesh.dp_shard=2

The advantage of a token is how much likelier its teachers find it than the student does: the steps
go down the reverse KL, at what the student itself writes. Each prompt has teachers of its own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from automodel_lite import TrainingClient
from automodel_lite.extras.client.sampling import Request, rows_of_answers
from automodel_lite.models.loss import CrossEntropy
from automodel_lite.parts.losses.policy import ImportanceSampling
from automodel_lite.seed import derive_seed

Prompt = tuple[list[int], Mapping[str, float]]  # ids, and the weight of each teacher's folder
SUMS = {f"{a}+{b}=": str(a + b) for a in range(4) for b in range(4)}
DIFFERENCES = {f"{a}-{b}=": str(a - b) for a in range(4) for b in range(a + 1)}
SETTINGS = ["model=llama_smoke", "tokenizer=bpe", "packed_sequence.packed_sequence_size=1024"]
SETTINGS += ["optimizer.lr=3e-3"]


def score(
    client: TrainingClient, prompts: Sequence[Prompt], seed: int, discount: float = 0.0, **how: Any
) -> list[list[dict[str, Any]]]:
    """Draws answers; returns a group of rows for each prompt, with advantages at the answers.

    discount  of what the tokens behind add to a token: 0 = it counts for itself
    """
    requests = [Request(x, seed=derive_seed(seed, i), **how) for i, (x, _) in enumerate(prompts)]
    drawn = client.draw(requests, batch_size=256)
    groups = [rows_of_answers(x, [y.ids for y in of_x]) for (x, _), of_x in zip(prompts, drawn)]
    gaps = [[-answer.log_probs for answer in answers] for answers in drawn]
    for folder in sorted({folder for _, teachers in prompts for folder in teachers}):
        own = [i for i, (_, teachers) in enumerate(prompts) if folder in teachers]
        with client.teacher(folder):
            found = iter(client.forward([groups[i] for i in own]).log_probs)
        for i in own:
            weight = prompts[i][1][folder] / sum(prompts[i][1].values())
            for gap in gaps[i]:
                gap += weight * next(found)[-len(gap) :]
    for group, of_group in zip(groups, gaps):
        for row, gap in zip(group, of_group):
            row["advantages"] = np.zeros(len(row["labels"]))
            behind = 0.0
            for t in range(1, len(gap) + 1):
                row["advantages"][-t] = behind = gap[-t] + discount * behind
    return groups


def supervise(client: TrainingClient, answers: Mapping[str, str], noise: float) -> None:
    """Takes supervised steps on answers of the right form, of which some are drawn blindly: a model
    that is sure of everything is a poor teacher.

    noise  share of them
    """
    encode, draw = client.tokenizer.encode, random.Random(0)
    for _ in range(200):
        rows = []
        for text, answer in answers.items():
            if draw.random() < noise:
                answer = str(draw.randrange(9))
            answer_ids = [*encode(answer), client.tokenizer.eos_token_id]
            rows += rows_of_answers(encode(text), [answer_ids])
        client.forward_backward(rows, CrossEntropy())
        client.optim_step()


def main(*overrides: str, num_steps: int = 60) -> list[float]:
    """Returns the reverse KL per token of each step, as the answers estimate it."""
    folders = {}
    for name, answers in {"sums": SUMS, "differences": DIFFERENCES}.items():
        own = [*SETTINGS, "model.config.hidden_size=64", "name=own_words", *overrides]
        with TrainingClient("policy", *own) as teacher:
            folders[name] = f"{teacher.config.output_dir}/teacher_{name}"
            if not Path(folders[name]).exists():
                supervise(teacher, answers, noise=0.2)
                teacher.save_weights(folders[name])
    with TrainingClient("policy", *SETTINGS, "name=own_words", *overrides) as client:
        encode = client.tokenizer.encode
        prompts = [(encode(text), {folders["sums"]: 1.0}) for text in SUMS]
        prompts += [(encode(text), {folders["differences"]: 1.0}) for text in DIFFERENCES]
        divergences = client.load_state()
        if divergences is None:
            supervise(client, SUMS | DIFFERENCES, noise=0.6)
            divergences = []
        while len(divergences) < num_steps:
            step = len(divergences)
            groups = score(client, prompts, step, num_samples=8, max_new_tokens=4)
            out = client.forward_backward(groups, ImportanceSampling())
            client.optim_step()
            gaps = sum(float(row["advantages"].sum()) for group in groups for row in group)
            divergences.append(-gaps / out.num_items)
            if client.mesh.rank == 0:
                print(f"step {step + 1:3d}  reverse KL {divergences[-1]:.3f}")
            if len(divergences) % 20 == 0:
                client.save_state(divergences)
        greedy = client.sample([ids for ids, _ in prompts], max_new_tokens=4, temperature=0)
        texts = [client.tokenizer.decode(x, skip_special_tokens=True) for (x,) in greedy]
        num_right = sum(map(str.__eq__, texts, (SUMS | DIFFERENCES).values()))
        if client.mesh.rank == 0:
            print(f"{num_right} of {len(prompts)} answers are the likeliest and right")
        return divergences


if __name__ == "__main__":
    main(*sys.argv[1:])
