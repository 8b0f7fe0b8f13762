"""A pretrained model from a wheel, trained by the commands of the README."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.real_model import final_number, main

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_final_number_is_what_follows_the_hashes() -> None:
    assert final_number("48 / 2 = 24\n#### 1,072") == "1072"
    assert final_number("#### $72.") is None
    assert final_number("the answer is 72") is None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_real_model_learns_and_exports(method: str) -> None:
    work = ROOT / ".cache" / "real"  # the download is kept
    command = ["--methods", method, "--steps", "6", "--questions", "2", "--max-new-tokens", "40"]
    (outcome,) = main([*command, "--work", str(work), "--fresh"])
    # 40 rows of GSM8K, before any training
    assert outcome.before.loss == pytest.approx(1.46, abs=0.01)
    assert outcome.after.loss < outcome.before.loss - 0.1
    assert outcome.plain_loss == pytest.approx(outcome.after.loss, abs=0.01)
