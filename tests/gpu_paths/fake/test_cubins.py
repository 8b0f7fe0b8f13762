"""Layers of a preset and a kernel of its own compile for an H100, and the table of them is drawn."""

from __future__ import annotations

from tests.gpu_paths.fake.cubins import compiled, table
from tests.gpu_paths.fake.jobs import only_on_fake_gpu

pytestmark = only_on_fake_gpu


def test_a_presets_layers_are_cubins_without_spills() -> None:
    row = compiled("llama3_1_8b")
    assert "error" not in row, row
    assert row["breaks"] == {}
    assert len(row["kernels"]) > 10
    # what each thread spills goes through memory: the loss spills (168 bytes by Triton 3.6, 128 by 3.8), no layer does
    spilling = [kernel["name"] for kernel in row["kernels"] if kernel["stack"]]
    assert all("log_softmax" in name for name in spilling), spilling
    head, _, case = table([row]).splitlines()
    assert head.count("|") == case.count("|") == 8
    assert case.startswith("| llama3_1_8b | ")


def test_a_flex_kernel_is_compiled_forward_and_backward() -> None:
    row = compiled("flex")
    assert "error" not in row, row
    assert sum("flex_attention" in kernel["name"] for kernel in row["kernels"]) >= 2
