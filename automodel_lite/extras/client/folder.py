"""The run's folder of a training client: taken at its first use, compared with what is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import nn

from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError
from automodel_lite.run.checkpoint import Checkpointer
from automodel_lite.run.folder import config_yaml
from automodel_lite.training import resume
from automodel_lite.training.guards import Guards

STATES = "states"
"""The folder of the run in which states with names are."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NAME_RULE = "must be letters, digits, '.', '_' and '-', beginning with a letter or a digit"


class ClientFolder:
    """module  the model, whose frozen weights are of a file"""

    def __init__(self, guards: Guards, config: Config, module: nn.Module) -> None:
        self.guards = guards
        self.config = config
        self.module = module
        self._is_open = False

    def open(self) -> Checkpointer:
        """Takes the folder at the first use."""
        guards = self.guards
        if not self._is_open:
            guards.open()
            self._is_open = True
            # what a checkpoint is compared with: folders of earlier versions have it there alone
            guards.folder.config_text = config_yaml(self.config)
            guards.ranks.on_first(guards.folder.restore_config)
            if guards.ranks.on_first(lambda: not guards.folder.config.is_file()):
                self.write_config()
        return guards.checkpointer

    def close(self) -> None:
        """Gives the folder back, which a later use takes again."""
        if self._is_open:
            self.guards.lock.release()
        self._is_open = False

    def write_config(self) -> None:
        """Writes config.yaml; raises ConfigError where the folder has that of other settings."""
        guards = self.guards

        def write() -> None:
            if guards.folder.config.is_file():
                guards.folder.check(self.config)
            guards.folder.open(self.config)

        guards.ranks.on_first(write)

    def path_of(self, name: str | Path) -> Path:
        """Returns the folder of a state's name, or of a path."""
        if isinstance(name, Path) or "/" in name:
            return Path(name).absolute()
        if not is_name(name):
            raise ValueError(f"name={name!r} {NAME_RULE}; or a path with a '/'.")
        return self.guards.folder.path / STATES / name

    def check_state(self, state: dict[str, Any]) -> None:
        """Raises ConfigError for a checkpoint of the recipe, or one of other settings or files."""
        folder = self.guards.folder
        if "client" not in state:
            raise ConfigError(
                f"{folder.path} is the folder of recipes/train_ft.py: start from its model, "
                f"model.pretrained={folder.path}, with name=... of your own."
            )
        folder.check(self.config)
        self.check_sources(state)

    def check_sources(self, state: dict[str, Any]) -> None:
        """Raises ConfigError for a state that another model or other files were trained to."""
        if "client" not in state:
            raise ConfigError("this is a checkpoint of recipes/train_ft.py, and no client's state.")
        has_frozen = not all(p.requires_grad for p in self.module.parameters())
        resume.accept_changes(self.guards, state.get("sources", {}), has_frozen)


def is_name(text: str) -> bool:
    """Returns whether a state may have this name, by `NAME_RULE`."""
    return bool(_NAME.fullmatch(text))
