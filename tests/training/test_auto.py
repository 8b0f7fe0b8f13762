"""`auto`: the size of a pack from the lengths of the documents, the learning rate from the kind of training."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from transformers import AutoConfig

from automodel_lite.config.components import build
from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.errors import ConfigError
from automodel_lite.models.source import CausalLM
from automodel_lite.parallel.peers import flat
from automodel_lite.run.folder import plain, saved_config
from automodel_lite.training.pack_sizes import fitted_pack_size
from automodel_lite.training.rates import learning_rate
from automodel_lite.training.resolve import resolve_auto
from automodel_lite.training.settings import build_parts
from recipes import inspect_data, prepare_data, train_ft
from tests.runs import quick_config, train_quick

AUTO = ["packed_sequence.packed_sequence_size=auto", "optimizer.lr=auto"]


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ([100, 250, 213], 256),
        ([256], 256),
        ([5], 64),  # no pack is shorter
        ([63] * 995 + [9000] * 5, 256),  # half a percent may be longer; four fill a pack
        ([64] * 400, 256),
        ([1020] * 400, 4096),
        # 180 million tokens are 500 steps of 8 packs of 4,096 many times over
        ([90] * 2_000_000, 4096),
        ([9000] * 2_000_000, 16384),
    ],
)
def test_a_pack_holds_nearly_every_document(lengths: list[int], size: int):
    assert fitted_pack_size(np.array(lengths), TrainingConfig())[0] == size


@pytest.mark.parametrize(
    ("lengths", "size", "full", "of_power"),
    [
        ([257], 260, "99 %", "packs of 512 would be 50 %"),
        ([97] * 20, 100, "97 %", "packs of 128 would be 76 %"),  # longer ones leave too few steps
        ([97] * 400, 488, "99 %", "packs of 512 would be 95 %"),  # five of them
        ([45, 47, 49, 51, 53] * 12, 100, "98 %", "packs of 128 would be 77 %"),  # two
        ([80, 85, 90, 95] * 13, 176, "99 %", "packs of 128 would be 68 %"),
    ],
)
def test_a_size_is_chosen_that_documents_fill(
    lengths: list[int], size: int, full: str, of_power: str
):
    found, reason = fitted_pack_size(np.array(lengths), TrainingConfig())
    assert (found, f"; {of_power} full, these are {full}" in reason) == (size, True), reason


def test_sizes_chosen_by_fill_are_whole_slots_and_leave_the_steps(tmp_path: Path):
    lengths = np.array([45, 47, 49, 51, 53] * 12)
    size, _ = fitted_pack_size(lengths, TrainingConfig(), multiple=16)
    assert size % 16 == 0
    assert fitted_pack_size(lengths, TrainingConfig(fp8="rowwise"))[0] % 16 == 0
    # documents end to end fill any size
    assert fitted_pack_size(lengths, TrainingConfig(), is_wrapped=True)[0] == 128
    # three to a pack of 148 would be 20 packs, 40 steps in two epochs
    assert fitted_pack_size(lengths, TrainingConfig(num_epochs=2))[0] == 100


def test_packs_grow_while_the_run_has_steps_enough():
    # 9,000 documents of 102 tokens, 3 epochs: 2.75 million tokens are 672 steps of 8 packs of 512
    lengths = np.full(9000, 102)
    assert fitted_pack_size(lengths, TrainingConfig())[0] == 512
    assert fitted_pack_size(lengths, TrainingConfig(num_epochs=12))[0] == 2048


def test_text_that_is_cut_needs_no_long_packs():
    size, reason = fitted_pack_size(np.array([90_000, 400]), TrainingConfig(), is_split=True)
    assert (size, reason) == (512, "2 documents, which may be cut")


def resolved(folder: Path, *overrides: str) -> Config:
    return resolve_auto(quick_config(folder, *AUTO, *overrides))


def test_without_packing_no_document_is_too_long(tmp_path: Path, capsys):
    """One of 200 documents is longer than the power of two that holds 99.5 % of them."""
    texts = ["a b c"] * 199 + ["a b c d e f g h " * 20]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "rows.jsonl").write_text(rows)
    files = ["dataset=files", "~dataset.num_chats", f"dataset.path={tmp_path / 'rows.jsonl'}"]
    packed = resolved(tmp_path, *files)
    ragged = resolved(tmp_path, *files, "packed_sequence=none", "packed_sequence.slot_multiple=8")
    assert packed.packed_sequence["packed_sequence_size"] == 120
    assert ragged.packed_sequence["packed_sequence_size"] == 168
    assert "168 (the longest document)" in capsys.readouterr().out


LEFT_OPEN = {
    "training.global_batch_size": "the packs, see feeding/planned.py",
    "packed_sequence.tree": "whether rows share their beginnings, see tokens/tokenize.py",
    "mesh.strategy": "decide.py",
    "mesh.cp_exchange": "decide.py",
    "model.experts": "decide.py",
    "training.precision": "decide.py",
    "training.activation_checkpointing": "decide.py",
    "training.compile": "compiling.py",
    "advanced.reshard_after_forward": "sharding.py",
    "advanced.reduce_every_micro_batch": "decide.py",
}
"""What depends on more than the settings and the data, and who decides it."""


def test_no_setting_is_open_that_the_data_answer(tmp_path: Path):
    """A new `auto` is resolved here, or has a line above."""
    open_ones = ["training.micro_batch_size=0", "training.global_batch_size=auto"]
    epochs = ["training.max_steps=null", "training.num_epochs=1"]
    config = resolved(tmp_path, *open_ones, *epochs)
    found = {key for key, value in flat(plain(config)).items() if value == "auto"}
    assert found == LEFT_OPEN.keys()
    assert config.training.micro_batch_size > 0


def test_the_size_is_bounded_by_the_positions_of_the_model(tmp_path: Path, capsys):
    chats = tmp_path / "chats.jsonl"
    turns = [
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": "one two " * 90},
    ]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 20)
    options = ["dataset=files", "~dataset.num_chats", f"dataset.path={chats}"]
    free = resolved(tmp_path / "a", *options).packed_sequence["packed_sequence_size"]
    assert free > 128
    # the run, which prints `cache: hit` of these rows, did not make them
    assert "cache      train: miss (" in capsys.readouterr().out
    resolved(tmp_path / "a", *options)
    assert "cache " not in capsys.readouterr().out
    few = "model.config.max_position_embeddings=100"
    bounded = resolved(tmp_path / "b", *options, few).packed_sequence["packed_sequence_size"]
    assert bounded == 100
    assert "the model has 100 positions" in capsys.readouterr().out
    slots = resolved(tmp_path / "c", *options, few, "packed_sequence.slot_multiple=16")
    assert slots.packed_sequence["packed_sequence_size"] == 96


@pytest.mark.parametrize(
    ("overrides", "lr", "reason"),
    [
        (["model.config.hidden_size=2048"], 6e-4, "trains a model from scratch, hidden size 2,048"),
        (
            ["peft=lora", "model.config.hidden_size=4096"],
            2e-4,
            "trains an adapter, hidden size 4,096",
        ),
        (["model.config.hidden_size=8"], 0.0048, "trains a model from scratch, hidden size 8"),
        (
            ["loss=orpo", "peft=lora", "model.config.hidden_size=1024"],
            4e-5,
            "trains an adapter on pairs of answers, hidden size 1,024",
        ),
    ],
)
def test_the_rate_follows_from_what_is_trained(
    tmp_path: Path, overrides: list[str], lr: float, reason: str
):
    config = quick_config(tmp_path, *overrides)
    model, loss = build(config.model), build(config.loss)
    assert learning_rate(model, loss, config.peft) == (lr, reason)


def test_a_pretrained_model_learns_slowest(tmp_path: Path):
    AutoConfig.for_model("llama", hidden_size=4096).save_pretrained(tmp_path)
    loss = build(quick_config(tmp_path).loss)
    model = CausalLM(pretrained=str(tmp_path))
    assert learning_rate(model, loss, {}) == (2e-5, "trains the whole model, hidden size 4,096")


@pytest.mark.parametrize(("lr", "is_noted"), [(0.05, True), (1e-9, True), (1e-3, False)])
def test_a_rate_far_from_the_usual_one_is_noted(tmp_path: Path, capsys, lr: float, is_noted: bool):
    few = ["training.micro_batch_size=0", "model.config.hidden_size=2048"]
    resolve_auto(quick_config(tmp_path, f"optimizer.lr={lr}", *few))
    noted = f"optimizer.lr={lr:g} is far from the usual 0.0006 (trains a model from scratch"
    assert (noted in capsys.readouterr().out) == is_noted


def test_a_stream_has_no_lengths(tmp_path: Path):
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    stream = ["dataset=streaming", "~dataset.num_chats", f"dataset.path={chats}"]
    with pytest.raises(ConfigError, match=r"packed_sequence_size=auto needs the lengths .* set "):
        resolved(tmp_path, *stream)


def test_a_mistake_of_the_settings_is_named_before_anything_is_tokenized(tmp_path: Path):
    with pytest.raises(ConfigError, match="teacher=none: loss=Distill"):
        resolved(tmp_path, "dataset.path=nothing.jsonl", "dataset=files", "~dataset.num_chats",
                 "loss=distill")  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "micro"),
    [
        # 8 packs of 128 are one pass of 1,024 tokens; of 1,024, two passes of four
        (["packed_sequence.packed_sequence_size=128", "training.max_steps=2"], 8),
        (["packed_sequence.packed_sequence_size=1024", "training.max_steps=2"], 4),
        (["packed_sequence.packed_sequence_size=1024", "training.global_batch_size=6"], 3),
        (["packed_sequence.packed_sequence_size=4096", "training.max_steps=2"], 1),
        # a step of as few packs as give 50 steps
        (["packed_sequence.packed_sequence_size=256", "training.num_epochs=3"], 2),
        (["packed_sequence.packed_sequence_size=256", "training.global_batch_size=null"], 1),
        (["packed_sequence=none", "training.max_steps=2"], 1),
        # of two ranks, each has four of the eight packs
        (["packed_sequence.packed_sequence_size=128", "training.max_steps=2", "mesh.cp=2"], 8),
        (["packed_sequence.packed_sequence_size=128", "training.max_steps=2", "2 ranks"], 4),
    ],
)
def test_a_forward_pass_has_packs_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], micro: int
):
    """The step stays what it is: the passes of a rank divide its packs."""
    if "mesh.cp=2" in overrides or "2 ranks" in overrides:
        monkeypatch.setenv("WORLD_SIZE", "2")
    options = ["training.global_batch_size=auto", "training.max_steps=null"]
    overrides = [text for text in overrides if text != "2 ranks"]
    config = quick_config(tmp_path, *options, "training.micro_batch_size=0", *overrides)
    assert resolve_auto(config).training.micro_batch_size == micro


def test_an_unresolved_size_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="packed_sequence_size=auto is not resolved"):
        build_parts(quick_config(tmp_path, *AUTO))


def test_an_unresolved_rate_is_refused(tmp_path: Path):
    parts = build_parts(quick_config(tmp_path, "optimizer.lr=auto"))
    with pytest.raises(
        ConfigError, match=r"optimizer.lr=auto is not resolved: call .*resolve_auto"
    ):
        parts.optimizer(nn.Linear(1, 1))


@pytest.mark.system
def test_every_program_takes_the_same_numbers_and_a_run_keeps_them(tmp_path: Path, capsys):
    """Training, the dry run, inspection and preparation; the numbers are saved, and resumed with."""
    overrides = [*AUTO, "training.max_steps=2"]
    config = quick_config(tmp_path / "run", *overrides)
    code, screen = train_quick(tmp_path / "run", *overrides)
    assert code == 0, screen
    auto = [line for line in screen.splitlines() if line.startswith("auto ")]
    assert [re.sub(r" \(.*", "", line) for line in auto] == [
        "auto       optimizer.lr: 0.0048",
        "auto       packed_sequence.packed_sequence_size: 256",
    ]
    saved = saved_config(tmp_path / "run" / "config.yaml")
    assert (saved["optimizer"]["lr"], saved["packed_sequence"]["packed_sequence_size"]) == (
        0.0048,
        256,
    )
    for main in (prepare_data.main, inspect_data.main, train_ft.main):
        capsys.readouterr()
        assert main(replace(config, dry_run=True)) == 0
        assert [
            *filter(lambda line: line.startswith("auto "), capsys.readouterr().out.splitlines())
        ] == auto
    # more chats would give other packs; a run goes on with its own
    code, screen = train_quick(
        tmp_path / "run", *AUTO, "training.max_steps=4", "checkpoint.accept_changes=true"
    )
    assert code == 0, screen
    assert not re.search("^auto ", screen, flags=re.MULTILINE)
    assert "continues from step_00000002" in screen


@pytest.mark.parametrize(("chats", "is_noted"), [(100, True), (400, False)])
def test_few_steps_are_noted(tmp_path: Path, capsys, chats: int, is_noted: bool):
    options = ["training.max_steps=null", "training.num_epochs=1", f"dataset.num_chats={chats}"]
    config = quick_config(tmp_path, *options, "training.global_batch_size=1", "dry_run=true")
    assert train_ft.main(config) == 0
    assert ("steps are few to learn from" in capsys.readouterr().out) == is_noted
