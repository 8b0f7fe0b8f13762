"""A name that is nearly right: the sentence has the right one."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from omegaconf import OmegaConf

from automodel_lite.cli.compose import compose_config
from automodel_lite.cli.line import read_line
from automodel_lite.config.check import check_config, known_keys
from automodel_lite.config.components import CONF_DIR, build
from automodel_lite.config.foreign import elsewhere
from automodel_lite.config.signatures import arguments_of
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.tokenizer import load_tokenizer
from automodel_lite.errors import ConfigError, did_you_mean_path
from automodel_lite.models.flops import model_size
from automodel_lite.models.reading import check_source
from automodel_lite.models.source import CausalLM
from automodel_lite.run.checkpoint_folder import exported_folder
from automodel_lite.run.folder import existing_run
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
    with pytest.raises(ConfigError, match=r"^model=chats\.jsonl is a file: give a model's folder"):
        check_source("model", "chats.jsonl")
    assert did_you_mean_path("mien") == "; did you mean runs/mine?"
    assert did_you_mean_path("something_else.jsonl") == "."


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
    """Every answer of foreign.yaml is a key, or an option of a group, that composes."""
    keys = {*known_keys(), *options_of_parts()}
    choices = {f"{path.parent.name}={path.stem}" for path in CONF_DIR.glob("*/*.yaml")}
    wrong = {meant for meant in elsewhere().values() if meant not in keys | choices}
    # columns have any name, and a tracker's options are known where it is chosen
    assert {one for one in wrong if not one.startswith(("dataset.columns.", "logger."))} == set()
    assert elsewhere()["learning_rate"] == "optimizer.lr"  # of a framework
    assert elsewhere()["grad_accum"] == "training.global_batch_size"  # of none in the table


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
    "text", ["defaults: finetune", "defaults: {finetune: x}", "defaults: [5]", "- finetune"]
)
def test_defaults_that_are_no_list_are_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match=r"^mine\.yaml: defaults: must be a list of other presets and "
    ):
        compose_config("mine", [], config_dir=str(tmp_path))


def test_a_preset_that_defaults_misspell(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [finetun]")
    with pytest.raises(ConfigError, match=r"no such preset; did you mean finetune\?$"):
        compose_config("mine", [], config_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--dryrun", "dry_run=true"),
        ("--dry-run", "dry_run=true"),
        ("--cpu-offload", "mesh.cpu_offload=true"),
        ("--max-steps", r"training.max_steps=\.\.\."),
        ("--maxsteps", r"training.max_steps=\.\.\."),
        ("--lr", r"optimizer.lr=\.\.\."),
        ("--optimizer.lr=1e-4", r"optimizer.lr=\.\.\."),
    ],
)
def test_a_flag_is_answered_with_the_setting_to_write(flag: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag}: a setting has no dashes, {setting} \("):
        read_line(["--config-name", "finetune", flag])


@pytest.mark.parametrize(
    "typed",
    ["mesh=[1]", "model.config=[]", "tokenize.template_kwargs=[1]", "security.allow_env={a: b}"],
)
def test_a_list_in_place_of_keys_and_keys_in_place_of_a_list(typed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config("finetune", [typed])
    assert str(caught.value) == (
        f"{typed} must be of the kind that the key has: a group of keys, {{name: value}}, or a "
        "list, [value]."
    )


@pytest.mark.parametrize("target", ["files", "memmap", "streaming", "images"])
def test_a_list_without_a_path(target: str, tmp_path: Path) -> None:
    part = OmegaConf.to_container(OmegaConf.load(CONF_DIR / f"dataset/{target}.yaml"))
    assert isinstance(part, dict)
    with pytest.raises(
        ConfigError, match=r"^dataset\.path= is empty: was a shell variable not set"
    ):
        build({"_target_": part["_target_"], "path": []})


def test_validation_files_without_a_path(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"^dataset\.val_path= is empty: was a shell"):
        FilesDataset(str(data), val_path=[])


def test_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    link = tmp_path / "chats.jsonl"
    link.symlink_to("elsewhere.jsonl")
    told = r": it is a link to elsewhere\.jsonl, where nothing is\.$"
    with pytest.raises(ConfigError, match=r"does not exist \(looked in .*\)" + told):
        FilesDataset(str(link))
    with pytest.raises(ConfigError, match="there is no such folder" + told):
        check_source("model", str(link))


CHECKED_EARLY = """\
import sys
from automodel_lite.cli.compose import compose_config
from automodel_lite.cli.hydra_app import place_problems
from automodel_lite.config.check import known_values

known, _ = known_values(compose_config("distill", ["name=a", *sys.argv[1:]]))
for problem in place_problems(known, has_data=False):
    print(problem, "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("teacher.pretrained=./none", "teacher.pretrained=./none: there is no such folder."),
        ("tokenizer.path=./none", "tokenizer.path=./none: there is no such folder."),
        (
            "tokenizer.chat_template=none.jinja",
            "tokenizer.chat_template=none.jinja cannot be read (No such file or directory).",
        ),
    ],
)
def test_what_is_not_there_is_told_before_torch_is_imported(
    setting: str, sentence: str, tmp_path: Path
) -> None:
    places = [f"model.pretrained={tmp_path}", f"teacher.pretrained={tmp_path}"]
    places += [f"dataset.path={tmp_path}", setting]  # of two values the later one
    done = subprocess.run(
        [sys.executable, "-c", CHECKED_EARLY, *places], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{sentence} False\n"


def test_a_tokenizer_of_the_hub_is_not_asked_for_without_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=r"no-one/nothing .*: the hub cannot be reached, and"):
        load_tokenizer("no-one/nothing")
    assert huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": "of_tomorrow"}', "model type `of_tomorrow` but Transformers does not"),
        ('{"model_type": 5}', "model type `5`"),
    ],
)
def test_a_config_of_no_known_model(tmp_path: Path, text: str, reason: str) -> None:
    """Most of all one that is newer than the transformers here."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^the model {tmp_path} cannot be loaded: .*{reason}"):
        CausalLM(str(tmp_path)).resolve_model_config({})


def test_a_preset_in_utf_16(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [finetune]", encoding="utf-16")
    with pytest.raises(
        ConfigError, match=r"^mine\.yaml, or a file that it is based on, is not UTF"
    ):
        compose_config("mine", [], config_dir=str(tmp_path))


def test_a_preset_that_is_based_on_itself(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("defaults: [two]")
    (tmp_path / "two.yaml").write_text("defaults: [one]")
    with pytest.raises(ConfigError, match=r"^one\.yaml: defaults: must be a list of other presets"):
        compose_config("one", [], config_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": "t5"}', "Unrecognized configuration class .*T5Config"),
        ('{"model_type": "llama", "rope_scaling": {"type": "none"}}', "'none' is not known"),
    ],
)
def test_a_config_that_no_model_for_texts_can_be_made_of(
    tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    config = CausalLM(str(tmp_path)).resolve_model_config({})
    with pytest.raises(ConfigError, match=rf"^a model with .*: {reason}.* \(its config\.json\)$"):
        model_size(config)


def test_a_misspelled_folder_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/mine/hf").mkdir(parents=True)
    assert did_you_mean_path("runs/mien/hf") == "; did you mean runs/mine/hf?"
    assert did_you_mean_path("rusn/mien/hff") == "; did you mean runs/mine/hf?"
    assert did_you_mean_path("org/model") == "."


def test_a_folder_of_models_names_them(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    cure = rf"has no config\.json; name one of those in it: {tmp_path}/a, {tmp_path}/b\.$"
    with pytest.raises(ConfigError, match=cure):
        check_source("model", str(tmp_path))


def test_what_is_no_run_is_named_for_what_it_is(tmp_path: Path) -> None:
    checkpoint = tmp_path / "mine/checkpoints/step_00000006"
    checkpoint.mkdir(parents=True)
    for path in (tmp_path / "mine/config.yaml", checkpoint / "config.yaml"):
        path.write_text("")
    (checkpoint / "COMPLETE.json").write_text("{}")
    run = rf"{tmp_path}/mine"
    with pytest.raises(ConfigError, match=rf"is a checkpoint of a run: name the run, {run}\.$"):
        existing_run(checkpoint)
    with pytest.raises(ConfigError, match=rf"no config\.yaml; name one of those in it: {run}\.$"):
        existing_run(tmp_path)
    with pytest.raises(ConfigError, match=rf"no such folder; did you mean {run}\?$"):
        existing_run(tmp_path / "mien")
    with pytest.raises(ConfigError, match=r"not the folder of a run: it is a file\.$"):
        existing_run(tmp_path / "mine/config.yaml")
    cure = rf"automodel-lite export {run} --checkpoint step_00000006 --to MODEL writes it"
    with pytest.raises(ConfigError, match=cure):
        exported_folder(str(checkpoint))


def test_a_command_without_its_package_is_one_sentence(tmp_path: Path) -> None:
    absent = 'raise ModuleNotFoundError("No module named tinker", name="tinker")\n'
    (tmp_path / "tinker.py").write_text(absent)
    (tmp_path / "mine.py").write_text("")
    line = [sys.executable, "-m", "automodel_lite.tinker", "mine.py"]
    environment = os.environ | {"PYTHONPATH": str(CONF_DIR.parent)}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    cure = "Tinker's API needs the package tinker: pip install 'automodel-lite[tinker]'.\n"
    assert (done.returncode, done.stderr) == (2, cure)
