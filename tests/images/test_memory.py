"""Whoever decodes images holds those of a pack or two, however many there are."""

from __future__ import annotations

import json
import multiprocessing
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_lite.config.schema import DataloaderConfig
from automodel_lite.data.feeding.feed import read_batches
from tests.images.families import draw, write_model
from tests.images.test_exact import config_of_images, data_of


def resident(worker: Any) -> int:
    """Bytes in memory that a process holds."""
    return int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.system
def test_workers_hold_no_more_after_many_large_images(tmp_path: Path) -> None:
    """Images of 2 MiB of pixels: after 10 packs and after 120 a worker is as large."""
    for number in range(4):
        draw(tmp_path / f"{number}.png", 1000, 800, seed=number)
    lines = []
    for row in range(120):
        asked = [{"type": "image", "image": f"{row % 4}.png"}, {"type": "text", "text": "a?"}]
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": "b"}]
        lines.append(json.dumps({"messages": said}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    write_model("gemma3", tmp_path)
    data = data_of(config_of_images(tmp_path, "packed_sequence.packed_sequence_size=24"))
    packs = data.packs_of(0)
    assert len(packs) == 120
    order = [np.array([[[number]]]) for number in range(len(packs))]
    feed = read_batches(packs, order, 0, DataloaderConfig(num_workers=2))
    sizes = []
    for number, _ in enumerate(feed):
        workers = multiprocessing.active_children()
        sizes.append(max(map(resident, workers), default=0))
        if number == len(packs) - 5:
            break
    early = max(sizes[10:30])
    assert early > 0
    # an image kept of each pack would be ten times as much; an allocator keeps a few
    kept = 1000 * 800 * 3 * len(sizes[30:])
    assert max(sizes[30:]) < early + kept / 10
