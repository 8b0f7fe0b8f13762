"""What `--help` prints: the template of Hydra's own help, which a `hydra/help` of the user's can replace."""

from __future__ import annotations

import re

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from automodel_lite.cli.commands import RECIPES, as_typed
from automodel_lite.cli.sources import Sources, groups_of, presets_of

EXAMPLES = (
    "torchrun recipes/train_ft.py --config-name llama_packed",
    "torchrun recipes/train_ft.py --config-name llama_packed packed_sequence.packed_sequence_size=512 name=b",
    "torchrun recipes/train_ft.py --config-name finetune name=c model.pretrained=/models/x dataset.path=a.jsonl",
    "torchrun --nproc-per-node 4 recipes/train_ft.py --config-name llama_packed mesh.cp=2",
    "automodel-lite train --nproc 4 --config-name llama_packed mesh.cp=2",
    "torchrun recipes/train_ft.py --config-name llama_packed name=sweep --multirun optimizer.lr=1e-3,3e-3",
)
ConfigStore.instance().store(group="hydra/help", name="recipe", node={"template": "${recipe_help:}"})


def fill_in_help(recipe: str, sources: Sources) -> None:
    """Fills in Hydra's template for this process."""
    text = help_of(recipe, sources).replace("$", "$$")
    OmegaConf.register_new_resolver("recipe_help", lambda: text, replace=True)


def help_text(recipe: str = "train_ft", config_dir: str | None = None) -> str:
    """Presets, groups with their options, and examples."""
    return help_of(recipe, Sources.of(config_dir))


def help_of(recipe: str, sources: Sources) -> str:
    start = "torchrun" if recipe == "train_ft" else "python"
    purpose = next(text for module, text in RECIPES.values() if module == recipe)
    lines = [
        f"{purpose[0].upper()}{purpose[1:]}.",
        "",
        f"usage: {start} recipes/{recipe}.py --config-name PRESET [--config-dir FOLDER] [key=value ...]",
    ]
    lines += ["", "presets:", *(f"  {name:16s} {first_comment(name, sources)}" for name in presets_of(sources))]
    lines += ["", "groups (group=option):"]
    lines += [f"  {group:16s} {', '.join(options)}" for group, options in groups_of(sources).items()]
    if recipe == "train_ft":
        lines += ["", "examples:", *(f"  {example}" for example in EXAMPLES)]
    lines += ["", "--cfg job prints the whole configuration and stops; --hydra-help lists Hydra's flags."]
    lines += [
        "--nproc 8 (or gpu) starts so many processes on this machine; --nnodes 2 --rdzv HOST:PORT joins machines."
    ]
    lines += ["dry_run=true checks everything, estimates memory and stops."] if recipe == "train_ft" else []
    return as_typed("\n".join(lines))


def first_comment(preset: str, sources: Sources) -> str:
    """The first sentence of the comment of a preset or an option, if it begins with one."""
    path = sources.file(preset)
    assert path is not None
    line = next(iter(path.read_text().splitlines()), "")
    return re.split(r"[:;] ", line.lstrip("# "))[0].rstrip(".") if line.startswith("#") else ""
