"""Which rank a job waited for, and in which collective: the records that its ranks left in
`logs/collectives_*.json` when they made no progress, side by side.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from automodel_lite.launched import named_ranks

Call = dict[str, Any]  # an entry of torch's flight recorder


def hangs_of(logs: Path) -> list[str]:
    """Returns a sentence for each process group in which ranks wait, the oldest wait first; files
    that are damaged are left out.
    """
    calls: dict[tuple[str, str], dict[int, Call]] = defaultdict(dict)
    members: dict[tuple[str, str], list[int]] = {}
    ranks = set()
    for path in sorted(logs.glob("collectives_*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            rank = int(path.stem.rpartition("_")[2])
            for backend, record in json.loads(path.read_text()).items():
                for call in record["entries"]:
                    name = call["process_group"][0]
                    calls[backend, name][rank] = call  # the newest comes last
                for name, group in record["pg_config"].items():
                    if listed := json.loads(group["ranks"]):
                        members[backend, name] = listed
            ranks.add(rank)
    found = []
    for key, of_ranks in calls.items():
        waiting = {
            rank: call
            for rank, call in of_ranks.items()
            if not call.get("retired") and call["state"] != "completed"
        }
        if waiting:
            # a group of gloo does not list its ranks; the first group has all of them
            known = members.get(key) or (sorted(ranks) if key[1] == "0" else sorted(of_ranks))
            began = min(call["time_created_ns"] for call in waiting.values())
            found.append((began, _sentence(key[0], known, of_ranks, waiting)))
    return [text for _, text in sorted(found)]


def _sentence(
    backend: str, members: list[int], calls: dict[int, Call], waiting: dict[int, Call]
) -> str:
    """Says for which ranks the waiting ones of a group wait, or that they disagree on the call.

    members  ranks of the group; calls: the last of each; waiting: those that are not done
    """
    number, first = max((_number(call), rank) for rank, call in waiting.items())
    call = waiting[first]
    name, description = call["process_group"]
    group = f"{backend} group {name}" + (f" ({description})" if description != "undefined" else "")
    where = f"{_what(call)}, number {number} of {group}"
    alike = [rank for rank in waiting if _number(waiting[rank]) == number]
    behind = [rank for rank in members if rank not in calls or _number(calls[rank]) < number]
    if behind:
        return f"{named_ranks(behind)} did not come to {where}, where {named_ranks(alike)} waited."
    others = [rank for rank in calls if _what(calls[rank]) != _what(call)]
    if others:
        other = calls[others[0]]
        return f"rank {others[0]} called {_what(other)} where rank {first} called {where}."
    return (
        f"{named_ranks(alike)} waited in {where}, which all of them had called: a link or a GPU "
        "hung."
    )


def _number(call: Call) -> int:
    return int(call["p2p_seq_id"] if call["is_p2p"] else call["collective_seq_id"])


def _what(call: Call) -> str:
    """As `all_reduce of float [3, 4]`."""
    shapes = ", ".join(map(str, call["input_sizes"][:2]))
    dtype = "".join(call["input_dtypes"][:1]).lower()
    return f"{call['profiling_name'].rpartition(':')[2]} of {dtype} {shapes}".rstrip()
