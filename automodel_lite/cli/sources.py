"""Where presets and group options come from, and the configuration that Hydra composes of them.

Folders are searched in this order: the user's own (`--config-dir`, or `--config-path` in place of the project's), the
project's conf/, then those of `hydra.searchpath`. The schema is in Hydra's ConfigStore: conf/base.yaml starts from it.

Where a preset and the option file of a group set the same key, Hydra lets the preset win. That is right for an option
that a preset chose, and wrong for a file of the user's own that was chosen on the command line: there the option file
wins. Either way a line tells what beat what.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from automodel_lite.cli.line import check_options, group_of, opened, split
from automodel_lite.cli.permissions import check_granted
from automodel_lite.config.check import check_config, with_defaults
from automodel_lite.config.components import CONF_DIR, flatten
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, did_you_mean, shown

_KEY = re.compile(r"[+~]*[\w@:/$-]+(\.[\w@:/$-]+)*\s*")
_NO_OPTION = re.compile(r"Could not find '(.+)/([^/]+)' Available options in '.+?': (.*?) Config search path")
# As plain values: against the dataclass itself Hydra would stop at the first wrong type, config.check lists them all.
ConfigStore.instance().store(name="schema", node=OmegaConf.to_container(OmegaConf.structured(Config)))


class MoreFolders(SearchPathPlugin):
    """Tells Hydra of the folders behind the first one."""

    folders: ClassVar[tuple[Path, ...]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in self.folders:
            search_path.append("automodel-lite", f"file://{folder}")


@dataclass(frozen=True)
class Sources:
    """Folders of presets and group options; the first that has a file wins."""

    first: Path = CONF_DIR
    behind: tuple[Path, ...] = ()  # that MoreFolders adds
    searchpath: tuple[Path, ...] = ()  # that Hydra adds by itself

    @classmethod
    def of(cls, config_dir: str | None = None, config_path: str | None = None, beside: Path | None = None) -> Sources:
        """`config_path` takes the place of conf/; a relative one is looked up beside the recipe, then here."""
        own = _folder("--config-dir", config_dir, None) if config_dir else None
        main = _folder("--config-path", config_path, beside) if config_path else None
        folders = [folder for folder in (main, own, None if main else CONF_DIR) if folder]
        return cls(folders[0].resolve(), tuple(folder.resolve() for folder in folders[1:]))

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.first, *self.behind, *self.searchpath)

    @property
    def are_ours(self) -> bool:
        """No file of anybody else's can have a say."""
        return self.folders == (CONF_DIR,)

    def file(self, name: str) -> Path | None:
        """`optimizer/adamw` -> the file that Hydra reads."""
        return next((path for folder in self.folders if (path := folder / f"{name}.yaml").is_file()), None)

    def with_searchpath(self, preset: str | None, overrides: Sequence[str]) -> Sources:
        """With the folders of `hydra.searchpath`, from the command line or the preset.

        Raises ConfigError when a preset names a Python package there: that would import it.
        """
        typed = [value for key, value in map(split, overrides) if key == "hydra.searchpath" and value]
        path = self.file(preset) if preset else None
        found: list[str] = []
        if typed:
            found = [item.strip(" '\"") for item in typed[-1].strip("[]").split(",")]
        elif path is not None and path.parent != CONF_DIR:
            found = list(map(str, OmegaConf.select(read(path), "hydra.searchpath", default=None) or ()))
            for item in found:
                if item.startswith("pkg://"):
                    raise ConfigError(f"hydra.searchpath={item} is set in {path}: give it on the command line.")
        folders = tuple(folder for item in found for folder in _folders_of(item))
        return replace(self, searchpath=folders)

    def activate(self) -> None:
        """From now on Hydra searches here."""
        MoreFolders.folders = self.behind
        Plugins.instance().register(MoreFolders)


def presets_of(sources: Sources) -> list[str]:
    """Names for --config-name."""
    return sorted({path.stem for folder in sources.folders for path in folder.glob("*.yaml")} - {"base"})


def groups_of(sources: Sources) -> dict[str, list[str]]:
    """Group -> its options: {"attention": ["auto", "flash", ...]}."""
    found: dict[str, set[str]] = {}
    for folder in sources.folders:
        for path in folder.glob("*/**/*.yaml"):
            found.setdefault(path.parent.relative_to(folder).as_posix(), set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}


def check_preset(sources: Sources, preset: str | None, overrides: Sequence[str] = ()) -> str:
    """Raises ConfigError: no preset named, or one that is nowhere."""
    known = presets_of(sources)
    if preset is None:
        stray = [f"{text}: cannot be read as key=value: there is no `=`." for text in overrides if "=" not in text]
        raise ConfigError("\n".join([*stray, f"--config-name is missing: choose one of {', '.join(known)}."]))
    if Path(preset).is_absolute() or preset.startswith("."):
        path = Path(preset)
        raise ConfigError(
            f"--config-name {preset} is a path: give the folder and the name, --config-dir {path.parent} "
            f"--config-name {path.stem}."
        )
    if sources.file(preset) is None:
        near = did_you_mean(preset, known) or "."
        raise ConfigError(f"--config-name {preset}: no such preset{near} The presets are {', '.join(known)}.")
    return preset


def composed(sources: Sources, preset: str, overrides: Sequence[str]) -> tuple[DictConfig, DictConfig]:
    """What Hydra makes of the preset and the overrides, and its own settings.

    Raises ConfigError, with a line for each override that cannot be read and each option that does not exist.
    """
    known = groups_of(sources)
    problems = list(check_options(overrides, known))
    readable = [opened(text, known) for text in overrides if not any(p.startswith(f"{text}:") for p in problems)]
    not_set: list[str] = []
    GlobalHydra.instance().clear()
    sources.activate()
    with initialize_config_dir(str(sources.first), version_base="1.3"):
        while True:
            try:
                raw = compose(preset, readable, return_hydra_config=True)
                break
            except OverrideParseException as error:
                problems.append(unreadable(error))
                readable.remove(error.override)
            except (HydraException, OmegaConfBaseException, ValueError) as error:
                found = _NOT_SET.search(str(error))
                deletions = [text for text in readable if found and text.partition("=")[0] == f"~{found[1]}"]
                if not found or not deletions:
                    raise ConfigError("\n".join([*problems, sentence_of(error)])) from None
                not_set.append(found[1])
                readable.remove(deletions[0])
    with open_dict(raw):
        hydra: DictConfig = raw.pop("hydra")
    problems += [_not_set(key, raw) for key in not_set]
    if problems:
        unread = {split(line.partition(":")[0])[0] for line in problems}
        others = [line for line in _mistakes_of(raw) if line.partition(" has no value")[0] not in unread]
        raise ConfigError("\n".join([*problems, *others]))
    return raw, hydra


_NOT_SET = re.compile(r"Could not delete from config\. '(.+)' does not exist\.")


def _not_set(key: str, raw: DictConfig) -> str:
    """The sentence for `~key` of a key that no file sets."""
    keys = dict(flatten(OmegaConf.to_container(with_defaults(raw), resolve=False)))
    if key in keys:
        return f"~{key}: no file sets it, so there is nothing to remove: it has its default, {shown(keys[key])}."
    return f"~{key}: unknown key{did_you_mean(key, list(keys)) or '.'}"


def sentence_of(error: Exception) -> str:
    """An error of Hydra in one line."""
    text = " ".join(str(error).split())
    if found := _NO_OPTION.search(text):
        group, option, options = found.groups()
        near = did_you_mean(option, options.split()) or "."
        return f"{group}={option}: no such option{near} The options are {', '.join(options.split())}."
    if found := _NOT_CHOSEN.search(text):
        return f"~{found[1]}: that option is not chosen, so there is nothing to remove."
    return text


def _mistakes_of(raw: DictConfig) -> list[str]:
    """What the check finds, for a message that names other mistakes already."""
    try:
        check_config(raw)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def unreadable(error: OverrideParseException) -> str:
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


_NOT_CHOSEN = re.compile(r"Could not delete '(.+)'\. No match in the defaults list")


def _folder(flag: str, text: str, beside: Path | None) -> Path:
    candidates = [folder / text for folder in (beside, Path.cwd()) if folder]
    found = next((path for path in candidates if path.is_dir()), None)
    if found is None:
        raise ConfigError(f"{flag} {text}: there is no such folder.")
    return found


def _folders_of(item: str) -> Iterator[Path]:
    """An entry of `hydra.searchpath`: a folder, file://folder or pkg://package."""
    if item.startswith("pkg://"):
        package = item.removeprefix("pkg://").replace("/", ".")
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.submodule_search_locations is None:
            raise ConfigError(f"hydra.searchpath={item}: there is no such package.")
        yield from map(Path, spec.submodule_search_locations)
    elif not item.startswith("structured://"):
        folder = Path(item.removeprefix("file://"))
        if not folder.is_dir():
            raise ConfigError(f"hydra.searchpath={item}: there is no such folder.")
        yield folder.resolve()


def read(path: Path) -> DictConfig:
    """A file of presets or options as it is; empty if it is not a mapping."""
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())[:300]}") from None
    return loaded if isinstance(loaded, DictConfig) else OmegaConf.create({})


_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")


def compose_config(config_name: str | None, overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """The merged configuration of a preset and overrides such as `training.max_steps=10 attention=varlen`.

    `config_dir` is a folder of the user's own presets and group options, searched before the project's.
    Raises ConfigError: unknown preset or option, unreadable override, a permission that a file grants.
    """
    sources = Sources.of(config_dir).with_searchpath(config_name, overrides)
    preset = check_preset(sources, config_name)
    raw, hydra = composed(sources, preset, overrides)
    check_granted(raw, overrides)
    return settled(raw, hydra, sources, preset, overrides)[0]


@dataclass(frozen=True)
class Layer:
    """One file's own values, by dotted key."""

    name: str  # optimizer/sgd.yaml
    path: Path
    values: dict[str, Any]


def settled(
    raw: DictConfig, hydra: Any, sources: Sources, preset: str, overrides: Sequence[str]
) -> tuple[DictConfig, dict[str, Any], list[str]]:
    """The configuration with the values of the user's chosen option files; those values by key; and a line for each
    key of a chosen option that two files set, `optimizer.lr=0.1 (optimizer/sgd.yaml over finetune.yaml)`.
    """
    known = groups_of(sources)
    typed = [split(text)[0] for text in overrides if not group_of(text, known)]
    if sources.are_ours and len(typed) == len(overrides):
        return raw, {}, []  # no option was chosen on the command line, and none is the user's own
    composed = dict(flatten(OmegaConf.to_container(raw, resolve=False)))
    changed: dict[str, Any] = {}
    lines = []
    presets = layers(sources, preset)
    for group, option in sorted(hydra.runtime.choices.items()):
        file = f"{group}/{option}".removesuffix(".yaml")
        path, is_typed = sources.file(file), any(group_of(text, known) == group for text in overrides)
        is_own = path is not None and CONF_DIR not in path.parents
        if path is None or not (is_typed or is_own):
            continue
        own = {key: (value, layer.name) for layer in layers(sources, file) for key, value in layer.values.items()}
        for key, (value, name) in own.items():
            rival = next((layer for layer in reversed(presets) if key in layer.values), None)
            if rival is None or composed.get(key) != rival.values[key] or rival.values[key] == value:
                continue
            if _is_below(key, typed):
                continue
            if is_typed and is_own:
                changed[key] = value
                lines.append(f"{key}={shown(value)} ({name} over {rival.name})")
            else:
                lines.append(f"{key}={shown(rival.values[key])} ({rival.name} over {name})")
    if changed:
        raw = raw.copy()
        for key, value in changed.items():
            OmegaConf.update(raw, key, value, force_add=True)
    return raw, changed, lines


def layers(sources: Sources, name: str, seen: tuple[str, ...] = ()) -> list[Layer]:
    """The files of a preset or an option in the order in which Hydra merges them, the last one wins; the options of
    groups are left out.
    """
    path = sources.file(name)
    if path is None or name in seen:
        return []
    content = read(path)
    folder, _, _ = name.rpartition("/")
    plain: Any = OmegaConf.to_container(content, resolve=False)
    defaults = plain.pop("defaults", None) or []
    header = next((match[1] for line in path.read_text().splitlines() if (match := _PACKAGE.match(line))), None)
    prefix = "" if header == "_global_" else header or folder.replace("/", ".")
    own = Layer(f"{name}.yaml", path, dict(flatten(plain, prefix)))
    found: list[Layer] = []
    for entry in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        if entry == "_self_":
            found.append(own)
        elif isinstance(entry, str):
            other = entry.removesuffix(".yaml")
            parent = other[1:] if other.startswith("/") else f"{folder}/{other}" if folder else other
            found += layers(sources, parent, (*seen, name))
    return found


def _is_below(key: str, names: Sequence[str]) -> bool:
    """Is it one of these keys, or inside one of them?"""
    return any(key == name or key.startswith(f"{name}.") for name in names)
