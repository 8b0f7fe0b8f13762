"""Where presets and group options come from.

Folders are searched in this order: the user's own (`--config-dir`, or `--config-path` in place of the project's), that
of a recipe from outside, the project's conf/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.recipes import Recipe
from automodel_lite.config.components import CONF_DIR
from automodel_lite.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Sources:
    """Folders of presets and group options; the first that has a file wins."""

    folders: tuple[Path, ...] = (CONF_DIR,)

    @classmethod
    def of(cls, config_dir: str | None = None, config_path: str | None = None, recipe: Recipe | None = None) -> Sources:
        """`config_path` takes the place of conf/; a relative one is looked up beside the recipe, then here."""
        own = _folder("--config-dir", config_dir, None) if config_dir else None
        main = _folder("--config-path", config_path, recipe.folder() if recipe else None) if config_path else None
        beside = recipe.conf() if recipe else None
        folders = [folder for folder in (main, own, beside, None if main else CONF_DIR) if folder]
        return cls(tuple(folder.resolve() for folder in folders))

    @property
    def are_ours(self) -> bool:
        """No file of anybody else's can have a say."""
        return self.folders == (CONF_DIR,)

    def file(self, name: str) -> Path | None:
        """`optimizer/adamw` -> the file that Hydra reads."""
        return next((path for folder in self.folders if (path := folder / f"{name}.yaml").is_file()), None)


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


def read(path: Path) -> DictConfig:
    """A file of presets or options as it is; empty if it is not a mapping."""
    try:
        loaded = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"{path} cannot be read as YAML: {' '.join(str(error).split())[:300]}") from None
    return loaded if isinstance(loaded, DictConfig) else OmegaConf.create({})
