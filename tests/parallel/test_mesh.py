"""Which device a rank takes."""

from __future__ import annotations

import pytest
import torch

from automodel_lite.config.schema import MeshConfig
from automodel_lite.parallel.mesh import init_mesh


@pytest.mark.parametrize(("num_visible", "index"), [(8, 3), (1, 0), (4, 3)], ids=["all", "its own alone", "half"])
def test_a_rank_takes_a_gpu_that_it_sees(num_visible: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --gpus-per-task=1` leaves LOCAL_RANK up to 7 and one visible GPU."""
    taken: list[torch.device] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert init_mesh(MeshConfig()).device == torch.device("cuda", index)
    assert taken == [torch.device("cuda", index)]
