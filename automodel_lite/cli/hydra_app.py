"""Each recipe that takes a configuration is a Hydra application.

Before Hydra is started the command line is read: flags, folders, group options that do not exist, overrides that cannot
be parsed. Hydra composes once, through `Loader`: keys need no `+`, errors are sentences, and settings by which a file
would run code are refused. Every key is then checked against the schema and the signatures (config.check_config).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from hydra import version as hydra_version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from automodel_lite.cli.completion import answer_query
from automodel_lite.cli.exit_codes import end, hide_secrets
from automodel_lite.cli.help import help_of
from automodel_lite.cli.line import Line, allow_new_key, check_options, chosen, group_of, is_sweep, parsed, split
from automodel_lite.cli.permissions import check_granted, check_hydra_settings
from automodel_lite.cli.recipes import Recipe
from automodel_lite.cli.sources import Sources, check_preset, groups_of, read
from automodel_lite.cli.sweep import Sweep, run_job, scrub_files_of_hydra
from automodel_lite.config.check import check_config, with_defaults
from automodel_lite.config.components import flatten, with_options
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, did_you_mean, shown
from automodel_lite.progress import activity, is_shown, print_above_bars
from automodel_lite.run.folder import SWEEP_COMMAND, typed_command
from automodel_lite.run.stopping import SIGNALS

# As plain values: against the dataclass itself Hydra would stop at the first wrong type, config.check lists them all.
hydra_version.setbase("1.3")  # as `@hydra.main(version_base="1.3")` does
ConfigStore.instance().store(name="schema", node=OmegaConf.to_container(OmegaConf.structured(Config)))


def run_recipe(main: str, argv: list[str] | None = None) -> NoReturn:
    """Composes the configuration named on the command line, checks it, calls the recipe and exits.

    main   "recipes.train_ft:main" or "my_package.kd:main"; ours are imported only when there is something to run:
           `--help` and `--cfg` need no torch
    """
    SIGNALS.install()
    hide_secrets()
    choose_allocator(os.environ)
    end(lambda: answer(main, sys.argv[1:] if argv is None else argv))


def answer(main: str, argv: Sequence[str]) -> int:
    """Runs what the command line asks for; returns the exit code."""
    line, recipe = parsed(argv), Recipe(main)
    is_question = bool(line.question)
    if is_question and not is_shown():
        return 0  # the first rank answers
    if line.launch and not is_question and not line.is_multirun:
        return launch_ranks(recipe, line.launch, list(argv))
    sources = Sources.of(line.config_dir, line.config_path, recipe).with_searchpath(line.preset, line.overrides)
    if line.is_help:
        print(help_of(recipe, sources))
        return 0
    if "--shell-completion" in line.question and any(text.startswith("query=") for text in line.overrides):
        print("\n".join(answer_query()))
        return 0
    if "--shell-completion" not in line.question and "--hydra-help" not in line.question:
        check_preset(sources, line.preset, line.overrides)
    return Job(recipe, sources, line).start()


def launch_ranks(recipe: Recipe, launch: dict[str, Any], argv: list[str]) -> int:
    """Starts several ranks of a recipe and waits for them; returns the exit code."""
    # torch prints 30 lines of C++ frames each time that the host of a store has left
    is_chosen = "TORCH_CPP_LOG_LEVEL" in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with activity("importing torch"):
        from automodel_lite.cli.launcher import launch as start  # imports torch
    if not is_chosen:  # ranks inherit nothing of it
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    return start(recipe.main, launch, argv)


def choose_allocator(environment: MutableMapping[str, str]) -> None:
    """Lets GPU memory grow in segments, before torch reads the setting; a choice of the user's stays."""
    # packs of changing documents ask for changing sizes, which cut fixed segments into small pieces
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@dataclass
class Job:
    """Hydra's task function: one run of a recipe. Launchers of sweeps send it to other processes."""

    recipe: Recipe
    sources: Sources
    line: Line
    code: int = 0
    error: Exception | None = None

    def __call__(self, raw: DictConfig) -> float | None:
        hide_secrets()  # a launcher may have started this process
        scrub_files_of_hydra()
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return run_job(self, raw)
        try:
            self.code = self.run(raw, self.line.overrides)
        except Exception as error:  # Hydra would print lines of its own about it, on every rank
            self.error = error
        return None

    def run(self, raw: DictConfig, overrides: Sequence[str]) -> int:
        """Checks the configuration and runs the recipe; returns the exit code. Raises ConfigError."""
        config = self.checked(raw, overrides)
        with activity("importing torch and transformers"):
            main = self.recipe.function()
        own = self.recipe.own_keys(config)
        return (main(config) if own is None else main(config, own)) or 0

    def checked(self, raw: DictConfig, overrides: Sequence[str]) -> Config:
        """Returns the checked configuration; prints which file beat an option that was chosen. Raises ConfigError."""
        if not self.recipe.writes_a_run and OmegaConf.is_missing(raw, "name"):
            raw.name = "unnamed"
        # who names a package as the recipe lets its code run; the run's folder remembers what the model needs of it
        package = self.recipe.main.split(":")[0].split(".")[0] + "."
        targets = [str(value) for key, value in flatten(OmegaConf.to_container(raw)) if key.endswith("_target_")]
        if any(target.startswith(package) for target in targets if not self.recipe.is_ours):
            raw.security.allow_targets = [*raw.security.allow_targets, package.rstrip(".")]
        config = check_config(raw, self.recipe.extra_type())
        for text in beaten_options(raw, self.sources, overrides) if is_shown() else ():
            print_above_bars(f"settings   {text}")
        return config

    def start(self) -> int:
        """Hands the command line over to Hydra; returns the exit code."""
        line, typed = self.line, list(self.line.overrides)
        loader = Loader(self.sources, typed, fills_options="--cfg" in line.question)
        GlobalHydra.instance().clear()
        hydra = Hydra(self.recipe.name, loader)
        GlobalHydra.instance().initialize(hydra)
        if line.question:
            return self.show(hydra, typed)
        check_overrides(loader, line.preset, typed, line.is_multirun)
        for text in typed:
            check_plugin(text)
        if not line.is_multirun:
            hydra.run(line.preset, self, typed)
            if self.error:
                raise self.error
            return self.code
        os.environ[SWEEP_COMMAND] = typed_command()
        # what is the same for all jobs is no part of a job's name
        fixed = [split(text)[0] for text in typed if not is_sweep(text)]
        typed.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
        try:
            hydra.multirun(line.preset, self, [*typed, "hydra.mode=MULTIRUN"])
        finally:
            if loader.sweep:
                loader.sweep.close()  # its error, which names the jobs that failed, is the last word
        return 0

    def show(self, hydra: Hydra, typed: list[str]) -> int:
        """Answers Hydra's own questions; each does what Hydra's documentation says."""
        line = self.line
        if "--shell-completion" in line.question:
            sys.argv[0] = sys.argv[0].split()[0]  # not `automodel-lite train`
            if "install=zsh" in typed:  # Hydra's script is bash's
                print("(( $+functions[compdef] )) || { autoload -Uz compinit; compinit }")
                print("autoload -Uz bashcompinit; bashcompinit")
            hydra.shell_completion(line.preset or "base", typed)
        elif "--hydra-help" in line.question:
            arguments = get_args_parser()
            ours = [text for text in typed if text.startswith("hydra")]
            hydra.hydra_help(None, arguments, arguments.parse_args(ours))
        else:
            check_overrides(hydra.config_loader, line.preset, typed, line.is_multirun)
            if line.info:
                hydra.show_info(line.info, line.preset, typed)
            else:
                hydra.show_cfg(line.preset, typed, line.cfg, line.package, line.is_resolved)
        return 0


class Loader(ConfigLoaderImpl):
    """Hydra's loader of configurations, which all that composes goes through, the jobs of sweeps included."""

    def __init__(self, sources: Sources, typed: Sequence[str] = (), fills_options: bool = False) -> None:
        path = create_config_search_path(f"file://{sources.first}")
        for folder in sources.behind:
            path.prepend("automodel-lite", f"file://{folder}", anchor="schema")
        super().__init__(path)
        self.sources, self.typed, self.known = sources, list(typed), groups_of(sources)
        self.fills_options = fills_options  # options of parts that no file sets are shown too
        self.sweep: Sweep | None = None

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Composes; raises ConfigError for what Hydra refuses, and for what a file may not set."""
        texts = [allow_new_key(text, self.known) for text in overrides]
        try:
            raw = super().load_configuration(config_name, texts, run_mode, from_shell, validate_sweep_overrides)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            text = sentence_of(error)
            if found := _NOT_SET.search(text):  # the sentence needs the default of the key, and names other mistakes
                others = [text for text in overrides if text.partition("=")[0] != f"~{found[1]}"]
                rest = self.load_configuration(config_name, others, run_mode, from_shell, validate_sweep_overrides)
                text = "\n".join([_not_set(found[1], rest), *_mistakes_of(rest)])
            raise ConfigError(text) from None
        if not self.sources.are_ours:
            check_hydra_settings(raw.hydra, self.typed)
        check_granted(raw, self.typed)
        if run_mode == RunMode.RUN and raw.hydra.mode == RunMode.MULTIRUN and "hydra.mode=MULTIRUN" not in overrides:
            raise ConfigError("hydra.mode=MULTIRUN is set in a file: start a sweep with --multirun.")
        if run_mode == RunMode.MULTIRUN and self.sweep is None:
            self.sweep = Sweep.started(raw)
        if self.fills_options:
            with open_dict(raw):
                for key, value in with_options(OmegaConf.to_container(_without_hydra(raw), resolve=False)).items():
                    raw[key] = value
        return raw


def composed(sources: Sources, preset: str, overrides: Sequence[str]) -> DictConfig:
    """Returns what Hydra makes of the preset and the overrides.

    Raises ConfigError, with a line for each override that cannot be read and each option that does not exist.
    """
    setup_globals()  # the resolvers of Hydra, `${hydra:...}`
    loader = Loader(sources, overrides)
    check_overrides(loader, preset, overrides)
    return _without_hydra(loader.load_configuration(preset, list(overrides), RunMode.RUN))


def compose_config(config_name: str | None, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """Returns the merged configuration of a preset and overrides such as `training.max_steps=10 attention=varlen`.

    `config_dir` is a folder of the user's own presets and group options, searched before the project's.
    Raises ConfigError: unknown preset or option, unreadable override, a permission that a file grants.
    """
    sources = Sources.of(config_dir).with_searchpath(config_name, overrides)
    return composed(sources, check_preset(sources, config_name), overrides)


def check_overrides(loader: Any, preset: str | None, typed: Sequence[str], is_multirun: bool = False) -> None:
    """Raises one ConfigError with all that is wrong with the overrides, and with the keys of those that are right."""
    problems, readable = [], []
    parser = OverridesParser.create()
    for text in typed:
        found = list(check_options([text], loader.known, is_multirun))
        try:
            parser.parse_overrides([allow_new_key(text, loader.known)])
        except OverrideParseException as error:
            found = found or [unreadable(error)]
        problems += found
        readable += [] if found else [text]
    if problems and not is_multirun:
        try:
            others = _mistakes_of(loader.load_configuration(preset, readable, RunMode.RUN))
        except ConfigError as error:
            others = str(error).splitlines()
        unread = {split(line.partition(":")[0])[0] for line in problems}
        problems += [line for line in others if line.partition(" has no value")[0] not in unread]
    if problems:
        raise ConfigError("\n".join(problems))


def beaten_options(raw: DictConfig, sources: Sources, overrides: Sequence[str]) -> Iterator[str]:
    """Yields a line for each key of an option that was chosen on the command line and that a preset sets otherwise.

    >>> optimizer.lr=0.003 (the preset's, over 0.001 of optimizer/adamw_8bit.yaml)
    """
    known = groups_of(sources)
    typed = [split(text)[0] for text in overrides]
    values = dict(flatten(OmegaConf.to_container(raw, resolve=False)))
    for text in overrides:
        group = group_of(text, known)
        for option in chosen(text) if group in known else ():
            path = sources.file(f"{group}/{option}")
            own = OmegaConf.to_container(read(path), resolve=False) if path else {}
            assert isinstance(own, dict)
            own.pop("defaults", None)
            for key, value in flatten(own, str(group).replace("/", ".")):
                is_typed = any(key == name or key.startswith(f"{name}.") for name in typed if name != group)
                if key in values and values[key] != value and not is_typed:
                    yield f"{key}={shown(values[key])} (the preset's, over {shown(value)} of {group}/{option}.yaml)"


_NO_OPTION = re.compile(r"Could not find '(.+)/([^/]+)' Available options in '.+?': (.*?) Config search path")
_NOT_SET = re.compile(r"Could not delete from config\. '(.+)' does not exist\.")
_NOT_CHOSEN = re.compile(r"Could not delete '(.+)'\. No match in the defaults list")
_KEY = re.compile(r"[+~]*[\w@:/$-]+(\.[\w@:/$-]+)*\s*")


def sentence_of(error: Exception) -> str:
    """Returns an error of Hydra in one line."""
    text = " ".join(str(error if str(error) else error.__cause__).split())
    if found := _NO_OPTION.search(text):
        group, option, options = found.groups()
        near = did_you_mean(option, options.split()) or "."
        return f"{group}={option}: no such option{near} The options are {', '.join(options.split())}."
    if found := _NOT_CHOSEN.search(text):
        return f"~{found[1]}: that option is not chosen, so there is nothing to remove."
    return text


def unreadable(error: OverrideParseException) -> str:
    """Returns the sentence for an override that Hydra's grammar does not take."""
    text = error.override.removeprefix("++")
    key, is_set, _ = text.partition("=")
    if text.startswith("-"):
        return f"{text}: unknown flag."
    if not is_set:
        return f"{text}: cannot be read as key=value: there is no `=`."
    if not _KEY.fullmatch(key):
        return f"{text}: cannot be read as key=value: {key!r} is no key such as training.max_steps."
    return (
        f"{text}: cannot be read as key=value: close every bracket and quote, or put a text with brackets into quotes, "
        f"'{key}=\"...\"'."
    )


def _not_set(key: str, raw: DictConfig) -> str:
    """Returns the sentence for `~key` of a key that no file sets."""
    keys = dict(flatten(OmegaConf.to_container(with_defaults(_without_hydra(raw)), resolve=False)))
    if key in keys:
        return f"~{key}: no file sets it, so there is nothing to remove: it has its default, {shown(keys[key])}."
    return f"~{key}: unknown key{did_you_mean(key, list(keys)) or '.'}"


def _mistakes_of(raw: DictConfig) -> list[str]:
    """Returns what the check finds, for a message that names other mistakes already."""
    try:
        check_config(_without_hydra(raw), extra=dict)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _without_hydra(raw: DictConfig) -> DictConfig:
    raw = raw.copy()
    with open_dict(raw):
        raw.pop("hydra", None)
    return raw


_PLUGINS = {
    "hydra/launcher=joblib": "hydra-joblib-launcher",
    "hydra/launcher=submitit_local": "hydra-submitit-launcher",
    "hydra/launcher=submitit_slurm": "hydra-submitit-launcher",
    "hydra/sweeper=optuna": "hydra-optuna-sweeper",
}


def check_plugin(override: str) -> None:
    """Raises ConfigError for a launcher or sweeper that is not installed, and for what a run's folder rules out."""
    key, value = split(override)
    if package := _PLUGINS.get(f"{key}={value}"):
        try:
            version(package)
        except PackageNotFoundError:
            sentence = f"{key}={value} needs the package {package}: pip install 'automodel-lite[sweep]'."
            raise ConfigError(sentence) from None
    if key == "hydra.run.dir":
        raise ConfigError(f"hydra.run.dir={value}: the folder of a run is output_dir: set output_dir={value}.")
    if key == "hydra.job.chdir" and value not in ("false", "null"):
        raise ConfigError(f"hydra.job.chdir={value}: a run does not change its working directory: remove this setting.")
