"""`--json FILE`: the numbers of a command beside what it prints, as one object.

A command puts what it finds into RESULTS under names that say the unit (`_bytes`, `_s`, `_frac`);
the end of the process writes them. `--json -` is the standard output, and all else goes to stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, TextIO

from automodel_lite.errors import ConfigError
from automodel_lite.launched import rank
from automodel_lite.redact import scrub

RESULTS: dict[str, Any] = {}
_targets: list[Path | TextIO] = []


def open_json(target: str) -> None:
    """Chooses where the numbers go; raises ConfigError where nothing can be written."""
    if target == "-":
        _targets.append(sys.stdout)
        sys.stdout = sys.stderr
    else:
        path = Path(target)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ConfigError(f"--json {target} is not a file in a folder that exists.")
        _targets.append(path)


def write_results() -> None:
    """Writes the numbers, on the first rank, where `--json` has asked for them."""
    while _targets:
        target = _targets.pop()
        if rank() != 0 or not RESULTS:
            continue
        # JSON has no NaN and no infinities: they become texts
        found = json.loads(json.dumps(RESULTS, default=str), parse_constant=str)
        text = scrub(json.dumps(found, indent=1))
        if isinstance(target, Path):
            target.write_text(f"{text}\n", encoding="utf-8")
        else:
            print(text, file=target, flush=True)
