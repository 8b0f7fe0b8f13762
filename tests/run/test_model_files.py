"""Files of a model that differ are noticed, and large ones cost no time."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from automodel_lite.run.weight_files import model_files


def _folder(path: Path, num_bytes: int, rope_theta: float = 1e4) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"rope_theta": rope_theta}))
    with open(path / "model.safetensors", "wb") as file:
        file.truncate(num_bytes)  # sparse
    return path


def test_sixteen_gigabytes_cost_less_than_half_a_second(tmp_path: Path) -> None:
    for number in range(4):
        _folder(tmp_path / str(number), 4 << 30)
    began = time.perf_counter()
    found = [model_files(str(tmp_path / str(number))) for number in range(4)]
    assert time.perf_counter() - began < 0.5
    assert found[0] == found[3]
    assert found[0].keys() == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("at", [0, 100_000_000, (1 << 30) - 1], ids=["header", "inside", "end"])
def test_trained_weights_have_another_digest(tmp_path: Path, at: int) -> None:
    """Training changes every block; a single byte in an unread one is not seen."""
    one, other = _folder(tmp_path / "one", 1 << 30), _folder(tmp_path / "other", 1 << 30)
    with open(other / "model.safetensors", "r+b") as file:
        file.seek(at)
        file.write(b"x" * min(1 << 26, (1 << 30) - at))
    differing = {name for name, digest in model_files(str(one)).items() if model_files(str(other))[name] != digest}
    assert differing == {"model.safetensors"}


def test_a_changed_configuration_has_another_digest(tmp_path: Path) -> None:
    one, other = _folder(tmp_path / "one", 10), _folder(tmp_path / "other", 10, rope_theta=1e6)
    assert model_files(str(one))["config.json"] != model_files(str(other))["config.json"]


def test_no_model_has_no_files() -> None:
    assert model_files(None) == {}
    assert model_files("nobody/has-this-model") == {}
