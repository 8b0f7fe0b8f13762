"""The recipes by name, for an installed package: `automodel-lite train --config-name finetune ...`.

Under a launcher: `torchrun -m automodel_lite train --config-name finetune ...`.
"""

from __future__ import annotations

import re
import runpy
import sys
from importlib.util import find_spec

RECIPES = {
    "train": ("train_ft", "fine-tune a Hugging Face causal LM on packed sequences"),
    "prepare": ("prepare_data", "tokenise and pack, and stop"),
    "inspect": ("inspect_data", "look at documents as tokens, labels and packs"),
    "verify": ("verify", "prove packing, sharding and the loss on your model and data"),
    "generate": ("generate", "ask a trained model"),
    "report": ("report", "draw a run, or compare several"),
    "export": ("export_hf", "write a run's model as a Hugging Face folder, adapters merged"),
    "estimate": ("estimate", "FLOPs, memory and traffic on paper, for any number of GPUs"),
}


def main() -> None:
    """Runs the recipe named by the first argument with the others."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in RECIPES:
        lines = [f"  automodel-lite {verb:9s} {text}" for verb, (_, text) in RECIPES.items()]
        print("\n".join(["usage: automodel-lite RECIPE ... (--help after a recipe says more)", "", *lines]))
        raise SystemExit(0 if name in ("-h", "--help") else 2)
    module, _ = RECIPES[name]
    sys.argv = [f"automodel-lite {name}", *sys.argv[2:]]
    runpy.run_module(f"{recipes_package()}.{module}", run_name="__main__")


def as_typed(text: str) -> str:
    """`python recipes/generate.py x` as it is typed here: an installed package has `automodel-lite generate x`.

    >>> torchrun --nproc-per-node 4 recipes/train_ft.py   ->   torchrun --nproc-per-node 4 -m automodel_lite train
    """
    if recipes_package() == "recipes":
        return text
    for verb, (module, _) in RECIPES.items():
        text = re.sub(rf"(torchrun|python) recipes/{module}\.py", f"automodel-lite {verb}", text)
        text = text.replace(f"recipes/{module}.py", f"-m automodel_lite {verb}")
    return text


def recipes_package() -> str:
    """Where the recipes are: inside of an installed package, beside it in a checkout."""
    return "automodel_lite.recipes" if find_spec("automodel_lite.recipes") else "recipes"


if __name__ == "__main__":
    main()
