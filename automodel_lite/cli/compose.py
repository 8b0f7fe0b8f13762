"""Composition: Hydra merges a preset, the options of its groups and the overrides into one
configuration, once.

Keys need no `+`, errors are sentences, parts have all of their options, and settings by which a
file would run code are refused. Whether the keys exist is checked afterwards (config.check_config).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import yaml
from hydra import version as hydra_version
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from automodel_lite.cli.line import (
    allow_new_key,
    is_choice,
    option_problem,
    split,
)
from automodel_lite.cli.sources import Sources, check_preset, groups_of, presets_of, read
from automodel_lite.compat import ConfigLoaderImpl, create_config_search_path
from automodel_lite.config.components import CONF_DIR, flatten
from automodel_lite.config.installed import installed_trackers
from automodel_lite.config.permissions import (
    check_yaml,
    environment_problems,
    needs_the_command_line,
    permission_problems,
)
from automodel_lite.config.schema import Config
from automodel_lite.config.signatures import with_options
from automodel_lite.errors import ConfigError, did_you_mean, printable

# As plain values: against the dataclass itself Hydra would stop at the first wrong type,
# config.check lists them all.
if hydra_version.__version__.startswith("1.3."):  # later ones have no other behavior
    hydra_version.setbase("1.3")  # as `@hydra.main(version_base="1.3")` does
ConfigStore.instance().store(
    name="schema", node=OmegaConf.to_container(OmegaConf.structured(Config))
)

# A preset may come from a stranger: with a data set, a run's folder, a bug report. Hydra configures
# Python's logging, builds callbacks, launchers and sweepers, and makes folders before the recipe
# sees a single key.
_OF_SWEEPS = re.compile(  # settings of plugins that are plain numbers and names
    r"hydra\.(sweeper\.(n_trials|n_jobs|direction|max_batch_size|study_name|max_failure_rate"
    r"|params\..+|sampler\.[a-z]\w*)"
    r"|launcher\.(n_jobs|timeout_min|nodes|tasks_per_node|partition|qos|account|constraint|exclude"
    r"|gres|comment|array_parallelism|signal_delay_s|max_num_timeout"
    r"|(cpus|gpus|mem)_(per_)?\w+))"
)
_PLAIN = re.compile(r"[\w.,:+*%/() -]*")  # the text of a launcher becomes a line of a shell script
_CODE = ("_target_", "()", "class", "filename")


class Loader(ConfigLoaderImpl):
    """Hydra's loader of configurations, which all that composes goes through, the jobs of sweeps
    included.
    """

    def __init__(self, sources: Sources, typed: Sequence[str] = ()) -> None:
        path = create_config_search_path(f"file://{sources.folders[0]}")
        for folder in sources.folders[1:]:
            path.prepend("automodel-lite", f"file://{folder}", anchor="schema")
        for name, target in installed_trackers().items():
            if sources.file(f"logger/{name}") is None:  # an option that is a file keeps its name
                node = {name: {"_target_": target}}
                ConfigStore.instance().store(group="logger", name=name, node=node)
        super().__init__(path)
        read_file = self.repository.load_config

        def read_checked(config_path: str) -> ConfigResult | None:
            if file := sources.file(config_path.removesuffix(".yaml")):
                check_yaml(file)
            return read_file(config_path)

        self.repository.load_config = read_checked  # type: ignore[method-assign]
        self.sources = sources
        self.typed = list(typed)
        self.known = groups_of(sources)
        self.removed: list[str] = []  # keys that files take out of what they are based on
        for group in ("hydra/launcher", "hydra/sweeper"):
            self.known[group] = self.repository.get_group_options(group)

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
        self.removed.clear()
        try:
            raw = super().load_configuration(
                config_name, texts, run_mode, from_shell, validate_sweep_overrides
            )
        except (
            HydraException,
            OmegaConfBaseException,
            ValueError,
            RecursionError,
            yaml.reader.ReaderError,
            OSError,
        ) as error:
            raise ConfigError(self._sentence(error, config_name)) from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            place = f"{mark.name}:{mark.line + 1}" if mark else "a file"
            problem = str(error.problem)
            cure = "indent with spaces" if "'\\t'" in problem else "mend the line, or the one above"
            raise ConfigError(f"{place}: not YAML: {problem}: {cure}.") from None
        self._remove_keys(raw)
        # to choose an option is to take another file, whatever it holds
        values = [text for text in self.typed if not is_choice(text, self.known)]
        own = without_hydra(raw)
        plain = OmegaConf.to_container(own)
        typed = partial(is_typed, overrides=values)
        problems = [*permission_problems(own, typed), *environment_problems(own, typed)]
        if problems:
            raise ConfigError("\n".join(problems))
        with open_dict(raw):
            raw.update(with_options(plain))
        return raw

    def _sentence(self, error: Exception, config_name: str | None) -> str:
        """What Hydra refuses, in words of presets and options."""
        text = " ".join(str(error if str(error) else error.__cause__).split())
        if found := _NOT_THERE.search(text):
            text = f"~{found[1]}: no file sets it, so there is nothing to remove."
        if (found := _NO_OPTION.search(text)) and found[1] in self.known:
            text = option_problem(f"{found[1]}={found[2]}", self.known, False) or text
        if found := _MERGED.search(text):
            text = (
                f"{found[1]} must be of the kind that the key has: a group of keys, "
                "{name: value}, or a list, [value]."
            )
        if "codec can't decode" in text:
            text = f"{config_name}.yaml, or a file that it is based on, is not UTF-8."
        if "loaded object type" in text:
            text = f"{config_name}.yaml, or a file that it is based on, holds no keys."
        if found := _NO_PRESET.search(text):
            text = f"{found[1]}.yaml: defaults: {found[2]}: no such preset"
            text += did_you_mean(found[2], presets_of(self.sources))
        elif _NO_DEFAULTS.search(text):
            text = (
                f"{config_name}.yaml: defaults: must be a list of other presets and options, "
                "such as [finetune, override peft: lora, _self_], and other keys stand below "
                "it."
            )
        return text.partition(" Config search path:")[0]

    def _remove_keys(self, raw: DictConfig) -> None:
        """Takes out what files list under `remove`, but for what is typed."""
        for key in self.removed:
            group, _, name = key.rpartition(".")
            block = OmegaConf.select(raw, group) if group else raw
            if not isinstance(block, DictConfig) or name not in block:
                raise ConfigError(f"remove: {key}: no file sets it, so there is nothing to remove.")
            if not is_typed(key, self.typed):
                with open_dict(block):
                    del block[name]

    def _load_single_config(self, default: ResultDefault, repo: Any) -> ConfigResult:
        """Reads a file; raises ConfigError for code that Hydra would run, or files it would write,
        for one of them.
        """
        found = super()._load_single_config(default, repo)
        if isinstance(found.config, DictConfig) and "remove" in found.config:
            with open_dict(found.config):
                keys = found.config.pop("remove")
            if not isinstance(keys, (list, ListConfig)):
                raise ConfigError(f"remove={keys} must be a list of keys, as [dataset.num_chats].")
            self.removed += map(str, keys)
        # an option of the project may be put among Hydra's settings too:
        # `/callbacks@hydra.callbacks: early_stopping`
        if not found.path.startswith("file://") or "hydra" not in list(found.config):
            return found
        ours = _of_base()
        changed = [
            (key, value)
            for key, value in _of_hydra(found.config)
            if (key, value) not in ours
            and not is_typed(key, self.typed)
            and not (is_of_sweeps(key) and _PLAIN.fullmatch(str(value)))
        ]
        if changed:  # the sentence is about what names code or a file, if anything does
            key, value = min(changed, key=lambda leaf: leaf[0].rpartition(".")[2] not in _CODE)
            raise ConfigError(
                f"{key}={value} is set in a file, but only the command line may set it: {key}=... ."
            )
        return found

    def _process_config_searchpath(
        self, config_name: Any, parsed_overrides: list[Override], repo: Any
    ) -> None:
        """Ignores `hydra.searchpath` of a file, which could import packages; it is refused after
        the composition.
        """
        if any(override.key_or_group == "hydra.searchpath" for override in parsed_overrides):
            raise ConfigError("hydra.searchpath: name the folder with --config-dir.")


@cache
def _of_base() -> list[tuple[str, Any]]:
    """Returns the settings of Hydra in the file that every preset begins with."""
    return _of_hydra(read(CONF_DIR / "base.yaml"))


def _of_hydra(file: Any) -> list[tuple[str, Any]]:
    """Returns the settings of Hydra in a file: keys with dots, and their values."""
    block = OmegaConf.to_container(OmegaConf.masked_copy(file, "hydra"))
    return [*flatten(block)]


def is_of_sweeps(key: str) -> bool:
    """Returns whether a file may set this key of Hydra's: what it sweeps over becomes typed."""
    of_job = key.removeprefix("hydra.sweeper.params.").lstrip("+~")
    return bool(_OF_SWEEPS.fullmatch(key)) and not needs_the_command_line(of_job)


_MERGED = re.compile(r"Error merging override \+*(.+)")
_NO_OPTION = re.compile(r"Could not find '([\w/]+)/(\w+)'")
_NO_PRESET = re.compile(r"In '(\w+)': Could not load '([\w/]+)'")
_NO_DEFAULTS = re.compile(
    "nvalid defaults list|type in defaults|in default item|ListConfig|recursion"
)
_NOT_THERE = re.compile(r"Could not delete (?:from config\. )?'(.+)'(?: does not exist)?\.")


def is_typed(key: str, overrides: Sequence[str]) -> bool:
    """Returns whether the key, or a group around it, is set on the command line."""
    names = [split(text)[0] for text in overrides]
    return any(key == name or key.startswith(f"{name}.") for name in names)


def compose(loader: Loader, preset: str, overrides: Sequence[str]) -> DictConfig:
    """Returns what Hydra makes of the preset and the overrides, its own settings included; raises
    ConfigError.
    """
    check_overrides(loader, overrides)
    return compose_checked(loader, preset, overrides)


def compose_checked(loader: Loader, preset: str, overrides: Sequence[str]) -> DictConfig:
    """Returns what `compose` does, of overrides that `check_overrides` has let through."""
    setup_globals()  # the resolvers of Hydra, `${hydra:...}`
    return loader.load_configuration(preset, list(overrides), RunMode.RUN)


def compose_config(
    config_name: str | None, overrides: Sequence[str], config_dir: str | None = None
) -> DictConfig:
    """Returns the merged configuration of a preset and overrides such as
    `training.max_steps=10 attention=varlen`.

    `config_dir` is a folder of the user's own presets and group options, searched before the
    project's. Raises ConfigError: unknown preset or option, unreadable override, a permission that
    a file grants.
    """
    sources = Sources.of(config_dir)
    return without_hydra(
        compose(Loader(sources, overrides), check_preset(sources, config_name), overrides)
    )


def without_hydra(raw: DictConfig) -> DictConfig:
    """Returns a copy without the settings of Hydra itself."""
    own = OmegaConf.masked_copy(raw, [str(key) for key in raw if key != "hydra"])
    OmegaConf.set_struct(own, OmegaConf.is_struct(raw))
    return own


def check_overrides(loader: Loader, typed: Sequence[str], is_multirun: bool = False) -> None:
    """Raises one ConfigError with all overrides that cannot be read, and all options that do not
    exist; the key of each problem is its override.
    """
    problems: list[ConfigError] = []
    for text in typed:
        if _depth_of(text) > _MOST_LEVELS:  # Hydra's parser recurses into each
            key = printable(text.partition("=")[0][:80])
            too_deep = f"{key}: brackets inside over {_MOST_LEVELS} others are not read."
            problems.append(ConfigError(too_deep, key=text))
            continue
        try:
            OverridesParser.create().parse_overrides([allow_new_key(text, loader.known)])
            problem = option_problem(text, loader.known, is_multirun)
        except OverrideParseException as error:
            problem = option_problem(text, loader.known, is_multirun) or _unreadable(error)
        if problem:
            problems.append(ConfigError(problem, key=text))
    if problems:
        raise ConfigError.of(problems)


_MOST_LEVELS = 64


def _depth_of(text: str) -> int:
    """Returns how many brackets are open at once.

    >>> _depth_of("a=[[1],[2]]")
    2
    """
    steps = ((char in "[{(") - (char in "]})") for char in text)
    return max(accumulate(steps), default=0)


_KEY = re.compile(r"[+~]*[\w@:/$-]+(\.[\w@:/$-]+)*\s*")


def _unreadable(error: OverrideParseException) -> str:
    """Returns the sentence for an override that Hydra's grammar does not take."""
    text = error.override.removeprefix("++")
    key, is_set, _ = text.partition("=")
    if text.startswith("-"):
        return f"{text}: unknown flag."
    if not is_set:
        return f"{text}: cannot be read as key=value: there is no `=`."
    if not _KEY.fullmatch(key):
        return (
            f"{text}: cannot be read as key=value: {key!r} is not a key such as training.max_steps."
        )
    value = text.partition("=")[2]
    is_closed = all(value.count(left) == value.count(right) for left, right in ("[]", "{}", "()"))
    if is_closed and not value.count("'") % 2 and not value.count('"') % 2:
        quoted = f'"{value}"'
        if value.startswith("[") and value.endswith("]"):
            items = [item.strip().strip("'\"") for item in value[1:-1].split(",")]
            quoted = "[" + ",".join(f'"{item}"' for item in items) + "]"
        return (
            f"{text}: cannot be read as key=value: a text with one of = < > ( ) $ : stands in "
            f"quotes, '{key}={quoted}'."
        )
    return (
        f"{text}: cannot be read as key=value: close every bracket and quote, or put a text with "
        f"brackets into quotes, '{key}=\"...\"'."
    )
