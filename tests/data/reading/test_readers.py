"""Broken files end in a sentence that names the row, or in a counted skip; never in a traceback of ours, never hang."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.tokenize import Job, tokenize_documents
from automodel_lite.errors import ConfigError, DataError
from tests.data.templates import MARKED, byte_tokenizer

ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
LINE = json.dumps(ROW).encode() + b"\n"


@pytest.fixture(autouse=True)
def _cache_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))


def prepare(path: Path, **options: Any) -> Any:
    return tokenize_documents(
        FilesDataset(str(path)), Job(byte_tokenizer(MARKED), TokenizeConfig(**options))
    ).counts["train"]


def changed(**changes: Any) -> bytes:
    return json.dumps({**ROW, **changes}).encode() + b"\n"


BROKEN = {
    "truncated": (LINE[:40] + b"\n", r"a.jsonl:2:41: not JSON: .*, near "),
    "invalid UTF-8": (
        LINE.replace(b"Hi", b"\xff\xfe"),
        r"a.jsonl:2:44: byte 0xff is not UTF-8: the file is damaged, or UTF-16",
    ),
    "NUL bytes": (b"\x00" * 50 + b"\n", r"a.jsonl:2:1: not JSON: Expecting value"),
    "raw control character": (
        LINE.replace(b"Hi", b"H\x01"),
        r"a.jsonl:2:45: not JSON: Invalid control character",
    ),
    "an array": (b"[1, 2]\n", r"a.jsonl:2: a row must be a JSON object, not list."),
    "a number": (b"3\n", r"a.jsonl:2: a row must be a JSON object, not int."),
    "not a word of JSON": (b"hello\n", r"a.jsonl:2:1: not JSON: Expecting value, near 'hello"),
    "missing column": (
        b'{"text": "x"}\n',
        r"a.jsonl:2: column messages must be a list of messages, not missing.",
    ),
    "wrong type": (
        changed(messages=3),
        r"a.jsonl:2: column messages must be a list of messages, not int '3'.",
    ),
    "message no object": (
        changed(messages=["Hi"]),
        r"a.jsonl:2: messages\[0\] must be an object with role and content",
    ),
    "role null": (
        changed(messages=[{"role": None, "content": ""}]),
        r"a.jsonl:2: messages\[0\].role must be a text",
    ),
    "two rows in a line": (LINE[:-1] + LINE, r"a.jsonl:2:\d+: not JSON: Extra data"),
    "deep nesting": (
        b"[" * 200_000 + b"\n",
        r"a.jsonl:2: not JSON that can be read: brackets are nested",
    ),
    "a key twice": (
        LINE[:-2] + b', "messages": []}\n',
        r"a.jsonl:2: not JSON that can be read: the key 'messages' is there twice in one object: keep one of them",
    ),
    "half a surrogate in a role": (
        changed(messages=[{"role": "\ud800", "content": "x"}, ROW["messages"][1]]),
        r"a.jsonl:2: messages\[0\].role='.ud800' is written by many templates",
    ),
    "huge number": (
        b'{"messages": ' + b"9" * 5000 + b"}\n",
        r"a.jsonl:2: (not JSON that can be read|column messages)",
    ),
    "tools no list": (
        changed(tools={"a": 1}),
        r"a.jsonl:2: column tools must be a list, not dict.",
    ),
    "tools broken": (changed(tools="[1,"), r"a.jsonl:2: column tools is not valid JSON"),
    "unknown role of a template": (
        changed(messages=[{"role": "user", "content": "x"}]),
        r"a.jsonl:2: has no assistant message",
    ),
}


@pytest.mark.parametrize(("line", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_named_or_skipped_and_counted(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + line + LINE * 3)
    with pytest.raises(DataError) as caught:
        prepare(path)
    assert re.match(message, str(caught.value)), str(caught.value)[:300]
    counts = prepare(path, on_bad_row="skip", max_bad_frac=0.5)
    assert (counts.num_documents, counts.num_rows, counts.num_bad) == (5, 4, 1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "a.jsonl: the file is empty: it holds no row."),
        ("a.jsonl", b"\n\n  \n", "a.jsonl: the file is empty: it holds no row."),
        ("a.json", b"", "a.json: the file is empty: it holds no row."),
        ("a.json", b"[]", "a.json: the file is empty: it holds no row."),
        ("a.json", b'[{"text": "x"', "a.json: not JSON: Expecting"),
        ("a.json", b'{"a": 1}x', "a.json: not JSON: "),
        ("a.json", b'[{"a": 1, "a": 2}]', "a.json: not JSON: the key 'a' is there twice"),
        ("a.json", b'[{"a": "\xff"}]', "a.json:1: byte 0xff is not UTF-8: the file is damaged"),
        ("a.csv", b"", "a.csv: the file is empty: it holds no row."),
        ("a.csv", b"question,answer\n", "a.csv: the file is empty: it holds no row."),
        ("a.csv", b"question,answer\nx\n", "a.csv:2: 1 values for 2 columns."),
        ("a.csv", b'question,answer\n"x,y\n', "a.csv:2: not CSV: unexpected end of data."),
        (
            "a.csv",
            b"question,answer\nx,\xff\n",
            "a.csv:2: byte 0xff is not UTF-8: the file is damaged, or UTF-16: save it as UTF-8.",
        ),
        ("a.parquet", b"PAR1 and no more", "a.parquet: cannot be read as parquet: "),
        ("a.parquet", b"", "a.parquet: cannot be read as parquet: "),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz: cannot be decompressed: zlib inflate failed"),
        ("a.jsonl.zst", b"no zstandard", "a.jsonl.zst: cannot be decompressed: "),
        ("a.jsonl.xz", b"no xz", "a.jsonl.xz: cannot be decompressed: "),
    ],
)
def test_files_without_a_good_row(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, ConfigError)) as caught:
        prepare(tmp_path / name)
    assert str(caught.value).startswith(message)


def test_empty_parts_hold_no_row(tmp_path: Path) -> None:
    schema = pyarrow.schema([("question", pyarrow.string()), ("answer", pyarrow.string())])
    pyarrow.parquet.write_table(schema.empty_table(), tmp_path / "part-0.parquet")
    with pytest.raises(DataError, match=r"^part-0.parquet: the file is empty: it holds no row\.$"):
        prepare(tmp_path)
    (tmp_path / "part-1.jsonl").write_text('{"question": "x", "answer": "y"}\n')
    assert prepare(tmp_path).num_rows == 1


def test_one_of_several_paths_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINE)
    with pytest.raises(ConfigError, match=r"^dataset.path: b.jsonl does not exist \(looked in "):
        FilesDataset([str(tmp_path / "a.jsonl"), "b.jsonl"])


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "memory://nothing/a.jsonl",
            r"^dataset.path=memory://nothing/a.jsonl cannot be read \(.*nothing/a.jsonl",
        ),
        (
            "sx3://bucket/a.jsonl",
            r"^dataset.path=sx3://bucket/a.jsonl cannot be read \(Protocol not known: sx3",
        ),
        ("dropbox://a.jsonl", r"^dataset.path=dropbox://a.jsonl cannot be read \(.*[Ii]nstall"),
    ],
)
def test_an_address_that_cannot_be_read_is_a_sentence(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FilesDataset(address)


def test_files_at_a_url_are_read_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path))
    remote = fsspec.filesystem("memory")
    remote.pipe("/bucket/deep/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    remote.pipe("/bucket/b.jsonl", b'{"text": "three"}\n')
    remote.pipe("/bucket/README.txt", b"about")
    texts = lambda rows: [rows[index]["text"] for index in range(len(rows))]  # noqa: E731
    assert texts(FilesDataset("memory://bucket/deep/a.jsonl").train) == ["one", "two"]
    assert sorted(texts(FilesDataset("memory://bucket").train)) == ["one", "three", "two"]
    assert texts(FilesDataset("memory://bucket/*.jsonl").train) == ["three"]
    with pytest.raises(ConfigError, match="is also validated on"):
        FilesDataset("memory://bucket/b.jsonl", val_path="memory://bucket/b.jsonl")
    remote.pipe("/bucket/b.jsonl", b'{"text": "other"}\n')
    assert texts(FilesDataset("memory://bucket/b.jsonl").train) == ["other"]


def test_a_huge_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        LINE
        + changed(messages=[ROW["messages"][0], {"role": "assistant", "content": "x" * 1_000_000}])
    )
    assert prepare(path).num_tokens > 1_000_000


@pytest.mark.parametrize("seed", range(40))
def test_random_damage(tmp_path: Path, seed: int) -> None:
    """Bytes flipped, cut, doubled and inserted anywhere: a sentence that names the file, or counted rows."""
    rng = random.Random(seed)
    data = bytearray(LINE * 20)
    for _ in range(rng.randint(1, 6)):
        start = rng.randrange(len(data))
        stop = min(len(data), start + rng.randint(0, 30))
        damage = [
            b"",
            bytes(rng.randrange(256) for _ in range(stop - start)),
            bytes(data[start:stop]) * 2,
            b"\n",
            b'"',
        ]
        data[start:stop] = rng.choice(damage)
    name = rng.choice(["a.jsonl", "a.json", "a.csv"])
    (tmp_path / name).write_bytes(data)
    for options in ({}, {"on_bad_row": "skip", "max_bad_frac": 0.5}):
        outcome = outcome_of(tmp_path / name, **options)
        assert (
            outcome == "all counted"
            or name in outcome
            or re.match("train: |the columns .* no known format", outcome)
        )


def outcome_of(path: Path, **options: Any) -> str:
    try:
        counts = prepare(path, **options)
    except (DataError, ConfigError) as error:
        return str(error)
    num_known = counts.num_rows + counts.num_bad + counts.num_fully_masked + counts.num_empty
    return "all counted" if num_known == counts.num_documents else f"{counts}"


@pytest.mark.parametrize(
    ("data", "cause"),
    [("prompt,completion\na,b\n".encode("utf-16"), "UTF-16"), (gzip.compress(b"{}"), r"\.gz")],
    # of the data, they would hold the time of gzip's header: other names in each process
    ids=["UTF-16", "gzip"],
)
def test_bytes_of_other_kinds_are_recognized(tmp_path: Path, data: bytes, cause: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(DataError, match=rf"a.jsonl:1.*{cause}"):
        FilesDataset(str(tmp_path / "a.jsonl")).train[0]


def documents(path: str, **options: Any) -> list[dict]:
    rows = FilesDataset(path, **options).train
    return [rows[i] for i in range(len(rows))]


SEPARATED = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}


@pytest.mark.parametrize("kind", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("delimiter", SEPARATED)
def test_the_delimiter_of_a_table_is_found(tmp_path: Path, kind: str, delimiter: str) -> None:
    mark = SEPARATED[delimiter]
    lines = (
        ["question", "answer"],
        ["a, b" if mark != "," else "b", "x"],
        [f'"c{mark} d\nline"', "1.5"],
    )
    (tmp_path / kind).write_text("".join(mark.join(line) + "\r\n" for line in lines))
    found = documents(str(tmp_path / kind))
    assert [document["completion"] for document in found] == ["x", "1.5"]
    assert found[1]["prompt"] == f"c{mark} d\nline"


def test_a_delimiter_is_not_found_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\none; two\nthree; four\nfive\n")
    assert documents(str(tmp_path / "a.csv"))[0] == {"text": "one; two"}
    (tmp_path / "b.csv").write_text("question,answer\na;b,c\nd,e,f\n")  # a bad row stays one
    with pytest.raises(DataError, match=r"b.csv:3: 3 values for 2 columns"):
        documents(str(tmp_path / "b.csv"))


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer,answer\na,b,c\n")
    with pytest.raises(DataError, match=r"a.csv:1: two columns are called 'answer'"):
        documents(str(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_bytes(b"question,antw\xf6rt\na,b\n")
    with pytest.raises(DataError, match=r"b.csv:1: byte 0xf6 is not UTF-8"):
        documents(str(tmp_path / "b.csv"))


def test_csv_values_stay_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question,answer\n007,NA\n"two\nlines","a, ""b"""\n')
    assert documents(str(tmp_path / "a.csv")) == [
        {"prompt": "007", "completion": "NA"},
        {"prompt": "two\nlines", "completion": 'a, "b"'},
    ]
