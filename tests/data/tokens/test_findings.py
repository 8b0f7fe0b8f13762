"""A set is judged at its end: counts, and an example of each fault."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import DataError
from tests.data.templates import MARKED, Family, byte_tokenizer
from tests.data.tokens.given import HELLO, HI, chats, token_file, tokenized

_ = -100


# ------------------------------------------------------------------------------------------------ what is refused
def test_everything_is_counted(tmp_path: Path) -> None:
    silent = {**HELLO, "weight": 0}
    documents = chats(*[[HI, HELLO]] * 96, [HI, silent], [HI], [HI, HELLO, HI], [HI, silent])
    data = tokenized(documents, tmp_path, on_bad_row="skip")
    counts = data.counts["train"]
    assert (counts.num_documents, counts.num_rows, counts.num_bad, counts.num_fully_masked) == (
        100,
        97,
        1,
        2,
    )
    assert data.notes == (
        "train: 100 documents → 97 rows, 780 tokens, 37% trained on, 1 bad skipped, 2 fully masked dropped"
        " · cache: miss (first time)",
    )


def test_too_many_bad_rows(tmp_path: Path) -> None:
    documents = chats(*[[HI, HELLO]] * 9, [HI])
    with pytest.raises(DataError) as caught:
        tokenized(documents, tmp_path, on_bad_row="skip")
    assert str(caught.value) == (
        "train: 10 documents: 1 bad, 0 empty, 0 with nothing trained on (tokenize.train_on=assistant); "
        "tokenize.max_bad_frac=0.05 allows 0. First bad row: given[9]: has no assistant message, so nothing is "
        "trained on: add one."
    )
    assert len(tokenized(documents, tmp_path, on_bad_row="skip", max_bad_frac=0.1).train) == 9


def test_a_pack_with_a_bad_document_is_left_out_whole(tmp_path: Path) -> None:
    """Its first document once stayed, and the rows behind it were counted as another document's."""
    ids = [[number, 6, 7, 8] for number in range(1, 7)]
    ids[3][0] = 999  # the second document of the second pack
    packs = [
        {"input_ids": ids[i] + ids[i + 1], "labels": [_, 7, 8, _] * 2, "seq_lens": [4, 4]}
        for i in (0, 2, 4)
    ]
    documents = token_file(tmp_path / "a.jsonl", *packs)
    data = tokenized(documents, tmp_path, on_bad_row="skip", max_bad_frac=0.5)
    rows = data.train
    assert [rows[i]["input_ids"].tolist() for i in range(len(rows))] == [ids[0], ids[1], *ids[4:]]
    assert data.counts["train"].num_bad == 1


def test_nothing_trained_on_shows_a_sample(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        tokenized(chats([HI, {**HELLO, "weight": 0}]), tmp_path)
    assert str(caught.value) == (
        "train: 1 document: 0 bad, 0 empty, 1 with nothing trained on (tokenize.train_on=assistant); nothing is left to train "
        "on. One of them, trained tokens in ⟦ ⟧: '<|user|>Hi<|end|><|assistant|>Yo<|end|>'"
    )


def test_everything_trained_on_shows_a_sample(tmp_path: Path) -> None:
    documents = token_file(tmp_path / "a.jsonl", {"input_ids": [1, 2, 3], "labels": [2, 3, _]})
    with pytest.raises(
        DataError,
        match=r"^train: every token of 1 row is trained on, including the questions;",
    ):
        tokenized(documents, tmp_path)


def test_an_answer_without_a_trained_stop_token_shows_a_sample(tmp_path: Path) -> None:
    """A template whose markers leave out an end token that does not follow at once."""
    template = MARKED.template.replace("{{- '<|end|>' }}", "{{- '.<|end|>' }}", 1)
    with pytest.raises(DataError) as caught:
        tokenized(chats([HI, HELLO]), tmp_path, Family(template, MARKED.specials, MARKED.eos))
    assert str(caught.value) == (
        "train: 1 of 1 row does not end on a trained stop token, so the model would not learn to stop: fix the chat "
        "template. One of them, trained tokens in ⟦ ⟧: '<|user|>Hi<|end|><|assistant|>⟦Yo⟧.<|end|>'"
    )


def test_no_documents(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no document in it"):
        tokenized(chats(), tmp_path)


def test_held_out_rows_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    """Whatever file they come from, and whatever is trained on in them."""

    def file(name: str, numbers: Iterable[int]) -> str:
        lines = [{"prompt": f"q {i}", "completion": f"a {i}"} for i in numbers]
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
        return str(tmp_path / name)

    train = file("train.jsonl", range(40))
    job = TokenizeJob(byte_tokenizer(MARKED))
    for val, said in (
        (
            file("a.jsonl", [*range(50, 60), 3, 7]),
            "2 of 12 rows are also trained on, word for word",
        ),
        (file("b.jsonl", range(50, 60)), ""),
    ):
        documents = FilesDataset(train, val_path=val)
        notes = "\n".join(tokenize_documents(documents, job, tmp_path / "cache").notes)
        assert said in notes
        assert ("also trained on" in notes) == bool(said)
