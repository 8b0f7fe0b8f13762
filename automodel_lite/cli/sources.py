"""Where presets and group options come from.

Folders are searched in this order: the user's own (`--config-dir`, or `--config-path` in place of
the project's), that of a recipe from outside, the project's conf/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.recipes import Recipe
from automodel_lite.config.components import CONF_DIR
from automodel_lite.config.installed import installed_trackers
from automodel_lite.errors import (
    ConfigError,
    did_you_mean,
    did_you_mean_path,
    is_limit,
    nearest,
    one_line,
)


@dataclass(frozen=True)
class Sources:
    """Folders of presets and group options; the first that has a file wins."""

    folders: tuple[Path, ...] = (CONF_DIR,)

    @classmethod
    def of(
        cls,
        config_dir: str | None = None,
        config_path: str | None = None,
        recipe: Recipe | None = None,
    ) -> Sources:
        """Raises ConfigError for a folder that is not there; `config_path` takes the place of
        conf/.
        """
        for flag, folder in (("--config-dir", config_dir), ("--config-path", config_path)):
            if folder and not Path(folder).is_dir():
                raise ConfigError(f"{flag} {folder}: there is no such folder.")
        beside = recipe.conf() if recipe else None
        folders = [config_path, config_dir, beside, None if config_path else CONF_DIR]
        return cls(tuple(Path(folder).resolve() for folder in folders if folder))

    def file(self, name: str) -> Path | None:
        """`optimizer/adamw` -> the file that Hydra reads."""
        return next(
            (path for folder in self.folders if (path := folder / f"{name}.yaml").is_file()), None
        )


def presets_of(sources: Sources) -> list[str]:
    """Names for --config-name."""
    paths = [path for folder in sources.folders for path in folder.glob("*.yaml")]
    return sorted({path.stem for path in paths if path.is_file()} - {"base"})


def groups_of(sources: Sources) -> dict[str, list[str]]:
    """Group -> its options: {"attention": ["auto", "flash", ...]}."""
    found: dict[str, set[str]] = {}
    for folder in sources.folders:
        for path in filter(Path.is_file, folder.glob("*/**/*.yaml")):
            found.setdefault(path.parent.relative_to(folder).as_posix(), set()).add(path.stem)
    if trackers := installed_trackers():
        found.setdefault("logger", set()).update(trackers)
    return {group: sorted(options) for group, options in sorted(found.items())}


USUAL = ("finetune", "lora", "dpo", "pretrain", "policy")
"""The presets for a model and data of one's own; the others are examples of them."""
COMPLETE = "automodel-lite ls lists all presets"


def check_preset(sources: Sources, preset: str | None, overrides: Sequence[str] = ()) -> str:
    """Raises ConfigError: no preset named, or one that is nowhere."""
    known = presets_of(sources)
    usual = ", ".join(name for name in USUAL if name in known) or ", ".join(known)
    if preset is None:
        stray = [
            f"{text}: cannot be read as key=value: there is no `=`." + _meant(Path(text))
            for text in overrides
            if "=" not in text
        ]
        both = "name a model and its data, automodel-lite train MODEL DATA, or choose a preset"
        problem = f"--config-name is missing: {both}: {usual} ({COMPLETE})."
        raise ConfigError("\n".join([*stray, problem]))
    path = Path(preset)
    if sources.file(preset) is None and len(path.parts) > 1:
        raise ConfigError(
            f"--config-name {preset} is a path: give the folder and the name, --config-dir "
            f"{path.parent} --config-name {path.stem}."
        )
    if sources.file(preset) is None:
        for folder in sources.folders:
            file = folder / f"{path.stem}.yml"
            if path.suffix in ("", ".yml") and file.is_file():
                raise ConfigError(
                    f"--config-name {preset}: a preset's file ends in .yaml: rename {file} to "
                    f"{path.stem}.yaml."
                )
        if (here := _file_here(path)) is not None:
            renamed = "" if here.suffix == ".yaml" else f" (rename it to {here.stem}.yaml)"
            raise ConfigError(
                f"--config-name {preset}: {here} stands in this folder{renamed}: presets of your "
                f"own are found with --config-dir . --config-name {here.stem}."
            )
        near = did_you_mean(path.stem if path.suffix == ".yml" else preset, known)
        raise ConfigError(
            f"--config-name {preset}: no such preset{near} The usual ones are {usual} ({COMPLETE})."
        )
    return preset


def _file_here(path: Path) -> Path | None:
    """Returns the file of the current folder that is meant by the name of a preset."""
    files = (Path(f"{path}.yaml"), Path(f"{path}.yml"), path)
    kinds = (".yaml", ".yml")
    return next((file for file in files if file.suffix in kinds and file.is_file()), None)


def preset_meant(sources: Sources, preset: str | None) -> str | None:
    """Returns the preset with the closest name; None where nothing is close."""
    return nearest(preset.removesuffix(".yml"), presets_of(sources)) if preset else None


def _meant(path: Path) -> str:
    """Returns how a path that was given without a key is written: a run, a model, a preset,
    data.
    """
    if path.is_dir() and (path / "config.json").is_file():
        return f" For this model: model.pretrained={path}."
    if path.is_dir():
        return f" For this run: model.pretrained={path}/hf."
    if path.suffix in (".yaml", ".yml"):
        return f" For this preset: --config-dir {path.parent} --config-name {path.stem}."
    return f" For this data: --config-name finetune dataset.path={path}." if path.is_file() else ""


def read(path: Path) -> DictConfig:
    """Reads a file of presets or options as it is; empty if it is not a mapping."""
    try:
        loaded = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}){did_you_mean_path(str(path))}"
        ) from None
    except Exception as error:
        if is_limit(error):
            raise
        raise ConfigError(f"{path} cannot be read as YAML: {one_line(error)}") from None
    return loaded if isinstance(loaded, DictConfig) else OmegaConf.create({})
