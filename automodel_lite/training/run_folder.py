"""The folder of a run: one for all ranks and every restart, no timestamps; the same command again continues in it.

runs/<name>/
    config.yaml       resolved, secrets left out      metrics.jsonl     one object a logged step
    checkpoints/      step_00000100/ ...              hf/               the exported model
    packing.json      what the packs cost and gain
        STATUS.json       how the last process of this run ended
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from automodel_lite.config import Config
from automodel_lite.errors import ConfigError

# settings that do not shape the numbers: free to change between the restarts of a run
FREE_SETTINGS = (
    "name",
    "output_dir",
    "cache_dir",
    "dataloader.num_workers",
    "dataloader.prefetch_factor",
    "dataloader.pin_memory",
    "mesh",
    "attention",
    "training.log_every_steps",
    "training.val_every_steps",
    "training.micro_batch_size",
    "training.activation_checkpointing",
    "training.num_threads",
    "checkpoint",
    "evaluation",
    "logger",
)


class RunFolder:
    """Paths and small files of a run. Everything that is written is written by rank 0."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.packing = self.path / "packing.json"
        self.checkpoints = self.path / "checkpoints"
        self.hf = self.path / "hf"
        self.status = self.path / "STATUS.json"

    def check(self, config: Config) -> None:
        """Raises ConfigError when the folder belongs to something else, or to a run with other settings."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"output_dir={self.path} is a file.")
        if not self.config.is_file():
            if self.path.is_dir() and any(self.path.iterdir()):
                raise ConfigError(
                    f"output_dir={self.path} is not empty and is no run's folder: choose another name=... ."
                )
            return
        if not self.checkpoints.is_dir() or config.checkpoint.accept_changes:
            return
        changes = list(changed_settings(saved_config(self.config), plain(config)))
        if changes:
            raise ConfigError(
                f"{self.path} was begun with other settings:\n"
                + "\n".join(f"  {key}: was {_show(old)}, now {_show(new)}" for key, old, new in changes)
                + "\nStart a new run with name=..., or continue this one with checkpoint.accept_changes=true."
            )

    def open(self, config: Config) -> None:
        """Makes the folder and writes config.yaml."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config, OmegaConf.to_yaml(OmegaConf.create(plain(config))))
        except OSError as error:
            raise ConfigError(f"output_dir={self.path} cannot be written: {error.strerror}.") from None

    def rewind_metrics(self, step: int) -> None:
        """Drops the rows after `step` from metrics.jsonl: a continued run writes them again. A torn last line goes
        too.
        """
        if not self.metrics.is_file():
            return
        kept = [line for line in self.metrics.read_text().splitlines() if _step_of(line) <= step]
        write_atomically(self.metrics, "".join(line + "\n" for line in kept))

    def write_status(self, state: str, step: int) -> None:
        write_atomically(self.status, json.dumps({"state": state, "step": step}) + "\n")

    def finished_message(self, config: Config) -> str | None:
        """What to tell someone who starts a run again that has reached its end; None when there is work to do."""
        self.check(config)
        if not self.status.is_file() or not self.config.is_file():
            return None
        status = json.loads(self.status.read_text())
        if status["state"] != "finished" or list(changed_settings(saved_config(self.config), plain(config))):
            return None
        return (
            f"{self.path} is finished (step {status['step']}): nothing to do. Start another run with name=..., "
            "or go on with more training.max_steps and checkpoint.accept_changes=true."
        )


def plain(config: Config) -> dict[str, Any]:
    """The configuration as nested dicts of plain values."""
    return asdict(config)


def saved_config(path: Path) -> dict[str, Any]:
    """A run's config.yaml as nested dicts."""
    saved = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(saved, dict)
    return {str(key): value for key, value in saved.items()}


def changed_settings(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, old value, new value) of every setting that shapes the numbers and differs."""
    for key in dict.fromkeys([*old, *new]):
        path = f"{prefix}{key}"
        if path in FREE_SETTINGS:
            continue
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from changed_settings(before, after, f"{path}.")
        elif before != after:
            yield path, before, after


def write_atomically(path: Path, text: str) -> None:
    """The file has the old content or the new, never a part: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _step_of(line: str) -> float:
    try:
        step: int = json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")
    return step


def _show(value: Any) -> str:
    return "null" if value is None else str(value)
