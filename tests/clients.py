"""A training client on a tiny model, for the tests of its calls."""

from __future__ import annotations

from pathlib import Path

from automodel_lite import TrainingClient

SIZES = ("packed_sequence.packed_sequence_size=256", "training.num_threads=1")


def open_client(folder: str, runs: Path, *overrides: str) -> TrainingClient:
    return TrainingClient(
        "policy", f"model.pretrained={folder}", *SIZES, f"output_dir={runs}", *overrides
    )
