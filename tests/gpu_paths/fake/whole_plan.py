"""gpu_check's whole plan on a fake card, part by part, with what each must come to where no number is real.

    python -m tests.gpu_paths.fake.run -m tests.gpu_paths.fake.whole_plan FOLDER               every part, on this card
    python -m tests.gpu_paths.fake.run -m tests.gpu_paths.fake.whole_plan FOLDER 8b features   groups or parts of it

FOLDER holds the results, and what passed is not run again. `tests.gpu_paths.fake.test_gpu_check` sets the card.
"""

from __future__ import annotations

import json
import re
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import gpu_check
from benchmarks.gpu.plan import Part, full_plan
from benchmarks.gpu.workers import NO_NUMBERS

PATIENCE = 20
"""Times the limit of a part: the limits are those of a machine whose cores wait for its card."""
# what this card, its disk or its packages do not have
MISSING = r"needs \d+ GiB, this GPU has|a larger card has a row|not installed: |GB of disk"


def chosen(names: list[str]) -> list[Part]:
    """Parts by their names or their group's, with patience; without names all."""
    known = full_plan()
    kept = [part for part in known if not names or {part.name, part.group} & set(names)]
    assert not names or kept, f"no part or group is called {names}"
    return [replace(part, limit_s=PATIENCE * part.limit_s) for part in kept]


def outcome(part: str, found: dict[str, Any]) -> str:
    """passed | numbers: it ran to where numbers are compared | missing | BROKEN."""
    if found["verdict"] == NO_NUMBERS:  # the part says so itself, where all of it has run
        return "numbers"
    if found["verdict"] == "missing" and re.search(MISSING, str(found.get("why"))):
        return "missing"
    return "passed" if found["verdict"] == "pass" else "BROKEN"


def run(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Results of the chosen parts, each with its `outcome`."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    arguments = Namespace(
        minutes=1e4, only=[], device="cuda", plan="full", out=folder / gpu_check.FILE
    )
    device = torch.cuda.get_device_properties(0)
    machine = {"device": device.name, "torch": torch.__version__, "plan": "full"}
    parts = chosen(names)
    results = gpu_check.check_all(parts, arguments, machine, device.total_memory / 2**30)
    wanted = {part.name: results[part.name] for part in parts}
    return {name: found | {"outcome": outcome(name, found)} for name, found in wanted.items()}


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    results = run(Path(arguments[0]), arguments[1:])
    for name, found in results.items():
        why = "" if found["outcome"] == "passed" else str(found.get("why"))[-300:]
        cost = f"{found.get('seconds', 0):6.0f} s {found.get('cpu_s', 0):6.0f} CPU-s"
        print(f"{name:28s} {found['outcome']:8s} {cost}  {json.dumps(why) if why else ''}")
    print(f"{len(results)} parts in {time.monotonic() - began:.0f} s")
    return int(any(found["outcome"] == "BROKEN" for found in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
