"""A name that is nearly right: the sentence has the right one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from automodel_lite.cli.compose import compose_config
from automodel_lite.cli.line import read_line
from automodel_lite.config.check import ELSEWHERE, check_config, known_keys
from automodel_lite.config.components import CONF_DIR
from automodel_lite.config.signatures import arguments_of
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


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optimizer.learning_rate=1e-4", "optimizer.lr"),
        ("peft.rank=8", "peft.r"),
        ("model.name=x", "model.pretrained"),
        ("load_in_4bit=true", "peft=qlora"),
        ("training.tensor_parallel_size=2", "mesh.tp"),
        ("lr_scheduler.type=linear", "lr_scheduler=cosine"),
        # an option of a part without its group
        ("packed_sequence_size=512", "packed_sequence.packed_sequence_size"),
        ("weight_decay=0.1", "optimizer.weight_decay"),
        ("val_path=x", "dataset.val_path"),
        ("strategy=fsdp", "mesh.strategy"),
    ],
)
def test_a_key_that_others_have_is_answered_with_ours(typed: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(
            compose_config("lora", ["name=a", "model.pretrained=x", "dataset.path=y", typed])
        )
    key = typed.partition("=")[0]
    assert re.fullmatch(rf"{key}=\S+: unknown key; did you mean {meant}\?", str(caught.value))


def test_an_option_of_a_tracker_is_named_with_its_tracker() -> None:
    options = ["name=a", "model.pretrained=x", "dataset.path=y", "logger=tensorboard"]
    with pytest.raises(ConfigError, match=r"did you mean logger\.tensorboard\.\w+\?"):
        check_config(compose_config("finetune", [*options, "logger.flush_secs=3"]))


def test_what_others_call_so_exists_here() -> None:
    """Every answer of elsewhere.yaml is a key, or an option of a group, that composes."""
    keys = {*known_keys(), *options_of_parts()}
    choices = {f"{path.parent.name}={path.stem}" for path in CONF_DIR.glob("*/*.yaml")}
    assert {meant for meant in ELSEWHERE.values() if meant not in keys | choices} == set()


def options_of_parts() -> set[str]:
    return {
        f"{path.parent.name}.{name}"
        for path in CONF_DIR.glob("*/*.yaml")
        for target in re.findall(r"^_target_: (\S+)", path.read_text(), re.MULTILINE)
        for name in arguments_of(target)
    }


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("training.fp8=true", "training.fp8=true must be one of none, tensorwise, rowwise."),
        ("training.precision=16", "training.precision=16 must be one of auto, fp32, bf16."),
        ("optimizer.lr=5", "optimizer.lr=5 must be at least 0 and at most 1."),
    ],
)
def test_a_value_of_another_kind_is_answered_with_what_to_write(typed: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(
            compose_config("finetune", ["name=a", "model.pretrained=x", "dataset.path=y", typed])
        )
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("flag", "setting"),
    [("--dry-run", "dry_run"), ("--max-steps", "training.max_steps"), ("--lr", "optimizer.lr")],
)
def test_a_setting_typed_as_a_flag(flag: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag}: a setting has no dashes, {setting}=\.\.\. \("):
        read_line(["--config-name", "finetune", flag])


@pytest.mark.parametrize(
    "text", ["defaults: finetune", "defaults: {finetune: x}", "defaults: [5]", "- finetune"]
)
def test_defaults_that_are_no_list_are_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^mine\.yaml: defaults: must be a list of presets and "):
        compose_config("mine", [], config_dir=str(tmp_path))


def test_a_preset_that_defaults_misspell(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [finetun]")
    with pytest.raises(ConfigError, match=r"no such preset; did you mean finetune\?$"):
        compose_config("mine", [], config_dir=str(tmp_path))
