"""Trackers that installed packages offer, by the entry point group `automodel_lite.trackers`:

[project.entry-points."automodel_lite.trackers"]
comet = "my_package.trackers:CometTracker"

`logger=comet` chooses it. Nothing is imported to know their names.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from importlib.metadata import entry_points

GROUP = "automodel_lite.trackers"
_NAME = re.compile(r"[a-z]\w*", re.ASCII)
_CODE = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)*:[A-Za-z]\w*", re.ASCII)


def installed_trackers() -> dict[str, str]:
    """Returns name -> dotted path of a class, in the order of the names. One whose name or value
    has another form is left out.
    """
    return _trackers_on(tuple(sys.path))


@lru_cache(maxsize=2)
def _trackers_on(path: tuple[str, ...]) -> dict[str, str]:
    found = {
        point.name: point.value.replace(":", ".")
        for point in entry_points(group=GROUP)
        if _NAME.fullmatch(point.name) and _CODE.fullmatch(point.value)
    }
    return dict(sorted(found.items()))
