"""A configuration of another framework becomes a preset, and what it cannot hold is listed."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from automodel_lite.extras.cli import convert
from automodel_lite.extras.cli.convert import _ANSWERS, answer_to

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


def test_an_axolotl_file_becomes_a_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.yml").write_text(AXOLOTL)
    convert.convert([str(tmp_path / "theirs.yml"), "--to", str(tmp_path / "conf/mine.yaml")])
    said = capsys.readouterr().out.splitlines()[1:]
    assert [line.split("=")[0].strip() for line in said] == [
        "gradient_accumulation_steps",
        "neftune_noise_alpha",
        "foo",
    ]
    config = check_config(compose_config("mine", [], config_dir=str(tmp_path / "conf")))
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


# what of a whole example is left to its reader; keys that repeat in all of them are not counted
LEFT = {
    "axolotl_full": {"chat_template", "datasets[].field_messages", "adam_beta2", "save_first_step"},
    "axolotl_qlora": {
        "loss_watchdog_threshold",
        "loss_watchdog_patience",
        "evals_per_epoch",
        "saves_per_epoch",
    }
    | {"special_tokens.pad_token"},
    "llama_factory_dpo": set(),
    "llama_factory_lora": {"trust_remote_code", "ddp_timeout"},
    "nemo_packed": {"dist_env.timeout_minutes", "dataset._target_", "lr_scheduler.min_lr"},
    "nemo_peft": {"dist_env.timeout_minutes", "peft.exclude_modules", "dataset._target_"}
    | {"dataset.column_mapping.question", "dataset.column_mapping.answer"},
    "torchtune_full": {"dataset._component_", "log_level"},
    "torchtune_lora": {
        "dataset._component_",
        "dataset.conversation_column",
        "dataset.conversation_style",
    }
    | {"dataset_val._component_"},
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
    "trl_sft": {"peft.r": 32, "checkpoint.keep_last": 2},
}
EXAMPLES = sorted((Path(__file__).parent / "peer_examples").iterdir())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_whole_example_becomes_a_preset_that_composes(
    example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert.convert([str(example), "--to", str(tmp_path / "mine.yaml")])
    first, *said = capsys.readouterr().out.splitlines()
    peer = next(peer for peer in _ANSWERS if example.stem.startswith(peer.partition("_")[0]))
    assert f": from {peer}; check it with automodel-lite validate" in first
    assert {line.split("=")[0].strip() for line in said} - {"gradient_accumulation_steps"} == LEFT[
        example.stem
    ]
    path = (
        []
        if "path" in yaml.safe_load((tmp_path / "mine.yaml").read_text()).get("dataset", {})
        else ["dataset.path=x"]
    )
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


@pytest.mark.parametrize("peer", ["axolotl", "llama_factory", "nemo_automodel", "torchtune", "trl"])
def test_every_answer_is_well_formed(peer: str) -> None:
    for answer in _ANSWERS[peer].values():
        for text in answer.values() if isinstance(answer, dict) else [answer]:
            is_said = text.startswith(("- ", "none", "by hand: "))
            assert is_said or all(
                re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*(=\S+)?", word) for word in text.split()
            ), text


def test_a_file_that_is_no_mapping_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(yaml.safe_dump([1, 2]))
    with pytest.raises(ConfigError, match="its YAML is no mapping of names"):
        convert.convert([str(tmp_path / "a.yml"), "--to", str(tmp_path / "b.yaml")])
