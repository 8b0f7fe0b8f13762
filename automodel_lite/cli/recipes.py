"""Recipes by name: ours, `recipes.train_ft:main`, and those of any importable package,
`my_package.kd:main`.

A recipe is a function `main(config)` or, with settings of its own, `main(config, extra: KdConfig)`:
KdConfig is a dataclass, and its fields are the keys below `extra` in presets and on the command
line, checked like all others.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path

from automodel_lite.cli.line import RECIPES, RECIPES_PACKAGE
from automodel_lite.errors import ConfigError, did_you_mean
from automodel_lite.interpreter import relaxed_gc


@dataclass(frozen=True)
class Recipe:
    """What `recipes.train_ft:main` names; nothing is imported before `function` or `extra_type` is
    called.
    """

    main: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", self.main):
            text = (
                f"{self.main[:80]!a}: a recipe is named package.module:function, such as "
                "my_package.kd:main."
            )
            raise ConfigError(text)

    @property
    def module(self) -> str:
        module = self.main.split(":")[0]
        return f"{RECIPES_PACKAGE}.{self.name}" if self.is_ours else module

    @property
    def name(self) -> str:
        return self.main.split(":")[0].rpartition(".")[2]

    @property
    def is_ours(self) -> bool:
        return self.main.startswith("recipes.")

    @property
    def writes_a_run(self) -> bool:
        """Returns whether `name=...` must be given: it names the run's folder."""
        return not self.is_ours or self.name == "train_ft"

    @property
    def purpose(self) -> str:
        """Returns the first sentence of its docstring."""
        if self.is_ours:
            return next(text for module, text in RECIPES.values() if module == self.name)
        text = (
            ast.get_docstring(ast.parse(self._file().read_text(encoding="utf-8")))
            or f"run {self.main}"
        )
        return text.splitlines()[0].rstrip(".")

    @property
    def start(self) -> str:
        """How it is typed, without its arguments."""
        if not self.is_ours:
            return f"automodel-lite run {self.main}"
        return f"{'torchrun' if self.name == 'train_ft' else 'python'} recipes/{self.name}.py"

    def conf(self) -> Path | None:
        """Returns the folder of its own presets and options, conf/ beside it."""
        found = None if self.is_ours else self._file().parent / "conf"
        return found if found and found.is_dir() else None

    def function(self) -> Callable[..., int | None]:
        """Imports it; raises ConfigError when there is no such function."""
        if not self.is_ours:
            self._file()
        with relaxed_gc():
            loaded = importlib.import_module(self.module)
        name = self.main.split(":")[1]
        found = vars(loaded).get(name)
        if not inspect.isroutine(found):
            known = [key for key, value in vars(loaded).items() if inspect.isroutine(value)]
            raise ConfigError(
                f"{self.main}: {self.module} has no function {name}{did_you_mean(name, known)}"
            )
        return typing.cast(Callable[..., "int | None"], found)

    def extra_type(self) -> type | None:
        """Returns the dataclass of its own keys; None for a recipe without any."""
        if self.is_ours:
            return None
        main = self.function()
        if "extra" not in inspect.signature(main).parameters:
            return None
        found = typing.get_type_hints(main).get("extra")
        if not (isinstance(found, type) and is_dataclass(found)):
            raise ConfigError(
                f"{self.main}: the argument extra must be annotated with a dataclass."
            )
        return found

    def _file(self) -> Path:
        """Returns where its module is, which is not imported for that; packages around it are."""
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # an installed command has its own folder there
        try:
            spec = importlib.util.find_spec(self.module)
        except ModuleNotFoundError as error:
            if error.name and not f"{self.module}.".startswith(f"{error.name}."):
                raise
            spec = None
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            cure = "install its package, or start from its folder"
            raise ConfigError(f"{self.main}: there is no module {self.module}: {cure}.")
        return Path(spec.origin).resolve()
