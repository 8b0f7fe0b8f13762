"""Each recipe that takes a configuration is a Hydra application: Hydra's flags, presets, overrides
and sweeps.

The command line is read first (line.py), Hydra composes once (compose.py), every key is checked
against the schema and the signatures (config.check_config), and only then the recipe is imported,
and torch with it.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, MutableMapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from automodel_lite.cli.compose import (
    Loader,
    check_overrides,
    compose_checked,
    without_hydra,
)
from automodel_lite.cli.exit_codes import end, hide_secrets
from automodel_lite.cli.job import DATA, MODEL, Job, job_of, name_of, rows_of, takes_words
from automodel_lite.cli.line import (
    COMMANDS,
    OWN_FLAGS,
    RECIPES,
    is_word,
    read_line,
    split,
    versions,
)
from automodel_lite.cli.recipes import Recipe
from automodel_lite.cli.sources import Sources, check_preset, preset_meant
from automodel_lite.compat import Hydra
from automodel_lite.config.check import NEEDED, check_config, key_of, known_values
from automodel_lite.config.components import flatten, locate, option
from automodel_lite.config.model_files import check_template
from automodel_lite.config.rules import check_folder, read_template
from automodel_lite.data.reading.paths import find_files
from automodel_lite.errors import ConfigError, DataError, UserError
from automodel_lite.progress import activity, is_shown, print_above_bars
from automodel_lite.results import open_json
from automodel_lite.run.ending import LAUNCHED_BY_US
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.stopping import SIGNALS

_PLACES = re.compile(r"((.+)\.(?:val_)?path)(?:\..+)?")
"""`dataset.path`, that of a source of a mixture, and `dataset.val_path.easy` of several sets."""


def run_recipe(main: str, argv: list[str] | None = None) -> NoReturn:
    """Composes the configuration named on the command line, checks it, calls the recipe and exits.

    main   "recipes.train_ft:main" or "my_package.kd:main"; ours are imported only when there is
           something to run: `--help` and `--cfg` need no torch
    """
    hide_secrets()
    choose_allocator(os.environ)

    def work() -> int:
        SIGNALS.install()  # no sooner: only in here a signal ends the process with a sentence
        return run_command_line(main, sys.argv[1:] if argv is None else argv)

    end(work)


def run_command_line(main: str, argv: Sequence[str]) -> int:
    """Runs what the command line asks for; returns the exit code."""
    line = read_line(argv)
    recipe = Recipe(main)
    own = own_flags(line, recipe)
    if line.is_question and not is_shown():
        return 0  # the first rank answers
    if line.version:
        print(versions())
        return 0
    # a rank that we launched gets the whole command line
    if line.nproc and not (line.is_question or line.is_multirun or LAUNCHED_BY_US in os.environ):
        with activity("importing torch"):
            launch = locate(COMMANDS["launcher"])  # imports torch
        return launch(main, line.nproc, list(argv))
    if recipe.name == RECIPES["verify"][0] and not line.is_question:
        run_folder, rest = named_run(line.overrides)
        if run_folder is not None:
            return verify_run(run_folder, rest, line)
        if line.replay:
            raise ConfigError(
                "--replay computes a step of a run again: automodel-lite verify runs/mine "
                f"--replay {line.replay}."
            )
    sources = Sources.of(line.config_dir, line.config_path, recipe)
    if line.help:
        print(locate(COMMANDS["help"])(recipe, sources))
        return 0
    if line.shell_completion and any(text.startswith("query=") for text in line.overrides):
        print("\n".join(locate(COMMANDS["completion"])()))
        return 0
    job = None
    unusable: list[UserError] = []  # what is left out, or replaced, to check the others
    if recipe.is_ours and not (line.is_question or line.is_multirun):
        unusable += take_out_valueless(line)
    words = [*filter(is_word, line.overrides)]
    if not line.shell_completion and takes_words(recipe, words, line.config_name):
        job = job_of(recipe, sources, line.overrides, line.config_name)
        line.config_name = job.preset
        # what is typed comes last, and wins
        line.overrides = [*job.chosen, *(text for text in line.overrides if text not in words)]
    if not line.shell_completion:
        try:
            check_preset(sources, line.config_name, line.overrides)
        except ConfigError as error:
            # what is wrong beside the name is told of the preset that was meant
            near = preset_meant(sources, line.config_name)
            if near is None or line.is_question or line.is_multirun:
                raise
            unusable.append(error)
            line.config_name = near
    loader = Loader(sources, line.overrides)
    GlobalHydra.instance().clear()
    hydra = Hydra(recipe.name, loader)
    GlobalHydra.instance().initialize(hydra)
    if line.is_question:
        return locate(COMMANDS["questions"])(hydra, line)
    if line.json and line.is_multirun:
        raise ConfigError("--json FILE holds the numbers of one run, not of a sweep.")
    if line.json:
        open_json(line.json)
    if line.is_multirun:
        return locate(COMMANDS["sweep"])(loader, main, line)
    if useless := [text for text in line.overrides if text.startswith("hydra")]:
        raise ConfigError(
            f"{useless[0]}: settings of Hydra are for --multirun; the folder of a run is "
            "output_dir."
        )
    raw, unread = compose_readable(loader, line, [*unusable, *(job.problems if job else ())])
    if not any(OmegaConf.select(raw, f"{group}._target_") for group in NEEDED):
        raise ConfigError(
            f"{sources.file(str(line.config_name))}: it is based on no other preset: begin it with "
            "`defaults: [finetune, _self_]`."
        )
    return run(recipe, raw, line.overrides, sources, own, job, [*unusable, *unread])


def take_out_valueless(line: Namespace) -> list[UserError]:
    """Takes settings without `=` off a line that names a model or data; returns what is wrong with
    them.
    """
    words = [*filter(is_word, line.overrides)]
    valueless = [word for word in words if key_of(word) == word and not Path(word).exists()]
    if len(valueless) == len(words):
        return []
    line.overrides = [text for text in line.overrides if text not in valueless]
    said = "cannot be read as key=value: there is no `=`"
    return [
        ConfigError(f"{word}: {said}", key=word, cure=f"write {word}=... ") for word in valueless
    ]


def own_flags(line: Namespace, recipe: Recipe) -> dict[str, Any]:
    """Returns the flags that the recipe alone takes; raises ConfigError for those of others."""
    own = {flag: vars(line)[flag] for flag in OWN_FLAGS if vars(line)[flag]}
    for flag in own:
        command = OWN_FLAGS[flag][0]
        if recipe.name != RECIPES[command][0]:
            raise ConfigError(
                f"--{flag}: of the commands with key=value, automodel-lite {command} alone "
                "takes it."
            )
    return own


def verify_run(folder: Path, overrides: Sequence[str], line: Namespace) -> int:
    """Checks a run against its own records; returns the exit code."""
    if line.json:
        open_json(line.json)
    with activity("importing torch and transformers"):
        replay = Recipe("recipes.replay:main").function()
    return replay(folder, overrides, line.replay) or 0


def compose_readable(
    loader: Loader, line: Namespace, known: Sequence[UserError]
) -> tuple[DictConfig, list[UserError]]:
    """Returns what the preset and the overrides make that can be read, and what is wrong with the
    others, which are taken off the line; raises ConfigError with all that is wrong.

    known  what is wrong with the line already
    """
    unread: list[UserError] = []
    try:
        check_overrides(loader, line.overrides)
    except ConfigError as error:
        unread = [*error.problems]
        wrong = {problem.key for problem in unread}
        line.overrides = [text for text in line.overrides if text not in wrong]
    try:
        return compose_checked(loader, str(line.config_name), line.overrides), unread
    except ConfigError as error:
        raise ConfigError.of([*known, *unread, error]) from None


def named_run(overrides: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Returns the folder of a run that stands among the overrides, None without one, and the rest.

    >>> named_run(["runs/mine", "mesh.cp=1"])
    (Path('runs/mine'), ['mesh.cp=1'])
    """
    runs = [*filter(is_word, overrides)]
    if len(runs) > 1:
        model, *data = runs
        listed = data[0] if len(data) == 1 else f"[{','.join(data)}]"
        raise ConfigError(
            f"{' '.join(runs)}: automodel-lite verify RUN compares one run with its own records",
            cure=f"name it alone; a model on other data is --config-name finetune "
            f"{MODEL}={model} {DATA}={listed}",
        )
    return (Path(runs[0]) if runs else None), [text for text in overrides if text not in runs]


def choose_allocator(environment: MutableMapping[str, str]) -> None:
    """Lets GPU memory grow in segments, and page-locked memory be as large as was asked for, before
    torch reads the setting; a choice of the user's stays.
    """
    # packs of changing documents ask for changing sizes, which cut fixed segments into small pieces
    chosen = "expandable_segments:True"
    if Version(version("torch")) >= Version("2.13"):
        # copies of weights would be rounded up to a power of two: 235 MB to 268
        chosen += ",pinned_max_round_threshold_mb:16"
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_ALLOC_CONF", chosen)


def run(
    recipe: Recipe,
    raw: DictConfig,
    overrides: Sequence[str],
    sources: Sources,
    flags: dict[str, Any],
    job: Job | None = None,
    unread: Sequence[UserError] = (),
) -> int:
    """Checks the configuration and runs the recipe; returns the exit code. Raises ConfigError.

    flags   what the recipe gets beside the configuration
    job     of a command that names a model and data by position
    unread  what is wrong with overrides that are left out: the rest is checked beside them
    """
    HydraConfig.instance().set_config(raw)  # of `${hydra:...}`
    raw = without_hydra(raw)
    names_a_run = recipe.writes_a_run and raw.get("dry_run") is not True
    if not names_a_run and OmegaConf.is_missing(raw, "name"):
        raw.name = "unnamed"
    # who names a package as the recipe lets its code run; the run's folder remembers what the model
    # needs of it
    package = recipe.main.split(":")[0].split(".")[0]
    targets = [
        str(value)
        for key, value in flatten(OmegaConf.to_container(raw))
        if key.endswith("_target_")
    ]
    if not recipe.is_ours and any(target.startswith(f"{package}.") for target in targets):
        raw.security.allow_targets = [*raw.security.allow_targets, package]
    kind = recipe.extra_type()  # its own keys, as an object of its dataclass
    # what is wrong with the settings hides no file that is not there
    problems: list[UserError] = [*unread]
    try:
        config = check_config(raw, kind)
        known = vars(config)
    except ConfigError as error:
        problems.append(error)
        known, _ = known_values(raw)
    if recipe.is_ours:
        problems += place_problems(known, has_data=recipe.name != "plan")
    if names_a_run and OmegaConf.is_missing(raw, "name"):
        problems = [with_a_name(one, known) for one in problems]
    if problems and recipe.is_ours and not job:
        problems += row_problems(known, overrides, problems)
    if names_a_run and isinstance(known.get("output_dir"), str):
        try:
            RunFolder(known["output_dir"]).check_place()
        except ConfigError as error:
            problems.append(error)
    if job:
        # what a word should have been is told in words, and once
        told = {problem.key for problem in job.problems} | {str(one) for one in job.problems}
        rest = [one for error in problems for one in error.problems or [error]]
        rest = [one for one in rest if not {one.key, str(one)} & (told - {""})]
        problems = [*job.problems, *rest]
    if problems:
        raise ConfigError.of(problems)
    if recipe.is_ours and recipe.name != "plan" and config.tokenizer.get("path"):
        check_template(config)
    for text in job.lines if job and is_shown() else ():
        print_above_bars(f"{'job':<10} {text}")
    if is_shown() and "overridden" in COMMANDS:
        for text in locate(COMMANDS["overridden"])(raw, sources, overrides):
            print_above_bars(f"settings   {text}")
    with activity("importing torch and transformers"):
        main = recipe.function()
    own = (
        [OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), config.extra))]
        if kind
        else []
    )
    return main(config, *own, **flags) or 0


def with_a_name(error: UserError, known: dict[str, Any]) -> UserError:
    """Returns the error; one that asks for a name with one to set, made of the model and the
    data.
    """
    if error.problems:
        return ConfigError.of([with_a_name(one, known) for one in error.problems])
    words = []
    for part, key in (("model", "pretrained"), ("dataset", "path")):
        block = known.get(part)
        given = block.get(key) if isinstance(block, dict) else None
        first = given[0] if isinstance(given, list) and given else given
        words.append(first if isinstance(first, str) else "")
    name = name_of(*words)
    if error.key != "name" or not name:
        return error
    return ConfigError(f"name has no value: set name={name}", key="name")


_MOST_READ_BYTES = 2**26
"""Of data whose rows are looked at beside other mistakes."""


def row_problems(
    known: dict[str, Any], overrides: Sequence[str], told: Sequence[UserError]
) -> list[UserError]:
    """Returns what is wrong with the rows of small files that are here, where something else is
    wrong as well: it is answered at once.
    """
    data = known.get("dataset")
    files = option("dataset", "files")["_target_"]
    keys = {one.key for error in told for one in error.problems or [error]}
    if not isinstance(data, dict) or data.get("_target_") != files:
        return []
    if any(key.startswith("dataset") for key in keys if key):
        return []
    given = data.get("path")
    paths = [str(path) for path in (given if isinstance(given, list) else [given]) if path]
    places = [Path(path).expanduser() for path in paths]
    if not paths or not all(place.is_file() for place in places):
        return []
    if sum(place.stat().st_size for place in places) > _MOST_READ_BYTES:
        return []
    typed = {key: value for key, value in map(split, overrides) if value is not None}
    try:
        rows_of(paths, typed)
    except (ConfigError, DataError) as error:
        return [error]
    return []


def place_problems(plain: dict[str, Any], has_data: bool) -> Iterator[ConfigError]:
    """Yields a problem for each model and each file that is not there, before torch is imported.

    plain   values that are known: some may be of another kind than the schema wants
    """
    sources: dict[str, str] = {}  # a folder or hub name -> the first key that names it
    for key in ("model.pretrained", "teacher.pretrained", "tokenizer.path"):
        part, _, name = key.partition(".")
        source = plain[part].get(name) if isinstance(plain.get(part), dict) else None
        if isinstance(source, str) and source:
            sources.setdefault(source, key)
    for source, key in sources.items():
        try:
            check_folder(key, source)
        except ConfigError as error:
            yield error
    tokenizer = plain.get("tokenizer")
    template = tokenizer.get("chat_template") if isinstance(tokenizer, dict) else None
    if isinstance(template, str) and template:
        try:
            read_template(template)
        except ConfigError as error:
            yield error
    if not has_data:
        return
    leaves = dict(flatten(plain.get("dataset", {}), "dataset"))
    files = option("dataset", "files")["_target_"]
    for key, given in leaves.items():
        place = _PLACES.fullmatch(key)
        if not (place and given) or leaves.get(f"{place[2]}._target_") != files:
            continue
        paths = given if isinstance(given, list) else [given]
        if not all(isinstance(path, str) for path in paths):
            continue
        if any("://" not in path and not Path(path).exists() for path in paths):
            is_val = place[1].endswith("val_path")
            subset = None if is_val else leaves.get(f"{place[2]}.name")
            split = leaves.get(f"{place[2]}.split", "train")
            try:
                find_files(paths, place[1], name=subset, split=split)
            except ConfigError as error:
                yield ConfigError(error.text, key=place[1], cure=error.cure)
