"""Questions as tokens: what a row ends with, in which order choices stand, what may answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.formats.decisions import Decision, decisions_of, record
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.decisions import DecisionRenderer, DecisionStyle, order_of
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.data.tokens.tokenizer import train_bpe_tokenizer
from automodel_lite.errors import ConfigError, DataError
from tests.data.templates import FAMILIES, MARKED, byte_tokenizer

TOKENIZER = byte_tokenizer(MARKED)
ROW: dict[str, Any] = {
    "state": "It is broken. " * 6,
    "questions": {
        "team": {"type": "choice", "instructions": "Which?", "criteria": {"a": "one", "b": ""}},
        "level": {"type": "score", "instructions": "Bad?", "criteria": ["no", "yes", "very"]},
    },
    "answers": {"team": "b", "level": 1},
}


def rows_of(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options.setdefault("tokenizer", TOKENIZER)
    options.setdefault("decisions", DecisionStyle(permutes=False))
    dataset = FilesDataset(str(path))
    return tokenize_documents(dataset, TokenizeJob(**options), folder / "cache").train


def test_a_row_ends_with_its_answer(tmp_path: Path) -> None:
    """The choices lie on the tokens up to the label, in the order of the text."""
    rows = rows_of(tmp_path, [ROW], tree="off")
    first = rows[0]
    assert TOKENIZER.decode(first["input_ids"]) == (
        f"<|user|>{ROW['state']}\n\nWhich?\n"
        'choice#A = "a": one\nchoice#B = "b"\n'
        "Answer with one of these choices, written as choice#A.<|end|><|assistant|>choice#B"
    )
    a, b = TOKENIZER.encode("AB", add_special_tokens=False)
    assert first["labels"][-3:].tolist() == [-100, b, -100]
    assert (first["labels"] != -100).sum() == 1
    assert first["choice_ids"][-4:].tolist() == [-1, a, b, -1]
    assert first["choice_weights"][-4:].tolist() == [0, 0, 1, 0]
    assert first["question_numbers"][-4:].tolist() == [0, 1, 1, 0]
    assert rows[1]["question_numbers"].max() == 2


def test_a_record_is_one_tree(tmp_path: Path) -> None:
    (tree,) = rows_of(tmp_path, [ROW], tree="auto", most_tokens=1000)
    assert (tree["branches"] > 0).sum() == 1
    assert sorted(np.unique(tree["question_numbers"])) == [0, 1, 2]
    assert (tree["labels"] != -100).sum() == 2


def test_questions_without_an_answer_are_left_out_or_asked(tmp_path: Path) -> None:
    row = {**ROW, "answers": {"level": 1}, "weights": {"level": 0.5}}
    (kept,) = rows_of(tmp_path, [row])
    assert kept["question_numbers"].max() == 2
    assert kept["choice_weights"].max() == 0.5
    (tmp_path / "ask").mkdir()
    style = DecisionStyle(permutes=False, asks_all=True)
    asked = rows_of(tmp_path / "ask", [row], decisions=style, tree="off")
    assert [x["choice_weights"].sum() for x in asked] == [0, 0.5]
    with pytest.raises(DataError, match=r"rows.jsonl:1: has no question with an answer"):
        rows_of(tmp_path, [{**ROW, "answers": {}}])


def test_the_order_of_choices_follows_from_the_seed() -> None:
    choices = tuple((str(i), "") for i in range(8))
    decision = Decision("q", "choice", "s", "q?", choices)
    orders = [order_of(decision, DecisionStyle(seed=seed)) for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == list(range(8))
    assert order_of(decision, DecisionStyle(seed=0)) == orders[0]
    assert order_of(decision, DecisionStyle(permutes=False)) == list(range(8))
    levels = Decision("q", "score", "s", "q?", choices)
    assert order_of(levels, DecisionStyle(seed=0)) == list(range(8))


def test_weights_stand_in_the_order_of_the_text() -> None:
    row = {"state": "s", "questions": [{"options": ["a", "b", "c"], "answer": "b"}]}
    (decision,) = decisions_of(record(row))
    seeds = [x for x in range(20) if order_of(decision, DecisionStyle(seed=x)) == [2, 0, 1]]
    renderer = DecisionRenderer(TOKENIZER.backend_tokenizer, DecisionStyle(seed=seeds[0]))
    (rendering,) = renderer.renderings(decision, None, "<s>")
    assert rendering.text.startswith("<s>s\n\n0\n")
    assert rendering.text.endswith("\n\nchoice#C")
    assert rendering.choices is not None
    assert rendering.choices.weights == (0, 0, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_style_of_template(family: str, tmp_path: Path) -> None:
    """The text before the answer is the prompt that asks for it, as a model meets it."""
    tokenizer = byte_tokenizer(FAMILIES[family])
    rows = rows_of(tmp_path, [ROW], tokenizer=tokenizer, tree="off")
    text = tokenizer.decode(rows[0]["input_ids"])
    chat = [{"role": "user", "content": text[text.index("It is") : text.index("choice#A.") + 9]}]
    chat.append({"role": "assistant", "content": "choice#B"})
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == whole[: whole.rindex("choice#B") + 8]


def merging(*merges: tuple[str, str]) -> Tokenizer:
    """A tokenizer of bytes that joins some of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    return tokenizer


def test_a_letter_that_is_no_token_of_its_own_is_refused_with_a_prefix_that_works() -> None:
    backend = merging(("#", "A"))
    renderer = DecisionRenderer(backend, DecisionStyle())
    with pytest.raises(ConfigError) as caught:
        renderer.letter_ids(2)
    text = str(caught.value)
    assert "tokenize.choice_prefix=choice#" in text
    prefix = text.split("tokenize.choice_prefix='")[1].split("'")[0]
    ids = DecisionRenderer(backend, DecisionStyle(prefix)).letter_ids(2)
    assert ids == [backend.token_to_id(letter) for letter in "AB"]


def test_more_choices_than_letters() -> None:
    renderer = DecisionRenderer(TOKENIZER.backend_tokenizer, DecisionStyle())
    assert len({*renderer.letter_ids(52)}) == 52
    with pytest.raises(DataError, match="has 53 choices, and each is a letter"):
        renderer.letter_ids(53)


def test_a_new_tokenizer_learns_the_words_of_questions(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([json.dumps(ROW)] * 3))
    tokenizer = train_bpe_tokenizer(FilesDataset(str(path)), 300, cache_dir=str(tmp_path))
    assert len(tokenizer.encode("It is broken.")) < 8
    assert len(tokenizer.encode("Bad?")) < 4


def test_questions_are_not_trained_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_on=all would train on questions too"):
        rows_of(tmp_path, [ROW], settings=TokenizeConfig(train_on="all"))
