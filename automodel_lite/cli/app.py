"""Each recipe that takes a configuration is a Hydra application: `@hydra.main`, with what Hydra leaves to the user.

Before Hydra is started the command line is looked at: flags and group options that do not exist, folders, code that
files name. Hydra composes and runs; every key is checked in the job against the schema and the signatures
(config.check_config), so that all mistakes are named at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automodel_lite.cli import sweep
from automodel_lite.cli.ending import end, hide_secrets
from automodel_lite.cli.help import answer_query, help_of
from automodel_lite.cli.line import (
    RECIPES_PACKAGE,
    Line,
    check_options,
    chosen,
    group_of,
    is_sweep,
    opened,
    parsed,
    split,
)
from automodel_lite.cli.permissions import check_granted, check_hydra_settings
from automodel_lite.cli.sources import (
    Sources,
    check_preset,
    composed,
    groups_of,
    sentence_of,
    settled,
    unreadable,
)
from automodel_lite.config.check import check_config
from automodel_lite.config.components import CONF_DIR, flatten, with_options
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, shown
from automodel_lite.interpreter import collecting_seldom
from automodel_lite.progress import activity, is_shown, print_above_bars
from automodel_lite.run.folder import SWEEP_COMMAND, typed_command
from automodel_lite.run.stopping import SIGNALS


def run_recipe(main: str, argv: list[str] | None = None) -> NoReturn:
    """Composes the configuration named on the command line, checks it, calls `main(config)` and exits.

    main   "recipes.train_ft:main", imported only when there is something to run: `--help` and `--cfg` need no torch.
    """
    SIGNALS.install()
    hide_secrets()
    choose_allocator(os.environ)
    end(lambda: answer(main, sys.argv[1:] if argv is None else argv))


def answer(main: str, argv: Sequence[str]) -> int:
    """What the command line asks for; the exit code."""
    line = parsed(argv)
    is_question = bool(line.question)
    if is_question and not is_shown():
        return 0  # the first rank answers
    recipe = main.split(":")[0].rpartition(".")[2]
    if line.launch and not is_question:
        with without_warnings_of_torch(), activity("importing torch"):
            from automodel_lite.cli.launcher import launch  # imports torch

        return launch(main, line.launch, list(argv))
    beside = CONF_DIR.parent / "recipes"
    sources = Sources.of(line.config_dir, line.config_path, beside).with_searchpath(line.preset, line.overrides)
    job = Job(main, sources, line.preset or "", line.overrides)
    if line.rerun:
        if not Path(line.rerun).is_file():
            raise ConfigError(f"--experimental-rerun {line.rerun}: there is no such file.")
        return job.start(["--experimental-rerun", line.rerun])
    if line.is_help and not _has_own_help(sources, line):
        print(help_of(recipe, sources))
        return 0
    if "--shell-completion" in line.question and any(text.startswith("query=") for text in line.overrides):
        print("\n".join(answer_query()))
        return 0
    if "--hydra-help" in line.question:
        hydras = tuple(text for text in line.overrides if text.startswith("hydra"))
        return replace(job, typed=hydras).start(["--hydra-help"])
    if "--shell-completion" in line.question:
        sys.argv[0] = sys.argv[0].split()[0]  # not `automodel-lite train`
        if "install=zsh" in line.overrides:  # Hydra's script is bash's
            print("(( $+functions[compdef] )) || { autoload -Uz compinit; compinit }")
            print("autoload -Uz bashcompinit; bashcompinit")
        return job.start(["--shell-completion"])
    if not (line.is_help and line.preset is None):
        check_preset(sources, line.preset, line.overrides)
    return job.start([*line.question, *(["--multirun"] if line.is_multirun else [])])


def _has_own_help(sources: Sources, line: Line) -> bool:
    """Is there a `hydra/help` of the user's? Hydra shows it, in seconds: it lists every group again for each."""
    path = sources.file(line.preset) if line.preset else None
    in_preset = path is not None and path.parent != CONF_DIR and "help" in path.read_text(errors="replace")
    return in_preset or any(split(text)[0].startswith(("hydra/help", "hydra.help")) for text in line.overrides)


def choose_allocator(environment: MutableMapping[str, str]) -> None:
    """GPU memory in segments that grow, before torch reads the setting; a choice of the user's stays. Packs of changing
    documents ask for blocks of changing sizes, which fixed segments cut into pieces that nothing fits.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@contextmanager
def without_warnings_of_torch() -> Iterator[None]:
    """For a launcher that imports torch here: 30 lines of C++ frames each time that a store's host has left. Its ranks
    inherit nothing of it, and a choice of the user's stays.
    """
    is_chosen = "TORCH_CPP_LOG_LEVEL" in os.environ
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    yield
    if not is_chosen:
        del os.environ["TORCH_CPP_LOG_LEVEL"]


def imported(main: str) -> Callable[[Config], int | None]:
    """The function that "recipes.train_ft:main" names."""
    module, function = main.removeprefix("recipes.").split(":")
    with collecting_seldom():
        loaded = importlib.import_module(f"{RECIPES_PACKAGE}.{module}")
    found: Callable[[Config], int | None] = vars(loaded)[function]
    return found


class Ended(BaseException):
    """How a single run ended. Not an Exception: Hydra would print its own lines about it on every rank."""

    def __init__(self, code: int = 0, error: Exception | None = None) -> None:
        self.code, self.error = code, error


@dataclass(frozen=True)
class Job:
    """Hydra's task function: one run of a recipe. Launchers send it to other processes."""

    main: str
    sources: Sources
    preset: str
    typed: tuple[str, ...]

    def __call__(self, raw: DictConfig) -> float | None:
        hide_secrets()  # a launcher may have started this process
        sweep.scrub_files_of_hydra()
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return sweep.run_job(self.config_of, raw, lambda: imported(self.main))
        try:
            with activity("importing torch and transformers"):  # the check of the keys reads signatures
                config = self.config_of(raw, self.typed)
                recipe = imported(self.main)
            code = recipe(config) or 0
        except Exception as error:
            raise Ended(error=error) from None
        raise Ended(code)

    def config_of(self, raw: DictConfig, overrides: Sequence[str]) -> Config:
        """The checked configuration; says which file beat which. Raises ConfigError."""
        check_granted(raw, self.typed)
        if self.main != "recipes.train_ft:main" and OmegaConf.is_missing(raw, "name"):
            raw.name = "unnamed"  # only what trains has a folder
        raw, _, lines = settled(raw, HydraConfig.get(), self.sources, self.preset, overrides)
        config = check_config(raw)
        for number, text in enumerate(lines if is_shown() else ()):
            print_above_bars(f"{'' if number else 'settings':<10} {text}")
        return config

    def start(self, flags: list[str]) -> int:
        """Hands the command line over to Hydra; the exit code."""
        sweep.forget()
        preset, overrides = self.preset or "base", self.overrides(flags)
        self.sources.activate()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as they are
        if "--multirun" in flags:
            os.environ[SWEEP_COMMAND] = typed_command()
        if "--experimental-rerun" not in flags and "--hydra-help" not in flags:
            flags = [*flags, "--config-name", preset]
        sys.argv = [sys.argv[0], *flags, *overrides]
        application: Any = hydra.main(version_base="1.3", config_path=str(self.sources.first))(self)
        try:
            application()
        except Ended as ended:
            if ended.error:
                raise ended.error from None
            return ended.code
        except OverrideParseException as error:
            if "--multirun" not in flags:
                composed(self.sources, preset, self.typed)  # names the other mistakes too
            raise ConfigError(unreadable(error)) from None
        except ConfigError:
            sweep.close()
            raise
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            sweep.close()
            if "--multirun" not in flags:
                composed(self.sources, preset, self.typed)
            raise ConfigError(sentence_of(error)) from None
        except Exception:
            sweep.close()
            raise
        sweep.close()
        return 0

    def overrides(self, flags: list[str]) -> list[str]:
        """As Hydra gets them; raises ConfigError for all that is wrong before anything is run."""
        known = groups_of(self.sources)
        if "--shell-completion" in flags or "--experimental-rerun" in flags:
            return list(self.typed)
        is_multirun = "--multirun" in flags
        if problems := list(check_options(self.typed, known, is_multirun)):
            if is_multirun:
                raise ConfigError("\n".join(problems))
            composed(self.sources, self.preset, self.typed)  # names the other mistakes too
        for text in self.typed:
            check_plugin(text)
        extra: list[str] = []
        if "--multirun" in flags:
            fixed = [split(text)[0] for text in self.typed if not is_sweep(text)]  # the same for all jobs
            extra += [f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]"]
        if self.preset and not self.sources.are_ours:
            for selection in _selections(self.typed, known) if "--multirun" in flags else [self.typed]:
                raw, settings = composed(self.sources, self.preset, selection)
                check_hydra_settings(settings, self.typed)
            if "--cfg" in flags:
                _, values, _ = settled(raw, settings, self.sources, self.preset, self.typed)
                extra += [f"++{key}={_as_override(value)}" for key, value in values.items()]
        if self.preset and "--cfg" in flags and "--multirun" not in flags:  # printed whole
            plain = OmegaConf.to_container(composed(self.sources, self.preset, self.typed)[0], resolve=False)
            given = dict(flatten(plain))
            left_out = [item for item in flatten(with_options(plain)) if item[0] not in given]
            extra += [f"++{key}={_as_override(value)}" for key, value in left_out]
        return [*extra, *(opened(text, known) for text in self.typed)]


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


def _selections(typed: Sequence[str], known: dict[str, list[str]]) -> list[list[str]]:
    """Choices of options and Hydra's own settings, so that each option of a sweep occurs in one of them."""
    rows: list[list[str]] = []
    swept = [(text, chosen(text)) for text in typed if group_of(text, known)]
    fixed = [text for text in typed if split(text)[0].startswith("hydra.")]
    for number in range(max([len(options) for _, options in swept], default=1) or 1):
        row = list(fixed)
        for text, options in swept:
            key = text.partition("=")[0]
            row += [f"{key}={options[min(number, len(options) - 1)]}"] if options else [text]
        rows.append(row)
    return rows


def _as_override(value: Any) -> str:
    """A value of YAML in the grammar of overrides."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_as_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_as_override, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\'", "\\\\'").replace("'", "\\'") + "'"
    return shown(value)
