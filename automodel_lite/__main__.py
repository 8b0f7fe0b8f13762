"""The recipes by name, for an installed package: `automodel-lite train --config-name finetune ...`.

Under a launcher: `torchrun -m automodel_lite train --config-name finetune ...`.
"""

from __future__ import annotations

import runpy
import sys

from automodel_lite.cli.commands import RECIPES, RECIPES_PACKAGE


def main() -> None:
    """Runs the recipe named by the first argument with the others."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in RECIPES:
        lines = [f"  automodel-lite {verb:9s} {text}" for verb, (_, text) in RECIPES.items()]
        print("\n".join(["usage: automodel-lite RECIPE ... (--help after a recipe says more)", "", *lines]))
        raise SystemExit(0 if name in ("-h", "--help") else 2)
    module, _ = RECIPES[name]
    sys.argv = [f"automodel-lite {name}", *sys.argv[2:]]
    runpy.run_module(f"{RECIPES_PACKAGE}.{module}", run_name="__main__")


if __name__ == "__main__":
    main()
