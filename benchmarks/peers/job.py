"""What every contestant of `benchmarks/peers_cpu.py` trains: the same rows, model shape, steps and clock.

Runs in each peer's own environment.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict, dataclass

# width, layers, heads (half as many of keys and values)
SHAPES = {"small": (256, 6, 8), "32m": (512, 8, 8), "tiny": (64, 2, 4)}
PACK_TOKENS = 2048
LR = 1e-4
# lines that a contestant prints for benchmarks.peers_cpu
STEP_DONE, RESULT = "STEP DONE ", "RESULT "


@dataclass(frozen=True)
class Job:
    """One contestant's run."""

    folder: str  # tokenizer/ and rows.json, written by benchmarks.peers.recipe
    shape: str
    precision: str  # fp32 | bf16 (autocast over fp32 weights)
    steps: int  # optimizer steps that are timed
    warmup_steps: int
    data: str  # the raw JSON lines
    scratch: str  # an empty folder of this run
    # a folder with weights and tokenizer, trained in place of a shape
    pretrained: str | None = None

    @staticmethod
    def from_argv() -> Job:
        return Job(**json.loads(sys.argv[1]))

    def to_argv(self) -> str:
        return json.dumps(asdict(self))

    @property
    def all_steps(self) -> int:
        return self.warmup_steps + self.steps

    def model_settings(self) -> dict[str, int | bool]:
        """Settings of a Llama; 8,192 tokens, feed-forward 8/3 of the hidden size."""
        width, num_layers, num_heads = SHAPES[self.shape]
        return {
            "hidden_size": width,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads // 2,
            "vocab_size": 8192,
            "intermediate_size": -(-width * 8 // 3 // 64) * 64,
            "max_position_embeddings": PACK_TOKENS,
            "tie_word_embeddings": True,
        }


class Clock:
    """CPU seconds of every step (children included), each begun when benchmarks.peers_cpu says that it is its turn."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = cpu_seconds()

    def step_done(self) -> None:
        """Says so, and waits for a line on stdin, without which the contest is over; `yes | python -m ...` never waits."""
        self.seconds.append(cpu_seconds() - self._began)
        print(f"\n{STEP_DONE}{self.seconds[-1]}", flush=True)
        if not sys.stdin.readline():
            raise SystemExit("nobody gives turns")
        self._began = cpu_seconds()

    def report(self, job: Job, tokens_of_step: list[int]) -> None:
        """Prints the rates of the timed steps as one JSON line."""
        assert len(self.seconds) >= job.all_steps, f"{len(self.seconds)} steps were timed"
        timed = slice(job.warmup_steps, job.all_steps)
        pairs = zip(tokens_of_step[timed], self.seconds[timed], strict=True)
        rates = [tokens / seconds for tokens, seconds in pairs]
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(RESULT + json.dumps({"tokens_per_cpu_s": rates, "peak_gib": peak_gib}), flush=True)


def cpu_seconds() -> float:
    return sum(os.times()[:4])
