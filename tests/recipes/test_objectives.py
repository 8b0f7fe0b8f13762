"""Whole runs of preference and distillation: every layout of ranks alike, resumed bit for bit, LoRA too."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parallel.mesh import init_mesh
from automodel_lite.results import RESULTS
from automodel_lite.training.build import build_model
from automodel_lite.training.decide import decide
from automodel_lite.training.settings import build_parts
from recipes import evaluate, score
from tests.data.templates import MARKED, byte_tokenizer
from tests.runs import Row, config_of, rows_of, train

pytestmark = pytest.mark.numbers

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Japan": "Tokyo",
}
SMALL = (
    "name=x",
    "model=llama_smoke",
    "tokenizer=bpe",
    "packed_sequence.packed_sequence_size=256",
    "training.global_batch_size=4",
    "training.num_threads=1",
    "training.log_every_steps=1",
    "training.val_every_steps=2",
    "training.max_steps=4",
    "lr_scheduler.warmup_steps=0",
    "optimizer.lr=1e-3",
    "checkpoint.every_steps=2",
    "checkpoint.keep_last=2",
)


NO_EXPORT = "checkpoint.export_hf=false"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs with prompts of several lengths."""
    file, draw = tmp_path_factory.mktemp("pairs") / "pairs.jsonl", random.Random(0)
    rows = []
    for _ in range(64):
        asked, other = draw.sample(sorted(CAPITALS), 2)
        prompt = f"What is the capital of {asked}? " * draw.randint(1, 3)
        chosen, rejected = (
            f"The capital of {asked} is {CAPITALS[asked]}.",
            f"I believe it is {CAPITALS[other]}.",
        )
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def dpo(folder: Path, pairs: Path, *overrides: str, world_size: int = 1) -> list[Row]:
    where = (
        f"dataset.path={pairs}",
        "dataset.val_frac=0.2",
        f"cache_dir={folder.parent / 'cache'}",
    )
    return train("dpo", folder, *where, *SMALL, *overrides, world_size=world_size)


def curve(rows: list[Row], name: str = "loss") -> list[float]:
    return [row[name] for row in rows if name in row]


@pytest.fixture(scope="module")
def trained(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of DPO, which no test changes."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    dpo(folder, pairs)
    return folder


def test_dpo_begins_at_ln_2_and_learns_to_prefer(trained: Path) -> None:
    rows = rows_of(trained)
    losses = curve(rows)
    assert losses[0] == pytest.approx(0.69314718, abs=1e-6)
    assert losses[-1] < 0.6
    assert curve(rows, "loss/accuracy")[-1] == 1.0
    assert curve(rows, "loss/reward_margin")[0] == pytest.approx(0, abs=1e-5)
    last = [row for row in rows if "val_loss/val" in row][-1]
    assert last["val_loss/val"] < 0.6
    assert last["val_accuracy/val"] == 1.0
    assert last["val_cross_entropy/val"] > 1


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("loss", ["loss=simpo", "loss=orpo"])
def test_losses_without_a_reference_learn_to_prefer(loss: str, pairs: Path, tmp_path: Path) -> None:
    rows = dpo(tmp_path / "run", pairs, loss, NO_EXPORT)
    assert curve(rows)[-1] < curve(rows)[0] - 0.01
    margins = curve(rows, "loss/reward_margin")
    assert margins[-1] > margins[0]
    assert curve(rows, "loss/kl") == []  # there is nothing to be far from


@pytest.fixture(scope="module")
def one(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("one") / "run"
    return dpo(folder, pairs, *OF_LAYOUTS)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers with a label, good or bad."""
    file = tmp_path_factory.mktemp("judged") / "judged.jsonl"
    draw = random.Random(0)
    rows = []
    for _ in range(32):
        asked, other = draw.sample(sorted(CAPITALS), 2)
        is_good = draw.random() < 0.9
        answer = f"It is {CAPITALS[asked]}." if is_good else f"I believe it is {CAPITALS[other]}."
        prompt = f"What is the capital of {asked}? " * draw.randint(1, 3)
        rows.append({"prompt": prompt, "completion": answer, "label": is_good})
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_kto_learns_from_single_answers_on_any_number_of_ranks(
    judged: Path, tmp_path: Path
) -> None:
    where = (
        f"dataset.path={judged}",
        "dataset.val_frac=0.2",
        f"cache_dir={tmp_path / 'cache'}",
        "packed_sequence.packed_sequence_size=512",
        "training.global_batch_size=2",
        "training.max_steps=3",
        "optimizer.lr=3e-3",
        NO_EXPORT,
    )
    one = train("kto", tmp_path / "one", *SMALL, *where)
    assert curve(one)[0] == pytest.approx(0.5, abs=1e-6)
    assert curve(one)[-1] < 0.499
    assert max(curve(one, "loss/reference_point")) > 0
    two = train("kto", tmp_path / "two", *SMALL, *where, "mesh.strategy=fsdp", world_size=2)
    for name in ("loss", "loss/reference_point", "val_loss/val", "val_reference_point/val"):
        assert curve(two, name) == pytest.approx(curve(one, name), abs=1e-4)


OF_LAYOUTS = ("packed_sequence.slot_multiple=4", "training.max_steps=2", NO_EXPORT)
LAYOUTS = {"dp 2": "mesh.strategy=ddp", "fsdp 2": "mesh.strategy=fsdp", "cp 2": "mesh.cp=2"}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=() if name == "fsdp 2" else pytest.mark.system)
        for name, layout in LAYOUTS.items()
    ],
)
def test_two_ranks_prefer_as_one(layout: str, one: list[Row], pairs: Path, tmp_path: Path) -> None:
    """Slots of a multiple of 4 give the packs that context parallelism needs to all."""
    two = dpo(tmp_path / "two", pairs, *OF_LAYOUTS, layout, world_size=2)
    assert len(curve(two)) == 2
    assert curve(two) == pytest.approx(curve(one), abs=1e-5)
    assert curve(two, "loss/reward_margin") == pytest.approx(
        curve(one, "loss/reward_margin"), abs=1e-4
    )
    assert curve(two, "val_loss/val") == pytest.approx(curve(one, "val_loss/val"), abs=1e-5)


@pytest.mark.same_on_every_cpu
def test_a_resumed_run_is_the_same_bit_for_bit(trained: Path, pairs: Path, tmp_path: Path) -> None:
    whole = curve(rows_of(trained))
    shutil.copytree(trained, tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step_00000004")
    shutil.rmtree(tmp_path / "parts" / "hf")
    (tmp_path / "parts" / "STATUS.json").unlink()
    parts = curve(dpo(tmp_path / "parts", pairs, NO_EXPORT))
    assert len(whole) == len(parts) == 4
    assert parts == whole


def test_lora_prefers_against_the_model_without_it(
    trained: Path, pairs: Path, tmp_path: Path
) -> None:
    rows = dpo(
        tmp_path / "lora",
        pairs,
        "model=pretrained",
        f"model.pretrained={trained / 'hf'}",
        "tokenizer=pretrained",
        "peft=lora",
    )
    assert curve(rows)[0] == pytest.approx(0.69314718, abs=1e-6)
    assert curve(rows)[-1] < curve(rows)[0]


CHATS = [
    {"messages": [{"role": "user", "content": "Peru?"}, {"role": "assistant", "content": "Lima."}]}
] * 50


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("chats", "loss", "said"),
    [
        (
            [],
            "fused_linear_cross_entropy",
            "column answers, which loss=FusedLinearCrossEntropy does not use",
        ),
        (CHATS, "dpo", "loss=Dpo needs the per-token column answers: train on preference pairs"),
    ],
    ids=["pairs for single answers", "chats for pairs"],
)
def test_a_loss_that_does_not_fit_is_refused_first(
    chats: list[Row], loss: str, said: str, pairs: Path, tmp_path: Path
) -> None:
    """Before the model is read: its folder has no weights."""
    smallest = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    LlamaConfig(vocab_size=300, **smallest).save_pretrained(tmp_path / "model")
    if chats:
        pairs = tmp_path / "chats.jsonl"
        pairs.write_text("\n".join(map(json.dumps, chats)))
    model = ("model=pretrained", f"model.pretrained={tmp_path / 'model'}")
    with pytest.raises(ConfigError, match=said):
        dpo(
            tmp_path / "run",
            pairs,
            *model,
            f"loss={loss}",
            f"dataset.format={'null' if chats else 'preference'}",
        )


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("kind", ["chats", "pairs"])
def test_pairs_beside_other_documents_are_refused(kind: str, pairs: Path, tmp_path: Path) -> None:
    """In one pack, where the first pack has both: the chats were packed and trained nothing."""
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    given = {"pairs": (pairs, "preference"), "chats": (tmp_path / "chats.jsonl", "null")}
    sources = [
        f"dataset.sources.{name}={{repeat:1,dataset:{{format:{form},path:{path},"
        "_target_:automodel_lite.data.reading.files.FilesDataset}}"
        for name, (path, form) in given.items()
    ]
    where = ("name=x", "dataset=mixture", *sources, *SMALL, f"dataset.seed={len(kind)}")
    loss = "simpo" if kind == "pairs" else "fused_linear_cross_entropy"
    with pytest.raises(DataError, match="train: some documents bring answers, and others do not"):
        train("finetune", tmp_path / "run", *where, f"loss={loss}")


def test_pairs_are_evaluated_without_their_reference(
    trained: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the cross-entropy that training logged: the start model is none of the arguments."""
    given = [f"dataset.path={pairs}", "dataset.val_frac=0.2", f"model.pretrained={trained}"]
    size = "packed_sequence.packed_sequence_size=256"
    assert evaluate.main(config_of("dpo", tmp_path / "run", "name=x", *given, size)) == 0
    assert "next-token cross-entropy, in place of Dpo" in capsys.readouterr().out
    logged = curve(rows_of(trained), "val_cross_entropy/val")[-1]
    assert RESULTS["val"]["loss"] == pytest.approx(logged, rel=1e-5)


@pytest.mark.same_on_every_cpu
def test_the_model_card_names_the_method(trained: Path) -> None:
    card = (trained / "hf/README.md").read_text()
    assert "- dpo" in card
    assert "| method | dpo |" in card


@pytest.mark.same_on_every_cpu
def test_a_teacher_is_a_part_of_the_memory(tmp_path: Path) -> None:
    """In fp32 as much as its student's weights."""
    smallest = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    tokenizer = byte_tokenizer(MARKED)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **smallest)).save_pretrained(
        tmp_path / "model"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    where = (
        f"model.pretrained={tmp_path / 'model'}",
        "dataset.path=none",
        "name=x",
        "training.precision=fp32",
        "packed_sequence.packed_sequence_size=128",
        "training.micro_batch_size=1",
        "optimizer.lr=1e-3",
    )
    weights = []
    for preset, more in (
        ("finetune", []),
        ("distill", [f"teacher.pretrained={tmp_path / 'model'}"]),
    ):
        config = config_of(preset, tmp_path / "run", *where, *more)
        mesh = init_mesh(config.mesh)
        decided = decide(build_parts(config), tokenizer, mesh.shape, mesh.device)
        weights.append(build_model(decided, tokenizer, mesh).memory.weights)
    assert weights[1] == 2 * weights[0] > 0


@pytest.mark.parametrize("kind", ["forward", pytest.param("jsd", marks=pytest.mark.system)])
def test_a_student_taught_by_itself_stays_where_it_is(
    kind: str, trained: Path, tmp_path: Path
) -> None:
    """Its gradients are rounding, of 1e-9: with the usual eps AdamW would make steps of them."""
    model = trained / "hf"
    rows = train(
        "distill",
        tmp_path / "student",
        "dataset=toy_chat",
        "dataset.num_chats=60",
        f"model.pretrained={model}",
        f"teacher.pretrained={model}",
        f"loss.kind={kind}",
        *(setting for setting in SMALL if setting not in ("model=llama_smoke", "tokenizer=bpe")),
        "packed_sequence.packed_sequence_size=1024",
        "optimizer.eps=1e-3",
        "optimizer.weight_decay=0",
    )
    assert curve(rows) == pytest.approx([0] * 4, abs=1e-7)
    assert curve(rows, "val_loss/held_out") == pytest.approx([0, 0], abs=1e-7)
    assert curve(rows, "val_cross_entropy/held_out")[1] == pytest.approx(
        curve(rows, "val_cross_entropy/held_out")[0], rel=1e-5
    )
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "student/hf")
    )
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6)


@pytest.mark.system
def test_a_whole_stored_vocabulary_teaches_as_the_teacher_does(
    trained: Path, pairs: Path, tmp_path: Path
) -> None:
    dpo(tmp_path / "other", pairs, "seed=5", "training.max_steps=2", "checkpoint.every_steps=0")
    common = (
        "dataset=toy_chat",
        "dataset.num_chats=60",
        f"model.pretrained={trained / 'hf'}",
        f"cache_dir={tmp_path / 'cache'}",
        *(setting for setting in SMALL if setting not in ("model=llama_smoke", "tokenizer=bpe")),
        "packed_sequence.packed_sequence_size=1024",
    )
    teacher = tmp_path / "other" / "hf"
    vocab_size = json.loads((teacher / "config.json").read_text())["vocab_size"]
    in_memory = train("distill", tmp_path / "a", *common, f"teacher.pretrained={teacher}")
    stored = (*common, "loss=distill_topk", f"loss.teacher={teacher}", f"loss.top_k={vocab_size}")
    with pytest.raises(ConfigError, match="with the same arguments first"):
        train("finetune", tmp_path / "b", *stored)
    assert score.main(config_of("finetune", tmp_path / "b", *stored)) == 0
    from_cache = train("finetune", tmp_path / "b", *stored)
    # log-probabilities are stored in fp16
    assert curve(from_cache) == pytest.approx(curve(in_memory), abs=1e-3)
