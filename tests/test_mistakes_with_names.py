"""A name that is nearly right: the sentence has the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel_lite.cli.compose import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.errors import ConfigError, did_you_mean_path
from automodel_lite.models.source import check_source
from tests.runs import train_quick


def test_a_misspelled_key_stands_before_what_has_no_value() -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(compose_config("finetune", ["modle.pretrained=x", "name=a"]))
    first = str(caught.value).splitlines()[0]
    assert first == "modle.pretrained=x: unknown key; did you mean model.pretrained?"


def test_the_closest_file_folder_or_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text("{}")
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"did you mean chats\.jsonl\?$"):
        FilesDataset("chtas.jsonl")
    with pytest.raises(ConfigError, match=r"did you mean runs/mine\?$"):
        check_source("model", "runs/mien")
    with pytest.raises(
        ConfigError, match=r"^model=chats\.jsonl is a file, and a model is a folder"
    ):
        check_source("model", "chats.jsonl")
    assert did_you_mean_path("mien") == "; did you mean runs/mine?"
    assert did_you_mean_path("something_else.jsonl") == ""


def test_a_tab_in_a_preset_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("defaults:\n\t- finetune\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml:2: not YAML: .*: indent with spaces\.$"):
        compose_config("bad", [], config_dir=str(tmp_path))


def test_stopping_early_without_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.early_stopping waits for val_loss, "):
        train_quick(tmp_path / "run", "callbacks=early_stopping")
