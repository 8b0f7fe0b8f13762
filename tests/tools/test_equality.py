"""Differences of two steps, with numbers to check by hand."""

from __future__ import annotations

import pytest
import torch

from automodel_lite.tools.verify import Check, Difference, Step, difference, table

WANT = Step(2.0, {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])})


def test_relative_differences() -> None:
    got = difference(Step(2.5, {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0])}), WANT)
    assert WANT.grad_norm == 5.0
    assert got.loss == 0.25
    assert got.gradients == 0.25
    assert got.grad_norm == pytest.approx(26**0.5 / 5 - 1)
    assert got.largest == 0.25


def test_another_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"gradients of \['b'\] exist in one"):
        difference(Step(2.0, {"a": torch.zeros(2)}), WANT)


def test_verdicts() -> None:
    near, far = Difference(0, 1e-6, 0), Difference(0, 1e-2, 0)
    checks = [Check("near", near, 1e-5), Check("far", far, 1e-5)]
    faults = [Check("seen", far, 1e-5, is_fault=True), Check("unseen", near, 1e-5, is_fault=True)]
    assert [check.passed for check in (*checks, *faults)] == [True, False, True, False]
    lines = table([*checks, *faults]).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == ["PASS", "FAIL", "noticed", "FAIL: not noticed"]
