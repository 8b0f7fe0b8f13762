"""Broken files end in a sentence that names the row, or in a counted skip; never in a traceback of ours, never hang."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import re
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.reading import readers
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import ConfigError, DataError
from tests.data.templates import MARKED, byte_tokenizer

ROW = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
LINE = json.dumps(ROW).encode() + b"\n"


@pytest.fixture(autouse=True)
def _cache_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))


def prepare(path: Path, **options: Any) -> Any:
    return tokenize_documents(
        FilesDataset(str(path)), TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig(**options))
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
        (
            "a.csv",
            b"question,answer\n",
            "a.csv: it has a header (question, answer) and no rows below it.",
        ),
        (
            "a.tsv",
            b"question\tanswer",
            "a.tsv: it has a header (question, answer) and no rows below it.",
        ),
        ("a.csv", b"question,answer\nx\n", "a.csv:2: 1 value for 2 columns: write each value"),
        ("a.csv", b"question,answer\nx,y,z\n", "a.csv:2: 3 values for 2 columns: write a value"),
        ("a.csv", b'question,answer\n"x,y', "a.csv:2: not CSV: unexpected end of data: close"),
        (
            "a.csv",
            b'question,answer\nx,y\n"a,b\nc,d\ne,f\n',
            "a.csv:3: not CSV: a quote that opens in this row is not closed until the end of",
        ),
        ("a.csv", b"PK\x03\x04\x00\x00", "a.csv: it is a zip archive, as Excel's .xlsx"),
        ("a.xlsx", b"PK\x03\x04\x00\x00", "a.xlsx: it is a zip archive, as Excel's .xlsx"),
        ("a.csv", b"PAR1\x15", "a.csv: it is a Parquet file: let its name end in .parquet."),
        ("a.png", b"\x89PNG\r\n\x1a\n", "a.png: it is a picture: name it in a row of a .jsonl"),
        ("a.jsonl", b"\x1f\x8b\x08", "a.jsonl: it is compressed by gzip: let its name end in"),
        (
            "a.csv",
            b"question,answer\nx,\xff\n",
            "a.csv:2: byte 0xff is not UTF-8: the file is damaged, or UTF-16: save it as UTF-8,",
        ),
        ("a.parquet", b"PAR1 and no more", "a.parquet: cannot be read as parquet ("),
        ("a.parquet", b"", "a.parquet: cannot be read as parquet ("),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz: cannot be decompressed (zlib inflate failed"),
        ("a.jsonl.zst", b"no zstandard", "a.jsonl.zst: cannot be decompressed ("),
        ("a.jsonl.xz", b"no xz", "a.jsonl.xz: cannot be decompressed ("),
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
    with pytest.raises(
        DataError, match=r"^part-0.parquet: it has a header \(question, answer\) and no rows"
    ):
        prepare(tmp_path)
    (tmp_path / "part-1.jsonl").write_text('{"question": "x", "answer": "y"}\n')
    assert prepare(tmp_path).num_rows == 1


def test_one_of_several_paths_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINE)
    with pytest.raises(ConfigError, match=r"^dataset.path=b.jsonl does not exist \(looked in "):
        FilesDataset([str(tmp_path / "a.jsonl"), "b.jsonl"])


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("file:///nothing/a.jsonl", r"^dataset.path=file:///nothing/a.jsonl cannot be read \("),
        ("s3://bucket/a.jsonl", r"^dataset.path=s3://bucket/a.jsonl cannot be read \(.*[Ii]nstall"),
        *(
            (address, rf"{protocol} is not a protocol that data are read by: use s3, gs, hf")
            for address, protocol in (
                ("sx3://bucket/a.jsonl", "sx3"),
                ("ftp://user:word@127.0.0.1/a.jsonl", "ftp"),
                ("github://me:repo@main/a.jsonl", "github"),
                ("zip://a.jsonl::ftp://host/a.zip", "ftp"),
                ("simplecache::file:///a.jsonl", "simplecache"),
                ("memory://a.jsonl", "memory"),
            )
        ),
    ],
)
def test_an_address_that_cannot_be_read_is_a_sentence(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FilesDataset(address)


def texts(rows: Any) -> list[str]:
    return [rows[index]["text"] for index in range(len(rows))]


def test_files_at_a_url_are_read_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket"
    (bucket / "deep").mkdir(parents=True)
    (bucket / "deep" / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (bucket / "b.jsonl").write_text('{"text": "three"}\n')
    (bucket / "README.txt").write_text("about")
    assert texts(FilesDataset(f"file://{bucket}/deep/a.jsonl").train) == ["one", "two"]
    assert sorted(texts(FilesDataset(f"file://{bucket}").train)) == ["one", "three", "two"]
    assert texts(FilesDataset(f"file://{bucket}/*.jsonl").train) == ["three"]
    with pytest.raises(ConfigError, match="is also validated on"):
        FilesDataset(f"file://{bucket}/b.jsonl", val_path=f"file://{bucket}/b.jsonl")
    (bucket / "b.jsonl").write_text('{"text": "other"}\n')
    assert texts(FilesDataset(f"file://{bucket}/b.jsonl").train) == ["other"]


def test_of_a_folder_elsewhere_the_data_alone_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their names there, as those of a folder here; the copies have others."""
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))
    names = ["train/test-0.jsonl", "test/a.jsonl", "b.jsonl", "c.bin", ".d.jsonl", "LICENSE.txt"]
    for name in names:
        path = tmp_path / "bucket" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")
    dataset = FilesDataset(f"file://{tmp_path}/bucket")
    assert sorted(texts(dataset.train)) == ["b.jsonl", "train/test-0.jsonl"]
    for left_out in ("1 of held-out splits (", "1 hidden (", "1 of other kinds (", "1 about the"):
        assert left_out in dataset.description
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*.jsonl")) == [
        "00000-b.jsonl",
        "00001-test-0.jsonl",
    ]


def test_a_saved_dataset_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))
    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved"))
    assert texts(FilesDataset(f"file://{tmp_path}/saved").train) == ["one", "two"]
    (tmp_path / "saved" / ".x").touch()
    with pytest.raises(ConfigError, match=r"\.x in a saved dataset is not a plain name"):
        FilesDataset(f"file://{tmp_path}/saved")


def archive(path: Path, entries: dict[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, content in entries.items():
                packed.writestr(name, content)
        return path
    with tarfile.open(path, "w") as packed:
        for name, content in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("link.jsonl")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(link)
    return path


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize(
    "name",
    [
        "../../../../../.bashrc",
        "../../../../../x.jsonl",
        "/{home}/x.jsonl",
        "a/../../../../../../x.jsonl",
        "..\\..\\x.jsonl",
        "a/./../b/..",
        "\x1b[2Jx.jsonl",
        "x" * 300 + ".jsonl",
    ],
)
def test_no_entry_of_an_archive_leaves_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    """Neither alone nor beside others, whether it is named or comes with the rest."""
    home = tmp_path / "home"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(home / "deep" / "cache"))
    name = name.format(home=home)
    line = b'{"text": "t"}\n'
    for number, more in enumerate([{}, {"good.jsonl": line}, {"state.json": b"{}"}]):
        packed = archive(tmp_path / f"{number}.{kind}", {name: line, **more})
        for address in (f"{kind}://::file://{packed}", f"{kind}://{name}::file://{packed}"):
            with suppress(ConfigError, DataError):
                assert set(texts(FilesDataset(address).train)) <= {"t"}
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    cache = home / "deep" / "cache"
    assert all(cache in path.parents or path.suffix == f".{kind}" for path in written), written
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_what_unpacks_to_far_more_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("automodel_lite.data.reading.compressed.PLAUSIBLE_BYTES", 2**20)
    content = b'{"text": "' + b"x" * 2**22 + b'"}\n'
    packed = archive(tmp_path / "a.zip", {"a.jsonl": content})
    with pytest.raises(ConfigError, match=r"a.jsonl unpacks to 4,194,317 bytes, over 200 times"):
        FilesDataset(f"zip://::file://{packed}")
    for ending, compress in (
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
    ):
        path = tmp_path / f"a.jsonl{ending}"
        path.write_bytes(compress(content))
        with pytest.raises(DataError, match=rf"a.jsonl{ending}: unpacks to over 1,048,576 bytes"):
            FilesDataset(str(path))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.stat().st_size > 2**21]


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


def test_utf_16_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes("prompt,completion\na,b\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"a.jsonl:1.*UTF-16: .*iconv -f utf-16 -t utf-8\.$"):
        FilesDataset(str(tmp_path / "a.jsonl")).train[0]


def test_an_open_quote_is_never_one_bad_row(tmp_path: Path) -> None:
    lines = "question,answer\n" + "a,b\n" * 30 + '"c,d\n' + "e,f\n" * 30
    (tmp_path / "a.csv").write_text(lines)
    with pytest.raises(DataError, match=r"^a.csv:32: not CSV: a quote that opens in this row"):
        prepare(tmp_path / "a.csv", on_bad_row="skip")


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


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_cells_with_line_breaks_is_found(tmp_path: Path, delimiter: str) -> None:
    """Records are looked at, not lines: cells hold breaks of all kinds, and the other separators."""
    draw = random.Random(delimiter)
    pieces = ["a", ",", ";", "\t", "|", "\n", "\r\n", "\u2028", "\x0b", '"', " ", "ü"]
    for number in range(40):
        rows = [
            {
                "question": f"q{n}" + "".join(draw.choices(pieces, k=draw.randint(0, 30))) + "q",
                "answer": f"a{n}" + "".join(draw.choices(pieces, k=draw.randint(0, 30))) + "a",
            }
            for n in range(draw.randint(3, 60))
        ]
        path = tmp_path / f"{number}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["question", "answer"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
        found = FilesDataset(
            str(path), columns={"prompt": "question", "completion": "answer"}
        ).train
        wanted = [{"prompt": row["question"], "completion": row["answer"]} for row in rows]
        assert [found[i] for i in range(len(found))] == wanted


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


def test_many_files_are_not_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of 100,000 ended at the limit of open files."""
    monkeypatch.setattr(readers, "MAX_OPEN_FILES", 3)
    files = []
    for number in range(20):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps({"text": str(number)}) + "\n")
        files.append(readers.open_spans(path, path.name, "utf-8"))
    for _ in range(2):
        assert [rows[0]["text"] for rows in files] == [str(number) for number in range(20)]
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert sum(place.startswith(os.path.realpath(tmp_path)) for place in opened) <= 3
