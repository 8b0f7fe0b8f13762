"""`automodel-lite train MODEL DATA`: what two words stand for, and what is said of wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from automodel_lite.cli.job import Job, job_of, name_of, takes_words
from automodel_lite.cli.recipes import Recipe
from automodel_lite.cli.sources import Sources
from automodel_lite.errors import ConfigError
from tests.ranks import in_a_process

TRAIN = Recipe("recipes.train_ft:main")
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LOOK = {"type": "image", "image": "a.png"}
ROWS = {
    "chats": (CHAT, "finetune", "chats"),
    "prompts": ({"question": "a", "answer": "b"}, "finetune", "prompts with answers"),
    "text": ({"text": "a b"}, "finetune", "plain text"),
    "pairs": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "dpo",
        "pairs of a chosen and a rejected answer",
    ),
    "judged": (
        {"prompt": "a", "completion": "b", "label": False},
        "kto",
        "answers with a label, good or bad",
    ),
    "decisions": (
        {"state": "a", "questions": {"q": {"type": "noul"}}, "answers": {"q": True}},
        "decisions",
        "questions with fixed choices",
    ),
    "decisions about images": (
        {"state": "a", "question": "b?", "type": "noul", "label": True, "images": ["a.png"]},
        "decisions",
        "questions with fixed choices about images",
    ),
    "policies": (
        {"input_ids": [1, 2], "loss_mask": [0, 1], "advantages": [0.0, 1.0]},
        "policy",
        "tokens with advantages",
    ),
    "a column of images": ({**CHAT, "images": ["a.png"]}, "finetune", "chats with images"),
    "a part of a turn": (
        {"messages": [{"role": "user", "content": [LOOK]}, CHAT["messages"][1]]},
        "finetune",
        "chats with images",
    ),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")


def write(name: str, row: dict, count: int = 100) -> str:
    Path(name).parent.mkdir(exist_ok=True, parents=True)
    Path(name).write_text((json.dumps(row) + "\n") * count)
    return name


def job(*words: str, preset: str | None = None, recipe: Recipe = TRAIN) -> Job:
    return job_of(recipe, Sources(), words, preset)


@pytest.mark.parametrize("kind", ROWS)
def test_the_rows_choose_the_preset(kind: str) -> None:
    row, preset, said = ROWS[kind]
    found = job("model", write("rows.jsonl", row))
    assert (found.preset, found.problems) == (preset, ())
    assert found.lines[0] == f"--config-name {preset}: the rows are {said}, 100 documents"
    assert ("dataset=images" in found.chosen) == ("images" in said)
    # what can be asked is asked; policies and pairs have no one answer, decisions are judged anyway
    asks = kind not in ("text", "pairs", "judged", "policies") and preset != "decisions"
    assert ("evaluation=exact_match" in found.chosen) == asks
    assert ("dataset.val_frac=0.08" in found.chosen) == (kind != "policies")


@pytest.mark.parametrize(
    ("row", "typed", "preset"),
    [
        ({"q": "a", "good": "b", "bad": "c"}, ["chosen=good", "rejected=bad", "prompt=q"], "dpo"),
        ({"q": "a", "a": "b", "ok": True}, ["label=ok", "prompt=q", "completion=a"], "kto"),
        ({"q": "a", "a": "b"}, ["prompt=q", "completion=a"], "finetune"),
    ],
    ids=["pairs", "judged", "prompts"],
)
def test_columns_that_are_named_choose_the_preset_too(
    row: dict, typed: list[str], preset: str
) -> None:
    file = write("rows.jsonl", row)
    by_key = job("model", file, *(f"dataset.columns.{one}" for one in typed))
    whole = ",".join(one.replace("=", ": ") for one in typed)
    at_once = job("model", file, f"dataset.columns={{{whole}}}")
    assert (by_key.preset, at_once.preset) == (preset, preset)
    assert (by_key.problems, at_once.problems) == ((), ())


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("null", "dataset.val_frac=0.08: 8 documents"),
        ("50", "dataset.val_frac=0.16: 8 documents"),
        ("abc", "dataset.val_frac=0.08: 8 documents"),  # refused with the other settings
    ],
)
def test_a_limit_of_documents_bounds_what_is_kept_aside(typed: str, line: str) -> None:
    found = job("model", write("rows.jsonl", CHAT), f"dataset.max_documents={typed}")
    assert found.lines[-1].startswith(line)


def test_a_tokenized_corpus_is_pre_trained_on() -> None:
    Path("corpus").mkdir()
    np.arange(100, dtype=np.uint16).tofile("corpus/a.bin")
    found = job("model", "corpus")
    assert found.preset == "pretrain"
    assert "dataset.path='corpus/a.bin'" in found.chosen


def test_all_that_is_left_out_is_chosen_and_what_is_typed_stands() -> None:
    data = write("gsm8k/train.jsonl", CHAT, 1000)
    assert job("model", data).chosen == (
        "model.pretrained='model'",
        "dataset.path='gsm8k/train.jsonl'",
        "name='model-gsm8k'",
        "dataset.val_frac=0.05",
        "evaluation=exact_match",
        "evaluation.num_questions=8",
        "evaluation.max_new_tokens=128",
    )
    typed = ["name=mine", "dataset.val_path=held.jsonl", "evaluation=none"]
    assert job("model", data, *typed).chosen == (
        "model.pretrained='model'",
        "dataset.path='gsm8k/train.jsonl'",
    )
    # a preset that is named stays, and nothing is held out that it does not
    assert job("model", data, preset="lora") == Job(
        "lora",
        ("model.pretrained='model'", "dataset.path='gsm8k/train.jsonl'", "name='model-gsm8k'"),
    )


def test_what_a_shell_makes_of_a_pattern_is_a_list() -> None:
    names = [write(f"part {number}.jsonl", CHAT, 10) for number in range(2)]
    assert "dataset.path=['part 0.jsonl','part 1.jsonl']" in job("model", *names).chosen


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("HuggingFaceTB/SmolLM2-135M", "data/chats.jsonl"), "SmolLM2-135M-chats"),
        (("HuggingFaceTB/SmolLM2-135M", "./data/chats.jsonl.gz"), "SmolLM2-135M-chats"),
        (("runs/first/hf", "gsm8k/train.jsonl"), "first-gsm8k"),
        (("runs/first/", "logs/"), "first-logs"),
        (("/m/Llama 3", "Müllers Daten (neu).csv"), "Llama-3-Müllers-Daten-neu"),
        (("m", "train.jsonl"), "m-train"),
        (("m", "data/*.jsonl"), "m-data"),
    ],
)
def test_a_name_is_made_of_both_words(words: tuple[str, str], name: str) -> None:
    assert name_of(*words) == name


WRONG = [
    (
        ["chats.jsonl"],
        "MODEL is missing, a folder or a hub name: automodel-lite train MODEL chats.jsonl.",
    ),
    (["model"], "DATA is missing: automodel-lite train model DATA."),
    (
        ["chats.jsonl", "model"],
        "chats.jsonl is data, and model a model: the model stands first, automodel-lite train "
        "model chats.jsonl.",
    ),
    (
        ["model", "chats.jsonl", "lora"],
        "lora: a preset is chosen with --config-name lora.",
    ),
    (
        ["llama_tiny", "chats.jsonl"],
        "llama_tiny is a model from scratch: write model=llama_tiny tokenizer=bpe in its place.",
    ),
    (
        ["model", "chats.jsonl,chats.jsonl"],
        "dataset.path=chats.jsonl,chats.jsonl: several files: name them one after the other, "
        "chats.jsonl chats.jsonl.",
    ),
    (
        ["model", "dataset.path=a.jsonl", "chats.jsonl"],
        "chats.jsonl: the data are dataset.path=a.jsonl already.",
    ),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG, ids=[" ".join(one[0]) for one in WRONG])
def test_a_word_that_is_missing_or_misplaced(words: list[str], sentence: str) -> None:
    write("chats.jsonl", CHAT)
    assert list(map(str, job(*words).problems)) == [sentence]


def test_a_model_from_scratch_stands_for_the_word() -> None:
    write("chats.jsonl", CHAT)
    found = job("chats.jsonl", "model=llama_tiny", "tokenizer=bpe")
    assert not found.problems
    assert found.lines[1] == "name=llama_tiny-chats: the same command continues this run"
    assert not any(text.startswith("model.pretrained") for text in found.chosen)


def test_a_preset_is_no_word() -> None:
    with pytest.raises(ConfigError, match=r"^finetune: a preset is chosen with --config-name fine"):
        job("finetune")
    assert not takes_words(TRAIN, ["mine.yaml"], None)
    assert not takes_words(TRAIN, ["model", "training.max_steps"], None)  # its `=` was forgotten
    assert not takes_words(TRAIN, ["model"], "finetune")
    assert not takes_words(Recipe("my.kd:main"), ["model", "data"], None)


def test_a_setting_that_is_taken_out_is_no_word() -> None:
    write("chats.jsonl", CHAT)
    found = job("model", "chats.jsonl", "~optimizer.lr")
    assert not found.problems
    assert "dataset.path='chats.jsonl'" in found.chosen


def test_rows_that_nothing_trains_on_are_told_beside_the_rest() -> None:
    Path("numbers.csv").write_text("a,b,c\n1,2,3\n")
    (problem,) = job("model", "numbers.csv").problems
    assert str(problem).startswith("the columns a, b, c match no known format")
    assert not job("model", "numbers.csv", "dataset.columns.text=a").problems


def test_everything_wrong_with_a_command_is_one_answer(tmp_path: Path) -> None:
    from automodel_lite.cli import run_recipe

    write("chats.jsonl", CHAT)
    words = ["modle", "chatz.jsonl", "training.max_stepz=4", "optimizer.lr=fast", "peft=lor"]
    code, screen = in_a_process(run_recipe, tmp_path, "recipes.train_ft:main", words)
    assert code == 2
    assert screen.strip().splitlines() == [
        f"model.pretrained=modle does not exist (looked in {tmp_path}); did you mean model?",
        f"dataset.path=chatz.jsonl does not exist (looked in {tmp_path}); did you mean "
        "chats.jsonl?",
        "peft=lor: no such option; did you mean lora? The options are dora, lora, none, qlora.",
        "training.max_stepz=4: unknown key; did you mean training.max_steps?",
        "optimizer.lr=fast must be a number or auto.",
    ]


def test_a_file_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    from automodel_lite.cli import run_recipe

    write("a.jsonl", CHAT)
    write("b.jsonl", CHAT)
    words = ["model", "a.jsonl,b.jsonl"]
    code, screen = in_a_process(run_recipe, tmp_path, "recipes.train_ft:main", words)
    assert (code, screen.strip().splitlines()) == (
        2,
        [
            "dataset.path=a.jsonl,b.jsonl: several files: name them one after the other, a.jsonl "
            "b.jsonl."
        ],
    )
