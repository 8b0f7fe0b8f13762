"""`python -m tests.affected BASE`: the test files of what differs from a commit, a line each.

A changed test file stands for itself, a changed file of the package for the test of its name, or, where there is none, for
all tests of the room that mirrors its own: `automodel_lite/data/packing/plan.py` -> `tests/data/packing/test_plan.py`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"automodel_lite": "tests", "recipes": "tests/recipes", "conf": "tests/recipes"}


def changed_files(base: str) -> list[str]:
    """Returns the paths that differ from a commit, those that git does not know yet among them."""
    commands = (
        ["git", "diff", "--name-only", "--diff-filter=d", base],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    found = []
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found += done.stdout.splitlines()
    return found


def affected_tests(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Returns the test files and folders of changed paths."""
    found = set()
    for name in changed:
        path = PurePosixPath(name)
        if path.parts[0] == "tests":
            if path.name.startswith("test_"):
                found.add(name)
            continue
        room = ROOMS.get(path.parts[0])
        if room is None or path.suffix not in (".py", ".yaml"):
            continue
        folder = PurePosixPath(room, *path.parts[1:-1])
        own = folder / f"test_{path.stem}.py"
        if (root / own).is_file():
            found.add(str(own))
            continue
        # a file without a test of its own name is tested by the room, or by the one above
        while not any((root / folder).glob("test_*.py")):
            folder = folder.parent
        found.update(str(test.relative_to(root)) for test in (root / folder).glob("test_*.py"))
    return sorted(found)


if __name__ == "__main__":
    print("\n".join(affected_tests(changed_files(sys.argv[1]))))
