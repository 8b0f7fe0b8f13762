"""One plan per host: the first process that asks makes it, all others map its arrays.

A plan of 10^9 documents takes 16 GB while it is made and 6 GB when it is kept: too much for each of
eight ranks. Smaller ones are made sooner than they are looked up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from automodel_lite.data.cache import build_once
from automodel_lite.data.packing.plan import PackPlan, PlanCounts

RULES_VERSION = "1"  # of plan_packs: other plans of the same lengths have another number
_FACTS = "plan.json"


def plan_of_host(
    make: Callable[[], PackPlan], settings: Mapping[str, Any], cache_dir: Path, identity: str
) -> PackPlan:
    """Returns the plan of these settings as the cache has it, after making it where there is none.

    identity  tells the rows from all others
    """
    key = {name: str(value) for name, value in settings.items()}
    key |= {"rows": identity, "rules": RULES_VERSION}
    entry = build_once(cache_dir, "plans", "plan", key, lambda to: write_plan(make(), to))
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
