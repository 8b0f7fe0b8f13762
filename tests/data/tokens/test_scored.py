"""Documents that are scored: rendered as their reader writes them, their label at the last token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from automodel_lite.classes import Classes
from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.token_rows import TokenizedData
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import ConfigError, DataError
from tests.data.templates import LLAMA3, QWEN3, byte_tokenizer

Row = dict[str, Any]


def files(tmp_path: Path, rows: list[Row], **settings: Any) -> FilesDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return FilesDataset(str(path), **{"format": "labeled", **settings})


def tokenized(tmp_path: Path, rows: list[Row], family: Any = LLAMA3, **settings: Any) -> Any:
    job = TokenizeJob(byte_tokenizer(family), TokenizeConfig(), separates=True, scores=True)
    data: TokenizedData = tokenize_documents(
        files(tmp_path, rows, **settings), job, tmp_path / "cache"
    )
    return data.train


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHAPES: dict[str, tuple[Row, Any]] = {
    "text": ({"text": "abc"}, "abc"),
    "sentences": ({"sentence1": "a b", "sentence2": "c"}, "a b\nc"),
    "query and document": ({"query": "q?", "document": "d"}, "Query: q?\nDocument: d"),
    "chat": ({"messages": CHAT}, CHAT),
    "chat of a question alone": ({"messages": CHAT[:1]}, CHAT[:1]),
    "sharegpt": ({"conversations": [{"from": "human", "value": "Hi"}]}, CHAT[:1]),
    "prompt and answer": ({"prompt": "Hi", "completion": "Hello"}, CHAT),
    "instruction": ({"instruction": "Hi", "output": "Hello"}, CHAT),
}


@pytest.mark.parametrize("family", [LLAMA3, QWEN3], ids=["llama3", "qwen3"])
@pytest.mark.parametrize(("row", "read"), SHAPES.values(), ids=SHAPES.keys())
def test_a_document_is_tokenized_as_its_reader_does(
    row: Row, read: Any, family: Any, tmp_path: Path
) -> None:
    if family is QWEN3 and row.keys() & {"completion", "output"}:
        pytest.skip("the same chat as the others")
    tokenizer = byte_tokenizer(family)
    if isinstance(read, str):
        want = tokenizer(read)["input_ids"]
    else:
        want = tokenizer.apply_chat_template(read, return_dict=True)["input_ids"]
    rows = [{**row, "label": "good"}, {**row, "label": "bad"}]
    got = tokenized(tmp_path, rows, family)
    assert got[0]["input_ids"].tolist() == want
    assert got[0]["labels"].tolist() == [-100] * (len(want) - 1) + [1]
    assert got[1]["labels"][-1] == 0


@pytest.mark.parametrize("form", ["$A", "<b> $A", "$A <e>", "<b> $A <e>"])
def test_texts_begin_and_end_as_the_tokenizer_writes_them(form: str, tmp_path: Path) -> None:
    """Also texts that bring these tokens themselves."""
    tokenizer = plain_tokenizer()
    begin, end = tokenizer.eos_token, "<|im_start|>"  # any two special tokens
    tokenizer.bos_token, tokenizer.eos_token = begin, end
    ids = tokenizer.get_vocab()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=form.replace("<b>", begin).replace("<e>", end),
        special_tokens=[(begin, ids[begin]), (end, ids[end])],
    )
    want = tokenizer("abc")["input_ids"]
    written = f"{begin if '<b>' in form else ''}abc{end if '<e>' in form else ''}"
    rows = [{"text": "abc", "label": 1}, {"text": written, "label": 0}]
    job = TokenizeJob(tokenizer, separates=True, scores=True)
    got = tokenize_documents(files(tmp_path, rows), job, tmp_path / "cache").train
    assert got[0]["input_ids"].tolist() == got[1]["input_ids"].tolist() == want
    assert got[0]["labels"][-1] == 1


def test_labels_weights_and_numbers_stand_at_the_last_token(tmp_path: Path) -> None:
    rows: list[Row] = [{"text": "ab", "label": ["x"], "weight": 0.5}, {"text": "c", "label": []}]
    got = tokenized(tmp_path, [*rows, {"text": "d", "label": ["y", "x"]}])
    # the sets are (), (x,) and (x, y)
    assert [got[row]["labels"].tolist() for row in range(3)] == [[-100, 1], [0], [2]]
    assert got[0]["loss_weights"].tolist() == [1.0, 0.5]
    numbers = tokenized(tmp_path, [{"text": "ab", "label": 1.5}, {"text": "c", "label": -2}])
    assert numbers[0]["labels"].tolist() == [-100, 0]
    assert numbers[0]["targets"].tolist() == [0.0, 1.5]
    assert numbers[1]["targets"].tolist() == [-2.0]


def test_pairs_are_one_tree_with_a_label_at_both_ends(tmp_path: Path) -> None:
    """`What? yes` and `What? no`: the prompt once, and its last token in both branches."""
    rows = [{"prompt": "What? ", "chosen": "yes", "rejected": "no", "margin": 2}]
    job = TokenizeJob(plain_tokenizer(), separates=True, scores=True)
    documents = files(tmp_path, rows, format="preference")
    tree = tokenize_documents(documents, job, tmp_path / "cache").train[0]
    assert bytes_of(tree["input_ids"]) == "What? no yes"
    assert np.flatnonzero(tree["branches"]).tolist() == [8]
    assert tree["answers"].tolist() == [0] * 7 + [2] + [0] * 3 + [1]
    assert tree["margins"].tolist() == [0.0] * 7 + [2.0] + [0.0] * 3 + [2.0]
    assert np.flatnonzero(tree["labels"] == 0).tolist() == [7, 11]


def plain_tokenizer() -> Any:
    tokenizer = byte_tokenizer(QWEN3)
    tokenizer.chat_template = None
    return tokenizer


def bytes_of(ids: np.ndarray) -> str:
    return str(plain_tokenizer().decode(ids.tolist()))


def test_documents_of_one_query_share_it(tmp_path: Path) -> None:
    query = "a question that is long enough to be worth a branch, of more than 64 tokens"
    rows = [{"query": query, "document": x, "label": x == "good"} for x in ("good", "bad", "odd")]
    job = TokenizeJob(plain_tokenizer(), separates=True, scores=True)
    data = tokenize_documents(files(tmp_path, rows), job, tmp_path / "cache").train
    assert len(data) == 1
    assert bytes_of(data[0]["input_ids"]).count(query) == 1
    labels = data[0]["labels"]
    assert sorted(labels[labels != -100].tolist()) == [0, 0, 1]


def test_a_margin_that_nothing_learns_from_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": "What?", "chosen": "yes", "rejected": "no", "margin": 2}] * 3
    job = TokenizeJob(plain_tokenizer())
    data = tokenize_documents(files(tmp_path, rows, format="preference"), job, tmp_path / "cache")
    assert "ignored, as nothing uses them: margin" in "\n".join(data.notes)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a", "label": "?", "weight": -1}, "column weight must be a number from 0 on"),
        ({"text": 3, "label": "good"}, "column text must be a text"),
        ({"text": "a", "label": None}, "column label is missing"),
    ],
    ids=["weight", "text", "label"],
)
def test_a_bad_row_names_its_place(row: Row, said: str, tmp_path: Path) -> None:
    good = [{"text": "a", "label": "good"}, {"text": "b", "label": "?"}]
    with pytest.raises(DataError, match=r"rows.jsonl:3: " + said):
        tokenized(tmp_path, [*good, row])


def test_columns_of_no_labeled_shape_are_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs the columns messages \+ label, or .* text \+ label"
    ):
        files(tmp_path, [{"body": "a", "stars": 1}])
    named = files(
        tmp_path,
        [{"body": "a", "stars": 1}, {"body": "b", "stars": 5}],
        columns={"text": "body", "label": "stars"},
    )
    assert named.found_classes is not None
    assert named.found_classes.names == ("1", "5")
    with pytest.raises(ConfigError, match=r"dataset\.classes=.* names the classes of rows with a"):
        files(tmp_path, [{"text": "a"}], format="text", classes=["a", "b"])


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_names_of_classes_are_those_that_datasets_keeps(kind: str, tmp_path: Path) -> None:
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["neg", "pos", "mixed"])
    )
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    path = tmp_path / ("rows.parquet" if kind == "parquet" else "rows")
    if kind == "parquet":
        rows.to_parquet(path)
    else:
        rows.save_to_disk(path)
    found = FilesDataset(str(path), format="labeled")
    assert found.found_classes == Classes("one", ("neg", "pos", "mixed"))
    assert [found.train[i]["label"] for i in range(2)] == [1, 0]
    named = FilesDataset(str(path), format="labeled", classes=["no", "yes"])
    assert named.found_classes == Classes("one", ("no", "yes"))
