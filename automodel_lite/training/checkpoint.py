"""Checkpoints: complete or absent.

A checkpoint is written into a temporary folder, every file and folder is fsynced, a manifest with the size of each
file is added last, then the folder is renamed. A folder is deleted by renaming it first. What is found under `step_*`
is complete.

    checkpoints/step_00000100/
        dcp/             model and optimizer, sharded (torch.distributed.checkpoint)
        state.json       step, position in the data
        COMPLETE.json    size in bytes of every file
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

_MANIFEST = "COMPLETE.json"


@dataclass(frozen=True)
class Checkpointer:
    """Saves and loads (model, optimizer, a small JSON state) under `folder`; every rank calls every method."""

    folder: Path
    keep_last: int

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Path:
        """Writes step_<step>; returns its folder. A checkpoint of that step that exists already is kept as it is."""
        final = self.folder / f"step_{step:08d}"
        if _agreed(final.is_dir()):
            return final
        temporary = self.folder / f".tmp-{final.name}"
        if _is_first():
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        _barrier()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=temporary / "dcp")
        _barrier()
        if _is_first():
            (temporary / "state.json").write_text(json.dumps(state, indent=1))
            _complete(temporary)
            os.rename(temporary, final)
            _fsync(self.folder)
            self._delete_old()
        _barrier()
        return final

    def newest(self) -> Path | None:
        """The newest complete checkpoint, the same on every rank; leftovers of killed saves are removed."""
        found: list[Path | None] = [None]
        if _is_first():
            for leftover in self.folder.glob(".tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            found = [max((p for p in self.folder.glob("step_*") if is_complete(p)), default=None)]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        return found[0]

    def load(self, checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restores model and optimizer in place and returns the JSON state."""
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=checkpoint / "dcp")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        restored: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
        return restored

    def _delete_old(self) -> None:
        for old in sorted(self.folder.glob("step_*"))[: -self.keep_last]:
            doomed = self.folder / f".tmp-deleted-{old.name}"
            os.rename(old, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def is_complete(checkpoint: Path) -> bool:
    """Does every file of the manifest exist with its size?"""
    try:
        sizes = json.loads((checkpoint / _MANIFEST).read_text())
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _complete(folder: Path) -> None:
    """fsync of every file and folder, then the manifest."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    for path in files:
        _fsync(path)
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps({str(p.relative_to(folder)): p.stat().st_size for p in files}, indent=1))
    _fsync(manifest)
    for path in [p for p in folder.rglob("*") if p.is_dir()]:
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _agreed(value: bool) -> bool:
    """Rank 0's answer, on every rank: file systems may show ranks different things."""
    answer: list[bool] = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(answer)
    return answer[0]
