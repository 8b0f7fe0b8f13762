"""One plan per host: the first process that asks makes it, all others map its arrays.

A plan of 10^9 documents takes 16 GB while it is made and 6 GB when it is kept: too much for each of
eight ranks. Smaller ones are made sooner than they are looked up.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from automodel_lite.data.cache import build_once
from automodel_lite.data.packing.plan import PackPlan, PlanCounts, plan_packs
from automodel_lite.data.tokens.token_rows import DocumentReader

SHARED_FROM = 1_000_000  # documents
RULES_VERSION = "1"  # of plan_packs: other plans of the same lengths have another number
_FACTS = "plan.json"


def plan_of_host(
    rows: DocumentReader, size: int, settings: dict[str, Any], shared: tuple[Path, str] | None
) -> PackPlan:
    """Returns `plan_packs` of the rows' lengths.

    shared  the cache, and what tells these rows from all others: all processes of the host share
            the plan of many rows, and the next start finds it; None = each makes its own
    """

    def plan() -> PackPlan:
        return plan_packs(rows.lengths, size, has_labels=rows.has_labels, **settings)

    is_own = ":" in settings["strategy"]  # a user's, which may change
    if shared is None or is_own or len(rows) < SHARED_FROM:
        return plan()
    root, identity = shared
    key = {name: str(value) for name, value in settings.items()}
    key |= {"rows": identity, "size": str(size), "rules": RULES_VERSION}
    entry = build_once(root, "plans", "plan", key, lambda to: write_plan(plan(), to))
    return read_plan(entry.folder)


def write_plan(plan: PackPlan, folder: Path) -> None:
    """Writes a file for each array, and one of all else."""
    facts: dict[str, Any] = {"counts": asdict(plan.counts)}
    for field in fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, np.ndarray):
            np.save(folder / f"{field.name}.npy", value)
        elif field.name != "counts":
            facts[field.name] = value
    (folder / _FACTS).write_text(json.dumps(facts))


def read_plan(folder: Path) -> PackPlan:
    """Maps what `write_plan` wrote."""
    facts = json.loads((folder / _FACTS).read_text())
    facts["counts"] = PlanCounts(**facts["counts"])
    for path in folder.glob("*.npy"):
        facts[path.stem] = np.asarray(np.load(path, mmap_mode="r"))
    return PackPlan(**facts)
