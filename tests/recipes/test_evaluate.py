"""evaluate and generate: the loss that training logged, answers in batches as one by one, scores, files of prompts; samples."""

import contextlib
import io
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.data.reading.documents import Question, question_of
from automodel_lite.errors import ConfigError
from automodel_lite.evaluation.generator import Generator
from automodel_lite.parts.evaluation.exact_match import ExactMatch, answers_to
from automodel_lite.tools.load_generator import load_generator
from automodel_lite.training.settings import build_parts
from recipes import evaluate, export_hf, generate
from tests.ranks import run_ranks
from tests.runs import config_of, files_end_at, train

CHATS = [
    [{"role": "user", "content": text}]
    for text in ("Hi", "Name the capital of Cuba.", "What " * 20, "Cuba?")
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    train("smoke", folder, "optimizer.lr=1e-2", "training.max_steps=8")
    return folder


@pytest.fixture(scope="module")
def generator(run: Path) -> Generator:
    return load_generator(str(run / "hf"))


def evaluation_of(run: Path, *overrides: str):
    model = ["model=pretrained", f"model.pretrained={run}", "tokenizer=pretrained"]
    return config_of("smoke", run, *model, *overrides)


def evaluate_on_rank(rank: int, world_size: int, run: Path, overrides: list[str]) -> str:
    """What the rank prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert evaluate.main(evaluation_of(run, *overrides)) == 0
    return printed.getvalue()


def test_the_exported_model_has_the_loss_that_was_logged(
    run: Path, capfd: pytest.CaptureFixture[str]
):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [row["val_loss/held_out"] for row in rows if "val_loss/held_out" in row][-1]
    assert evaluate.main(evaluation_of(run, "evaluation=exact_match")) == 0
    said = capfd.readouterr().out
    assert (
        f"held_out: {logged:.4f}, perplexity {math.exp(logged):.2f}, {plainly_right(run):.2%} of the tokens"
        in said
    )
    assert "of 24 exactly right, f1 0." in said
    with pytest.raises(ConfigError, match=r"model.pretrained=null is a model from scratch"):
        evaluate.main(config_of("smoke", run))


def plainly_right(run: Path) -> float:
    """Counts what plain transformers get right of the held-out documents' labels, one document at a time."""
    config = evaluate.of_folder(evaluation_of(run), None)
    packs = prepare_data(config, check_sizes(config, 1), build_parts(config).packer).val_packs[
        "held_out"
    ]
    model, hits = AutoModelForCausalLM.from_pretrained(run / "hf"), []
    for index in packs.plan.doc_ids:
        row = packs.rows[int(index)]
        labels = torch.as_tensor(np.asarray(row["labels"]))  # each is that of the next token
        likeliest = model(torch.as_tensor(np.asarray(row["input_ids"]))[None]).logits[0].argmax(-1)
        hits += (likeliest == labels)[labels != IGNORE_INDEX].tolist()
    assert 0 < sum(hits) < len(hits)
    return sum(hits) / len(hits)


def test_two_ranks_evaluate_to_the_same_numbers(run: Path):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [row["val_loss/held_out"] for row in rows if "val_loss/held_out" in row][-1]
    said, _ = run_ranks(evaluate_on_rank, 2, run, ["mesh.cp=2"])
    last = [
        row["val_token_accuracy/held_out"] for row in rows if "val_token_accuracy/held_out" in row
    ][-1]
    assert last == pytest.approx(plainly_right(run), abs=1e-9)
    assert f"held_out: {logged:.4f}, perplexity {math.exp(logged):.2f}, {last:.2%} of the" in said


def test_a_batch_answers_as_each_prompt_alone(generator: Generator):
    alone = [generator.answers([chat], max_new_tokens=12)[0] for chat in CHATS]
    assert len(set(alone)) > 1
    assert generator.answers(CHATS, max_new_tokens=12) == alone
    questions = [Question(chat, None) for chat in CHATS]
    assert answers_to(questions, generator, batch_size=3, max_new_tokens=12) == alone


def test_padding_behind_an_answer_is_not_part_of_it(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
):
    """Some families' pad token is an ordinary one of the tokenizer."""
    settings = generator.model.generation_config
    whole = [generator.answers([chat], max_new_tokens=12)[0] for chat in CHATS]
    one, *others = [generator.tokenizer(text)["input_ids"] for text in whole]
    stop = next(token for token in one if not any(token in ids for ids in others))
    monkeypatch.setattr(settings, "pad_token_id", others[0][0])
    monkeypatch.setattr(settings, "eos_token_id", [stop, settings.eos_token_id])
    alone = [generator.answers([chat], max_new_tokens=12)[0] for chat in CHATS]
    assert len(alone[0]) < len(whole[0])
    assert alone[1:] == whole[1:]
    assert generator.answers(CHATS, max_new_tokens=12) == alone


def test_a_file_of_prompts_is_answered_row_by_row(run: Path, tmp_path: Path, generator: Generator):
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text(
        "".join(
            json.dumps({"id": n, "prompt": chat[0]["content"]}) + "\n"
            for n, chat in enumerate(CHATS)
        )
    )
    options = [
        "--prompts",
        str(asked),
        "--out",
        str(answered),
        "--max-new-tokens",
        "12",
        "--batch-size",
        "3",
    ]
    # a file of answers is whole or not there, and the same command begins again
    with files_end_at(100), pytest.raises(OSError, match="File too large"):
        generate.main([str(run), *options])
    assert not answered.exists()
    assert generate.main([str(run), *options]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    rows = [json.loads(line) for line in answered.read_text().splitlines()]
    assert [row["id"] for row in rows] == [0, 1, 2, 3]
    assert [row["generated"] for row in rows] == [
        generator.answers([chat], max_new_tokens=12)[0] for chat in CHATS
    ]
    with pytest.raises(ConfigError, match=r"out.jsonl exists already"):
        generate.main([str(run), *options])
    with pytest.raises(
        ConfigError, match=r"--prompts in.jsonl and --out out.jsonl must be given together"
    ):
        generate.main([str(run), "--prompts", str(asked)])


def test_an_export_that_finds_no_room_is_a_sentence(run: Path, tmp_path: Path):
    """The tokenizer's file is the first that does not fit; it is written in Rust, which has no OSError."""
    to = tmp_path / "model"
    with files_end_at(4_000), pytest.raises(ConfigError, match=r"written \(File too large"):
        export_hf.main([str(run), "--to", str(to)])
    assert list(tmp_path.iterdir()) == []
    assert export_hf.main([str(run), "--to", str(to)]) == 0
    assert {path.name: path.stat().st_size for path in (run / "hf").glob("*.json")}.items() >= {
        path.name: path.stat().st_size for path in to.glob("*.json")
    }.items()


def test_what_a_document_asks():
    user = {"role": "user", "content": "2 + 2?"}
    assert question_of(
        {"messages": [user, {"role": "assistant", "content": "4", "weight": 1}]}
    ) == Question([user], "4")
    assert question_of({"messages": [user]}) == Question([user], None)
    assert question_of({"prompt": "2 + 2?", "completion": "4"}) == Question([user], "4")
    assert question_of({"text": "2 + 2?"}) == Question([user], None, is_chat=False)
    assert question_of({"input_ids": torch.tensor([1])}) is None


def test_validation_documents_are_asked_and_scored_by_a_metric_of_ones_own(
    run: Path, generator: Generator
):
    score = ExactMatch(
        num_questions=2,
        max_new_tokens=4,
        metrics={"long": lambda given, expected: len(expected) / 2},
    )
    text, row = score.ask(generator, [Question(chat, "four") for chat in CHATS])
    assert text.startswith("held-out questions: 0 of 2 exactly right, long 2.000\n  Q: Hi\n  A: ")
    answers = {key: row.pop(key) for key in [*row] if key.startswith("text/")}  # for the report
    assert row == {"answers_right": 0, "answers": 2, "score/long": 2.0}
    assert [*answers] == ["text/Hi", "text/Name the capital of Cuba."]
    assert all(text.endswith("  (expected: four)") for text in answers.values())
    assert score.ask(generator, []) == (
        "held-out questions: the data has none",
        {"answers_right": 0, "answers": 0},
    )


def test_the_metric_of_the_page_scores_any_answer() -> None:
    """A model may answer without a number, or nothing at all."""
    page = Path(__file__).resolve().parents[2] / "docs/evaluation.md"
    code = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1]
    made: dict = {"__name__": "my_metrics"}
    exec(code, made)
    score = made["SameNumber"](0.1)
    answers = ("12.05", "12.2", "Who knows?", "")
    assert [score(given, "It is 12") for given in answers] == [1, 0, 0, 0]


def test_a_chat_says_how_to_ask(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    generate.chat(generator, generate.parser().parse_args(["runs/mine"]))
    assert "type a prompt and press Enter; an empty line ends it" in capsys.readouterr().err


def test_columns_that_do_not_ask_are_named_by_what_the_command_can_do() -> None:
    """`--prompts` takes no dataset.columns, which training names for the same file."""
    with pytest.raises(
        ConfigError, match=r"its columns Frage, Antwort none asks: rename .*chats\.$"
    ):
        generate.format_of_questions(["Frage", "Antwort"], "a.csv")
    with pytest.raises(ConfigError, match="preference pairs"):
        generate.format_of_questions(["prompt", "chosen", "rejected"], "a.csv")
    found, missing = generate.format_of_questions(["question"], "a.csv")
    assert (found.format.name, "answer" in missing) == ("question_answer", True)
