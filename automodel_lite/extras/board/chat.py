"""A checkpoint that answers: one model is in memory, and one answer is written at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_lite.config.rules import Range
from automodel_lite.errors import ConfigError, harmless
from automodel_lite.run.checkpoint_folder import exported_folder, survey
from automodel_lite.run.folder import RunFolder

if TYPE_CHECKING:  # with torch, which the page does not wait for
    from automodel_lite.evaluation.generator import Generator

    Load = Callable[[Path, str | None], Generator]
    """(run, checkpoint) -> its model; None is what the run has exported."""

EXPORT = "the exported model"
_MOST_TOKENS = Range(1, 65_536)
_TEMPERATURES = Range(0, 1000)
_ROLES = ("system", "user", "assistant")


@dataclass
class Chat:
    """The model that was asked last. `load` is handed down."""

    load: Load
    _one: threading.Lock = field(default_factory=threading.Lock)
    _loaded: tuple[Any, Generator] | None = None

    def answer(
        self, run: RunFolder, asked: Mapping[str, Any], write: Callable[[str], None]
    ) -> None:
        """Writes the answer of a checkpoint to some messages, piece by piece. Raises ConfigError:
        another answer is being written, the request is not one, or the model cannot be loaded.

        asked   checkpoint, messages, max_new_tokens, temperature
        """
        from transformers import set_seed  # with torch

        messages = _messages(asked.get("messages"))
        max_new_tokens = asked.get("max_new_tokens", 256)
        temperature = asked.get("temperature", 0.0)
        _check("max_new_tokens", max_new_tokens, _MOST_TOKENS, int)
        _check("temperature", temperature, _TEMPERATURES, (int, float))
        if not self._one.acquire(blocking=False):
            raise ConfigError("another answer is being written: wait for its end, or stop it.")
        try:
            generator = self._generator(run, str(asked.get("checkpoint", "")))
            set_seed(0)
            generator.answers(
                [messages],
                max_new_tokens=max_new_tokens,
                temperature=float(temperature),
                write=lambda text: write(harmless(text)),
            )
        finally:
            self._one.release()

    def _generator(self, run: RunFolder, checkpoint: str) -> Generator:
        if checkpoint not in choices(run):
            raise ConfigError(f"{run.path} has no {checkpoint or 'checkpoint'} any more: reload.")
        # an export is written again when the run goes on
        place = run.path if checkpoint == EXPORT else run.checkpoints / checkpoint
        when_ns = [path.stat().st_mtime_ns for path in (place, run.hf) if path.exists()]
        wanted = (place, when_ns)
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = None  # its memory is free before the next one is read
            self._loaded = (
                wanted,
                self.load(run.path, None if checkpoint == EXPORT else checkpoint),
            )
        return self._loaded[1]


def choices(run: RunFolder) -> list[str]:
    """Returns what of a run can be asked: its export, where it is of the newest checkpoint, and its
    checkpoints, the newest first.
    """
    found = []
    with suppress(ConfigError):
        exported_folder(str(run.path))
        found.append(EXPORT)
    return found + [path.name for path in survey(run.checkpoints)[0]]


def _messages(found: Any) -> list[dict[str, Any]]:
    """Raises ConfigError for what is no chat that ends with the user's turn."""
    turns: Sequence[Any] = found if isinstance(found, list) else []
    messages = [
        {"role": turn["role"], "content": turn["content"]}
        for turn in turns
        if isinstance(turn, dict)
        and turn.get("role") in _ROLES
        and isinstance(turn.get("content"), str)
    ]
    if len(messages) != len(turns) or not messages or messages[-1]["role"] != "user":
        raise ConfigError("messages are turns of system, user and assistant; the last is a user's.")
    return messages


def _check(name: str, value: Any, rule: Range, kind: Any) -> None:
    is_number = isinstance(value, kind) and not isinstance(value, bool) and value == value
    if not is_number or rule.problem(value):
        raise ConfigError(f"{name}={value} must be a number, {rule}.")
