"""What there is to choose: `automodel-lite ls`, `--help` of a recipe, and what a preset sets over a
chosen option.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.compose import is_typed
from automodel_lite.cli.line import (
    EXAMPLES,
    JSON_HELP,
    OWN_FLAGS,
    RECIPES,
    argument_parser,
    group_of,
    options_in,
    parser,
    rewrite_program_name,
)
from automodel_lite.cli.recipes import Recipe
from automodel_lite.cli.sources import USUAL, Sources, groups_of, presets_of, read
from automodel_lite.config.components import flatten
from automodel_lite.errors import ConfigError, did_you_mean, format_value


def ls(argv: list[str]) -> int:
    """List presets and options: all, those of a group, or one file.

    automodel-lite ls
    automodel-lite ls optimizer
    automodel-lite ls optimizer/adamw
    automodel-lite ls finetune > my_conf/mine.yaml
    automodel-lite train --config-dir my_conf --config-name mine
    """
    found = argument_parser(ls.__doc__)
    found.add_argument("name", nargs="?", help="a group, a preset or group/option")
    found.add_argument("--config-dir", "-cd", help="a folder of your own presets and options")
    args = found.parse_args(argv)
    sources = Sources.of(args.config_dir)
    known = groups_of(sources)
    if args.name is None:
        lines = [f"{name:18s} {first_comment(name, sources)}" for name in usual_first(sources)]
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
                *known,
                *presets_of(sources),
                *(f"{group}/{option}" for group in known for option in known[group]),
            ]
            raise ConfigError(
                f"{args.name}: no such preset or option{did_you_mean(args.name, names)}"
            )
        lines = [f"# {path}", path.read_text().rstrip()]
    print("\n".join(lines))
    return 0


def help_of(recipe: Recipe, sources: Sources) -> str:
    """Presets, groups with their options, and examples."""
    purpose = recipe.purpose
    # of a recipe of one's own none of ours
    modules = {module: name for name, (module, _) in RECIPES.items()}
    verb = modules[recipe.name] if recipe.is_ours else ""
    usage = f"usage: {recipe.start} --config-name PRESET [--config-dir FOLDER] [key=value ...]"
    lines = [f"{purpose[:1].upper()}{purpose[1:]}.", "", usage]
    if recipe.is_ours:
        what = "the rows choose the preset"
        lines.append(f"or:    {recipe.start} MODEL DATA [key=value ...]   ({what})")
    lines += [
        "",
        "presets:",
        *(f"  {name:17s} {first_comment(name, sources)}" for name in usual_first(sources)),
        "",
        "groups (group=option):",
        *(f"  {group:17s} {', '.join(options)}" for group, options in groups_of(sources).items()),
    ]
    if recipe.main == "recipes.train_ft:main":
        lines += ["", "examples:", *(f"  {example}" for example in EXAMPLES)]
        lines += ["", "dry_run=true checks everything, estimates memory and stops."]
    lines += [
        "",
        "--cfg job prints the whole configuration and stops; --multirun sweeps, seed=0,1.",
        f"--json FILE: {JSON_HELP}.",
        "--nproc 8 (or gpu) starts 8 processes (or one per GPU) on this machine.",
        *(text for command, _, text in OWN_FLAGS.values() if command == verb),
        "",
        parser(verb).format_usage().replace("usage", "all flags").rstrip(),
    ]
    return rewrite_program_name("\n".join(lines))


def usual_first(sources: Sources) -> list[str]:
    """Returns the presets, those for a model and data of one's own before the others."""
    known = presets_of(sources)
    usual = [name for name in USUAL if name in known]
    return [*usual, *(name for name in known if name not in usual)]


def first_comment(preset: str, sources: Sources) -> str:
    """Returns the first sentence of the comment of a preset or an option, if it begins with one."""
    path = sources.file(preset)
    assert path is not None
    line = next(iter(path.read_text(errors="replace").splitlines()), "")
    return re.split(r"[:;] ", line.lstrip("# "))[0].rstrip(".") if line.startswith("#") else ""


def overridden_options(
    raw: DictConfig, sources: Sources, overrides: Sequence[str]
) -> Iterator[str]:
    """Yields a line for each key of an option that was chosen on the command line and that a preset
    sets otherwise.

    >>> optimizer.lr=0.003 (the preset's, over 0.001 of optimizer/adamw_8bit.yaml)
    """
    known = groups_of(sources)
    values = dict(flatten(OmegaConf.to_container(raw, resolve=False)))
    for text in overrides:
        group = group_of(text, known)
        if group not in known:
            continue
        others = [other for other in overrides if other != text]
        for option in options_in(text):
            path = sources.file(f"{group}/{option}")
            own = OmegaConf.to_container(read(path), resolve=False) if path else {}
            for key, value in flatten(own, str(group).replace("/", ".")):
                if key in values and values[key] != value and not is_typed(key, others):
                    now = format_value(values[key])
                    own_value = format_value(value)
                    yield f"{key}={now} (the preset's, over {own_value} of {group}/{option}.yaml)"
