"""prepare_data and inspect_data: what they print, what they leave in the cache, how they exit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config
from automodel_lite.errors import DataError
from recipes import inspect_data, prepare_data


def config_of(tmp_path: Path, *overrides: str, preset: str = "smoke") -> Config:
    return check_config(compose_config(preset, [f"cache_dir={tmp_path / 'cache'}", *overrides]))


def test_preparing_fills_the_cache_that_a_second_call_hits(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert prepare_data.main(config_of(tmp_path)) == 0
    assert "cache: miss (first time)" in capsys.readouterr().out
    assert prepare_data.main(config_of(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "cache: hit" in printed
    assert "cache: miss" not in printed
    assert "fill" in printed


def test_inspecting_shows_every_part(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert inspect_data.main(config_of(tmp_path)) == 0
    printed = capsys.readouterr().out
    for part in ("DATA", "LENGTHS", "PACKING", "PACKS", "ATTENTION MASK", "SAMPLES (trained on: ⟦ ⟧)"):
        assert part in printed
    assert "<|assistant|>⟦The capital of" in printed
    assert "\x1b[" not in printed
    assert "padded batches" in printed


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"messages": [{"role": "user", "content": "Hi"}]}], "a.jsonl:1: has no assistant message"),
        ([{"prompt": "x" * 300, "completion": "y" * 300}], "would be dropped"),
    ],
    ids=["no answer", "all too long"],
)
def test_inspecting_is_an_error_when_nothing_would_be_trained_on(tmp_path: Path, rows: list, sentence: str) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        tmp_path,
        "dataset=files",
        f"dataset.path={tmp_path / 'a.jsonl'}",
        "tokenizer=bpe",
        "tokenizer.vocab_size=262",
        "packed_sequence.packed_sequence_size=64",
        preset="llama_packed",
    )
    with pytest.raises(DataError, match=r"^nothing would be trained on: ") as error:
        inspect_data.main(config)
    assert sentence in str(error.value)
