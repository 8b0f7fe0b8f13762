"""Whole runs of score heads: what is validated is what plain transformers gives of the export."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from automodel_lite.errors import ConfigError, DataError
from automodel_lite.extras.load_run import load_trained
from automodel_lite.results import RESULTS
from automodel_lite.tools.load_generator import load_exported
from recipes import evaluate
from tests.data.templates import LLAMA3, byte_tokenizer
from tests.runs import Row, config_of, train, train_until

pytestmark = pytest.mark.numbers

WORDS = {"fruit": ["apple", "pear", "plum"], "tool": ["saw", "drill"], "pet": ["dog", "cat"]}
NAMES = ("fruit", "pet", "tool")  # in the order of their numbers


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def texts(num_rows: int, seed: int) -> list[Row]:
    draw = random.Random(seed)
    rows = []
    for number in range(num_rows):
        name = NAMES[number % 3]
        words = draw.choices(WORDS[name], k=draw.randint(1, 6))
        rows.append({"text": " ".join(words), "label": name})
    return rows


def chat_pairs(num_rows: int, seed: int) -> list[Row]:
    draw = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        asked = [{"role": "user", "content": f"Name {draw.choice(NAMES)}s, please."}]
        row: Row = {"prompt": asked, "margin": draw.choice([0.0, 0.5])}
        for answer, words in (("chosen", WORDS["fruit"]), ("rejected", WORDS["tool"])):
            row[answer] = " ".join(draw.choices(words, k=draw.randint(1, 4)))
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal LM as the hub has them: a tied head, no padding token, answers that end with the
    only end token.
    """
    folder = tmp_path_factory.mktemp("base") / "llama"
    tokenizer = byte_tokenizer(LLAMA3)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The arguments that name the data of a preset."""
    folder = tmp_path_factory.mktemp("files")
    found = {}
    for preset, make in (("classify", texts), ("reward", chat_pairs)):
        trained = write(folder / f"{preset}.jsonl", make(36, 0))
        held_out = write(folder / f"{preset}_val.jsonl", make(12, 1))
        found[preset] = [f"dataset.path={trained}", f"dataset.val_path={held_out}"]
    return found


SMALL = (
    "name=x",
    "packed_sequence.packed_sequence_size=256",
    "packed_sequence.slot_multiple=4",
    "training.global_batch_size=2",
    "training.max_steps=3",
    "training.num_threads=1",
    "training.log_every_steps=1",
    "training.val_every_steps=1",
    "optimizer.lr=3e-3",
    "report=false",
)


def run(preset: str, folder: Path, base: Path, data: list[str], *more: str, ranks: int = 1) -> Any:
    where = [f"model.pretrained={base}", *data, *SMALL, *more]
    return train(preset, folder, *where, world_size=ranks)


def curve(rows: list[Row], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def held_out_rows(data: list[str]) -> list[Row]:
    path = Path(data[1].partition("=")[2])
    return [json.loads(line) for line in path.read_text().splitlines()]


@torch.no_grad()
def scores_of(model: Any, tokenizer: Any, documents: list[Any]) -> torch.Tensor:
    """The scores of texts or chats in one padded batch, as anybody computes them."""
    if isinstance(documents[0], str):
        batch = tokenizer(documents, return_tensors="pt", padding=True)
    else:
        batch = tokenizer.apply_chat_template(
            documents, return_tensors="pt", padding=True, return_dict=True
        )
    names = ("input_ids", "attention_mask")
    logits: torch.Tensor = model.eval()(**{name: batch[name] for name in names}).logits
    return logits


def val_loss(preset: str, model: Any, tokenizer: Any, rows: list[Row]) -> float:
    """The validation loss by plain transformers."""
    if preset == "classify":
        scores = scores_of(model, tokenizer, [row["text"] for row in rows])
        labels = [model.config.label2id[row["label"]] for row in rows]
        return float(F.cross_entropy(scores, torch.tensor(labels)))
    chosen, rejected = (
        scores_of(
            model,
            tokenizer,
            [[*row["prompt"], {"role": "assistant", "content": row[name]}] for row in rows],
        )[:, 0]
        for name in ("chosen", "rejected")
    )
    margins = torch.tensor([row["margin"] for row in rows])
    return float(-F.logsigmoid(chosen - rejected - margins).mean())


@pytest.mark.parametrize("preset", ["classify", "reward"])
def test_the_export_gives_in_a_padded_batch_what_was_validated(
    preset: str, base: Path, files: dict[str, list[str]], tmp_path: Path
) -> None:
    data = files[preset]
    rows = run(preset, tmp_path / "run", base, data)
    losses = curve(rows, "val_loss/val")
    assert losses[-1] < losses[0] - 0.05
    validated = [row for row in rows if "val_loss/val" in row][-1]
    assert {"val_accuracy/val"} <= validated.keys()
    assert "val_perplexity/val" not in validated
    hf = tmp_path / "run" / "hf"
    model = AutoModelForSequenceClassification.from_pretrained(hf)
    tokenizer = AutoTokenizer.from_pretrained(hf)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    # chats end with the end token, by which transformers would take the token before it for theirs
    assert (tokenizer.pad_token_id == tokenizer.eos_token_id) == (preset == "classify")
    want = val_loss(preset, model, tokenizer, held_out_rows(data))
    assert validated["val_loss/val"] == pytest.approx(want, abs=1e-5)
    if preset == "classify":
        assert model.config.id2label == dict(enumerate(NAMES))
        assert model.config.problem_type == "single_label_classification"
        assert {"val_f1/val", "val_ece/val"} <= validated.keys()
    with pytest.raises(ConfigError, match="writes no text"):
        load_exported(str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("preset", "more"),
    [("classify", []), ("reward", ["peft.trainable_tokens=['<|eot_id|>']"])],
    ids=["classify", "reward, with a token's row"],
)
def test_an_adapter_brings_its_head(
    preset: str, more: list[str], base: Path, files: dict[str, list[str]], tmp_path: Path
) -> None:
    rows = run(preset, tmp_path / "run", base, files[preset], "peft=lora", "peft.r=4", *more)
    validated = curve(rows, "val_loss/val")[-1]
    held_out = held_out_rows(files[preset])
    adapter = tmp_path / "run" / "adapter"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    names = NAMES if preset == "classify" else ("LABEL_0",)
    model = AutoModelForSequenceClassification.from_pretrained(
        adapter,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
        pad_token_id=tokenizer.pad_token_id,
    )
    assert val_loss(preset, model, tokenizer, held_out) == pytest.approx(validated, abs=1e-5)
    # merged, with its classes and its padding
    load_trained(tmp_path / "run").export(tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.id2label == dict(enumerate(names))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert val_loss(preset, merged, tokenizer, held_out) == pytest.approx(validated, abs=1e-5)


def test_ranks_that_read_their_own_shards_draw_one_head(
    base: Path, files: dict[str, list[str]], tmp_path: Path
) -> None:
    data = files["classify"]
    steps = ("training.max_steps=2", "checkpoint.export_hf=false")
    one = run("classify", tmp_path / "one", base, data, *steps)
    two = run("classify", tmp_path / "two", base, data, *steps, "mesh.strategy=fsdp", ranks=2)
    for name in ("loss", "grad_norm", "val_loss/val", "val_f1/val", "val_ece/val"):
        assert curve(two, name) == pytest.approx(curve(one, name), abs=1e-5), name


@pytest.mark.same_on_every_cpu
def test_a_run_is_continued_bit_for_bit_and_evaluated_by_its_own_classes(
    base: Path, files: dict[str, list[str]], tmp_path: Path
) -> None:
    data = files["classify"]
    saves = ("checkpoint.every_steps=2", "checkpoint.keep_last=2")
    whole = curve(run("classify", tmp_path / "whole", base, data, *saves), "loss")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step_00000003")
    shutil.rmtree(tmp_path / "parts" / "hf")
    (tmp_path / "parts" / "STATUS.json").unlink()
    parts = run("classify", tmp_path / "parts", base, data, *saves)
    assert curve(parts, "loss") == whole
    # a file that lacks a class
    some = [row for row in texts(12, 1) if row["label"] != "pet"]
    path = write(tmp_path / "some.jsonl", some)
    names = (f"model.pretrained={tmp_path / 'parts'}", f"dataset.path={path}", "name=x")
    assert evaluate.main(config_of("classify", tmp_path / "e", *names)) == 0
    found = RESULTS["all"]
    assert found["documents"] == 8
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "parts" / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "parts" / "hf")
    assert found["loss"] == pytest.approx(val_loss("classify", model, tokenizer, some), abs=1e-5)
    # another class than the model has
    path = write(tmp_path / "other.jsonl", [{"text": "oak", "label": "tree"}, *some])
    names = (f"model.pretrained={tmp_path / 'parts'}", f"dataset.path={path}", "name=x")
    with pytest.raises(
        DataError, match=r"other\.jsonl:1: column label is 'tree', which is none of"
    ):
        evaluate.main(config_of("classify", tmp_path / "e", *names))


REFUSED = {
    "tokens from a score head": (
        "finetune",
        ["dataset.format=text", "model.head=score"],
        "model.head=score: loss=FusedLinearCrossEntropy is of tokens: set loss=classify",
    ),
    "scores from a head of tokens": (
        "classify",
        ["model.head=lm"],
        "loss=Classify reads the scores of documents: set model.head=score",
    ),
    "documents that are cut": (
        "classify",
        ["packed_sequence.overlong=truncate"],
        "packed_sequence.overlong=truncate: a document is scored at its end, and stays whole: use drop or error",
    ),
    "a text that is written": (
        "classify",
        ["samples.prompts=[Hi]"],
        "samples.prompts with model.head=score",
    ),
    "tasks that are answered": (
        "classify",
        ["tasks=files", "tasks.files=[a.jsonl]"],
        "tasks with model.head=score",
    ),
    "added tokens beside an adapter": (
        "classify",
        ["peft=lora", "model.resize_embeddings=true"],
        "set peft.modules_to_save=[embed_tokens].",
    ),
    "trained tokens": ("classify", ["tokenize.train_on=all"], "tokenize.train_on=all chooses"),
    "labels for pairs": (
        "reward",
        ["dataset.format=labeled"],
        "loss=reward learns which of two answers is better, and the rows have labels",
    ),
    "no label": (
        "classify",
        ["dataset.format=text"],
        "the rows have no label, and a score head learns one for each document",
    ),
}


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(("preset", "more", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_go_with_a_score_head_is_refused(
    preset: str, more: list[str], said: str, base: Path, files: dict[str, list[str]], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        run(preset, tmp_path / "run", base, files["classify"], *more)


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("preset", ["classify", "reward"])
def test_a_model_without_a_score_head_is_not_evaluated_with_one_drawn_at_random(
    preset: str, base: Path, files: dict[str, list[str]], tmp_path: Path
) -> None:
    names = (f"model.pretrained={base}", files[preset][0], "name=x")
    with pytest.raises(ConfigError, match="has no score head"):
        evaluate.main(config_of(preset, tmp_path / "e", *names))


@pytest.mark.same_on_every_cpu
def test_classes_that_are_not_trained_on_are_noted(
    base: Path, files: dict[str, list[str]], tmp_path: Path
) -> None:
    held_out = write(tmp_path / "val.jsonl", [{"text": "oak", "label": "tree"}])
    note = "NOTE: no document that is trained on has the label tree: the model never learns it"
    for val, is_noted in ((f"dataset.val_path={held_out}", True), (files["classify"][1], False)):
        data = (f"model.pretrained={base}", files["classify"][0], val)
        code, screen = train_until(
            "classify", tmp_path / "run", *data, *SMALL, "dry_run=true", stop_at=0
        )
        assert (code, note in screen) == (0, is_noted)
