"""Settings that would do nothing, because of another one, of the data or of the model: one sentence names them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from automodel_lite.config.rules import Only
from automodel_lite.data.packing.packs import Packer
from automodel_lite.errors import ConfigError
from automodel_lite.parts.adapters.targets import lora_targets, same_targets
from automodel_lite.parts.callbacks.early_stopping import EarlyStopping
from automodel_lite.parts.datasets.memmap import MemmapCorpus, write_memmap
from automodel_lite.parts.datasets.streams import StreamingDataset
from automodel_lite.telemetry.callbacks import RunInfo
from recipes import train_ft
from tests.images.families import write_chats, write_model
from tests.images.test_exact import config_of_images
from tests.runs import problems, quick_config, train_quick

BESIDE_OTHERS = {
    "lr_scheduler.warmup_frac=0.1": "lr_scheduler.warmup_steps=10: set lr_scheduler.warmup_steps=null",
    "lr_scheduler=constant lr_scheduler.min_lr_frac=0.5": "lr_scheduler.decay_frac=0.0: set lr_scheduler.decay_frac",
    "loss=ppo loss.kl_kind=k1": "loss.kl=0.0: set loss.kl",
    "loss=gspo loss.constant_length=3": "loss.average=labels: set loss.average=constant",
    "loss=dpo loss.kind=ipo loss.label_smoothing=0.1": "loss.kind=ipo: set loss.kind=sigmoid",
    "loss=distill loss.beta=0.3": "loss.kind=forward: set loss.kind=jsd",
    "checkpoint.every_steps=0 checkpoint.keep_every=3": "checkpoint.every_steps=0: set checkpoint.every_steps",
    "samples.max_new_tokens=4": "samples.prompts=[]: set samples.prompts",
    "dataset=files ~dataset.num_chats dataset.path=x dataset.seed=4": "dataset.val_frac=0.0: set dataset.val_frac",
}


@pytest.mark.parametrize("typed", BESIDE_OTHERS)
def test_a_setting_that_counts_only_beside_another(typed: str) -> None:
    last = typed.rpartition(" ")[2]
    assert problems(*typed.split(" ")) == [
        f"{last} does nothing where {BESIDE_OTHERS[typed]}, or leave it out."
    ]


@pytest.mark.parametrize(
    "typed",
    [
        "lr_scheduler.warmup_steps=null lr_scheduler.warmup_frac=0.1",
        "lr_scheduler.min_lr_frac=0.5",
        "loss=ppo loss.kl=0.1 loss.kl_kind=k1",
        "loss=ppo loss.constant_length=1024.0",
        "loss=dpo loss.label_smoothing=0.1",
        "loss=distill loss.kind=jsd loss.beta=0.3",
        "checkpoint.keep_every=3",
        "samples.prompts=[hi] samples.max_new_tokens=4",
    ],
)
def test_a_setting_that_counts_or_is_the_default_is_taken(typed: str) -> None:
    assert problems(*typed.split(" ")) == []


def test_a_key_that_is_not_there_is_not_judged() -> None:
    assert Only("kl").problem_beside({}, "loss.") is None


CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"what is {n}?"},
            {"role": "assistant", "content": f"it is {n}."},
        ]
    }
    for n in range(30)
]
TEXTS = [{"text": f"it is {n}, and it was {n + 1}."} for n in range(30)]
TOKENS = [{"input_ids": [5, 6, 7, n + 8]} for n in range(30)]
BY_DATA = {
    "name": (
        CHATS,
        "dataset.name=main",
        "is a subset of a hub dataset or a folder, and .* has none: leave it out",
    ),
    "labels of chats": (CHATS, "dataset.labels=aligned", "and the data are messages without any"),
    "labels of ids alone": (
        TOKENS,
        "dataset.labels=unshifted",
        "and the data are tokens without any",
    ),
    "unit of chats": (
        CHATS,
        "dataset.text_unit=line",
        "is what a document is in a .txt file, and the data have none",
    ),
    "split of validation": (CHATS, "dataset.val_split=test", "rows.jsonl has no splits"),
    "answers of texts": (
        TEXTS,
        "tokenize.train_on=completion",
        "is of chats and answers, and the data are plain text",
    ),
    "template of texts": (
        TEXTS,
        "tokenize.template_kwargs={a: 1}",
        "is of chats and answers, and the data are plain",
    ),
    "variable of a template": (
        CHATS,
        "tokenize.template_kwargs={deep: 1}",
        "the chat template knows no deep",
    ),
}


@pytest.mark.parametrize("case", BY_DATA)
def test_a_setting_of_other_data(case: str, tmp_path: Path) -> None:
    lines, typed, why = BY_DATA[case]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = ["dataset=files", "~dataset.num_chats", f"dataset.path={path}", f"cache_dir={tmp_path}"]
    key = typed.partition("=")[0]
    named = re.escape(key if key.endswith("kwargs") else typed)
    with pytest.raises(ConfigError, match=rf"^{named}.*{why}"):
        train_ft.main(quick_config(tmp_path / "run", *data, typed))


def test_a_setting_of_streams_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^dataset.name=main is of a hub dataset"):
        StreamingDataset(generator="tests.nothing:rows", name="main")
    with pytest.raises(ConfigError, match=r"^dataset.split=test is of a hub dataset"):
        StreamingDataset(generator="tests.nothing:rows", split="test")


@pytest.mark.parametrize("typed", [{"dtype": "uint16"}, {"separator_id": 3}])
def test_a_corpus_with_an_index_says_its_own(typed: dict, tmp_path: Path) -> None:
    write_memmap(tmp_path / "a", [[5, 6], [7]], "uint16")
    with pytest.raises(ConfigError, match=r"is for files without \.idx"):
        MemmapCorpus(str(tmp_path / "a"), **typed)


def test_settings_of_models(tmp_path: Path) -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 384}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    dense = LlamaForCausalLM(LlamaConfig(**small))
    with pytest.raises(ConfigError, match=r"^peft.experts=true: LlamaForCausalLM has no experts"):
        lora_targets(dense, "all-linear", experts=True)
    mixture = Qwen3MoeForCausalLM(Qwen3MoeConfig(**small, num_experts=2, moe_intermediate_size=8))
    assert lora_targets(mixture, "all-linear", experts=True)[1]
    dense.save_pretrained(tmp_path / "model")
    pretrained = ["~model.config", f"model.pretrained={tmp_path / 'model'}", "tokenizer=bpe"]
    for typed in ("grouped_mm", "sorted_mm", "eager"):
        with pytest.raises(ConfigError, match=rf"^model.experts={typed}: LlamaForCausalLM has no"):
            train_quick(tmp_path / "run", f"model.experts={typed}")
    with pytest.raises(ConfigError, match=r"^model.revision=abc is of a hub repository"):
        train_quick(tmp_path / "run", "model.revision=abc")
    with pytest.raises(ConfigError, match=r"^model.revision=abc .* is a folder: leave it out"):
        train_quick(tmp_path / "run", *pretrained, "model.revision=abc")
    teacher = ["loss=distill", "teacher=pretrained", f"teacher.pretrained={tmp_path / 'model'}"]
    for typed in ("router_aux_loss=0.1", "mtp_loss=0.1", "train_towers=true", "experts=eager"):
        with pytest.raises(ConfigError, match=rf"^teacher.{typed}"):
            train_quick(tmp_path / "run", *teacher, f"teacher.{typed}")


def test_settings_of_towers(tmp_path: Path) -> None:
    write_chats(tmp_path, num=4)
    write_model("qwen3_vl", tmp_path)
    for typed, why in {
        "model.freeze=[visual.blocks]": "visual.blocks is not trained without model.train_towers=",
        "model.train_towers=true model.freeze=[visual]": "trains nothing, as model.freeze=",
        "dataset.columns.image=picture": "picture is not a column of the data, which has messages",
    }.items():
        with pytest.raises(ConfigError, match=rf"^{re.escape(typed[:12])}.*{why}"):
            train_ft.main(config_of_images(tmp_path, *typed.split(" ")))


@pytest.mark.parametrize(
    ("wanted", "own", "is_same"),
    [
        (["q_proj", "v_proj"], ["v_proj", "q_proj"], True),
        (["q_proj"], ["layers.0.q_proj", "layers.1.q_proj"], True),
        (["q_proj"], ["q_proj", "v_proj"], False),
        (["q_proj", "o_proj"], ["q_proj"], False),
        (["q_proj"], [], False),
    ],
)
def test_targets_of_a_continued_adapter(wanted: list[str], own: list[str], is_same: bool) -> None:
    assert same_targets(wanted, own) == is_same


@pytest.mark.parametrize("strategy", ["next_fit", "none"])
def test_packs_in_the_order_of_the_documents_are_not_made_again(strategy: str) -> None:
    with pytest.raises(ConfigError, match=rf"^packed_sequence.repack_each_epoch.*={strategy} "):
        Packer(64, strategy, repack_each_epoch=True)
    Packer(64, strategy, repack_each_epoch=True, max_packs=3)  # another sample in each epoch


def test_questions_that_no_model_was_written_for_are_told(tmp_path: Path) -> None:
    code, screen = train_quick(tmp_path / "run", "evaluation=exact_match")
    assert (code, "answers    not asked for: checkpoint.export_hf=false" in screen) == (0, True)


def test_steps_that_are_not_trained_are_not_profiled(tmp_path: Path) -> None:
    quick = ("training.max_steps=1", "checkpoint.every_steps=0")
    screen = train_quick(tmp_path / "run", *quick, "training.profile_steps=[20,30]")[1]
    assert "profiled   nothing: this run trained none of training.profile_steps=[20,30]" in screen


def test_a_metric_that_no_row_has_is_told(tmp_path: Path) -> None:
    run = RunInfo("x", tmp_path, {}, 0, {}, lambda reason: None)
    step = {"step": 1, "loss": 2.0, "grad_norm": 1.0}
    held_out = {"step": 1, "val_loss/easy": 2.0}
    with pytest.raises(ConfigError, match=r"metric=los has no known .*; did you mean loss"):
        EarlyStopping(run, metric="los")
    with pytest.raises(ValueError, match=r"no row has metric=los; did you mean loss"):
        EarlyStopping(run, metric="los", rises=False).log(step)
    with pytest.raises(ValueError, match=r"no row has metric=val_loss/hard"):
        EarlyStopping(run, metric="val_loss/hard").log(held_out)
    for metric in ("val_loss", "loss"):
        stopping = EarlyStopping(run, metric=metric)
        for row in ({"step": 0, "start_s/data": 1.0}, step, held_out):
            stopping.log(row)
        assert math.isclose(stopping.best, 2.0)
