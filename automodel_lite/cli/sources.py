"""Where presets and group options come from.

Folders are searched in this order: the user's own (`--config-dir`, or `--config-path` in place of the project's), that
of a recipe from outside, the project's conf/, then those of `hydra.searchpath`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.line import split
from automodel_lite.cli.recipes import Recipe
from automodel_lite.config.components import CONF_DIR
from automodel_lite.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Sources:
    """Folders of presets and group options; the first that has a file wins."""

    first: Path = CONF_DIR
    behind: tuple[Path, ...] = ()  # that the loader adds
    searchpath: tuple[Path, ...] = ()  # that Hydra adds by itself

    @classmethod
    def of(cls, config_dir: str | None = None, config_path: str | None = None, recipe: Recipe | None = None) -> Sources:
        """`config_path` takes the place of conf/; a relative one is looked up beside the recipe, then here."""
        own = _folder("--config-dir", config_dir, None) if config_dir else None
        main = _folder("--config-path", config_path, recipe.folder() if recipe else None) if config_path else None
        beside = recipe.conf() if recipe else None
        folders = [folder for folder in (main, own, beside, None if main else CONF_DIR) if folder]
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
