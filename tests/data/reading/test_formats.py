"""Formats: found from the columns, normalized, and refused in a sentence that names the place."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest

from automodel_lite.data.reading import paths
from automodel_lite.data.reading.columns import detect
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.reading.formats import FORMATS
from automodel_lite.errors import ConfigError, DataError


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
CASES = {
    "messages": ({"messages": CHAT}, {"messages": CHAT}),
    "messages, other name": ({"dialogue": CHAT}, {"messages": CHAT}),
    "messages as JSON text": ({"messages": json.dumps(CHAT)}, {"messages": CHAT}),
    "content in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CHAT[1]]},
        {"messages": CHAT},
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}], "system": "S"},
        {"messages": [{"role": "system", "content": "S"}, *CHAT]},
    ),
    "sharegpt with roles": ({"conversations": CHAT}, {"messages": CHAT}),
    "alpaca": (
        {"instruction": "Add", "input": "1+1", "output": "2"},
        {"prompt": "Add\n\n1+1", "completion": "2"},
    ),
    "alpaca without input": (
        {"instruction": "Add", "input": "", "output": "2", "system": "S"},
        {"prompt": "Add", "completion": "2", "system": "S"},
    ),
    "prompt_completion": ({"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1=", "completion": "2"}),
    "prompt_completion of messages": (
        {"prompt": CHAT, "completion": CHAT[1:]},
        {"messages": [{**CHAT[0], "weight": 0}, {**CHAT[1], "weight": 0}, CHAT[1]]},
    ),
    "prompt and response": ({"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"}),
    "question_answer": ({"question": "q", "answer": "a"}, {"prompt": "q", "completion": "a"}),
    "with context": ({"context": "c", "question": "q", "answer": "a"}, {"prompt": "c\n\nq", "completion": "a"}),
    "text": ({"text": "abc", "url": "x"}, {"text": "abc"}),
    "parts under value": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "H"}, {"type": "text", "content": "i"}]},
                CHAT[1],
            ]
        },
        {"messages": CHAT},
    ),
    "sharegpt turns in messages": (
        {"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!", "weight": 0.0}]},
        {"messages": [CHAT[0], {**CHAT[1], "weight": 0}]},
    ),
    "sharegpt calls": (
        {
            "conversations": [
                {"from": "human", "value": "2+2?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "It is 4."},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
                },
                {"role": "tool", "content": "4"},
                {"role": "assistant", "content": "It is 4."},
            ]
        },
    ),
    "the older function_call": (
        {
            "messages": [
                CHAT[0],
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            ]
        },
        {
            "messages": [
                CHAT[0],
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
                },
            ]
        },
    ),
    "alpaca with a history": (
        {"instruction": "2+2?", "input": "", "output": "4", "history": [["Hi", "Hello!"]]},
        {"messages": [*CHAT, {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
    ),
    "dolly": (
        {"instruction": "Add", "context": "1+1", "response": "2", "category": "x"},
        {"prompt": "Add\n\n1+1", "completion": "2"},
    ),
    "orca": (
        {"system_prompt": "S", "question": "q", "response": "a"},
        {"prompt": "q", "completion": "a", "system": "S"},
    ),
    "images that are none": ({"messages": CHAT, "images": []}, {"messages": CHAT}),
}


@pytest.mark.parametrize(("row", "document"), CASES.values(), ids=CASES)
def test_normalized(tmp_path: Path, row: dict, document: dict) -> None:
    assert FilesDataset(jsonl(tmp_path / "a.jsonl", [row])).train[0] == document


def test_tools_and_calls_become_objects(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": {"default": None}}}}
    row = {
        "messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}],
        "tools": json.dumps([tool]),
    }
    document = FilesDataset(jsonl(tmp_path / "a.jsonl", [row])).train[0]
    assert document["tools"] == [tool]
    assert document["messages"][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        "reasoning_content": "hm",
    }


def test_the_printed_line_says_what_was_found(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": "a", "input": "", "output": "b"}])
    assert FilesDataset(path).description == "a.jsonl: 1 documents, columns instruction,input,output → alpaca"
    path = jsonl(tmp_path / "b.jsonl", [{"Frage": "a", "Antwort": "b"}])
    mapped = FilesDataset(path, columns={"question": "Frage", "answer": "Antwort"})
    assert mapped.description == (
        "b.jsonl: 1 documents, columns Frage,Antwort → question_answer (question = Frage, answer = Antwort)"
    )
    assert mapped.train[0] == {"prompt": "a", "completion": "b"}


def test_unknown_columns_list_what_was_found_and_what_is_known() -> None:
    with pytest.raises(ConfigError) as caught:
        detect(["a", "b"], None, None)
    message = str(caught.value)
    assert message.startswith(
        "the columns a, b match no known format: name them, for instance dataset.columns.prompt=a dataset.columns.completion=b."
    )
    assert all(" + ".join(known.columns) in message for known in FORMATS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("alpaka", None), "dataset.format=alpaka is not one of packed, tokens, messages"),
        (("alpaca", None), "dataset.format=alpaca needs the columns instruction + output, the data have question,"),
        ((None, {"answer": "x"}), "dataset.columns.answer=x is not a column of the data, which has question, answer"),
    ],
    ids=["unknown format", "format without its columns", "unknown column"],
)
def test_wrong_settings(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(["question", "answer"], *arguments)
    assert str(caught.value).startswith(message)


PART = "must hold its text once, under text: it is"
BAD_ROWS = {
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        f"a.jsonl:2: messages[0].content[0] {PART} {{'type': 'text', 'text': None}}.",
    ),
    "a part under another key": (
        {"messages": [{"role": "user", "content": [{"type": "text", "body": "Hi"}]}]},
        f"a.jsonl:2: messages[0].content[0] {PART} {{'type': 'text', 'body': 'Hi'}}.",
    ),
    "a part twice": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "value": "b"}]}]},
        f"a.jsonl:2: messages[0].content[0] {PART} {{'type': 'text', 'text': 'a', 'value': 'b'}}.",
    ),
    "a part that is a text": (
        {"messages": [{"role": "user", "content": ["Hi"]}]},
        """a.jsonl:2: messages[0].content[0] must be an object such as {"type": "text", "text": ...}, not 'Hi'.""",
    ),
    "a weight that is a text": (
        {"messages": [CHAT[0], {**CHAT[1], "weight": "0"}]},
        "a.jsonl:2: messages[1].weight must be 0 (not trained on) or 1, not '0'.",
    ),
    "half a weight": (
        {"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]},
        "a.jsonl:2: messages[1].weight must be 0 (not trained on) or 1, not 0.5.",
    ),
    "another program's mask": (
        {"messages": [CHAT[0], {**CHAT[1], "train": False}]},
        "a.jsonl:2: messages[1].train=False is another program's loss mask: set weight: 1 for a turn to train on and weight: 0 for the others.",
    ),
    "a picture in a turn": (
        {"messages": [{**CHAT[0], "images": ["a.png"]}, CHAT[1]]},
        "a.jsonl:2: messages[0].images would be ignored: this program trains only on text.",
    ),
    "a picture beside the chat": (
        {"messages": CHAT, "images": ["a.png"]},
        "a.jsonl:2: column images would be ignored: this program trains only on text; set dataset.format=messages to train without it.",
    ),
    "a call that is a sentence": (
        {"messages": [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": "call add"}]},
        """a.jsonl:2: messages[1].value of a function_call must be JSON such as {"name": "f", "arguments": {}}, not 'call add'.""",
    ),
    "a call without a name": (
        {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "a.jsonl:2: messages[1].tool_calls must hold objects with a function and its name, not \"{'function': {}}\".",
    ),
    "no content": ({"messages": [{"role": "user"}]}, "a.jsonl:2: messages[0].content must be a text, not missing."),
    "no role": ({"messages": [{"content": "Hi"}]}, "a.jsonl:2: messages[0].role must be a text, not None."),
    "content a number": (
        {"messages": [{"role": "user", "content": 7}]},
        "a.jsonl:2: messages[0].content must be a text, not int.",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "a.jsonl:2: messages[0].content[0] is of type 'image_url', but only text is supported: remove it, or convert it to text.",
    ),
    "no list": ({"messages": "Hi"}, "a.jsonl:2: column messages must be a list of messages, not str 'Hi'."),
    "missing": ({"other": 1}, "a.jsonl:2: column messages must be a list of messages, not missing."),
    "empty": ({"messages": []}, "a.jsonl:2: an empty list of messages."),
    "half a surrogate": (
        '{"messages": [{"role": "user", "content": "ab\\ud800"}]}\n',
        "a.jsonl:2: messages[0].content contains an unpaired surrogate at character 3.",
    ),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_names_its_place(tmp_path: Path, row: Any, message: str) -> None:
    first = {"messages": CHAT, "images": []} if isinstance(row, dict) and "images" in row else {"messages": CHAT}
    rows = FilesDataset(jsonl(tmp_path / "a.jsonl", [first, row])).train
    with pytest.raises(DataError) as caught:
        rows[1]
    assert str(caught.value) == message


# What each renderer gets that it does not know: a part of a content, a number where a text should be.
UNKNOWN = [{"type": "image_url", "image_url": {"url": "x"}}]
UNKNOWN_PARTS = {
    "messages": ({"messages": [{"role": "user", "content": UNKNOWN}, CHAT[1]]}, "messages[0].content[0] is of type 'image_url'"),
    "sharegpt": ({"conversations": [{"from": "human", "value": UNKNOWN}, CHAT[1]]}, "conversations[0].content[0] is of type 'image_url'"),
    "prompt_completion": ({"prompt": CHAT[:1], "completion": [{"role": "assistant", "content": UNKNOWN}]}, "completion[0].content[0] is of type 'image_url'"),
    "responses": ({"prompt": "a", "responses": "b"}, "column responses must be a list of answers, not str"),
    "alpaca": ({"instruction": "a", "input": UNKNOWN, "output": "b"}, "column input must be a text, not list"),
    "question_answer": ({"question": "a", "answer": UNKNOWN}, "column answer must be a text, not list"),
    "text": ({"text": UNKNOWN}, "column text must be a text, not list"),
    "tokens": ({"input_ids": UNKNOWN, "labels": [1]}, "column input_ids must be a list of integers, not list"),
    "preference": ({"prompt": 5, "chosen": "a", "rejected": "b"}, "column prompt must be a text, not int"),
    "packed": ({"input_ids": [1], "labels": [1], "seq_lens": UNKNOWN}, "column seq_lens must be a list of integers, not list"),
}  # fmt: skip


@pytest.mark.parametrize("name", [known.name for known in FORMATS])
def test_every_renderer_refuses_what_it_does_not_know(name: str) -> None:
    row, message = UNKNOWN_PARTS[name]
    (known,) = [known for known in FORMATS if known.name == name]
    with pytest.raises(DataError) as caught:
        known.normalize(row)
    assert str(caught.value).startswith(message)


WHAT_THEY_ARE = {
    "preference texts": (["prompt", "chosen", "rejected"], None, r"the columns chosen, rejected are preference pairs, and this program trains on one answer: select the chosen answers with dataset.columns.completion=chosen \(texts"),
    "the rejected ones": (["prompt", "chosen", "rejected"], {"completion": "rejected"}, r"preference pairs, and rejected would be trained on"),
    "beside messages": (["messages", "chosen", "rejected"], None, r"are preference pairs"),
    "other names": (["question", "response_j_better", "response_k_worse"], None, r"dataset.columns.completion=response_j_better"),
    "one bad answer": (["prompt", "answer", "rejected_answer"], None, r"dataset.columns.completion=answer"),
    "kto": (["prompt", "completion", "label"], None, r"column label says which answers are good and which are bad \(KTO\).* dataset.format=prompt_completion to train on all"),
    "kto chats": (["messages", "kto_tag"], None, r"column kto_tag says .* dataset.format=messages"),
}  # fmt: skip


@pytest.mark.parametrize("case", WHAT_THEY_ARE)
def test_columns_that_change_the_meaning_are_named(case: str) -> None:
    columns, renames, message = WHAT_THEY_ARE[case]
    with pytest.raises(ConfigError, match=message):
        detect(columns, None, renames)


def test_a_given_format_says_that_it_is_meant(tmp_path: Path) -> None:
    assert detect(["prompt", "chosen", "rejected"], None, {"completion": "chosen"}).format.name == "prompt_completion"
    meant = detect(["prompt", "chosen", "rejected"], "prompt_completion", {"completion": "rejected"})
    assert meant.renames == {"completion": "rejected"}
    assert detect(["prompt", "completion", "label"], "prompt_completion", None).description.endswith("ignored: label")
    assert detect(["text", "label"], None, None).format.name == "text"
    rows = FilesDataset(jsonl(tmp_path / "a.jsonl", [{"messages": CHAT, "images": ["a"]}]), format="messages").train
    assert rows[0] == {"messages": CHAT}


def test_hints_drop_no_column() -> None:
    for columns, hint in (
        (["Text"], "dataset.columns.text=Text."),
        (["Frage", "Antwort"], "dataset.columns.prompt=Frage dataset.columns.completion=Antwort."),
        (["Anweisung", "Eingabe", "Ausgabe"], "dataset.columns.instruction=Anweisung dataset.columns.input=Eingabe dataset.columns.output=Ausgabe."),
        (["a", "b", "c", "d"], "dataset.columns.prompt=a dataset.columns.completion=d (which leaves out b, c)."),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            detect(columns, None, None)
        assert f"for instance {hint}" in str(caught.value)


def test_a_renamed_column_is_called_by_its_own_name(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"Frage": "a", "Antwort": "b"}, {"Frage": "a", "Antwort": 7}])
    rows = FilesDataset(path, columns={"question": "Frage", "answer": "Antwort"}).train
    with pytest.raises(DataError, match=r"^a.jsonl:2: column Antwort must be a text, not int '7'.$"):
        rows[1]


# ---------------------------------------------------------------------------------------------------------- files
ROWS = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(5)]
DOCUMENTS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(5)]


def documents(path: str, **options: Any) -> list[dict]:
    rows = FilesDataset(path, **options).train
    return [rows[i] for i in range(len(rows))]


def write_csv(path: Path, delimiter: str) -> None:
    lines = [delimiter.join(["question", "answer"]), *(delimiter.join(row.values()) for row in ROWS)]
    path.write_text("\n".join(lines) + "\n")


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "no_last_break.jsonl": lambda path: path.write_bytes(LINES.rstrip()),
    "blank_lines.jsonl": lambda path: path.write_bytes(b"\n" + LINES.replace(b"\n", b"\n \r\n\n")),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES),
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "pretty.json": lambda path: path.write_text(json.dumps(ROWS, indent=2)),
    "inside.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "lines.json": lambda path: path.write_bytes(LINES),
    "a.csv": lambda path: write_csv(path, ","),
    "a.tsv": lambda path: write_csv(path, "\t"),
    "a.parquet": lambda path: datasets.Dataset.from_list(ROWS).to_parquet(path),
    "folder_of_arrow": lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path),
    "dict_of_arrow": lambda path: datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "a.jsonl.zst": lambda path: path.write_bytes(pyarrow.compress(LINES, "zstd", asbytes=True)),
}


@pytest.fixture(autouse=True)
def _cache_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_every_kind_give_the_same_documents(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name)
    assert documents(str(tmp_path / name)) == DOCUMENTS


def test_globs_folders_and_lists_keep_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "b.jsonl", ROWS[3:])
    (folder / "a.json").write_text(json.dumps(ROWS[:3]))
    (folder / "README.md").write_text("not data")
    assert documents(str(folder)) == DOCUMENTS
    assert documents(str(folder / "*.json*")) == DOCUMENTS
    assert documents([str(folder / "a.json"), str(folder / "b.jsonl")]) == DOCUMENTS
    rows = FilesDataset(str(folder)).train
    assert [rows.where(i) for i in (0, 2, 3, 4)] == ["a.json[1]", "a.json[3]", "b.jsonl:1", "b.jsonl:2"]


@pytest.mark.parametrize(
    ("unit", "texts", "places"),
    [
        ("file", ["one\ntwo\n\n\nthree"], ["a.txt:1"]),
        ("paragraph", ["one\ntwo", "three"], ["a.txt:1", "a.txt:5"]),
        ("line", ["one", "two", "three"], ["a.txt:1", "a.txt:2", "a.txt:5"]),
    ],
)
def test_text_files_are_plain_text(tmp_path: Path, unit: str, texts: list[str], places: list[str]) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n\nthree\n")
    found = FilesDataset(str(tmp_path / "a.txt"), text_unit=unit)
    assert [found.train[i] for i in range(len(found.train))] == [{"text": text} for text in texts]
    assert [found.train.where(i) for i in range(len(found.train))] == places
    assert f"a document is a {unit} of text, median " in found.description


def test_an_encoding_can_be_given(tmp_path: Path) -> None:
    """Excel writes cp1252; the error names the cure."""
    (tmp_path / "a.csv").write_bytes("question,answer\nGrüße?,Öl\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"a.csv:2: byte 0xfc is not UTF-8; in cp1252 .* it is 'ü'.*encoding=cp1252"):
        documents(str(tmp_path / "a.csv"))
    assert documents(str(tmp_path / "a.csv"), encoding="cp1252") == [{"prompt": "Grüße?", "completion": "Öl"}]
    (tmp_path / "a.txt").write_bytes("Grüße".encode("latin-1"))
    assert documents(str(tmp_path / "a.txt"), encoding="latin-1") == [{"text": "Grüße"}]
    with pytest.raises(ConfigError, match=r"dataset.encoding=utf-16 cannot be read line by line: convert"):
        documents(str(tmp_path / "a.txt"), encoding="utf-16")
    with pytest.raises(ConfigError, match=r"dataset.encoding=utf-9 is unknown"):
        documents(str(tmp_path / "a.txt"), encoding="utf-9")


SEPARATED = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}


@pytest.mark.parametrize("kind", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("delimiter", SEPARATED)
def test_the_delimiter_of_a_table_is_found(tmp_path: Path, kind: str, delimiter: str) -> None:
    mark = SEPARATED[delimiter]
    lines = ["question", "answer"], ["a, b" if mark != "," else "b", "x"], [f'"c{mark} d\nline"', "1.5"]
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


def test_a_delimiter_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question;answer,x\na;b,y\n")
    assert documents(str(tmp_path / "a.csv"), delimiter="semicolon", columns={"answer": "answer,x"}) == [
        {"prompt": "a", "completion": "b,y"}
    ]


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer,answer\na,b,c\n")
    with pytest.raises(DataError, match=r"a.csv:1: two columns are called 'answer'"):
        documents(str(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_bytes(b"question,antw\xf6rt\na,b\n")
    with pytest.raises(DataError, match=r"b.csv:1: byte 0xf6 is not UTF-8"):
        documents(str(tmp_path / "b.csv"))


def test_what_is_not_a_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody writes to would be waited for, for ever; a disk would be searched for an hour."""
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"dataset.path=.*a.jsonl is neither a file nor a folder"):
        documents(str(tmp_path / "a.jsonl"))
    with pytest.raises(ConfigError, match=r"is a folder without data: it has no .jsonl"):
        documents(str(tmp_path))
    with pytest.raises(ConfigError, match=r"dataset.path= is empty"):
        documents("")
    monkeypatch.setattr(paths, "MAX_ENTRIES", 3)
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"holds over 3 files and folders: name the one with the data"):
        documents(str(tmp_path))


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    """A mapped file would end the process by SIGBUS."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES * 1000)
    rows = FilesDataset(str(path)).train
    assert rows[4999] == DOCUMENTS[4]
    os.truncate(path, len(LINES))
    assert rows[4] == DOCUMENTS[4]
    with pytest.raises(
        DataError, match=r"a.jsonl:6: the file was truncated while it was being read: it had 175,000 bytes"
    ):
        rows[5]
    with pytest.raises(DataError, match=r"a.jsonl:5000: the file was truncated"):
        rows[4999]


def test_csv_values_stay_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question,answer\n007,NA\n"two\nlines","a, ""b"""\n')
    assert documents(str(tmp_path / "a.csv")) == [
        {"prompt": "007", "completion": "NA"},
        {"prompt": "two\nlines", "completion": 'a, "b"'},
    ]


def test_nulls_that_arrow_fills_in_are_taken_out(tmp_path: Path) -> None:
    tools = [{"name": "f", "x": 1}, {"name": "g", "y": 2}]
    rows = [{"messages": CHAT, "tools": [tool]} for tool in tools]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert [document["tools"] for document in documents(str(tmp_path / "a.parquet"))] == [[tool] for tool in tools]


def test_validation_documents(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    other = jsonl(tmp_path / "b.jsonl", ROWS[:2])
    third = jsonl(tmp_path / "c.jsonl", ROWS[::-1])
    by_name = FilesDataset(path, val_path={"one": other, "two": third})
    assert {name: len(rows) for name, rows in by_name.val.items()} == {"one": 2, "two": 5}
    split = FilesDataset(path, val_frac=0.4, seed=3)
    again = FilesDataset(path, val_frac=0.4, seed=3)
    val = [split.val["val"][i]["prompt"] for i in range(2)]
    assert sorted(val + [split.train[i]["prompt"] for i in range(3)]) == ["q0", "q1", "q2", "q3", "q4"]
    assert val == [again.val["val"][i]["prompt"] for i in range(2)]
    with pytest.raises(ConfigError, match="set only one of them"):
        FilesDataset(path, val_frac=0.4, val_path=other)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset.path=.*/none.jsonl does not exist \(looked in "):
        FilesDataset(str(tmp_path / "none.jsonl"))
    (tmp_path / "a.doc").write_text("x")
    with pytest.raises(ConfigError, match=r"unknown kind of file"):
        FilesDataset(str(tmp_path / "a.doc"))


def test_files_have_no_splits(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"dataset.split=test: .*a.jsonl has no splits"):
        FilesDataset(path, val_split="test")
    datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")}).save_to_disk(
        tmp_path / "saved"
    )
    saved = FilesDataset(str(tmp_path / "saved"), val_split="test")
    assert (len(saved.train), len(saved.val["val"])) == (5, 5)
    with pytest.raises(ConfigError, match=r"dataset.split=dev is not in .*saved, which has train, test"):
        FilesDataset(str(tmp_path / "saved"), split="dev")


def test_hub_names_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", no_network)
    with pytest.raises(ConfigError, match=r"dataset.path=org/set is not a local file .* Couldn't reach the hub"):
        FilesDataset("org/set")


def test_hub_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda path, name, split: datasets.Dataset.from_list(ROWS))
    loaded = FilesDataset("org/set", name="main")
    assert loaded.description == "org/set/main: 5 documents, columns question,answer → question_answer"
    assert loaded.train.where(2) == "org/set/main[3]"
    assert loaded.train[2] == DOCUMENTS[2]


def chat(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]


ASKED = {"role": "user", "content": "2+2?", "weight": 0}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
PAIR_OF_CHATS = {"chosen": {"messages": [ASKED, GOOD]}, "rejected": {"messages": [ASKED, BAD]}}
PAIR_OF_TEXTS = {"chosen": {"prompt": "2+2?", "completion": "4"}, "rejected": {"prompt": "2+2?", "completion": "5"}}
PAIRS = {
    "TRL, explicit texts": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, PAIR_OF_TEXTS),
    "TRL, explicit chats": ({"prompt": chat("2+2?"), "chosen": [GOOD], "rejected": [BAD]}, PAIR_OF_CHATS),
    "TRL, implicit chats": ({"chosen": chat("2+2?", "4"), "rejected": chat("2+2?", "5")}, PAIR_OF_CHATS),
    "TRL, implicit texts": (
        {"chosen": "Q: 2+2? A: 4", "rejected": "Q: 2+2? A: 5"},
        {"chosen": {"prompt": "Q: 2+2? A: ", "completion": "4"}, "rejected": {"prompt": "Q: 2+2? A: ", "completion": "5"}},
    ),
    "LLaMA-Factory, alpaca": ({"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5"}, PAIR_OF_TEXTS),
    "LLaMA-Factory, sharegpt": (
        {"conversations": [{"from": "human", "value": "2+2?"}], "chosen": {"from": "gpt", "value": "4"}, "rejected": {"from": "gpt", "value": "5"}},
        PAIR_OF_CHATS,
    ),
    "UltraFeedback": (
        {"prompt": "2+2?", "chosen": chat("2+2?", "4"), "rejected": chat("2+2?", "5"), "messages": chat("2+2?", "4"), "score_chosen": 9.0},
        PAIR_OF_CHATS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("row", "pair"), PAIRS.values(), ids=PAIRS)
def test_preference_pairs_of_others(row: dict[str, Any], pair: dict[str, Any]) -> None:
    detected = detect(list(row), "preference", None)
    assert detected.document(row, "pairs.jsonl:1") == pair


WRONG_PAIRS = {
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "column chosen and column rejected are equal"),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": ""}, "column rejected is empty: a preference pair has two"),
    "a missing half": ({"prompt": "a", "chosen": "b", "rejected": None}, "column rejected is empty"),
    "other prompts": (
        {"chosen": chat("2+2?", "4"), "rejected": chat("3+3?", "6")},
        "column chosen and column rejected must begin with the same prompt",
    ),
    "two kinds": ({"chosen": chat("2+2?", "4"), "rejected": "5"}, "must be of one kind"),
}


@pytest.mark.parametrize(("row", "message"), WRONG_PAIRS.values(), ids=WRONG_PAIRS)
def test_a_wrong_pair_names_its_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"pairs.jsonl:7: .*{message}"):
        detect(list(row), "preference", None).document(row, "pairs.jsonl:7")
