"""The recipes and tools by name, for an installed package:
`automodel-lite train --config-name finetune ...`.

Several processes: `automodel-lite train --nproc 8 ...`, or `torchrun -m automodel_lite train ...`.
"""

from __future__ import annotations

import os
import runpy
import sys

from automodel_lite.cli.line import COMMANDS, RECIPES, RECIPES_PACKAGE, TOOLS
from automodel_lite.config.components import locate
from automodel_lite.errors import MISTAKE_EXIT, meant, nearest


def main() -> None:
    """Runs the recipe named by the first argument with the others."""
    name, *rest = sys.argv[1:] or ["--help"]
    # what the shell asks: `automodel-lite -sc query=bash`
    if name in ("-sc", "--shell-completion"):
        sys.argv[0] = os.path.basename(sys.argv[0])
        name = "run"
        rest = ["recipes.train_ft:main", "-sc", *rest]
    if name == "--version":
        name = "train"
        rest = ["--version"]
    if name in TOOLS:
        from automodel_lite.cli import run_recipe, run_tool

        sys.argv = [sys.argv[0] if "-sc" in rest else f"automodel-lite {name}", *rest]
        if name == "validate":
            run_recipe("recipes.train_ft:main", [*rest, "dry_run=true"])
        if name == "run" and rest[:1] not in ([], ["-h"], ["--help"]):
            run_recipe(rest[0], rest[1:])
        if name == "run":
            print(
                "usage: automodel-lite run PACKAGE.MODULE:FUNCTION --config-name PRESET "
                "[key=value ...]"
            )
            raise SystemExit(0 if rest else 2)
        run_tool(locate(COMMANDS["tool"].format(name)), rest)
    if name not in RECIPES and not name.startswith("-"):
        near = meant(COMMANDS["meant"].get(name) or nearest(name, [*RECIPES, *TOOLS]))
        print(
            f"automodel-lite {name[:80]!a}: no such command{near} automodel-lite --help lists "
            "them.",
            file=sys.stderr,
        )
        raise SystemExit(MISTAKE_EXIT)
    if name not in RECIPES:
        lines = [f"  automodel-lite {verb:9s} {text}" for verb, (_, text) in RECIPES.items()]
        lines += ["", *(f"  automodel-lite {verb:9s} {text}" for verb, text in TOOLS.items())]
        print(
            "\n".join(
                ["usage: automodel-lite COMMAND ... (--help after a command says more)", "", *lines]
            )
        )
        raise SystemExit(0 if name in ("-h", "--help") else 2)
    module, _ = RECIPES[name]
    sys.argv = [f"automodel-lite {name}", *rest]
    runpy.run_module(f"{RECIPES_PACKAGE}.{module}", run_name="__main__")


if __name__ == "__main__":
    main()
