"""Every number of the schema and of the parts has its range, found before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

import pytest

from automodel_lite.config.rules import DURATION, PATH, UP_TO_THE_CORES, OneOf, Range
from tests.runs import problems

WRONG = {
    "optimizer.lr=inf": "optimizer.lr=inf must be a finite number.",
    "optimizer.lr=-1": "optimizer.lr=-1 must be at least 0 and at most 1.",
    "optimizer.betas=[0.9]": "optimizer.betas=[0.9] must be a list of 2 values.",
    "optimizer.betas=[0.9,1.0]": "optimizer.betas.1=1.0 must be at least 0 and below 1.",
    "optimizer.eps=-1": "optimizer.eps=-1 must be at least 1e-30.",
    "optimizer.weight_decay=-0.1": "optimizer.weight_decay=-0.1 must be at least 0.",
    "training.max_grad_norm=nan": "training.max_grad_norm=nan must be a finite number.",
    "lr_scheduler.warmup_steps=-3": "lr_scheduler.warmup_steps=-3 must be at least 0.",
    "lr_scheduler.min_lr_frac=-1": "lr_scheduler.min_lr_frac=-1 must be at least 0 and at most 1.",
    "lr_scheduler.min_lr_frac=7": "lr_scheduler.min_lr_frac=7 must be at least 0 and at most 1.",
    "loss.chunk_tokens=-5": "loss.chunk_tokens=-5 must be at least 1.",
    "tokenize.max_bad_frac=nan": "tokenize.max_bad_frac=nan must be a finite number.",
    "training.max_time=-1:00:00": "training.max_time=-1:00:00 must be hours:minutes:seconds, such as 1:30:00, or a number of seconds.",
    "training.max_time=1:99:99": "training.max_time=1:99:99 must be hours:minutes:seconds, such as 1:30:00, or a number of seconds.",
    "security.allow_targets=['']": "security.allow_targets=[''] must be names of packages, such as [my_package].",
    "training.max_time=0": "training.max_time=0 must be over 0.",
    "training.hang_timeout_s=-1": "training.hang_timeout_s=-1 must be at least 0 and at most 10,000,000.",
    "samples.max_new_tokens=100000000": "samples.max_new_tokens=100000000 must be at least 1 and at most 131,072.",
    "training.micro_batch_size=1000000000000000000": "training.micro_batch_size=1000000000000000000 must be at least 0 and at most 131,072.",
    "training.max_steps=1000000000000000000": "training.max_steps=1000000000000000000 must be at most 1,000,000,000.",
    "advanced.stop_margin_s=1e18": "advanced.stop_margin_s=1e+18 must be at least 0 and at most 10,000,000.",
    "mesh.reduce_every_micro_batch=true": "mesh.reduce_every_micro_batch=true: unknown key; did you mean advanced.reduce_every_micro_batch?",
    "training.stop_margin_s=9": "training.stop_margin_s=9: unknown key; did you mean advanced.stop_margin_s?",
    "seed=-1": "seed=-1 must be at least 0.",
    "seed=100000000000000000000": "seed=100000000000000000000 must be below 2**63.",
    "training.num_epochs=1000000000": "training.num_epochs=1000000000 must be at least 1 and at most 10,000.",
    "packed_sequence.packed_sequence_size=100000000000": "packed_sequence.packed_sequence_size=100000000000 must be at least 1 and at most 16,777,216.",
    "training.precision=bf61": "training.precision=bf61 must be one of auto, fp32, bf16; did you mean bf16?",
    "~name": "name has no value: set name=...",
    f"name={'x' * 300}": f"name={'x' * 300} must be a plain folder name (letters, digits, _-.=+@) of at most 200 bytes: set output_dir=... for a path.",
    "output_dir=": "output_dir= must be a path, and it is empty: was a shell variable not set?",
    "cache_dir=": "cache_dir= must be a path, and it is empty: was a shell variable not set?",
}  # fmt: skip


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_named_with_its_rule(override: str) -> None:
    assert WRONG[override] in problems(override)


def test_processes_and_threads_are_bounded_by_the_machine() -> None:
    cores = len(os.sched_getaffinity(0))
    for key in ("dataloader.num_workers", "tokenize.num_proc", "training.num_threads"):
        sentence = f"{key}=9999 must be at most {max(4, cores)}: this machine has {cores} cores."
        assert problems(f"{key}=9999") == [sentence]
        assert problems(f"{key}={cores}") == []


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (Range(0, 1), [0, 0.5, 1], [-1e-9, 1.1]),
        (Range(above=0, below=1), [0.1], [0, 1]),
        (OneOf(("a", "b")), ["a"], ["c", ""]),
        (UP_TO_THE_CORES, [0, 1, 4], [100_000]),
        (PATH, ["a", "ü/日本語", "~/x", "x" * 255], ["", " ", "x" * 256, "ü" * 128, "a/" * 3000]),
        (DURATION, ["1:30:00", "2-12:00:00", 5], ["soon", "-1:00:00", "1:30", "1:99:99", "0:00:00", 0, -5, "１:00:00"]),
    ],
    ids=["closed", "open", "choice", "cores", "path", "duration"],
)  # fmt: skip
def test_what_a_rule_lets_through(rule: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [rule.problem(value) for value in right] == [None] * len(right)
    assert all(rule.problem(value) for value in wrong)
