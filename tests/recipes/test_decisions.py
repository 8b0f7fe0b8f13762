"""A run on decisions to its end, and the answers of what it exports."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_lite.data.formats.decisions import decisions_of, record
from automodel_lite.data.tokens.decisions import DecisionRenderer, DecisionStyle, order_of
from automodel_lite.errors import ConfigError
from automodel_lite.extras.hub import write_card
from automodel_lite.extras.report import draw_run
from automodel_lite.results import RESULTS
from recipes import decide, evaluate
from tests.runs import Row, config_of, train

pytestmark = pytest.mark.numbers

SMALL = (
    "name=x",
    "model=llama_smoke",
    "tokenizer=bpe",
    "packed_sequence.packed_sequence_size=1024",
    "training.global_batch_size=2",
    "training.num_threads=1",
    "training.max_steps=3",
    "training.val_every_steps=2",
    "checkpoint.every_steps=2",
    "optimizer.lr=3e-3",
    "seed=3",
)
QUESTIONS = {
    "kind": {"type": "choice", "instructions": "Which?", "criteria": ["fruit", "tool", "bird"]},
    "big": {"type": "noul", "instructions": "Is it big?"},
    "rank": {"type": "score", "instructions": "How far?", "criteria": ["near", "far", "out"]},
}


def rows(num: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    found = []
    for number in range(num):
        answers = {"kind": draw.choice(["fruit", "tool", "bird"]), "big": draw.random() < 0.5}
        state = f"Thing {number}: a {answers['kind']}, {'large' if answers['big'] else 'small'}. "
        soft = {"rank": [0.5, 0.25, 0.25]}
        found.append({"id": f"t{number}", "state": state * 3, "questions": QUESTIONS,
                      "answers": answers, "soft_labels": soft})  # fmt: skip
    return found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, rows(40))))
    return path


def run(folder: Path, file: Path, *more: str, world_size: int = 1) -> list[Row]:
    where = (f"dataset.path={file}", "dataset.val_frac=0.2", f"cache_dir={folder.parent}/cache")
    return train("decisions", folder, *where, *SMALL, *more, world_size=world_size)


@pytest.fixture(scope="module")
def trained(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(folder, file)
    return folder


def test_validation_judges_answers(trained: Path) -> None:
    last = json.loads((trained / "decisions.jsonl").read_text().splitlines()[-1])
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in reversed(metrics) if "val_ece/val" in row)
    numbers = last["held_out"]["val"]
    assert (numbers["questions"], numbers["records"]) == (24, 8)
    for name in ("loss", "accuracy", "brier", "ece", "records_right"):
        assert row[f"val_{name}/val"] == pytest.approx(numbers[name], abs=1e-5)
    assert row["val_temperature/val"] == last["fitted"]["temperature"]
    assert row["val_calibrated_ece/val"] == pytest.approx(numbers["calibrated"]["ece"])
    assert numbers["calibrated"]["loss"] <= numbers["loss"]
    by_question = numbers["by_question"]
    assert [one["questions"] for one in by_question.values()] == [8, 8, 8]
    mean = np.mean([one["accuracy"] for one in by_question.values()])
    assert mean == pytest.approx(numbers["accuracy"])


def test_a_validation_counts_questions_alone(
    trained: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No tokens: a question that is asked without an answer has the first letter as its label."""
    by_part = json.loads((trained / "decisions.jsonl").read_text().splitlines()[-1])
    assert not [x for x in (trained / "metrics.jsonl").read_text().split('"') if "token_acc" in x]
    given = (f"model.pretrained={trained}", f"dataset.path={file}", "dataset.val_frac=0.2")
    more = ("name=x", "seed=3", "packed_sequence.packed_sequence_size=1024")
    config = config_of("decisions", tmp_path, *given, *more, "tokenize.unanswered=ask")
    assert evaluate.main(config) == 0
    want = by_part["held_out"]["val"]
    for name in ("loss", "accuracy", "brier", "ece", "records_right"):
        assert RESULTS["val"][name] == pytest.approx(want[name], abs=1e-5)
    assert "perplexity" not in RESULTS["val"]
    said = f"answers    val: loss {want['loss']:.4f}, accuracy {want['accuracy']:.2%}"
    assert said in capsys.readouterr().out


def test_the_export_says_how_it_was_asked(trained: Path) -> None:
    found = json.loads((trained / "hf" / "decisions.json").read_text())
    last = json.loads((trained / "decisions.jsonl").read_text().splitlines()[-1])
    assert found["temperature"] == last["fitted"]["temperature"] != 1
    assert found["step"] == 3
    assert found["written"] == {
        "choice_prefix": "choice#", "permute_choices": True, "template_kwargs": {}, "seed": 3,
    }  # fmt: skip
    write_card(trained, trained / "hf")
    card = (trained / "hf" / "README.md").read_text()
    assert "temperature " + f"{found['temperature']:.3g}" in card
    assert "| kind | 8 |" in card
    draw_run(trained, None)
    page = (trained / "report.html").read_text()
    assert "val: kind" in page
    assert "The loss\n(nats per question) should fall" in page


def test_a_mean_of_checkpoints_takes_no_temperature_of_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The held-out answers of the last step are not those of the mean."""
    from recipes import average

    assert average.main([str(trained), "--to", str(tmp_path / "mean")]) == 0
    assert "temperature 1, as no validation has judged these weights" in capsys.readouterr().out
    found = json.loads((tmp_path / "mean" / "decisions.json").read_text())
    assert (found["temperature"], found["fitted"], found["held_out"]) == (1.0, {}, {})
    assert found["written"]["seed"] == 3
    card = (tmp_path / "mean" / "README.md").read_text()
    assert "none was fitted, as no validation has judged these weights" in card


def plain_answers(folder: Path, row: dict[str, Any], temperature: float) -> dict[str, Any]:
    """Probabilities of the choices by transformers, a question at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    style = DecisionStyle(seed=3)
    renderer = DecisionRenderer(tokenizer.backend_tokenizer, style)
    found = {}
    for decision in decisions_of(record(row)):
        order = order_of(decision, style)
        turns, _ = renderer.messages(decision)
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(f"{text}choice#", add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        probs = (logits[renderer.letter_ids(len(order))] / temperature).softmax(-1).tolist()
        by_place = dict(zip(order, probs, strict=True))
        names = [name for name, _ in decision.choices]
        found[decision.name] = {name: by_place[place] for place, name in enumerate(names)}
    return found


def names_of(question: str) -> dict[str, int]:
    """Places of the levels of a score, by their names."""
    return {str(at): at for at in range(len(QUESTIONS[question]["criteria"]))}


def asked(folder: Path, tmp_path: Path) -> Path:
    """A file of two records, one of whose questions have no answer, and one decision in a third."""
    first, second = rows(2)
    del second["answers"], second["soft_labels"]
    path = tmp_path / "asked.jsonl"
    path.write_text("\n".join(map(json.dumps, (first, second))))
    return path


def test_answers_are_those_of_transformers(trained: Path, tmp_path: Path) -> None:
    """In the order of the file, with the order of the prompt undone, at the fitted temperature."""
    path = asked(trained, tmp_path)
    out = tmp_path / "answers.jsonl"
    assert decide.main([str(trained), str(path), "--out", str(out)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in found] == ["t0", "t1"]
    temperature = json.loads((trained / "hf" / "decisions.json").read_text())["temperature"]
    for row, given in zip(found, map(json.loads, path.read_text().splitlines()), strict=True):
        want = plain_answers(trained / "hf", given, temperature)
        assert row["probabilities"].keys() == want.keys()
        for name, probs in want.items():
            assert row["probabilities"][name] == pytest.approx(probs, abs=1e-5)
            best = max(probs, key=probs.__getitem__)
            as_typed = {"kind": best, "big": best == "true", "rank": names_of("rank").get(best)}
            assert row["answers"][name] == as_typed[name]


def test_a_known_answer_is_compared_and_printed(
    trained: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = asked(trained, tmp_path)
    assert decide.main([str(trained), str(path), "--temperature", "2"]) == 0
    said = capsys.readouterr().out
    assert "t1\n  kind: " in said
    assert "3 answers are known: loss " in said
    with pytest.raises(ConfigError, match="does not exist: name a file of questions"):
        decide.main([str(trained), str(tmp_path / "none.jsonl")])


def test_an_adapter_answers_as_its_merged_model(trained: Path, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lora"
    more = ("model=pretrained", f"model.pretrained={trained}/hf", "tokenizer=pretrained",
            "peft=lora", "peft.r=2", "optimizer.lr=0.05")  # fmt: skip
    losses = run(folder, file, *more)
    assert "val_ece/val" in losses[-1] or any("val_ece/val" in row for row in losses)
    path = asked(trained, tmp_path)
    answers = []
    from recipes import export_hf

    for name in ("adapter", "merged"):
        if name == "merged":
            export_hf.main([str(folder), "--to", str(tmp_path / "merged")])
        model = folder if name == "adapter" else tmp_path / "merged"
        out = tmp_path / f"{name}.jsonl"
        decide.main([str(model), str(path), "--out", str(out)])
        answers.append([json.loads(line) for line in out.read_text().splitlines()])
    for one, other in zip(*answers, strict=True):
        for name, probs in one["probabilities"].items():
            assert probs == pytest.approx(other["probabilities"][name], abs=1e-4)


@pytest.mark.same_on_every_cpu
def test_packs_that_cut_rows_are_refused(file: Path, tmp_path: Path) -> None:
    from automodel_lite.training.rules import checked_parts

    for more in ("packed_sequence=wrapped", "packed_sequence.overlong=truncate"):
        config = config_of("decisions", tmp_path, f"dataset.path={file}", "model.pretrained=x",
                           "name=x", "packed_sequence.packed_sequence_size=512", more)  # fmt: skip
        with pytest.raises(ConfigError, match="questions stay whole"):
            checked_parts(config)


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("more", "key"),
    [
        (["checkpoint.keep_best=1", "checkpoint.best_metric=val_perplexity"],
         "checkpoint.best_metric=val_perplexity"),
        (["callbacks=early_stopping", "callbacks.early_stopping.metric=val_token_accuracy/val"],
         "callbacks.early_stopping.metric=val_token_accuracy/val"),
    ],
)  # fmt: skip
def test_numbers_of_text_are_not_waited_for(
    more: list[str], key: str, file: Path, tmp_path: Path
) -> None:
    """Best checkpoints ended the run at its first validation, early stopping was turned off."""
    from automodel_lite.training.rules import checked_parts

    given = (f"dataset.path={file}", "dataset.val_frac=0.2", *SMALL)
    with pytest.raises(ConfigError) as refused:
        checked_parts(config_of("decisions", tmp_path, *given, *more))
    assert str(refused.value).startswith(key)
    cured = [one.replace(key, f"{key.split('=')[0]}=val_loss") for one in more]
    checked_parts(config_of("decisions", tmp_path, *given, *cured))


@pytest.mark.same_on_every_cpu
def test_the_file_alone_is_asked_for_where_it_is_missing() -> None:
    args = decide.parser().parse_args(["runs/x", "questions.jsonl"])
    assert (args.file, [*args.settings]) == ("questions.jsonl", [])
    with pytest.raises(ConfigError, match=r"arguments are required: file \("):
        decide.parser().parse_args(["runs/x"])


@pytest.mark.parametrize(
    ("more", "settings", "reads_images"),
    [
        ({}, [], False),
        ({"images": ["a.png"]}, [], True),
        ({"images": ["a.png"]}, ["dataset.format=decisions"], False),  # which leaves them out
    ],
)
def test_pictures_are_read_where_rows_have_them(
    trained: Path, tmp_path: Path, more: dict[str, Any], settings: list[str], reads_images: bool
) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps({**rows(1)[0], **more}))
    args = decide.parser().parse_args([str(trained), str(path), *settings])
    found = decide.config_of(str(trained / "hf"), args, {}).dataset
    assert ("processor" in found) is reads_images
