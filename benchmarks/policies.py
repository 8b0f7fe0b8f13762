"""A step of the training client beside one of TRL's GRPOTrainer: the same rows, loss and model, in turns.

    .venv-trl/bin/python -m benchmarks.policies [--rounds 3]

A group is one prompt and its sampled answers of 16 to 48 tokens. TRL pads prompts and answers and computes the prompt once for
each answer; the client packs the group as a tree. One thread; CPU seconds of forward, backward and the optimizer's step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from automodel_lite import TrainingClient
from automodel_lite.parts.losses.policy import Ppo
from benchmarks.turns import ratio, take_turns
from tests.models.test_policy import row_of, save_tokenizer
from tests.models.test_policy_trl import padded, trainer_of

VOCAB = 1000
COLUMNS = ("input_ids", "labels", "advantages", "old_log_probs")
CASES = [(8, 200), (16, 200), (8, 2000), (16, 2000)]


def groups_of(num_rows: int, num_prompt: int) -> list[list[dict]]:
    """One group: the rows of a prompt."""
    draw = np.random.default_rng(num_rows + num_prompt)
    prompt = draw.integers(2, VOCAB, num_prompt).tolist()
    answers = [
        draw.integers(2, VOCAB, int(draw.integers(16, 48))).tolist() for _ in range(num_rows)
    ]
    return [[row_of(prompt, answer, float(draw.normal()), draw) for answer in answers]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        folder = f"{root}/model"
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        save_tokenizer(Path(folder), VOCAB)
        theirs = trainer_of(folder, Path(root, "trl"), loss_type="grpo", beta=0.0)
        theirs.current_gradient_accumulation_steps = 1
        theirs.args.steps_per_generation = 1
        theirs.model.train()
        optimizer = torch.optim.AdamW(theirs.model.parameters(), lr=1e-6)
        overrides = ("training.num_threads=1", f"output_dir={root}/run", "attention=reference")
        with TrainingClient("policy", f"model.pretrained={folder}", *overrides) as client:
            for num_rows, num_prompt in CASES:
                groups = groups_of(num_rows, num_prompt)
                rows = [[{k: row[k] for k in COLUMNS} for row in group] for group in groups]
                inputs = padded(groups)

                def step_theirs(inputs: dict = inputs) -> float:
                    loss = theirs._compute_loss(theirs.model, inputs)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    return float(loss)

                def step_ours(rows: list = rows) -> float:
                    out = client.forward_backward(rows, Ppo(average="rows"))
                    client.optim_step(lr=1e-6)
                    return out.loss / out.num_items

                ways = {"TRL": step_theirs, "client": step_ours}
                spent, losses = take_turns(ways, args.rounds)
                cpu_s = [f"{np.median(seconds):.2f}" for seconds in spent.values()]
                print(f"losses {losses}")
                print(
                    f"| {num_rows} | {num_prompt:,} | {' | '.join(cpu_s)} | {ratio(*spent.values())} |"
                )


if __name__ == "__main__":
    main()
