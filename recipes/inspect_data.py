"""Look at what a run would be trained on, before it is: lengths, packs, a mask, samples, and all
that is left out.

    python recipes/inspect_data.py --config-name llama_packed
    python recipes/inspect_data.py --config-name llama_packed --html data.html   (the same as a page
    of its own)

Takes the arguments of train_ft.py. Exits with 2 when nothing would be trained on.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

# --help, --cfg and mistakes are answered before torch is imported; this does not return
if __name__ == "__main__":
    run_recipe("recipes.inspect_data:main")

import os
import sys
from dataclasses import asdict
from pathlib import Path

from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.extras.inspection import first_documents, inspection_of
from automodel_lite.extras.report import READ, TRAINED
from automodel_lite.launched import check_alone
from automodel_lite.results import RESULTS
from automodel_lite.training.resolve import resolve_auto

BRACKETS = ("⟦", "⟧")
GREEN = ("\x1b[32m", "\x1b[0m")


def main(config: Config, html: Path | None = None) -> int:
    """Prints everything, and writes it as a page; raises DataError when nothing would be trained
    on.
    """
    check_alone()
    data = first_documents(resolve_auto(config))
    report = data.report()
    RESULTS.update(data.counts, lengths=data.lengths(), packing=report and asdict(report))
    in_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ and html is None
    marks = GREEN if in_color else BRACKETS
    shown = inspection_of(data, is_page=html is not None, mark="green" if in_color else "⟦ ⟧")
    for heading, lines in shown.sections:
        text = "\n".join(lines).replace(TRAINED, marks[0]).replace(READ, marks[1])
        print(f"{heading}\n{text}\n")
    if html:
        try:
            print(shown.write(html))
        except OSError as error:
            raise ConfigError(f"--html {html} cannot be written ({error.strerror}).") from error
    num_packs = len(data.packs_of(0))
    if not num_packs or not any(count.num_label_tokens for count in data.tokens.counts.values()):
        raise DataError("nothing would be trained on: no pack has a label.")
    return 0
