"""The files that shape the numbers of a run, and which changes of them count when it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from automodel_lite.config.schema import SecurityConfig
from automodel_lite.training.agreement import changed_files, files_read
from automodel_lite.training.settings import build_parts
from tests.runs import quick_config


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_change_of_any_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "processor preprocessor_config.json": tmp_path / "proc" / "preprocessor_config.json",
        "processor chat_template.jinja": tmp_path / "proc" / "chat_template.jinja",
        "tokenizer tokenizer.json": tmp_path / "tok" / "tokenizer.json",
        "tokenizer chat_template.jinja": tmp_path / "tok" / "chat_template.jinja",
        "template own.jinja": tmp_path / "own.jinja",
        "code parts_of_mine": tmp_path / "parts_of_mine" / "deep" / "loss.py",
        "code module_of_mine": tmp_path / "module_of_mine.py",
    }
    for path in files.values():
        write(path, "{}")
    write(tmp_path / "parts_of_mine" / "__init__.py", "")
    monkeypatch.syspath_prepend(tmp_path)
    config = quick_config(tmp_path / "run")
    config = replace(
        config,
        dataset={"sources": {"a": {"dataset": {"processor": str(tmp_path / "proc")}}}},
        tokenizer={"path": str(tmp_path / "tok"), "chat_template": str(tmp_path / "own.jinja")},
        security=SecurityConfig(allow_targets=["parts_of_mine.deep", "module_of_mine", "builtins"]),
    )
    parts = build_parts(quick_config(tmp_path / "run"))
    before = files_read(config, parts, keeps_start=False)
    assert before.keys() == files.keys()
    for key, path in files.items():
        write(path, "[1]")
        now = files_read(config, parts, keeps_start=False)
        assert changed_files(before, now, has_frozen=False) == [key]
        write(path, "{}")


def test_weights_count_where_they_are_read_from_their_files() -> None:
    before = {
        "model config.json": "a",
        "model model.safetensors": "a",
        "adapter adapter_config.json": "a",
        "adapter adapter_model.safetensors": "a",
        "reference model.safetensors": "a",
    }
    now = dict.fromkeys(before, "b")
    trained = ["adapter adapter_config.json", "model config.json", "reference model.safetensors"]
    assert changed_files(before, now, has_frozen=False) == trained
    assert changed_files(before, now, has_frozen=True) == [
        *trained[:2],
        "model model.safetensors",
        trained[2],
    ]


def test_a_checkpoint_that_does_not_tell_a_file_is_continued() -> None:
    before = {"model config.json": "a"}
    now = before | {"adapter adapter_config.json": "b", "tokenizer tokenizer.json": "c"}
    assert changed_files(before, now, has_frozen=True) == []
    assert changed_files(before | {"code mine": "a"}, now, has_frozen=True) == ["code mine"]
