"""The parts of `benchmarks/gpu_check.py`, from the table plan.yaml.

Parts of one group share a process: torch and transformers take ten seconds to import, and a shape is built once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

PLANS = ("full", "smoke")
# of parts whose rows name no call, by how their names begin
CALLS = {"step": "steps.measure", "recipe": "recipe.rate", "feature": "recipe.feature"}


@dataclass(frozen=True)
class Part:
    """One line of the results: a function of `benchmarks/gpu`.

    limit_s    after so many seconds its process is ended
    seconds    that it is expected to take on a card; it begins only when they are left
    least_gib  of the GPU
    most_gib   of the GPU: a larger one has a row of its own for the same question
    published  tokens per second and GPU that others report for this job, who, and with which batch
    """

    name: str
    call: str  # module.function
    limit_s: float = 120
    seconds: float = 45
    arguments: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # packages
    least_gib: float = 0.0
    group: str = ""
    most_gib: float = float("inf")
    published: str = ""


@cache
def read_table() -> dict[str, Any]:
    """Returns packages, shapes of models, cases of kernels, and the rows of each plan."""
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("plan.yaml").read_text())
    return table


def full_plan() -> list[Part]:
    return [part for row in read_table()["full"] for part in parts_of(row)]


def smoke_plan() -> list[Part]:
    """The same functions in miniature."""
    return [part for row in read_table()["smoke"] for part in parts_of(row)]


def parts_of(row: dict[str, Any]) -> Iterator[Part]:
    """Yields the part of a row; of a kernel one for each case: what a kill cuts off leaves the cases before it."""
    if "kernel" not in row:
        settings = {"call": CALLS.get(row["name"].split("-")[0])} | row
        own = {name.name: settings.pop(name.name) for name in fields(Part) if name.name in settings}
        yield Part(**own | {"needs": tuple(own.get("needs", ())), "arguments": settings})
        return
    name, needs = row["kernel"], tuple(row.get("needs", ()))
    for case in row["cases"]:
        call, arguments = "kernels.run", {"kernel_name": name, "case_name": case}
        if case == "speed":
            call, arguments = "kernels.speed", {"kernel_name": name}
        group = f"kernel-{name}"
        limit_s = row.get("limit_s", 60)
        seconds = row.get("seconds", 6)
        yield Part(f"{group}: {case}", call, limit_s, seconds, arguments, needs, group=group)


def groups(parts: list[Part]) -> Iterator[list[Part]]:
    """Neighbors of one group."""
    for _, members in groupby(parts, key=lambda part: part.group):
        yield list(members)
