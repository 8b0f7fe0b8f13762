"""A configuration of another framework becomes a preset, and what it cannot hold is listed."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from automodel_lite.extras.cli import convert
from automodel_lite.extras.cli.convert import _ANSWERS, answer_to
from tests.data.templates import FAMILIES, byte_tokenizer

USES_OF_TRL = json.loads((Path(__file__).parent / "trl_fields.json").read_text())
USES = json.loads((Path(__file__).parent / "peer_keys.json").read_text())

AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B
datasets:
  - {path: chats.jsonl, type: chat_template}
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
adapter: lora
lora_r: 16
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 2e-4
optimizer: paged_adamw_8bit
warmup_steps: 10
neftune_noise_alpha: 5
foo: 3
"""


@pytest.mark.parametrize("peer", sorted(USES))
def test_at_least_95_percent_of_uses_have_an_answer(peer: str) -> None:
    uses = USES[peer]["keys"]
    answered = sum(count for key, count in uses.items() if answer_to(peer, key) is not None)
    assert answered >= 0.95 * sum(uses.values())


def test_the_keys_of_trl_have_an_answer() -> None:
    """Fields of TRL 1.16's SFTConfig, DPOConfig, ModelConfig and ScriptArguments, and of transformers' TrainingArguments."""
    assert [key for key in USES_OF_TRL if answer_to("trl", key) is None] == []


PAGE = (Path(__file__).parents[2] / "docs/moving.md").read_text()
HEADINGS = {
    "NeMo AutoModel": "nemo_automodel",
    "TRL (SFTTrainer)": "trl",
    "axolotl": "axolotl",
    "LLaMA-Factory": "llama_factory",
    "torchtune": "torchtune",
}
NO_KEYS = {"eval_dataset", "target_modules", "modules_to_save", "r", "chat", "dataset_info.json"}


@pytest.mark.parametrize(("heading", "peer"), HEADINGS.items(), ids=HEADINGS.values())
def test_what_the_page_says_of_a_key_is_what_convert_does(heading: str, peer: str) -> None:
    table = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].split("\n\nCode that calls")[0]
    wrong = []
    for line in table.splitlines()[4:]:
        theirs, _, ours = line.partition(" | ")
        prefix = ""
        for key, value in re.findall(r"`([a-z][a-z_0-9.]*)((?:[:=] ?[^`]*)?)`", theirs):
            prefix = key.rpartition(".")[0] or prefix
            names = (key, f"{prefix}.{key}", f"{key}._target_", f"{key}[].path", f"{key}.x")
            found = [answer for name in names if (answer := answer_to(peer, name)) is not None]
            if not found and key not in NO_KEYS:
                wrong.append(f"{key}: not known to convert")
            plain = found[0] if found and isinstance(found[0], str) else ""
            for setting in re.findall(r"(?:^| )([a-z_]+\.[a-z_.]+)", plain):
                if plain[:2] not in ("- ", "= ") and ":" not in plain and setting not in ours:
                    wrong.append(f"{key}: {plain} is not on the page, {ours}")
            if value:  # the spans behind it are others of its values
                break
    assert wrong == []


def test_an_axolotl_file_becomes_a_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.yml").write_text(AXOLOTL)
    convert.convert([str(tmp_path / "theirs.yml"), "--to", str(tmp_path / "conf/mine.yaml")])
    said = capsys.readouterr().out.splitlines()[1:]
    assert [line.split("=")[0].strip() for line in said] == [
        "foo",
        "training.global_batch_size",
    ]
    config = check_config(compose_config("mine", [], config_dir=str(tmp_path / "conf")))
    assert config.training.neftune_noise_alpha == 5
    assert (config.model["pretrained"], config.dataset["path"]) == (
        "meta-llama/Llama-3.1-8B",
        "chats.jsonl",
    )
    assert (config.optimizer["lr"], config.peft["r"], config.lr_scheduler["warmup_steps"]) == (
        2e-4,
        16,
        10,
    )
    assert config.optimizer["moments"] == "8bit"
    with pytest.raises(ConfigError, match=r"mine.yaml exists already"):
        convert.convert([str(tmp_path / "theirs.yml"), "--to", str(tmp_path / "conf/mine.yaml")])


# what of a whole example is left to its reader, beside the number of GPUs
LEFT = {
    "axolotl_full": {"chat_template", "save_first_step"},
    "axolotl_qlora": {
        "loss_watchdog_threshold",
        "loss_watchdog_patience",
        "evals_per_epoch",
        "saves_per_epoch",
    }
    | {"special_tokens.pad_token"},
    "llama_factory_dpo": {"dataset"},
    "llama_factory_lora": {"trust_remote_code", "dataset"},
    "nemo_packed": set(),
    "nemo_peft": set(),
    "torchtune_full": {"log_level"},
    "torchtune_lora": {"dataset_val"},
    "trl_sft": {"eos_token", "push_to_hub", "hub_model_id"},
}
SET = {
    "axolotl_full": {
        "mesh.cp": 2,
        "lr_scheduler.min_lr_frac": 0.1,
        "training.activation_checkpointing": "offload",
    },
    "axolotl_qlora": {
        "peft.r": 32,
        "dataset.val_frac": 0.1,
        "packed_sequence.packed_sequence_size": 2048,
    },
    "llama_factory_dpo": {
        "loss.beta": 0.1,
        "dataset.format": "preference",
        "optimizer.weight_decay": 0.1,
    },
    "llama_factory_lora": {
        "peft.r": 8,
        "lr_scheduler.warmup_frac": 0.1,
        "training.val_every_steps": 500,
    },
    "nemo_packed": {
        "mesh.cp": 2,
        "training.global_batch_size": 32,
        "training.max_steps": 400,
        "seed": 1111,
    },
    "nemo_peft": {"peft.alpha": 32, "checkpoint.mode": "async", "dataset.path": "faq.jsonl"},
    "torchtune_full": {"training.compile": True, "packed_sequence.packed_sequence_size": 4096},
    "torchtune_lora": {
        "peft.r": 16,
        "dataset.path": "chats.jsonl",
        "lr_scheduler.warmup_steps": 100,
    },
    "trl_sft": {"peft.r": 32, "checkpoint.keep_last": 2, "training.global_batch_size": 16},
}
EXAMPLES = sorted((Path(__file__).parent / "peer_examples").iterdir())


def test_a_full_disk_leaves_no_half_of_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stand in the way of the next try."""

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "axolotl.yml").write_text(AXOLOTL)
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        convert.convert([str(tmp_path / "axolotl.yml"), "--to", str(tmp_path / "a/mine.yaml")])
    assert list((tmp_path / "a").iterdir()) == []


DAMAGED = {
    "empty": (b"", "its YAML is no mapping of names"),
    "binary": (bytes([0xDE, 0x00] * 50), "cannot be read as YAML ('utf-8' codec can't decode"),
    "zero bytes": (bytes(5), "cannot be read as YAML (unacceptable character"),
    "list": (b"- a", "its YAML is no mapping of names"),
    "deep": (b"a: " + b"[" * 5000, "brackets too deep to read"),
    "code": (b"a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_is_no_configuration(case: str, tmp_path: Path) -> None:
    content, sentence = DAMAGED[case]
    (tmp_path / "theirs.yml").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        convert.convert([str(tmp_path / "theirs.yml"), "--to", str(tmp_path / "mine.yaml")])
    assert not (tmp_path / "mine.yaml").exists()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "axolotl.yml").write_text(AXOLOTL)
    near = f"; did you mean {tmp_path}/axolotl.yml?"
    for file, sentence in (
        (tmp_path / "axolot.yml", f"{tmp_path}/axolot.yml: there is no such file{near}"),
        (tmp_path, f"{tmp_path} cannot be read (Is a directory)."),
    ):
        with pytest.raises(ConfigError) as error:
            convert.convert([str(file), "--to", str(tmp_path / "mine.yaml")])
        assert str(error.value) == sentence


def test_a_place_where_no_preset_can_be(tmp_path: Path) -> None:
    theirs = tmp_path / "axolotl.yml"
    theirs.write_text(AXOLOTL)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for to, sentence in (
        (theirs / "mine.yaml", "cannot be written (File exists): choose another place."),
        ("/proc/nothing/mine.yaml", "cannot be written (No such file or directory): choose"),
        (tmp_path / "mine.yml", "a preset is found by its name, which ends in .yaml."),
        (tmp_path / "loop.yaml", "exists already: choose another file with --to."),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            convert.convert([str(theirs), "--to", str(to)])
    with pytest.raises(ConfigError, match=r"--gpus: 0 must be at least 1"):
        convert.convert([str(theirs), "--gpus", "0"])


@pytest.mark.parametrize("value", ["1e400", ".inf", ".nan", "two", "-1", "[2]"])
def test_a_number_of_rows_that_is_none_is_listed(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = AXOLOTL.replace("micro_batch_size: 2", f"micro_batch_size: {value}")
    (tmp_path / "axolotl.yml").write_text(text)
    convert.convert([str(tmp_path / "axolotl.yml"), "--to", str(tmp_path / "mine.yaml")])
    assert "gradient_accumulation_steps=4: by hand: training.global_batch_size" in (
        capsys.readouterr().out
    )


ONE_OF_EACH = {path.stem.split("_")[0]: path for path in EXAMPLES}


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            path, marks=() if path in ONE_OF_EACH.values() else pytest.mark.system, id=path.stem
        )
        for path in EXAMPLES
    ],
)
def test_a_whole_example_becomes_a_preset_that_composes(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert.convert([str(example), "--to", str(tmp_path / "mine.yaml")])
    first, *said = capsys.readouterr().out.splitlines()
    peer = next(peer for peer in _ANSWERS if example.stem.startswith(peer.partition("_")[0]))
    assert f": from {peer}; check it with automodel-lite validate" in first
    left = {re.split("[=:]", line)[0].strip() for line in said}
    assert left - {"training.global_batch_size"} == LEFT[example.stem]
    data = yaml.safe_load((tmp_path / "mine.yaml").read_text()).get("dataset", {})
    path = [] if {"path", "sources"} & set(data) else ["dataset.path=x"]
    raw = compose_config("mine", path, config_dir=str(tmp_path))
    for key, value in SET[example.stem].items():
        assert OmegaConf.select(raw, key) == value, key
    raw.tokenize.num_proc = None  # theirs may be more than this machine has cores
    if raw.logger and not find_spec("wandb"):
        raw.logger = {}
    check_config(raw)


@pytest.mark.parametrize(
    ("theirs", "peer"),
    [
        ({"step_scheduler": {"max_steps": 3}, "dist_env": {"backend": "nccl"}}, "nemo_automodel"),
        ({"stage": "sft", "cutoff_len": 8, "template": "x"}, "llama_factory"),
        ({"checkpointer": {"checkpoint_dir": "x"}, "metric_logger": {"log_dir": "y"}}, "torchtune"),
    ],
)
def test_whose_file_it_is_is_found_by_its_keys(theirs: dict, peer: str) -> None:
    assert convert.peer_of(theirs) == peer


def preset(peer: str, **theirs: object) -> dict[str, object]:
    return convert.preset_of(peer, theirs, "mine", num_gpus=8).settings


def test_false_and_null_are_answers_too() -> None:
    """Of torchtune and axolotl, where they are the usual values."""
    base = {"model": {"_component_": "x"}, "optimizer": {"lr": 1e-5}}
    found = preset("torchtune", **base, clip_grad_norm=None, dataset={"packed": False})
    assert found["training.max_grad_norm"] == 0
    chosen = convert.preset_of("axolotl", {"sample_packing": False}, "mine").chosen
    assert chosen["packed_sequence"] == "none"
    assert "training.precision" in preset("axolotl", bf16=False)


def test_half_a_character_is_written_escaped(tmp_path: Path) -> None:
    (tmp_path / "theirs.yml").write_text('sample_packing: true\nlearning_rate: "\\udc00"\n')
    given = [str(tmp_path / "theirs.yml"), "--from", "axolotl", "--to", str(tmp_path / "mine.yaml")]
    convert.convert(given)
    assert r"\udc00" in (tmp_path / "mine.yaml").read_text()


def test_what_a_file_leaves_out_is_what_they_would_have_taken() -> None:
    """TRL's values: 8 rows on each of 8 GPUs, 1,024 tokens, cut at the end, all tokens trained."""
    found = preset("trl", model_name_or_path="x", dataset_name="y")
    assert found["training.global_batch_size"] == 64
    assert found["optimizer.betas"] == [0.9, 0.999]
    assert (found["optimizer.weight_decay"], found["optimizer.lr"]) == (0, 2e-5)
    assert found["packed_sequence.packed_sequence_size"] == 1024
    assert found["packed_sequence.overlong"] == "truncate"
    assert found["tokenize.train_on"] == "all"
    text = convert.preset_of("trl", {"dataset_name": "y"}, "mine").text()
    assert "packed_sequence_size: 1024 # trl's default" in text


LEFT_OUT = {
    "llama_factory": (
        {"model_name_or_path": "x", "dataset": "y"},
        {"peft": "lora", "lr_scheduler": "linear"},
        {"peft.r": 8, "peft.alpha": 16, "peft.dropout": 0, "optimizer.weight_decay": 0},
    ),
    "llama_factory, its rank": (
        {"model_name_or_path": "x", "dataset": "y", "finetuning_type": "lora", "lora_rank": 64},
        {"peft": "lora"},
        {"peft.r": 64, "peft.alpha": 128},
    ),
    "llama_factory, all weights": (
        {"model_name_or_path": "x", "dataset": "y", "finetuning_type": "full"},
        {"peft": None},
        {"peft.alpha": None, "training.global_batch_size": 64},
    ),
    "llama_factory, v1": (
        {
            "model": "x",
            "train_dataset": "y",
            "peft_config": {"name": "lora"},
            "micro_batch_size": 2,
        },
        {"peft": "lora", "lr_scheduler": "constant"},
        {
            "peft.alpha": 16,
            "peft.dropout": 0.05,
            "optimizer.weight_decay": 0.01,
            "training.global_batch_size": 16,
        },
    ),
    "nemo_automodel": (
        {
            "benchmark": {"num_gpus": 1},
            "dataset": {"dataset_name": "y"},
            "lr_scheduler": {"lr_decay_style": "cosine"},
        },
        {"lr_scheduler": "cosine"},
        {"lr_scheduler.warmup_frac": 0.1, "lr_scheduler.min_lr_frac": 0.01},
    ),
    "nemo_automodel, its own": (
        {"optimizer": {"lr": 1e-5}, "lr_scheduler": {"lr_warmup_steps": 5, "min_lr": 1e-6}},
        {},
        {
            "lr_scheduler.warmup_steps": 5,
            "lr_scheduler.warmup_frac": None,
            "lr_scheduler.min_lr_frac": 0.1,
        },
    ),
    "torchtune": (
        {"optimizer": {"_component_": "torch.optim.Adam", "lr": 1e-5}},
        {"lr_scheduler": "constant"},
        {"lr_scheduler.warmup_steps": 0, "optimizer.weight_decay": 0},
    ),
    "torchtune, pairs": (
        {
            "loss": {"_component_": "torchtune.rlhf.loss.SimPOLoss"},
            "dataset": {"_component_": "torchtune.datasets.stack_exchange_paired_dataset"},
        },
        {"loss": "simpo"},
        {"loss.gamma": 0.5, "dataset.columns.chosen": "response_j"},
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_would_have_been_trained_by_their_defaults(case: str) -> None:
    """LoRA where LLaMA-Factory names no method, of twice its rank; a constant rate."""
    theirs, chosen, settings = LEFT_OUT[case]
    found = convert.preset_of(case.partition(",")[0], theirs, "mine", 8)
    assert {group: found.chosen.get(group) for group in chosen} == chosen
    assert {key: found.settings.get(key) for key in settings} == settings


def test_a_default_that_does_nothing_is_left_out() -> None:
    theirs = {"optimizer": {"lr": 1e-5}, "lr_scheduler": {"lr_decay_style": "constant"}}
    found = convert.preset_of("nemo_automodel", theirs, "mine")
    assert found.settings["lr_scheduler.min_lr_frac"] == 0.01
    found.leave_what_is_refused()
    assert "lr_scheduler.min_lr_frac" not in found.settings
    assert not found.unsaid


def test_a_decay_that_means_another_thing_is_named() -> None:
    theirs = {"optimizer": {"_target_": "torch.optim.Adam", "weight_decay": 0.1}}
    unsaid = convert.preset_of("nemo_automodel", theirs, "mine").unsaid
    assert any(line.startswith("optimizer.weight_decay=0.1: none: torch.optim.") for line in unsaid)


def test_numbers_of_several_keys_are_computed() -> None:
    """Ranks and accumulation, layers by their names here, steps of epochs, a floor of the rate."""
    found = preset("axolotl", micro_batch_size=2, gradient_accumulation_steps=4,
                   context_parallel_size=2, learning_rate="1e-5")  # fmt: skip
    assert (found["training.global_batch_size"], found["mesh.cp"]) == (2 * 4 * 4, 2)
    lora = {"lora_attn_modules": ["q_proj", "output_proj"], "apply_lora_to_mlp": True}
    found = preset("torchtune", model=lora | {"lora_rank": 8}, optimizer={"lr": 1},
                   max_steps_per_epoch=50, epochs=3)  # fmt: skip
    modules = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert found["peft.target_modules"] == modules
    assert found["training.max_steps"] == 150
    found = preset("nemo_automodel", optimizer={"lr": 1e-5}, lr_scheduler={"min_lr": 1e-6})
    assert found["lr_scheduler.min_lr_frac"] == 0.1


HELD_OUT = {
    "another split": ({"dataset_name": "a", "split": "validation"}, {"val_split": "validation"}),
    "another data set": ({"dataset_name": "b", "split": "train"}, {"val_path": "b"}),
    "another split of another": ({"path_or_dataset": "b", "split": "test"}, {"val_path": "b"}),
    "a split alone": ({"split": "test"}, {"val_split": "test"}),
}


@pytest.mark.parametrize("case", HELD_OUT)
def test_held_out_data_of_nemo_are_one_setting(case: str) -> None:
    """A run refuses two of them."""
    theirs, ours = HELD_OUT[case]
    data = {"dataset_name": "a", "split": "train"}
    found = preset("nemo_automodel", dataset=data, validation_dataset=theirs)
    held_out = {
        key.removeprefix("dataset."): value for key, value in found.items() if ".val_" in key
    }
    assert held_out == ours


def test_several_data_sets_are_a_mixture(tmp_path: Path) -> None:
    """A list of axolotl's, and names of LLaMA-Factory's list with their columns."""
    data = [{"path": "a.jsonl"}, {"path": "org/b", "type": "alpaca"}]
    found = preset("axolotl", datasets=data, val_set_size=0.1)
    source = found["dataset.sources.b"]
    assert isinstance(source, dict)
    assert source["repeat"] == 1
    assert source["dataset"]["format"] == "alpaca_prompt"
    assert source["dataset"]["val_frac"] == 0.1
    (tmp_path / "data").mkdir()
    tags = {"role_tag": "role", "user_tag": "human"}
    listed = {"one": {"file_name": "one.json", "columns": {"prompt": "frage"}, "tags": tags}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(listed))
    theirs = {"dataset": "one", "stage": "sft", "learning_rate": 1}
    preset_of_one = convert.preset_of("llama_factory", theirs, "mine", 1, folder=tmp_path)
    assert not preset_of_one.unsaid  # tags that are known are nothing to do
    found = preset_of_one.settings
    assert found["dataset.path"] == str(tmp_path / "data" / "one.json")
    assert found["dataset.columns"] == {"instruction": "frage"}


def test_a_number_of_gpus_is_asked_for_where_none_is_given() -> None:
    theirs: dict[str, object] = {"model_name_or_path": "x", "assistant_only_loss": True}
    theirs |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    asked = ["training.global_batch_size=8: for 1 GPU, as the file does not name their number: "
             "convert with --gpus N"]  # fmt: skip
    assert convert.preset_of("trl", theirs, "mine").unsaid == asked
    assert not convert.preset_of("trl", theirs, "mine", num_gpus=1).unsaid


@pytest.mark.parametrize("peer", ["axolotl", "llama_factory", "nemo_automodel", "torchtune", "trl"])
def test_every_answer_is_well_formed(peer: str) -> None:
    for answer in _ANSWERS[peer].values():
        for text in answer.values() if isinstance(answer, dict) else [answer]:
            is_said = text.startswith(("- ", "= ", "none", "by hand: "))
            assert is_said or all(
                re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*~?(=\S+)?", word) for word in text.split()
            ), text


@pytest.mark.parametrize(("text", "problem"), [("{", r"is no JSON \("), ("[]", "is no object")])
def test_a_broken_list_of_data_sets_is_a_sentence(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        convert.preset_of("llama_factory", {"dataset": "one"}, "mine", folder=tmp_path)


def test_a_file_that_is_no_mapping_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(yaml.safe_dump([1, 2]))
    with pytest.raises(ConfigError, match="its YAML is no mapping of names"):
        convert.convert([str(tmp_path / "a.yml"), "--to", str(tmp_path / "b.yaml")])


def test_a_reference_is_followed_to_its_value() -> None:
    """Also to 0, and to a text that has another one; one around itself stays as it is."""
    theirs = {"a": "${b}/x", "b": "${c.d}-${n}", "c": {"d": "y"}, "n": 0, "e": "${e}", "f": "${g}"}
    assert convert.resolved(theirs, theirs) == {
        **theirs, "a": "y-0/x", "b": "y-0", "e": "${e}", "f": "${g}"
    }  # fmt: skip


BOMBS = {  # a level, of the one before it
    "anchors": ("&a{n} [{others}]", "*a{m}"),
    "references": ("[{others}]", "'${{a{m}}}'"),
    "references in a text": ("'{others}'", "${{a{m}}}"),
}


@pytest.mark.parametrize("form", BOMBS)
def test_a_kilobyte_that_stands_for_a_billion_values_is_refused(form: str, tmp_path: Path) -> None:
    level, other = BOMBS[form]
    lines = ["a0: " + level.format(n=0, others="x, x, x")]
    for n in range(1, 10):
        others = ", ".join([other.format(m=n - 1)] * 9)
        lines.append(f"a{n}: " + level.format(n=n, others=others))
    (tmp_path / "theirs.yml").write_text("\n".join(lines))
    began = time.monotonic()
    with pytest.raises(ConfigError, match="for over 100,000"):
        convert.convert([str(tmp_path / "theirs.yml"), "--to", str(tmp_path / "mine.yaml")])
    assert time.monotonic() - began < 20


def test_names_are_printed_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would set the terminal's title, or write over lines."""
    lines = AXOLOTL + '"k\\e]0;PWNED\\a": 1\n"two\\nlines": "\\e[2J"\n'
    (tmp_path / "theirs.yml").write_text(lines)
    convert.convert([str(tmp_path / "theirs.yml"), "--to", str(tmp_path / "mine.yaml")])
    said = capsys.readouterr().out
    assert r"k\x1b]0;PWNED\x07=1: not known here" in said
    assert r"two\nlines=\x1b[2J: not known here" in said
    assert "\x1b" not in said + (tmp_path / "mine.yaml").read_text()


def of(peer: str, **theirs: object) -> convert.Preset:
    return convert.preset_of(peer, theirs, "mine", num_gpus=8)


TARGET = "nemo_automodel.components.datasets.llm"
TEXTS = {
    "axolotl": ({"datasets": [{"path": "a.jsonl", "type": "alpaca"}]}, "alpaca_prompt"),
    "torchtune": ({"dataset": {"_component_": "torchtune.datasets.alpaca_dataset"}}, "alpaca_turn"),
    "nemo_automodel": ({"dataset": {"_target_": f"{TARGET}.squad.make_squad_dataset"}}, "squad"),
}


@pytest.mark.parametrize("peer", TEXTS)
def test_prompts_of_their_own_are_formats(peer: str) -> None:
    theirs, name = TEXTS[peer]
    found = of(peer, **theirs)
    assert found.settings["dataset.format"] == name
    assert not any("dataset" in line for line in found.unsaid)


@pytest.mark.parametrize(
    ("template", "model", "is_own"),
    [
        ("llama3", "meta-llama/Meta-Llama-3-8B-Instruct", True),
        ("llama3", "meta-llama/Meta-Llama-3-8B", False),
        # they write dates, a system turn or thoughts of their own
        ("llama3", "meta-llama/Llama-3.1-8B-Instruct", False),
        ("llama3", "meta-llama/Llama-3.2-1B-Instruct", False),
        ("qwen", "Qwen/Qwen2.5-7B-Instruct", True),
        ("qwen", "Qwen/Qwen2-7B-Instruct", False),
        ("qwen3", "Qwen/Qwen3-4B-Thinking-2507", False),
        ("qwen3_5", "Qwen/Qwen3.5-9B", True),
        ("qwen3_5_nothink", "Qwen/Qwen3.5-9B", False),
        ("lfm2", "LiquidAI/LFM2-1.2B", False),
        ("gpt_oss", "openai/gpt-oss-20b", False),
        ("gemma4", "google/gemma-4-E2B-it", False),
        ("phi4", "microsoft/Phi-4-reasoning", False),
        ("mistral_small", "mistralai/Mistral-Small-24B-Instruct-2501", False),
        ("mistral", "mistralai/Mistral-7B-Instruct-v0.3", True),
        ("mistral", "mistralai/Mistral-7B-Instruct-v0.1", False),
        ("qwen3", "Qwen/Qwen3-4B", True),
        ("qwen3", "Qwen/Qwen3-4B-Base", False),
        ("qwen3_nothink", "Qwen/Qwen3-4B-Instruct-2507", True),
        ("qwen3_nothink", "Qwen/Qwen3-4B", False),
        ("gemma3", "google/gemma-3-4b-it", True),
        ("default", "Qwen/Qwen3-4B", False),
        ("vicuna", "Qwen/Qwen3-4B", False),
    ],
)
def test_a_template_that_is_not_the_models_own_is_named(
    template: str, model: str, is_own: bool
) -> None:
    unsaid = of("llama_factory", model_name_or_path=model, stage="sft", template=template).unsaid
    assert any(line.startswith(f"template={template}: by hand:") for line in unsaid) != is_own


PAIR = [{"role": "user", "content": "Add 2 2."}, {"role": "assistant", "content": "4"}]
CHAT = [*PAIR, {"role": "user", "content": "And 1?"}, {"role": "assistant", "content": "It is 5"}]
IM = "<|im_start|>user\nAdd 2 2.<|im_end|>\n<|im_start|>assistant\n"
GEMMA = (
    "<bos><start_of_turn>user\nAdd 2 2.<end_of_turn>\n<start_of_turn>model\n4<end_of_turn>\n"
    "<start_of_turn>user\nAnd 1?<end_of_turn>\n<start_of_turn>model\nIt is 5<end_of_turn>\n"
)
# template of LLaMA-Factory -> the same model's own, whose tokenizer, the turns, what theirs writes
OF_LLAMA_FACTORY = [
    (
        *("llama3", "llama3", "llama3", CHAT),
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nAdd 2 2.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd 1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nIt is 5<|eot_id|>",
    ),
    (
        *("qwen", "qwen2_5", "qwen3", PAIR),
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        f"<|im_end|>\n{IM}4<|im_end|>\n",
    ),
    ("qwen3", "qwen3", "qwen3", PAIR, f"{IM}<think>\n\n</think>\n\n4<|im_end|>\n"),
    ("qwen3_nothink", "qwen3_instruct_2507", "qwen3", PAIR, f"{IM}4<|im_end|>\n"),
    ("qwen3_5", "qwen3_5_think", "qwen3", PAIR, f"{IM}<think>\n\n</think>\n\n4<|im_end|>\n"),
    ("qwen3_6", "qwen3_6", "qwen3", PAIR, f"{IM}<think>\n\n</think>\n\n4<|im_end|>\n"),
    ("gemma", "gemma", "gemma3", CHAT, GEMMA),
    ("gemma3", "gemma3", "gemma3", CHAT, GEMMA),
    ("gemma3n", "gemma3n", "gemma3", CHAT, GEMMA),
    ("mistral", "mistral_v2v3", "mistral", PAIR, "<s>[INST] Add 2 2.[/INST] 4</s>"),
    ("ministral", "mistral_v3_tekken", "mistral", PAIR, "<s>[INST]Add 2 2.[/INST]4</s>"),
    ("falcon_h1", "falcon_h1", "qwen3", PAIR, f"{IM}4<|im_end|>\n"),
]


@pytest.mark.parametrize(
    ("template", "own", "family", "turns", "text"),
    OF_LLAMA_FACTORY,
    ids=[row[0] for row in OF_LLAMA_FACTORY],
)
def test_such_templates_write_what_the_models_own_do(
    template: str, own: str, family: str, turns: list[dict[str, str]], text: str
) -> None:
    """The text is that of LLaMA-Factory 0.9.5's `encode_multiturn`; Qwen's own drop the empty thoughts of earlier answers."""
    tokenizer = byte_tokenizer(FAMILIES[family])
    file = Path(__file__).parent.parent / f"data/chat_templates/{own}.jinja"
    tokenizer.chat_template = file.read_text()
    found = tokenizer.apply_chat_template(turns, tokenize=False)
    assert found.rstrip("\n") == text.rstrip("\n")


def test_a_step_of_pairs_has_as_many_of_them() -> None:
    """Two rows on each of 8 GPUs, four times: 64 pairs, in packs of twice the length."""
    found = of(
        "axolotl", rl="dpo", micro_batch_size=2, gradient_accumulation_steps=4, sequence_len=1024
    )
    assert found.settings["training.global_batch_documents"] == 64
    assert found.settings["packed_sequence.packed_sequence_size"] == 2048
    assert not {"training.global_batch_size", "training.micro_batch_size"} & set(found.settings)
    assert not any("batch" in line for line in found.unsaid)


def converted(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """Returns the preset that a command line makes, and what was printed."""
    convert.convert(["--to", str(folder / "mine.yaml"), *words])
    return (folder / "mine.yaml").read_text(), capsys.readouterr().out


COMMANDS = [
    "trl dpo --model_name_or_path org/x --dataset_name org/pairs --num_train_epochs=2 --bf16",
    "python trl/scripts/dpo.py --model_name_or_path org/x --dataset_name org/pairs "
    "--num_train_epochs 2 --bf16 true",
    "accelerate launch --num_processes 8 dpo.py --model_name_or_path=org/x --dataset_name=org/pairs "
    "--num-train-epochs 2",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_trl_is_converted(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, said = converted(tmp_path, capsys, "--gpus", "8", "--", *command.split())
    assert len(said.splitlines()) == 1
    raw = compose_config("mine", [], config_dir=str(tmp_path))
    assert raw.loss.beta == 0.1
    assert (raw.dataset.path, raw.dataset.format) == ("org/pairs", "preference")
    assert (raw.training.num_epochs, raw.training.global_batch_documents) == (2, 64)
    assert raw.optimizer.lr == 1e-6
    assert "override loss: dpo" in text


def test_a_command_of_trl_needs_no_dashes_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, said = converted(tmp_path, capsys, "--gpus", "8", *COMMANDS[0].split())
    assert len(said.splitlines()) == 1
    assert compose_config("mine", [], config_dir=str(tmp_path)).dataset.path == "org/pairs"


def test_a_command_with_a_file_overrules_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("dataset_name: org/y\nlearning_rate: 1e-5\nmax_length: 64\n")
    words = ["--", "trl", "sft", "--config", str(tmp_path / "a.yaml"), "--learning_rate", "3e-5"]
    words += ["--lora_target_modules", "q_proj", "v_proj", "--use_peft"]
    converted(tmp_path, capsys, *words)
    raw = compose_config("mine", ["model.pretrained=x"], config_dir=str(tmp_path))
    assert (raw.optimizer.lr, raw.packed_sequence.packed_sequence_size) == (3e-5, 64)
    assert list(raw.peft.target_modules) == ["q_proj", "v_proj"]


def test_words_that_are_no_command(tmp_path: Path) -> None:
    for words, sentence in (
        (["tune", "run", "x"], "tune run x is no command of TRL's: type it as it is"),
        (["trl", "sft", "x.yaml"], "x.yaml: stands before the first --key"),
        (["trl", "grpo", "--beta", "1"], "method=grpo: reinforcement learning is not here"),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            convert.convert(["--to", str(tmp_path / "mine.yaml"), "--", *words])


def test_the_method_of_a_file_of_trl() -> None:
    """Its files do not name it: by its keys, or by --method; else the preset says what it was taken for."""
    plain = {"model_name_or_path": "x", "dataset_name": "y", "learning_rate": 1e-6}
    assert convert.preset_of("trl", {**plain, "beta": 0.2}, "a").settings["loss.beta"] == 0.2
    for more in ({"loss_type": "ipo"}, {"precompute_ref_log_probs": True}):
        found = convert.preset_of("trl", {**plain, **more}, "a")
        assert found.chosen["loss"] == "dpo"
        assert found.settings["loss.beta"] == 0.1
        assert found.settings["dataset.format"] == "preference"
    found = convert.preset_of("trl", plain, "a")
    assert "loss" not in found.chosen
    assert any(line.startswith("method: sft, as no key names it:") for line in found.unsaid)
    found = convert.preset_of("trl", plain, "a", method="dpo")
    assert found.chosen["loss"] == "dpo"
    assert not any("method" in line for line in found.unsaid)


@pytest.mark.parametrize(
    ("peer", "theirs", "settings"),
    [
        ("trl", {"loss_type": "apo_zero_unpaired"}, {"loss.kind": "apo_zero", "loss.beta": 0.1}),
        ("trl", {"undesirable_weight": 1.3}, {"loss.undesirable_weight": 1.3}),
        ("axolotl", {"rl": "kto", "kto_desirable_weight": 0.2}, {"loss.desirable_weight": 0.2}),
        ("llama_factory", {"stage": "kto", "pref_beta": 0.3}, {"loss.beta": 0.3}),
    ],
)
def test_answers_with_a_label_are_converted(
    peer: str, theirs: dict[str, Any], settings: dict[str, Any]
) -> None:
    names = {"trl": ("model_name_or_path", "dataset_name"), "axolotl": ("base_model", "datasets")}
    model, data = names.get(peer, ("model_name_or_path", "dataset"))
    given = {model: "x", data: [{"path": "y"}] if peer == "axolotl" else "y"}
    found = convert.preset_of(peer, {**given, **theirs}, "a")
    assert found.chosen["loss"] == "kto"
    assert settings.items() <= found.settings.items()
    assert found.settings["dataset.format"] == "verdict"


@pytest.mark.parametrize(
    ("theirs", "held_out", "every"),
    [
        ({"eval_strategy": "steps", "eval_steps": 50}, "test", 50),
        ({"eval_strategy": "steps", "dataset_test_split": "dev", "logging_steps": 5}, "dev", 5),
        ({"eval_strategy": "epoch"}, "test", None),
        ({"eval_strategy": False, "eval_steps": 50}, None, None),
        ({"eval_strategy": "no", "dataset_test_split": "test"}, None, None),
        ({"eval_steps": 50}, None, None),
    ],
)
def test_trl_validates_where_its_strategy_asks_for_it(
    theirs: dict[str, object], held_out: str | None, every: int | None
) -> None:
    found = of("trl", **theirs)
    assert found.settings.get("dataset.val_split") == held_out
    assert found.settings.get("training.val_every_steps") == every
    named = [line.partition("=")[0] for line in found.unsaid]
    asked = {"eval_strategy", "eval_steps", "dataset_test_split"} & {*named}
    assert bool(asked) == (every is None)


def test_values_of_nemo_that_another_setting_means() -> None:
    adam = {"_target_": "torch.optim.Adam", "lr": 1e-5}
    assert of("nemo_automodel", optimizer=adam).settings["optimizer.weight_decay"] == 0
    found = of("nemo_automodel", optimizer={**adam, "weight_decay": 0.01})
    assert found.settings["optimizer.weight_decay"] == 0
    assert any(line.startswith("optimizer.weight_decay=0.01: none:") for line in found.unsaid)
    found = of(
        "nemo_automodel", checkpoint={"enabled": False}, step_scheduler={"ckpt_every_steps": 500}
    )
    assert found.settings["checkpoint.every_steps"] == 0
    assert found.settings["checkpoint.export_hf"] is False
    found = of("nemo_automodel", packed_sequence={"split_across_pack": True})
    assert "packed_sequence.overlong" not in found.settings
    assert any("0.7 does not read it" in line for line in found.unsaid)
    found = of("nemo_automodel", packed_sequence={"drop_long_samples": False})
    assert found.settings["packed_sequence.overlong"] == "error"
    mapping = {"context": "c", "question": "q", "answer": "a"}
    found = of("nemo_automodel", dataset={"path_or_dataset_id": "d", "column_mapping": mapping})
    assert found.settings["dataset.columns"] == {"system": "c", "question": "q", "answer": "a"}


def test_a_file_has_no_splits() -> None:
    files = {"source": "json", "data_files": "a.jsonl", "split": "train[:95%]"}
    found = of("torchtune", dataset=files, dataset_val={**files, "split": "train[95%:]"})
    assert found.settings["dataset.val_frac"] == 0.05
    assert not {"dataset.split", "dataset.val_split"} & set(found.settings)
    found = of("nemo_automodel", dataset={"path_or_dataset": "a.jsonl", "split": "train[:9]"})
    assert "dataset.split" not in found.settings
    assert any(line.startswith("dataset.split=train[:9]: by hand: a file") for line in found.unsaid)


def test_ranks_that_a_file_names() -> None:
    """Without --gpus: two replicas of four shards, each of two GPUs, with two rows each."""
    mesh = {"dp_shard_size": 4, "dp_replicate_size": 2, "context_parallel_size": 2}
    found = convert.preset_of("axolotl", {**mesh, "micro_batch_size": 2}, "mine")
    assert found.settings["training.global_batch_size"] == 16
    assert not any("--gpus" in line for line in found.unsaid)


def test_jobs_with_images_are_jobs_with_images() -> None:
    theirs = {"recipe": "FinetuneRecipeForVLM", "dataset": {"path_or_dataset": "org/cord"}}
    assert of("nemo_automodel", **theirs).chosen["dataset"] == "images"
    found = of("llama_factory", dataset="a.json", image_max_pixels=1000)
    assert found.chosen["dataset"] == "images"
    assert found.settings["dataset.max_image_pixels"] == 1000
