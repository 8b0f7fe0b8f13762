"""What keeps fp8 from working is said before data is read; its products are in the slow suite (torchao)."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from automodel_lite.errors import ConfigError
from automodel_lite.models import lora
from automodel_lite.training import plan
from automodel_lite.training.plan import build_parts, check_parts
from tests.runs import quick_config


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["packed_sequence.packed_sequence_size=120"],
            "multiples of 16 tokens: packed_sequence.packed_sequence_size x",
        ),
        (["packed_sequence.packed_sequence_size=144", "mesh.cp=2"], "= 144 must be a multiple of 32"),
        (["packed_sequence=none"], "and padded rows are not"),
    ],
    ids=["size", "cp", "padded"],
)
def test_sizes_that_fp8_cannot_multiply(
    overrides: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.machinery.ModuleSpec("torchao", None)
    monkeypatch.setattr(plan, "find_spec", lambda name: spec)  # installed or not, the sizes are wrong
    config = quick_config(tmp_path, "training.fp8=rowwise", *overrides)
    with pytest.raises(ConfigError, match=sentence):
        check_parts(build_parts(config), "fsdp", torch.device("cpu"))


def test_4_bit_weights_are_not_multiplied_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("bitsandbytes")  # only its presence is asked for
    package.__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    config = quick_config(tmp_path, "training.fp8=rowwise", "packed_sequence.packed_sequence_size=128")
    config.peft = {"_target_": "automodel_lite.models.lora.QLora"}
    with pytest.raises(ConfigError, match="cannot multiply peft=qlora's 4-bit weights"):
        check_parts(build_parts(config), "fsdp", torch.device("cpu"))


def test_qlora_without_its_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"peft=qlora needs the package bitsandbytes: pip install 'automodel-lite\[qlora\]'"
    ):
        lora.QLora()
