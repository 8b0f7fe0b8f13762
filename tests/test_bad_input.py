"""Rows of docs/faults.md that a setting or a file can cause: one sentence that names it and the way out. The
most likely ones are in test_error_texts.py, as whole screens.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config

from automodel_lite.config.model_files import NAMES, check_template
from automodel_lite.config.rules import check_folder
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.run.weight_files import model_files
from automodel_lite.tools.load_generator import load_generator
from tests.runs import config_of, train_quick


def chat(number: int, answer: str = "it is {}.") -> str:
    turns = [{"role": "user", "content": f"what is {number}?"}]
    return json.dumps(
        {"messages": [*turns, {"role": "assistant", "content": answer.replace("{}", str(number))}]}
    )


GOOD = [chat(number) for number in range(30)]
LINES = "\n".join(GOOD)


def rows(
    content: str | bytes, *more: str, name: str = "chats.jsonl"
) -> Callable[[Path], list[str]]:
    """Overrides that train on a file with this content."""

    def make(folder: Path) -> list[str]:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["dataset=files", "~dataset.num_chats", f"dataset.path={path}", *more]

    return make


def settings(*overrides: str) -> Callable[[Path], list[str]]:
    return lambda folder: list(overrides)


NO_ANSWER = "\n".join(
    json.dumps({"messages": [{"role": "user", "content": f"x{n}"}]}) for n in range(30)
)
SHORT = "packed_sequence.packed_sequence_size=8"
CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "corrupt line": (rows(LINES + '\n{"messages": [{]\n'), r"chats.jsonl:31:16: not JSON: .*near '\{\"messages\": \[\{\]'"),
    "truncated file": (rows(LINES[:-20]), r"chats.jsonl:30:81: not JSON: Unterminated string.*: it ends too soon, as a file that was cut off"),
    "array in lines": (rows("[\n" + ",\n".join(GOOD) + "\n]"), r"chats.jsonl:1:2: not JSON: .*: an array of rows belongs in a file named .json\.$"),
    "array in a line": (rows(f"[{', '.join(GOOD)}]"), r"chats.jsonl:1: a row must be a JSON object, not list: an array of rows belongs"),
    "truncated array": (rows("[\n" + ",\n".join(GOOD), name="chats.json"), r"chats.json: not JSON: .*: it ends too soon, as a file that was cut off"),
    "empty file": (rows(""), r"chats.jsonl: the file is empty"),
    "binary file": (rows(bytes([0x7B, 0xF8, 0x00] * 50)), r"chats.jsonl:1:2: byte 0xf8 is not UTF-8"),
    "mixed types": (rows(f"{LINES}\n{json.dumps({'messages': 5})}"), r"chats.jsonl:31: .*must be a list of messages, not int"),
    "row without its column": (rows(f"{LINES}\n{json.dumps({'other': 'x'})}"), r"chats.jsonl:31: .*messages .*missing"),
    "truncated parquet": (rows(b"PAR1abc", name="x.parquet"), r"x.parquet: cannot be read as parquet"),
    "nothing to train on": (rows(NO_ANSWER), r"chats.jsonl:1: has no assistant message"),
    "over-long documents": (rows(LINES, SHORT, "packed_sequence.overlong=error"), r"30 of 30 documents are over packed_sequence.packed_sequence_size=8, such as .*: raise it, or"),
    "all documents over-long": (rows(LINES, SHORT), r"30 of 30 documents are over packed_sequence.packed_sequence_size=8, .*overlong to truncate or split"),
    "all mistakes at once": (
        settings("training.max_stepz=3", "training.precision=fp8", "optimizer.lrr=1"),
        r"(?s)training.max_stepz=3.*\n.*training.precision=fp8 must be one of.*\n.*optimizer.lrr=1: unknown key; did you mean optimizer.lr\?",
    ),
    "sizes that do not divide": (
        settings("training.global_batch_size=7", "training.micro_batch_size=2"),
        r"training.global_batch_size=7 must be a multiple of 2 .*use 8, or",
    ),
    "a pack of no whole slots": (
        settings("packed_sequence.packed_sequence_size=63", "packed_sequence.slot_multiple=2"),
        r"packed_sequence.packed_sequence_size=63 must be a multiple of 2",
    ),
    "missing folder": (settings("model=pretrained", "~model.config", "model.pretrained=./nothing"), r"model.pretrained=./nothing: there is no such folder"),
    "hub unreachable": (settings("model=pretrained", "~model.config", "model.pretrained=someone/nothing"), r"the model someone/nothing cannot be loaded: .*hf download someone/nothing"),
    "unwritable folder": (settings("output_dir=/proc/x"), r"output_dir=/proc/x cannot be written"),
    "unwritable folder of a dry run": (settings("output_dir=/proc/x", "dry_run=true"), r"output_dir=/proc/x cannot be written in /proc \(.*\): choose another"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_sentence(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_ENDPOINT", "HTTPS_PROXY"):  # nobody answers there
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    make, sentence = CASES[case]
    with pytest.raises((ConfigError, DataError)) as error:
        train_quick(tmp_path / "run", *make(tmp_path))
    assert re.search(sentence, str(error.value)), str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("row", "counted"),
    [(chat(99, ""), "31 documents"), (json.dumps({"messages": []}), "skip"), ("not json", "skip")],
    ids=["empty answer", "empty chat", "no JSON"],
)
def test_bad_rows_can_be_skipped_and_are_counted(
    row: str, counted: str, model_folder: Path, tmp_path: Path
) -> None:
    options = rows(f"{LINES}\n{row}", "tokenize.on_bad_row=skip", *_tokenizer(model_folder))(
        tmp_path
    )
    code, screen = train_quick(tmp_path / "run", *options)
    assert code == 0
    assert counted in screen


def _tokenizer(folder: Path) -> list[str]:
    return ["tokenizer=pretrained", f"tokenizer.path={folder}"]


def test_too_many_bad_rows_are_an_error(model_folder: Path, tmp_path: Path) -> None:
    bad = "\n".join([*GOOD, *["not json"] * 10])
    options = rows(bad, "tokenize.on_bad_row=skip", *_tokenizer(model_folder))(tmp_path)
    with pytest.raises(DataError, match=r"max_bad_frac"):
        train_quick(tmp_path / "run", *options)


# ------------------------------------------------------------------------------------------------------------- weights
@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    assert train_quick(folder / "run", "checkpoint.export_hf=true", "training.max_steps=1")[0] == 0
    return folder / "run" / "hf"


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _without(folder: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _another_shape(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (_truncated, r"the model .*: the weights are truncated or not safetensors .*download them again"),
    "a layer is missing": (lambda f: _without(f, "model.layers.1.mlp.up_proj.weight"), r"1 weights are missing .*model.layers.1.mlp.up_proj.weight first; they would be initialized at random"),
    "a different shape": (_another_shape, r"1 have a different shape than in the config, model.norm.weight first"),
    "no config": (_no_config, r"the folder has no config.json"),
    "no weights": (_no_weights, r"the model .*no file named"),
    "no chat template": (_no_template, r"chat template"),
}  # fmt: skip


@pytest.mark.parametrize("case", WEIGHTS)
def test_a_model_folder_that_is_not_whole(case: str, model_folder: Path, tmp_path: Path) -> None:
    damage, sentence = WEIGHTS[case]
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    damage(folder)
    options = ["model=pretrained", "~model.config", f"model.pretrained={folder}"]
    options += ["tokenizer=pretrained"] if case == "no chat template" else []
    with pytest.raises((ConfigError, DataError)) as error:
        train_quick(tmp_path / "run", *options)
    assert re.search(sentence, str(error.value)), str(error.value)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "list": (lambda path: path.write_text("[1]"), "no object with names and values"),
    "number": (lambda path: path.write_text("3"), "no object with names and values"),
    "empty": (lambda path: path.write_text(""), "Expecting value"),
    "cut": (lambda path: path.write_text('{"a": [1, 2'), "Expecting ',' delimiter"),
    "binary": (lambda path: path.write_bytes(bytes([0xF8, 0x00] * 50)), "codec can't decode"),
    "folder": (lambda path: path.mkdir(), "Is a directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", NAMES)
def test_a_small_file_of_a_model_that_is_damaged(name: str, damage: str, tmp_path: Path) -> None:
    """Their readers fail without its name, or leave it out: an export would then have other settings for generation."""
    harm, reason = DAMAGES[damage]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    harm(tmp_path / name)
    for key in ("model.pretrained", "teacher.pretrained", "tokenizer.path"):
        with pytest.raises(ConfigError) as error:
            check_folder(key, str(tmp_path))
        found = str(error.value)
        assert found.startswith(f"{key}={tmp_path}: {name} is damaged ("), found
        assert reason in found
        assert found.endswith("): download it again.")


WRONG_TYPES = {
    "an index of no files": ("model.safetensors.index.json", {}, "its weight_map does not name"),
    "an index of no weights": (
        "model.safetensors.index.json",
        {"weight_map": {}, "metadata": {}},
        "its weight_map does not name a file for each weight",
    ),
    "an index of numbers": (
        "model.safetensors.index.json",
        {"weight_map": {"a": "a.safetensors", "b": 3}},
        "its weight_map does not name a file for each weight",
    ),
    "an index of half a character": (
        "model.safetensors.index.json",
        {"weight_map": {"a": "\udc00"}},
        "its weight_map does not name a file for each weight",
    ),
    "an index without metadata": (
        "model.safetensors.index.json",
        {"weight_map": {"a": "a.safetensors"}},
        "its metadata are no object",
    ),
    "an index of a number": (
        "model.safetensors.index.json",
        {"weight_map": {"a": "a.safetensors"}, "metadata": 0},
        "its metadata are no object",
    ),
    "a length": ("tokenizer_config.json", {"model_max_length": [1]}, "must be a number"),
    "an id": ("generation_config.json", {"eos_token_id": [1, "2"]}, "must be a token id or a list"),
    "a switch": ("generation_config.json", {"output_scores": "x"}, "must be true or false"),
    "a prefix": (
        "tokenizer.json",
        {"model": {"continuing_subword_prefix": "##", "merges": [["a", "##b"], ["b", "c"]]}},
        "its merges lack the continuing_subword_prefix",
    ),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_a_small_file_of_wrong_types(case: str, tmp_path: Path) -> None:
    """Its reader ended in a traceback."""
    name, found, reason = WRONG_TYPES[case]
    (tmp_path / name).write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=rf"^teacher.pretrained={tmp_path}: {name} .*{reason}"):
        check_folder("teacher.pretrained", str(tmp_path))


@pytest.mark.parametrize("case", ["none", "a file", "a setting", "in its settings", "no chats"])
def test_chats_without_a_template_are_told_before_anything_is_imported(
    case: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    settings = {"chat_template": "{{ messages }}"} if case == "in its settings" else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if case == "a file":
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "a"}' if case == "no chats" else LINES)
    more = ["tokenizer.chat_template='{{ messages }}'"] if case == "a setting" else []
    given = [f"tokenizer.path={tmp_path}", f"dataset.path={data}", "tokenizer=pretrained"]
    model = f"model.pretrained={tmp_path}"
    config = config_of("finetune", tmp_path / "run", "name=x", model, *given, *more)
    if case == "none":
        with pytest.raises(ConfigError, match=r"the data are chats, and the tokenizer .* has no"):
            check_template(config)
    else:
        check_template(config)


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    """transformers loads both and freezes the model: the run then has nothing to train."""
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    check_folder("tokenizer.path", str(tmp_path))
    with pytest.raises(ConfigError, match=r"holds a model and an adapter, and would load both"):
        check_folder("model.pretrained", str(tmp_path))


@pytest.mark.parametrize("damage", ["list", "cut"])
def test_an_adapter_whose_settings_are_damaged(damage: str, tmp_path: Path) -> None:
    DAMAGES[damage][0](tmp_path / "adapter_config.json")
    with pytest.raises(ConfigError, match=rf"^model={tmp_path}: adapter_config.json is damaged"):
        load_generator(str(tmp_path))


def test_a_folder_named_as_a_file_is_no_file_of_the_model(
    model_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "results.json").mkdir()
    assert "results.json" not in model_files(str(tmp_path / "model"))


def test_a_teacher_is_named_by_its_own_settings(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    options = ["loss=distill", "teacher=pretrained", f"teacher.pretrained={folder}"]
    unknown = "teacher.config.hidden_siz=3"
    with pytest.raises(ConfigError, match=rf"^{unknown}: llama has no such setting"):
        train_quick(tmp_path / "run", *options, unknown)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=rf"^teacher.pretrained={folder}: the folder has no"):
        train_quick(tmp_path / "run", *options)
    T5Config(num_layers=1, d_model=8, vocab_size=384).save_pretrained(folder)
    with pytest.raises(ConfigError, match="does not work: Unrecognized configuration class"):
        train_quick(tmp_path / "run", *options)


def test_validation_without_anything_held_out_is_noted(tmp_path: Path) -> None:
    make = rows(LINES, "training.max_steps=1", "checkpoint.every_steps=0", "dataset.val_frac=0")
    task = tmp_path / "task.jsonl"
    task.write_text('{"question": "hi", "answer": "ho"}')
    note = "NOTE: training.val_every_steps=5 has nothing to validate on: hold out a part, "
    for more, is_noted in (
        (["training.val_every_steps=5"], True),
        (["training.val_every_steps=5", "dry_run=true"], True),
        (["training.val_every_steps=0"], False),
        (["training.val_every_steps=5", "dataset.val_frac=0.2"], False),
        (["training.val_every_steps=5", "samples.prompts=[hi]", "samples.max_new_tokens=1"], False),
        (["training.val_every_steps=5", "tasks=files", f"tasks.files=[{task}]"], False),
    ):
        run = tmp_path / "-".join(more).replace("/", "")
        screen = train_quick(run, *make(tmp_path), *more)[1]
        assert (note in screen) == is_noted, more


def test_a_tokenizer_without_a_pad_token_trains(model_folder: Path, tmp_path: Path) -> None:
    """Padding is masked by length, never by an id: there is nothing to set."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("pad_token", None)
    path.write_text(json.dumps(settings))
    options = ["model=pretrained", "~model.config", f"model.pretrained={folder}"]
    assert train_quick(tmp_path / "run", *options, "tokenizer=pretrained")[0] == 0


# ----------------------------------------------------------------------------------------------------------- the folder
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"is not empty and is not the folder of a run: choose another name="
    ):
        train_quick(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match=r"is a file"):
        train_quick(tmp_path / "run")


def test_a_disk_that_is_full_for_a_while_costs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from automodel_lite.run import durable

    answers = iter([0, 0, *[1 << 40] * 100])
    monkeypatch.setattr(durable, "free_bytes", lambda folder: next(answers))
    code, screen = train_quick(tmp_path)
    assert code == 0
    assert screen.count("is not saved: no space") == 2
    assert "saved step_00000006" in screen
