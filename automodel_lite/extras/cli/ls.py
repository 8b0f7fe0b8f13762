"""What there is to choose: `automodel-lite ls`, and `--help` of a recipe."""

from __future__ import annotations

import re

from automodel_lite.cli.line import (
    EXAMPLES,
    JSON_HELP,
    argument_parser,
    parser,
    rewrite_program_name,
)
from automodel_lite.cli.recipes import Recipe
from automodel_lite.cli.sources import Sources, groups_of, presets_of
from automodel_lite.errors import ConfigError, did_you_mean


def ls(argv: list[str]) -> int:
    """List presets and options: all, those of a group, or one file.

    automodel-lite ls
    automodel-lite ls optimizer
    automodel-lite ls optimizer/adamw
    automodel-lite ls finetune > my_conf/mine.yaml     # train --config-dir my_conf --config-name
    mine
    """
    found = argument_parser(ls.__doc__)
    found.add_argument("name", nargs="?", help="a group, a preset or group/option")
    found.add_argument("--config-dir", "-cd", help="a folder of your own presets and options")
    args = found.parse_args(argv)
    sources = Sources.of(args.config_dir)
    known = groups_of(sources)
    if args.name is None:
        lines = [f"{name:18s} {first_comment(name, sources)}" for name in presets_of(sources)]
        lines += [
            "",
            *(f"{f'{group}/':18s} {', '.join(options)}" for group, options in known.items()),
        ]
    elif (group := args.name.rstrip("/")) in known:
        lines = [
            f"{option:18s} {first_comment(f'{group}/{option}', sources)}" for option in known[group]
        ]
    else:
        path = sources.file(args.name.removesuffix(".yaml"))
        if path is None:
            names = [
                *presets_of(sources),
                *(f"{group}/{option}" for group in known for option in known[group]),
            ]
            raise ConfigError(
                f"{args.name}: no such preset or option{did_you_mean(args.name, names) or '.'}"
            )
        lines = [f"# {path}", path.read_text().rstrip()]
    print("\n".join(lines))
    return 0


def help_of(recipe: Recipe, sources: Sources) -> str:
    """Presets, groups with their options, and examples."""
    purpose = recipe.purpose
    lines = [
        f"{purpose[:1].upper()}{purpose[1:]}.",
        "",
        f"usage: {recipe.start} --config-name PRESET [--config-dir FOLDER] [key=value ...]",
    ]
    lines += [
        "",
        "presets:",
        *(f"  {name:17s} {first_comment(name, sources)}" for name in presets_of(sources)),
    ]
    lines += ["", "groups (group=option):"]
    lines += [
        f"  {group:17s} {', '.join(options)}" for group, options in groups_of(sources).items()
    ]
    if recipe.main == "recipes.train_ft:main":
        lines += ["", "examples:", *(f"  {example}" for example in EXAMPLES)]
        lines += ["", "dry_run=true checks everything, estimates memory and stops."]
    lines += [
        "",
        "--cfg job prints the whole configuration and stops; --multirun sweeps, seed=0,1.",
    ]
    lines += [f"--json FILE: {JSON_HELP}."]
    lines += ["--nproc 8 (or gpu) starts 8 processes (or one per GPU) on this machine."]
    lines += ["", parser().format_usage().replace("usage", "all flags").rstrip()]
    return rewrite_program_name("\n".join(lines))


def first_comment(preset: str, sources: Sources) -> str:
    """Returns the first sentence of the comment of a preset or an option, if it begins with one."""
    path = sources.file(preset)
    assert path is not None
    line = next(iter(path.read_text(errors="replace").splitlines()), "")
    return re.split(r"[:;] ", line.lstrip("# "))[0].rstrip(".") if line.startswith("#") else ""
