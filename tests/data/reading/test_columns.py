"""Every row is judged, whatever its number: columns and roles that change the meaning are met where they begin."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.formats.known import FORMATS
from automodel_lite.data.reading.columns import detect
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.reading.readers import placed
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parts.datasets.streams import StreamingDataset
from tests.data.templates import MARKED, byte_tokenizer

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
PAIR = {"prompt": "q", "completion": "a"}


def late(path: Path, first: dict[str, Any], row: dict[str, Any]) -> str:
    """`row` behind 29 others, beyond the rows by which a format is found."""
    path.write_text("".join(json.dumps(one) + "\n" for one in [*[first] * 29, row]))
    return str(path)


LATE = {
    "a verdict": (
        PAIR,
        {**PAIR, "label": False},
        "column label says which answers are good and which are bad",
    ),
    "a picture": (
        {"messages": CHAT},
        {"messages": CHAT, "images": ["x.png"]},
        "column images would be ignored",
    ),
    "a rejected answer": (
        PAIR,
        {**PAIR, "rejected": "b"},
        "column rejected is the answer that is not wanted",
    ),
    "a weight": (
        PAIR,
        {**PAIR, "weight": 0.2},
        "column weight would be ignored: all rows weigh the same",
    ),
    "a mask": (
        {"messages": CHAT},
        {"messages": CHAT, "do_train": 0},
        "column do_train is another program's loss mask",
    ),
    "a mask of a turn": (
        {"messages": CHAT},
        {"messages": [CHAT[0], {**CHAT[1], "do_train": False}]},
        r"messages\[1\].do_train=False is another program's loss mask",
    ),
    "a role nobody trains": (
        {"messages": CHAT},
        {"messages": [CHAT[0], {"role": "bot", "content": "x"}, CHAT[1]]},
        r"messages\[1\].role='bot' is written by many templates, and never trained on",
    ),
    "a mask of tokens": (
        {"input_ids": [1, 2], "labels": [2, -100]},
        {"input_ids": [1, 2], "labels": [2, -100], "special_tokens_mask": [0, 1]},
        "column special_tokens_mask would be ignored",
    ),
    "two system prompts": (
        {"messages": CHAT},
        {"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"},
        "column system would be ignored: the first message is another system prompt",
    ),
}


@pytest.mark.parametrize("case", LATE)
def test_a_row_is_judged_wherever_it_stands(tmp_path: Path, case: str) -> None:
    first, row, message = LATE[case]
    path = late(tmp_path / "a.jsonl", first, row)
    rows = FilesDataset(path).train
    assert len(rows[28]) > 0
    with pytest.raises(DataError, match=rf"^a.jsonl:30: {message}"):
        rows[29]
    if "input_ids" not in first:
        (_, error), *_ = list(StreamingDataset(path, num_shards=1).read(0, 29))
        assert isinstance(error, DataError)


def test_columns_that_say_nothing_are_no_problem(tmp_path: Path) -> None:
    row = {**PAIR, "weight": 1.0, "images": [], "label": None, "rejected": None, "do_train": True}
    assert FilesDataset(late(tmp_path / "a.jsonl", PAIR, row)).train[29] == PAIR


def test_another_name_of_a_column_may_begin_anywhere(tmp_path: Path) -> None:
    first = {"instruction": "Add", "output": "2"}
    rows = FilesDataset(late(tmp_path / "a.jsonl", first, {**first, "context": "1+1"})).train
    assert rows[29] == {"prompt": "Add\n\n1+1", "completion": "2"}
    rows = FilesDataset(
        late(tmp_path / "b.jsonl", first, {"instruction": "Add", "response": "3"})
    ).train
    assert rows[29] == {"prompt": "Add", "completion": "3"}


def test_a_wanted_answer_that_is_named_is_taken(tmp_path: Path) -> None:
    """The cure that the refusal of preference pairs names works."""
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"prompt": "q", "answer": "a", "rejected_answer": "b"}) + "\n"
    )
    with pytest.raises(ConfigError, match=r"dataset.columns.completion=answer"):
        FilesDataset(str(tmp_path / "a.jsonl"))
    assert FilesDataset(str(tmp_path / "a.jsonl"), columns={"completion": "answer"}).train[0] == {
        "prompt": "q",
        "completion": "a",
    }


@pytest.mark.parametrize(("chosen", "completion"), [("solution", "2+2=4, so 4"), ("answer", "4")])
def test_a_solution_beside_an_answer_is_chosen(
    tmp_path: Path, chosen: str, completion: str
) -> None:
    """The short answer was trained on, and the solution ignored."""
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"question": "2+2?", "solution": "2+2=4, so 4", "answer": "4"}) + "\n"
    )
    with pytest.raises(DataError, match=r"column solution .* dataset.columns.answer=solution or"):
        FilesDataset(str(path)).train[0]
    named = FilesDataset(str(path), columns={"answer": chosen}).train[0]
    assert named == {"prompt": "2+2?", "completion": completion}


# ------------------------------------------------------------------------------------- a format from outside
def dialog(row: dict[str, Any], assistant: str = "bot") -> list[dict[str, str]]:
    """`{"dialog": [{"who", "said"}]}`, as the example of the page about extending has it."""
    return [
        {"role": "assistant" if turn["who"] == assistant else "user", "content": turn["said"]}
        for turn in row["dialog"]
    ]


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    turns = [{"who": "me", "said": "Hi"}, {"who": "bot", "said": "Hello!"}]
    path = late(tmp_path / "a.jsonl", {"dialog": turns}, {"chat": turns})
    dataset = FilesDataset(path, format=dialog)
    assert dataset.kind == "messages"
    assert dataset.train[0] == {"messages": CHAT}
    assert "read by tests.data.reading.test_columns.dialog" in dataset.description
    with pytest.raises(
        DataError, match=r"^a.jsonl:30: tests.*dialog: there is no 'dialog' in this row\.$"
    ):
        dataset.train[29]
    texts = FilesDataset(path, format=len)
    with pytest.raises(
        DataError,
        match=r"^a.jsonl:1: dataset.format=.*len.* must return a list of messages, .* not int '1'",
    ):
        texts.train[0]


SOUND = b'{"prompt": "a", "completion": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        (b"a.jsonl", b'{"prompt": "a", "completion": "b", "x\\ud800": 1}', r"ignored: x\\ud800$"),
        (
            b"a.jsonl",
            b'{"prompt": "a", "completion": "b", "\\u001b[31m\\n": 1}',
            r"ignored: \\x1b\[31m\\n$",
        ),
        (b"a.csv", b'prompt,completion,"\x1b[2J\ny"\na,b,c\n', r"ignored: \\x1b\[2J\\ny$"),
        (b"a\xff.jsonl", SOUND, r"^a\\udcff.jsonl: 1 document"),
        (b"a\x1b[31m\nb.jsonl", SOUND, r"^a\\x1b\[31m\\nb.jsonl: 1 document"),
        (
            b"a.jsonl",
            b'{"p\\ud800\\n": "a", "c": "b"}',
            r"the columns p\\ud800\\n, c match no known format",
        ),
        (
            b"a.jsonl",
            b'{"prompt": "a", "chosen": "b", "rejected\\u001b[1m": "c"}',
            r"chosen, rejected\\x1b\[1m are pref",
        ),
        (
            b"a.jsonl",
            SOUND * 20 + b'{"prompt": "a", "completion": "b", "reject\\ud800": 1}',
            r"column reject\\ud800 is the",
        ),
        (
            b"a.jsonl",
            b'{"messages": [{"role": "x\\ud800\\u001b", "content": "x"}]}',
            r"role='x\\ud800\\x1b' is written",
        ),
        (
            b"a.jsonl",
            b'{"messages": [{"role": "user", "loss_\\ud800": 1}]}',
            r"\[0\].loss_\\ud800=1 is another",
        ),
        (b"a\xff\n.jsonl", SOUND + b"{", r"^a\\udcff\\n.jsonl:2:2: not JSON"),
        (b"a\xff.bad", SOUND, r"^a\\udcff.bad: unknown kind of file"),
    ],
)
def test_names_of_columns_and_files_are_printed_escaped(
    tmp_path: Path, name: bytes, content: bytes, shown: str
) -> None:
    path, found = os.fsdecode(os.fsencode(tmp_path) + b"/" + name), list[str]()
    Path(path).write_bytes(content)
    settings = TokenizeConfig(on_bad_row="skip", max_bad_frac=0.99)
    try:
        dataset = FilesDataset(path)
        found += [
            dataset.description,
            *(str(row) for _, row in placed(dataset.train) if isinstance(row, DataError)),
        ]
        found += tokenize_documents(
            dataset, TokenizeJob(byte_tokenizer(MARKED), settings), tmp_path
        ).notes
    except (ConfigError, DataError) as error:
        found.append(str(error))
    assert any(re.search(shown, text) for text in found), found
    assert all(text.isprintable() for text in found)


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return str(path)


WHAT_THEY_ARE = {
    "preference texts": (["prompt", "chosen", "rejected"], None, r"the columns chosen, rejected are preference pairs, and this program trains on one answer: select the chosen answers with dataset.columns.completion=chosen \(texts"),
    "the rejected ones": (["prompt", "chosen", "rejected"], {"completion": "rejected"}, r"preference pairs, and rejected would be trained on"),
    "beside messages": (["messages", "chosen", "rejected"], None, r"are preference pairs"),
    "rejected ones alone": (["rejected"], None, r"the columns rejected are preference pairs, .* dataset.columns.completion=\.\.\. "),
    "other names": (["question", "response_j_better", "response_k_worse"], None, r"dataset.columns.completion=response_j_better"),
    "one bad answer": (["prompt", "answer", "rejected_answer"], None, r"dataset.columns.completion=answer"),
    "kto": (["prompt", "completion", "label"], None, r"column label says which answers are good and which are bad \(KTO\).* dataset.format=prompt_completion to train on all"),
    "kto chats": (["messages", "kto_tag"], None, r"column kto_tag says .* dataset.format=messages"),
}  # fmt: skip


def test_the_printed_line_says_what_was_found(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"instruction": "a", "input": "", "output": "b"}])
    assert (
        FilesDataset(path).description
        == FilesDataset(Path(path)).description
        == "a.jsonl: 1 document, columns instruction,input,output → alpaca"
    )
    path = jsonl(tmp_path / "b.jsonl", [{"Frage": "a", "Antwort": "b"}])
    mapped = FilesDataset(path, columns={"question": "Frage", "answer": "Antwort"})
    assert mapped.description == (
        "b.jsonl: 1 document, columns Frage,Antwort → question_answer (question = Frage, answer = Antwort)"
    )
    assert mapped.train[0] == {"prompt": "a", "completion": "b"}


def test_unknown_columns_list_what_was_found_and_what_is_known() -> None:
    with pytest.raises(ConfigError) as caught:
        detect(["a", "b"], None, None)
    message = str(caught.value)
    assert message.startswith(
        "the columns a, b match no known format: name them, for instance dataset.columns.prompt=a dataset.columns.completion=b."
    )
    assert all(" + ".join(known.columns) in message for known in FORMATS if known.is_found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("alpaka", None), "dataset.format=alpaka is not one of packed, tokens, decisions"),
        (
            ("alpaca", None),
            "dataset.format=alpaca needs the columns instruction + output, the data have question,",
        ),
        (
            (None, {"answer": "x"}),
            "dataset.columns.answer=x is not a column of the data, which has question, answer",
        ),
    ],
    ids=["unknown format", "format without its columns", "unknown column"],
)
def test_wrong_settings(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        detect(["question", "answer"], *arguments)
    assert str(caught.value).startswith(message)


def test_a_label_names_the_presets_that_learn_it() -> None:
    columns = ["Text", "Abteilung"]
    named = {"text": "Text", "label": "Abteilung"}
    with pytest.raises(ConfigError, match=r"no label: .* --config-name classify, .*-name kto, or"):
        detect(columns, None, named)
    assert detect(columns, "labeled", named).format.kind == "labeled"


def test_a_verdict_without_an_answer_names_its_columns() -> None:
    columns = ["Frage", "Antwort", "gut"]
    with pytest.raises(
        ConfigError, match=r"needs the columns messages \+ label, .*have Frage"
    ) as e:
        detect(columns, "verdict", {"label": "gut"})
    cure = "for instance dataset.columns.prompt=Frage dataset.columns.completion=Antwort, or"
    assert cure in str(e.value)
    named = {"prompt": "Frage", "completion": "Antwort", "label": "gut"}
    assert detect(columns, "verdict", named).format.columns == ("prompt", "completion", "label")


@pytest.mark.parametrize("case", WHAT_THEY_ARE)
def test_columns_that_change_the_meaning_are_named(case: str) -> None:
    columns, renames, message = WHAT_THEY_ARE[case]
    with pytest.raises(ConfigError, match=message):
        detect(columns, None, renames)


@pytest.mark.parametrize(
    ("columns", "found", "renames"),
    [
        (["instruction", "response", "source"], "alpaca", {"output": "response"}),
        (["question", "response", "source"], "question_answer", {"answer": "response"}),
        (["query", "answer", "source"], "prompt_completion", {"prompt": "query", "completion": "answer"}),
        (["problem", "solution", "answer"], "prompt_completion", {"prompt": "problem", "completion": "solution"}),
        (["inputs", "targets"], "prompt_completion", {"prompt": "inputs", "completion": "targets"}),
        (["document", "summary"], "prompt_completion", {"prompt": "document", "completion": "summary"}),
        (["question", "solution", "context"], "question_answer", {"answer": "solution"}),
    ],
)  # fmt: skip
def test_columns_by_other_names(columns: list[str], found: str, renames: dict[str, str]) -> None:
    detected = detect(columns, None, None)
    assert (detected.format.name, dict(detected.renames)) == (found, renames)


def test_the_source_of_a_pair_is_no_prompt() -> None:
    assert detect(["chosen", "rejected", "source"], "preference", None).renames == {}


def test_a_given_format_says_that_it_is_meant(tmp_path: Path) -> None:
    assert (
        detect(["prompt", "chosen", "rejected"], None, {"completion": "chosen"}).format.name
        == "prompt_completion"
    )
    meant = detect(
        ["prompt", "chosen", "rejected"], "prompt_completion", {"completion": "rejected"}
    )
    assert meant.renames == {"completion": "rejected"}
    assert detect(
        ["prompt", "completion", "label"], "prompt_completion", None
    ).description.endswith("ignored: label")
    assert detect(["text", "label"], None, None).format.name == "text"
    rows = FilesDataset(
        jsonl(tmp_path / "a.jsonl", [{"messages": CHAT, "images": ["a"]}]), format="messages"
    ).train
    assert rows[0] == {"messages": CHAT}


def test_hints_name_columns_where_their_order_tells_them() -> None:
    for columns, hint in (
        (["Text"], "dataset.columns.text=Text."),
        (["Frage", "Antwort"], "dataset.columns.prompt=Frage dataset.columns.completion=Antwort."),
        (["mesages"], "dataset.columns.messages=mesages."),
        (["question", "anwser"], "dataset.columns.question=question dataset.columns.answer=anwser."),
        (["a", "b", "c"], "dataset.columns.prompt=NAME dataset.columns.completion=NAME."),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            detect(columns, None, None)
        assert f"for instance {hint}" in str(caught.value)


def test_a_renamed_column_is_called_by_its_own_name(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl", [{"Frage": "a", "Antwort": "b"}, {"Frage": "a", "Antwort": 7}]
    )
    rows = FilesDataset(path, columns={"question": "Frage", "answer": "Antwort"}).train
    with pytest.raises(
        DataError, match=r"^a.jsonl:2: column Antwort must be a text, not int '7'.$"
    ):
        rows[1]


def test_a_column_that_has_the_name_of_another_is_called_by_its_own(tmp_path: Path) -> None:
    """The label is in a column text, and the text in another one."""
    row = {"text": "good", "body": "abc"}
    path = jsonl(tmp_path / "a.jsonl", [row, {**row, "text": "bad"}, {**row, "text": None}])
    columns = {"label": "text", "text": "body"}
    rows = FilesDataset(path, format="labeled", columns=columns).train
    with pytest.raises(DataError, match=r"^a.jsonl:3: column text is missing: "):
        rows[2]
    path = jsonl(tmp_path / "b.jsonl", [{"ask": "q", "answer": "a", "past\n": [["only one"]]}])
    columns = {"prompt": "ask", "completion": "answer", "history": "past\n"}
    rows = FilesDataset(path, columns=columns).train
    with pytest.raises(DataError, match=r"^b.jsonl:1: column past\\n\[0\] must be a pair of texts"):
        rows[0]
