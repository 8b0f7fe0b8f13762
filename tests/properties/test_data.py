"""Rows and files drawn at random, whole and damaged: the right tokens, or a sentence that names the place."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chat import ChatRenderer
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.encode import Renderer
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parts.datasets.memmap import MemmapCorpus, write_memmap
from tests.data.templates import LLAMA3, byte_tokenizer
from tests.properties.explore import explore

TOKENIZER = byte_tokenizer(LLAMA3)
# where a sync to the disk costs nothing
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
texts = st.text(max_size=12)
answers = st.text(
    st.characters(codec="utf-8", exclude_characters="⟦⟧"), min_size=1, max_size=12
).filter(str.strip)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, st.just("\ud800")),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=5,
)


def turn(role: str, content: str, shape: int) -> dict[str, Any]:
    """The same turn in the shapes that are in use."""
    shapes: list[dict[str, Any]] = [
        {"role": role, "content": content},
        {"role": role, "content": [{"type": "text", "text": content}]},
        {"role": role, "content": [{"type": "text", "value": content}]},
        {"from": {"user": "human", "assistant": "gpt"}[role], "value": content},
    ]
    return shapes[shape]


@st.composite
def good_rows(draw: st.DrawFn) -> tuple[dict[str, Any], list[str]]:
    """A row of some format, and the answers that must be trained on."""
    question, answer = draw(answers), draw(answers)
    kind = draw(
        st.sampled_from(["messages", "conversations", "prompt", "alpaca", "question", "text"])
    )
    if kind in ("messages", "conversations"):
        pairs = draw(st.lists(st.tuples(answers, answers), min_size=1, max_size=3))
        shape = st.integers(0, 3)
        turns = [
            t
            for q, a in pairs
            for t in (turn("user", q, draw(shape)), turn("assistant", a, draw(shape)))
        ]
        return {kind: turns}, [a for _, a in pairs]
    rows = {
        "prompt": {"prompt": question, "completion": answer},
        "alpaca": {"instruction": question, "input": draw(texts), "output": answer},
        "question": {"question": question, "answer": answer},
        "text": {"text": answer},
    }
    return rows[kind], [answer]


def trained_texts(path: Path, **options: Any) -> list[str]:
    """What the rows of a file train, decoded, a text per row; checks the labels on the way."""
    documents = FilesDataset(str(path), **options)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as cache:
        rows = tokenize_documents(documents, TokenizeJob(TOKENIZER), cache).train
        found = []
        for index in range(len(rows)):
            ids, labels = np.array(rows[index]["input_ids"]), np.array(rows[index]["labels"])
            has_label = labels != -100
            assert has_label.any()
            assert not has_label[-1]
            assert (labels[:-1][has_label[:-1]] == ids[1:][has_label[:-1]]).all()
            found.append(str(TOKENIZER.decode([int(token) for token in labels[has_label]])))
    return found


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("num_cases", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_good_rows_train_their_answers(num_cases: int, tmp_path: Path) -> None:
    def attempt(case: tuple[dict[str, Any], list[str]]) -> None:
        row, expected = case
        (text,) = trained_texts(write(tmp_path / "a.jsonl", [row]))
        stop = "<|eot_id|>"
        if "text" in row:  # its first token follows nothing, and is not trained
            ids = TOKENIZER(f"{expected[0]}{stop}", add_special_tokens=False)["input_ids"]
            assert text == TOKENIZER.decode(ids[1:])
        else:
            assert text == "".join(f"{answer.strip()}{stop}" for answer in expected), text

    counts = explore(good_rows(), attempt, num_cases)
    assert counts["sentence"] == 0


@st.composite
def bad_rows(draw: st.DrawFn) -> list[Any]:
    """Rows one of which has something else in one place."""
    row, _ = draw(good_rows())
    rows = [row, draw(good_rows())[0] if draw(st.booleans()) else row]
    place: Any = rows[-1]
    for _ in range(draw(st.integers(0, 4))):
        children = (
            list(place)
            if isinstance(place, dict)
            else list(range(len(place)))
            if isinstance(place, list)
            else []
        )
        inner = [key for key in children if isinstance(place[key], (dict, list))]
        if not inner:
            break
        place = place[draw(st.sampled_from(inner))]
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    known = st.sampled_from(
        [
            "weight",
            "tool_calls",
            "images",
            "system",
            "tools",
            "label",
            "rejected",
            "train",
            "input_ids",
            "from",
            "history",
            "role",
        ]
    )
    if isinstance(place, dict) and draw(st.booleans()):
        place[draw(known)] = draw(anything)
    elif keys:
        place[draw(st.sampled_from(keys))] = draw(anything)
    return rows


@pytest.mark.parametrize(
    "num_cases",
    [50, pytest.param(150, marks=pytest.mark.system), pytest.param(6000, marks=pytest.mark.slow)],
)
def test_other_rows_are_trained_or_named(num_cases: int, tmp_path: Path) -> None:
    def attempt(rows: list[Any]) -> None:
        try:
            trained_texts(write(tmp_path / "a.jsonl", rows))
        except DataError as error:
            if not re.match(r"a\.jsonl(:\d+|\[)|train: |of [\d,]+ labels", str(error)):
                raise AssertionError(f"no place is named: {error}") from error
            raise

    explore(bad_rows(), attempt, num_cases)


# ------------------------------------------------------------------------------------------------------- damaged files
ROWS = [{"question": f"q{n}", "answer": f"a, {n}"} for n in range(6)]


def _table(delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["question", "answer"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def _parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FILES = {
    "a.jsonl": LINES,
    "a.json": json.dumps(ROWS).encode(),
    "b.json": json.dumps({"data": ROWS}, indent=1).encode(),
    "a.csv": _table(","),
    "b.csv": _table(";"),
    "a.tsv": _table("\t"),
    "a.jsonl.gz": gzip.compress(LINES),
    "a.parquet": _parquet(),
}


@st.composite
def damaged(draw: st.DrawFn, files: dict[str, bytes]) -> tuple[str, bytes]:
    name = draw(st.sampled_from(sorted(files)))
    content = bytearray(files[name])
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(content) - 1)))
        how = draw(st.sampled_from(["cut", "flip", "insert", "delete", "repeat"]))
        if how == "cut":
            del content[place:]
        elif how == "flip" and content:
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif how == "insert":
            content[place:place] = draw(
                st.one_of(st.binary(max_size=8), st.sampled_from([b"\n", b'"', b"\0", b"[" * 2000]))
            )
        elif how == "delete":
            del content[place : place + draw(st.integers(1, 20))]
        else:
            content += content[place:]
    return name, bytes(content)


@pytest.mark.parametrize("num_cases", [120, pytest.param(4000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_named(
    num_cases: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))

    def attempt(case: tuple[str, bytes]) -> None:
        name, content = case
        (tmp_path / name).write_bytes(content)
        rows = FilesDataset(str(tmp_path / name)).train
        for index in range(len(rows)):
            try:
                assert isinstance(rows[index], dict)
            except DataError as error:
                if not str(error).startswith(name.removesuffix(".gz")):
                    raise AssertionError(f"no place is named: {error}") from error
        if not len(rows):
            raise DataError("there is nothing left")

    explore(damaged(FILES), attempt, num_cases)


@pytest.mark.parametrize("num_cases", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_corpora_are_read_or_named(num_cases: int, tmp_path: Path) -> None:
    write_memmap(tmp_path / "whole", [[1, 2, 3], [4], [5, 6]], "uint16")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def attempt(case: tuple[str, bytes]) -> None:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in {**files, case[0]: case[1]}.items():
            (folder / name).write_bytes(content)
        rows = MemmapCorpus(str(folder / "whole")).rows
        assert sum(len(rows[index]["input_ids"]) for index in range(len(rows))) == rows.num_tokens

    explore(damaged(files), attempt, num_cases)


# ------------------------------------------------------------------------------------------------------------ templates
PIECES = st.sampled_from(
    ["{{ messages }}", "{{ messages[0].content }}", "{% for m in messages %}", "{% endfor %}", "{{ m.role }}: {{ m.content }}",
     "{{ eos_token }}", "{% if add_generation_prompt %}<|start_header_id|>", "{% endif %}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}",
     "{% generation %}", "{% endgeneration %}", "{{ x.y.z }}", "{{ messages | tojson }}", "{% set a = a ~ a %}", "<|eot_id|>", "{{", "{% macro f() %}"]
)  # fmt: skip


@pytest.mark.parametrize("num_cases", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_template_renders_or_is_named(num_cases: int) -> None:
    def attempt(pieces: tuple[list[str], list[str]]) -> None:
        tokenizer = byte_tokenizer(LLAMA3)
        tokenizer.chat_template = "".join([*pieces[0], LLAMA3.template, *pieces[1]])
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
        for rendering in ChatRenderer(tokenizer, "assistant").renderings(chat):
            assert all(0 <= start <= stop <= len(rendering.text) for start, stop in rendering.spans)
        Renderer(tokenizer, "assistant", {})

    explore(
        st.tuples(st.lists(PIECES, max_size=3), st.lists(PIECES, max_size=3)), attempt, num_cases
    )


def test_the_rule_can_be_broken() -> None:
    """A traceback, or a message that is no sentence, fails."""
    with pytest.raises(KeyError):
        explore(st.just(0), lambda _: {}["x"], 2)
    with pytest.raises(AssertionError):
        explore(st.just(0), _tell("no"), 2)
    assert explore(st.just(0), _tell("a.jsonl:1: this is wrong"), 2)["sentence"] > 0


def _tell(text: str) -> Any:
    def attempt(_: object) -> None:
        raise ConfigError(text)

    return attempt
