"""How a mixture's experts are computed: settable, printed, and the same numbers."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from benchmarks.survey_models import load, run, save, separate, step_of
from benchmarks.tiny_models import tiny_model


@pytest.mark.parametrize("how", ["eager", "batched_mm", "grouped_mm"])
def test_the_experts_are_computed_as_asked(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiny_model("qwen3_moe"), tmp_path / "model")
    want = step_of(separate(load(tmp_path)))
    printed = io.StringIO()
    monkeypatch.setattr(contextlib, "redirect_stdout", lambda _: contextlib.nullcontext())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", printed)
        row = json.loads(run(tmp_path, "full", f"model.experts={how}", "checkpoint.export_hf=false"))
    assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert f"experts {how}" in " ".join(printed.getvalue().split())
