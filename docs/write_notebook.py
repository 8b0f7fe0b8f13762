"""Runs examples/first_steps.ipynb from top to bottom and keeps what its cells print.

python docs/write_notebook.py [--to FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"
BETWEEN = "\x1e"  # what separates the cells on the screen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, default=NOTEBOOK)
    to = parser.parse_args().to
    notebook = json.loads(NOTEBOOK.read_text())
    cells = run_cells(notebook)
    with tempfile.TemporaryDirectory() as folder:
        code = f"\nprint({BETWEEN!r}, flush=True)\n".join("".join(cell["source"]) for cell in cells)
        more = {
            "PYTHONPATH": str(ROOT),
            "AUTOMODEL_LITE_CACHE": f"{folder}/cache",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | more,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    for number, (cell, text) in enumerate(
        zip(cells, done.stdout.split(f"{BETWEEN}\n"), strict=True), start=1
    ):
        # folders of this machine
        for here, there in ((folder, "..."), (f"{Path(sys.executable).parent}/", "")):
            text = text.replace(here, there)
        shown = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = (
            [{"output_type": "stream", "name": "stdout", "text": shown}] if shown else []
        )
    to.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def run_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the cells of code but those that install: they are for a machine without the
    package.
    """
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in code if "install" not in cell["metadata"].get("tags", [])]


if __name__ == "__main__":
    main()
