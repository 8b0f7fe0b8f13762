"""The recipes by the names that an installed package has for them."""

from __future__ import annotations

import argparse
import re

from automodel_lite.config.components import IS_INSTALLED

RECIPES_PACKAGE = "automodel_lite.recipes" if IS_INSTALLED else "recipes"
RECIPES = {
    "train": ("train_ft", "fine-tune a Hugging Face causal LM on packed sequences"),
    "prepare": ("prepare_data", "tokenise and pack, and stop"),
    "inspect": ("inspect_data", "look at documents as tokens, labels and packs"),
    "verify": ("verify", "prove packing, sharding and the loss on your model and data"),
    "evaluate": ("evaluate", "loss and answers on held-out files"),
    "generate": ("generate", "ask a trained model"),
    "report": ("report", "draw a run, or compare several"),
    "export": ("export_hf", "write a run's model as a Hugging Face folder, adapters merged"),
    "average": ("average", "write the mean of a run's checkpoints as a Hugging Face folder"),
    "estimate": ("estimate", "FLOPs, memory and traffic on paper, for any number of GPUs"),
}


def as_typed(text: str) -> str:
    """`python recipes/generate.py x` as it is typed here: an installed package has `automodel-lite generate x`.

    >>> torchrun --nproc-per-node 4 recipes/train_ft.py   ->   torchrun --nproc-per-node 4 -m automodel_lite train
    """
    if not IS_INSTALLED:
        return text
    for verb, (module, _) in RECIPES.items():
        text = re.sub(rf"(torchrun|python) recipes/{module}\.py", f"automodel-lite {verb}", text)
        text = text.replace(f"recipes/{module}.py", f"-m automodel_lite {verb}")
    return text


def argument_parser(recipe_doc: str | None) -> argparse.ArgumentParser:
    """Of a recipe that reads its own command line; its docstring is the head of `--help`."""
    return argparse.ArgumentParser(
        description=as_typed(recipe_doc or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
