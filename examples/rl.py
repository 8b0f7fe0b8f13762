"""Reinforcement learning with verifiable rewards in a loop of your own: a model learns to add.

    python examples/rl.py                         (a tiny Llama from scratch, on a CPU, in minutes)
    torchrun --nproc-per-node 2 examples/rl.py mesh.dp_shard=2

Every rank runs this script and draws from one seed, so all make the same calls. Stopped at any
moment, the same command goes on from the last save.
"""

from __future__ import annotations

import random
import statistics
import sys

from automodel_lite import TrainingClient
from automodel_lite.models.loss import CrossEntropy
from automodel_lite.parts.losses.policy import Ppo

SUMS = [(a, b) for a in range(5) for b in range(5)]
SETTINGS = ["model=llama_smoke", "model.config.hidden_size=64", "tokenizer=bpe"]
SETTINGS += ["packed_sequence.packed_sequence_size=1024", "name=rl"]
NUM_SAMPLES = 8  # answers to each question


def row_of(prompt: list[int], answer: list[int], advantage: float | None = None) -> dict:
    """A row: the labels are the answer's tokens, each at the position that predicts it."""
    before = len(prompt) - 1
    row = {"input_ids": prompt + answer, "labels": [-100] * before + answer + [-100]}
    if advantage is not None:
        row["advantages"] = [0.0] * before + [advantage] * len(answer) + [0.0]
    return row


def warm_up(client: TrainingClient, prompts: list[list[int]], draw: random.Random) -> None:
    """Supervised steps on answers of the right form, of which half are right."""
    for _ in range(300):
        rows = []
        for (a, b), prompt in zip(SUMS, prompts):
            answer = a + b if draw.random() < 1 / 2 else draw.randrange(9)
            end = [client.tokenizer.eos_token_id]
            rows.append(row_of(prompt, client.tokenizer.encode(str(answer)) + end))
        client.forward_backward(rows, CrossEntropy())
        client.optim_step(lr=3e-3)


def main(*overrides: str, num_steps: int = 60) -> list[float]:
    """Returns the mean reward of each step."""
    with TrainingClient("policy", *SETTINGS, *overrides) as client:
        tokenizer, is_first = client.tokenizer, client.mesh.rank == 0
        prompts = [tokenizer.encode(f"{a}+{b}=") for a, b in SUMS]
        rewards = client.load_state()
        if rewards is None:
            warm_up(client, prompts, random.Random(0))
            rewards = []
        while len(rewards) < num_steps:
            samples = client.sample(prompts, NUM_SAMPLES, max_new_tokens=4, seed=len(rewards))
            groups, right = [], 0.0
            for (a, b), prompt, answers in zip(SUMS, prompts, samples):
                texts = [tokenizer.decode(x, skip_special_tokens=True) for x in answers]
                scores = [float(text == str(a + b)) for text in texts]
                mean, deviation = statistics.mean(scores), statistics.pstdev(scores) + 0.01
                better = [(score - mean) / deviation for score in scores]
                groups.append([row_of(prompt, x, by) for x, by in zip(answers, better)])
                right += mean / len(SUMS)
            client.forward_backward(groups, Ppo(average="rows"))  # one step: every ratio is 1
            client.optim_step(lr=3e-3)
            rewards.append(right)
            if is_first:
                print(f"step {len(rewards):3d}  reward {right:.2f}  {'#' * round(50 * right)}")
            if len(rewards) % 20 == 0:
                client.save_state(rewards)
        return rewards


if __name__ == "__main__":
    main(*sys.argv[1:])
