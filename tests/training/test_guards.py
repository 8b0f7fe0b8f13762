"""What watches over a run: ranks whose folders are not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.peers import Peers
from automodel_lite.run.lock import RunLock
from automodel_lite.training.guards import Guards
from tests.ranks import run_ranks


def _open_on_own_disk(rank: int, world_size: int, folder: str) -> str:
    guards = Guards(Config(name="x", output_dir=f"{folder}/disk_of_{rank}"), Peers(None), print)
    try:
        guards.open()
    except ConfigError as error:
        return str(error)
    finally:
        guards.lock.release()
    return "opened"


def test_disks_of_their_own_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save once warned, and the run ended without a checkpoint."""
    for rank, text in enumerate(run_ranks(_open_on_own_disk, 2, str(tmp_path))):
        assert f"disk_of_{rank} is not the same folder on all nodes: rank 1 does not see" in text
    assert not RunLock(tmp_path / "disk_of_0" / "run.lock").path.exists()
