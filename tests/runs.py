"""Whole runs of the recipe on small settings, in this process or on several ranks."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError
from automodel_lite.run.stopping import SIGNALS
from recipes import train_ft
from tests.ranks import run_ranks

Row = dict[str, Any]
QUICK = [
    "training.num_threads=1",
    "training.val_every_steps=0",
    "training.max_steps=6",
    "training.global_batch_size=4",
    "checkpoint.every_steps=2",
    "checkpoint.export_hf=false",
    "optimizer.lr=0.01",
]
# a model with dropout in its embeddings and its layers; learned positions, so the model's length is the pack's
DROPOUT = [
    "~model.config",
    "model.config.model_type=gpt2",
    "model.config.n_embd=32",
    "model.config.n_layer=2",
    "model.config.n_head=4",
    "model.config.n_positions=128",
    "model.config.attn_pdrop=0.0",
    "model.config.resid_pdrop=0.1",
    "model.config.embd_pdrop=0.1",
]


@contextmanager
def files_end_at(num_bytes: int) -> Iterator[None]:
    """Lets no file of this process grow beyond, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def config_of(preset: str, folder: Path, *overrides: str) -> Config:
    """The checked configuration of a run in `folder`; token caches live beside it."""
    return check_config(_composed(preset, folder, *overrides))


def train(preset: str, folder: Path, *overrides: str, world_size: int = 1) -> list[Row]:
    """Runs a preset to its end and returns the rows of metrics.jsonl."""
    if world_size == 1:
        assert train_ft.main(config_of(preset, folder, *overrides)) == 0
    else:
        run_ranks(_train_on_rank, world_size, _composed(preset, folder, *overrides))
    return rows_of(folder)


def problems(*overrides: str) -> list[str]:
    """The sentences that refuse the smoke preset with these overrides; none where it is taken."""
    try:
        check_config(composed("smoke", *overrides))
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _train_on_rank(rank: int, world_size: int, raw: DictConfig) -> None:
    assert train_ft.main(check_config(raw)) == 0


def rows_of(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(rows: list[Row]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each logged step."""
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def losses_by_step(folder: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm) as logged, every digit."""
    return {
        row["step"]: (row["loss"], row["grad_norm"]) for row in rows_of(folder) if "loss" in row
    }


def wait_until(is_so: Callable[[], bool], seconds: float, log: Path | None = None) -> None:
    """For what another process will do; `log` is quoted when it does not."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, log.read_text()[-3000:] if log else ""
        time.sleep(0.1)


def wait_for_rows(
    folder: Path, more_than: int, seconds: float = 120, log: Path | None = None
) -> None:
    """Until metrics.jsonl has more rows than that."""
    path = folder / "metrics.jsonl"
    wait_until(
        lambda: path.is_file() and len(path.read_text().splitlines()) > more_than, seconds, log
    )


def quick_config(folder: Path, *overrides: str) -> Config:
    """The smoke preset in even fewer steps; token caches are those of all tests."""
    return check_config(_quick(folder, *overrides))


def train_quick(
    folder: Path, *overrides: str, stop_at: int = 0, stop_by: signal.Signals = signal.SIGTERM
) -> tuple[int, str]:
    """Runs `quick_config` in this process -> exit code, what it printed.

    stop_at   the step in which the process gets the signal `stop_by`; negative: its data workers too
    """
    return _train_raw(_quick(folder, *overrides), stop_at, stop_by)


def train_until(preset: str, folder: Path, *overrides: str, stop_at: int) -> tuple[int, str]:
    """Runs a preset in this process, which gets a signal in step `stop_at` -> exit code, screen."""
    return _train_raw(_composed(preset, folder, *overrides), stop_at)


def train_on(
    world_size: int, folder: Path, *overrides: str, stop_at: int = 0, on_rank: int = 0
) -> tuple[int, str]:
    """The same on so many ranks, of which `on_rank` gets the signal -> rank 0's exit code and screen."""
    results = run_ranks(
        _train_quick_on_rank, world_size, _quick(folder, *overrides), stop_at, on_rank
    )
    assert len({code for code, _ in results}) == 1, results
    return tuple(results[0])  # type: ignore[return-value]


def _train_quick_on_rank(
    rank: int, world_size: int, raw: DictConfig, stop_at: int, on_rank: int
) -> Any:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have workers
    return _train_raw(raw, stop_at if rank == on_rank else 0)


def _train_raw(
    raw: DictConfig, stop_at: int = 0, stop_by: signal.Signals = signal.SIGTERM
) -> tuple[int, str]:
    torch.set_num_threads(1)
    SIGNALS.__init__()  # type: ignore[misc]
    SIGNALS.install()
    real_step = train_ft.TrainFinetuneRecipe.step

    def step(recipe: Any, batches: Any) -> Any:
        if recipe.num_steps + 1 == abs(stop_at):
            for child in multiprocessing.active_children() if stop_at < 0 else ():
                # from elsewhere, as SLURM would
                subprocess.run(["kill", "-TERM", str(child.pid)], check=True)
            os.kill(os.getpid(), stop_by)
        return real_step(recipe, batches)

    train_ft.TrainFinetuneRecipe.step = step  # type: ignore[method-assign]
    screen = io.StringIO()
    try:
        with redirect_stdout(screen):
            code = train_ft.main(check_config(raw))
    finally:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        train_ft.TrainFinetuneRecipe.step = real_step  # type: ignore[method-assign]
        SIGNALS.__init__()  # type: ignore[misc]  # what this run was told is not for the next one
    return code, screen.getvalue()


def _quick(folder: Path, *overrides: str) -> DictConfig:
    return _placed("smoke", (*QUICK, *overrides), output_dir=str(folder))


def _composed(preset: str, folder: Path, *overrides: str) -> DictConfig:
    return _placed(
        preset, overrides, output_dir=str(folder), cache_dir=str(folder.parent / "cache")
    )


def _placed(preset: str, overrides: tuple[str, ...], **places: str) -> DictConfig:
    """Folders that are not among the overrides differ by run."""
    typed = {text.partition("=")[0] for text in overrides}
    raw = composed(preset, *overrides)
    for key, value in places.items():
        if key not in typed:
            raw[key] = value
    return raw


# no choice of an option, no removal; of the keys without a group those that differ by test
_PLAIN_VALUE = re.compile(
    r"(?!.*_target_)([a-z_]\w*(\.\w+)+|name|seed|output_dir|cache_dir|dry_run)="
)


def composed(preset: str, *overrides: str) -> DictConfig:
    """What `compose_config` gives (tests/cli/test_compose.py compares them), in a tenth of its time: Hydra composes once
    per process and choice of options, and values are set in what it made.
    """
    plain = [text for text in overrides if _PLAIN_VALUE.match(text)]
    try:
        values = OverridesParser.create().parse_overrides(plain)
    except HydraException:
        return compose_config(preset, overrides)
    raw = _composed_once(preset, tuple(text for text in overrides if text not in plain)).copy()
    for value in values:
        OmegaConf.update(raw, value.key_or_group, value.value(), force_add=True)
    return raw


@cache
def _composed_once(preset: str, choices: tuple[str, ...]) -> DictConfig:
    return compose_config(preset, choices)
