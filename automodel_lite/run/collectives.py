"""What each process group of a rank did last, from torch's flight recorder, which is always on:
`logs/collectives_*.json` of a rank that makes no progress. `automodel-lite report` reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from automodel_lite import compat
from automodel_lite.run.durable import write_atomically

_KEPT = 8  # the newest of each group; torch keeps 2,000 of all


def write_collectives(path: Path) -> None:
    """Writes a JSON object of backend -> torch's record; nothing where no group is open."""
    if not dist.is_initialized():
        return
    recorders = {"gloo": compat.flight_recorder._dump_fr_trace_json}
    if dist.is_nccl_available():
        recorders["nccl"] = compat.flight_recorder._dump_nccl_trace_json
    found = {name: json.loads(dump()) for name, dump in recorders.items()}
    for record in found.values():
        record["entries"] = newest(record.get("entries", []))
    write_atomically(path, json.dumps(found) + "\n")


def newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the last few calls of each group, oldest first."""
    of_groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        of_groups.setdefault(str(entry["process_group"]), []).append(entry)
    return [entry for calls in of_groups.values() for entry in calls[-_KEPT:]]
