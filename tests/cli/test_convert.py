"""A configuration of another framework becomes a preset, and what it cannot hold is listed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from automodel_lite.cli import compose_config, convert
from automodel_lite.cli.convert import answer_to, answers_of
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError

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


def test_an_axolotl_file_becomes_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "theirs.yml").write_text(AXOLOTL)
    convert.convert([str(tmp_path / "theirs.yml"), "--to", str(tmp_path / "conf/mine.yaml")])
    said = capsys.readouterr().out.splitlines()[1:]
    assert [line.split("=")[0].strip() for line in said] == [
        "gradient_accumulation_steps",
        "neftune_noise_alpha",
        "foo",
    ]
    config = check_config(compose_config("mine", [], config_dir=str(tmp_path / "conf")))
    assert (config.model["pretrained"], config.dataset["path"]) == ("meta-llama/Llama-3.1-8B", "chats.jsonl")
    assert (config.optimizer["lr"], config.peft["r"], config.lr_scheduler["warmup_steps"]) == (2e-4, 16, 10)
    assert config.optimizer["_target_"].endswith("adamw_8bit")
    with pytest.raises(ConfigError, match=r"mine.yaml exists already"):
        convert.convert([str(tmp_path / "theirs.yml"), "--to", str(tmp_path / "conf/mine.yaml")])


@pytest.mark.parametrize(
    ("theirs", "peer"),
    [
        ({"step_scheduler": {"max_steps": 3}, "dist_env": {}}, "nemo_automodel"),
        ({"stage": "sft", "cutoff_len": 8, "template": "x"}, "llama_factory"),
        ({"checkpointer": {}, "metric_logger": {}}, "torchtune"),
    ],
)
def test_whose_file_it_is_is_found_by_its_keys(theirs: dict, peer: str) -> None:
    assert convert.peer_of(theirs) == peer


@pytest.mark.parametrize("peer", ["axolotl", "llama_factory", "nemo_automodel", "torchtune", "trl"])
def test_every_answer_is_well_formed(peer: str) -> None:
    for answer in answers_of(peer).values():
        for text in answer.values() if isinstance(answer, dict) else [answer]:
            is_said = text.startswith(("- ", "none", "by hand: "))
            assert is_said or all(re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*(=\S+)?", word) for word in text.split()), text


def test_a_file_that_is_no_mapping_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(yaml.safe_dump([1, 2]))
    with pytest.raises(ConfigError, match="its YAML is no mapping of names"):
        convert.convert([str(tmp_path / "a.yml"), "--to", str(tmp_path / "b.yaml")])
