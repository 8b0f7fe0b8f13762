"""Formats: found from the columns, normalized, and refused in a sentence that names the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.data.formats.known import FORMATS
from automodel_lite.data.formats.texts import responses
from automodel_lite.data.reading.columns import detect
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.errors import DataError


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
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
        {
            "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}],
            "system": "S",
        },
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
    "prompt_completion": (
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "1+1=", "completion": "2"},
    ),
    "prompt_completion of messages": (
        {"prompt": CHAT, "completion": CHAT[1:]},
        {"messages": [{**CHAT[0], "weight": 0}, {**CHAT[1], "weight": 0}, CHAT[1]]},
    ),
    "prompt and response": ({"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"}),
    "question_answer": ({"question": "q", "answer": "a"}, {"prompt": "q", "completion": "a"}),
    "with context": (
        {"context": "c", "question": "q", "answer": "a"},
        {"prompt": "c\n\nq", "completion": "a"},
    ),
    "text": ({"text": "abc", "url": "x"}, {"text": "abc"}),
    "parts under value": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "value": "H"}, {"type": "text", "content": "i"}],
                },
                CHAT[1],
            ]
        },
        {"messages": CHAT},
    ),
    "sharegpt turns in messages": (
        {
            "messages": [
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello!", "weight": 0.0},
            ]
        },
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
                    "tool_calls": [
                        {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
                    ],
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
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "f", "arguments": "{}"},
                },
            ]
        },
        {
            "messages": [
                CHAT[0],
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"type": "function", "function": {"name": "f", "arguments": {}}}
                    ],
                },
            ]
        },
    ),
    "alpaca with a history": (
        {"instruction": "2+2?", "input": "", "output": "4", "history": [["Hi", "Hello!"]]},
        {
            "messages": [
                *CHAT,
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4"},
            ]
        },
    ),
    "query and response behind a history": (
        {"system": "S", "query": "2+2?", "response": "4", "history": [["Hi", "Hello!"]]},
        {
            "messages": [
                {"role": "system", "content": "S"},
                *CHAT,
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4"},
            ]
        },
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
        "a.jsonl:2: messages[0].images would be ignored: dataset=images reads images, and nothing reads other media.",
    ),
    "a picture beside the chat": (
        {"messages": CHAT, "images": ["a.png"]},
        "a.jsonl:2: column images would be ignored: dataset=images reads images, and nothing reads other media; set dataset.format=messages to train without it.",
    ),
    "variables of the template": (
        {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
        "a.jsonl:2: column chat_template_kwargs would be ignored: set dataset.format=messages to train without it.",
    ),
    "a call that is a sentence": (
        {
            "messages": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": "call add"},
            ]
        },
        """a.jsonl:2: messages[1].value of a function_call must be JSON such as {"name": "f", "arguments": {}}, not 'call add'.""",
    ),
    "a call without a name": (
        {"messages": [CHAT[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "a.jsonl:2: messages[1].tool_calls[0] must be an object with a function and its name, not \"{'function': {}}\".",
    ),
    "no content": (
        {"messages": [{"role": "user"}]},
        "a.jsonl:2: messages[0].content must be a text, not missing.",
    ),
    "no role": (
        {"messages": [{"content": "Hi"}]},
        "a.jsonl:2: messages[0].role must be a text, not None.",
    ),
    "content a number": (
        {"messages": [{"role": "user", "content": 7}]},
        "a.jsonl:2: messages[0].content must be a text, not int.",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "a.jsonl:2: messages[0].content[0] is of type 'image_url', but only text is supported, and images with dataset=images: remove it, or convert it to text.",
    ),
    "no list": (
        {"messages": "Hi"},
        "a.jsonl:2: column messages must be a list of messages, not str 'Hi'.",
    ),
    "missing": (
        {"other": 1},
        "a.jsonl:2: column messages must be a list of messages, not missing.",
    ),
    "empty": ({"messages": []}, "a.jsonl:2: an empty list of messages."),
    "half a surrogate": (
        '{"messages": [{"role": "user", "content": "ab\\ud800"}]}\n',
        "a.jsonl:2: messages[0].content contains an unpaired surrogate at character 3.",
    ),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_names_its_place(tmp_path: Path, row: Any, message: str) -> None:
    first = (
        {"messages": CHAT, "images": []}
        if isinstance(row, dict) and "images" in row
        else {"messages": CHAT}
    )
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
    "alpaca_prompt": ({"instruction": UNKNOWN, "output": "b"}, "column instruction must be a text, not list"),
    "alpaca_turn": ({"instruction": "a", "input": UNKNOWN, "output": "b"}, "column input must be a text, not list"),
    "squad": ({"context": "a", "question": "b", "answers": UNKNOWN}, "column answers must have a list of texts, text, not"),
    "question_answer": ({"question": "a", "answer": UNKNOWN}, "column answer must be a text, not list"),
    "text": ({"text": UNKNOWN}, "column text must be a text, not list"),
    "tokens": ({"input_ids": UNKNOWN, "labels": [1]}, "column input_ids must be a list of integers, not list"),
    "preference": ({"prompt": 5, "chosen": "a", "rejected": "b"}, "column prompt must be a text, not int"),
    "verdict": ({"prompt": 5, "completion": "a", "label": True}, "column prompt must be a text, not int"),
    "decisions": ({"state": "a", "questions": 5}, "column questions must hold questions by name, or a list"),
    "decision": ({"state": "a", "question": 5}, "column question has no type"),
    "labeled": ({"text": UNKNOWN, "label": 1}, "column text must be a text, not list"),
    "packed": ({"input_ids": [1], "labels": [1], "seq_lens": UNKNOWN}, "column seq_lens must be a list of integers, not list"),
}  # fmt: skip


@pytest.mark.parametrize("name", dict.fromkeys(known.name for known in FORMATS))
def test_every_renderer_refuses_what_it_does_not_know(name: str) -> None:
    row, message = UNKNOWN_PARTS[name]
    known = next(one for one in FORMATS if one.name == name and row.keys() >= {*one.columns})
    with pytest.raises(DataError) as caught:
        known.normalize(row)
    assert str(caught.value).startswith(message)


def test_answers_behind_a_history() -> None:
    row = {"prompt": "2+2?", "responses": ["4", "four"], "history": [["Hi", "Hello!"]]}
    detected = detect(list(row), None, None)
    asked = [*CHAT, {"role": "user", "content": "2+2?"}]
    assert detected.document(row, "a.jsonl:1") == {
        "documents": [
            {"messages": [*asked, {"role": "assistant", "content": answer}]}
            for answer in row["responses"]
        ]
    }
    row = {"prompt": CHAT[:1], "completion": CHAT[1:], "history": [["Hi", "Hello!"]]}
    with pytest.raises(DataError, match=r"a.jsonl:1: column history is read beside texts: "):
        detect(list(row), None, None).document(row, "a.jsonl:1")


def chat(*turns: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(turns)
    ]


ASKED = {"role": "user", "content": "2+2?", "weight": 0}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
PAIR_OF_CHATS = {"chosen": {"messages": [ASKED, GOOD]}, "rejected": {"messages": [ASKED, BAD]}}
PAIR_OF_TEXTS = {
    "chosen": {"prompt": "2+2?", "completion": "4"},
    "rejected": {"prompt": "2+2?", "completion": "5"},
}
PAIRS = {
    "TRL, explicit texts": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, PAIR_OF_TEXTS),
    "TRL, explicit chats": ({"prompt": chat("2+2?"), "chosen": [GOOD], "rejected": [BAD]}, PAIR_OF_CHATS),
    "TRL, implicit chats": ({"chosen": chat("2+2?", "4"), "rejected": chat("2+2?", "5")}, PAIR_OF_CHATS),
    "TRL, implicit texts": (
        {"chosen": "Q: 2+2? A: 4", "rejected": "Q: 2+2? A: 5"},
        {"chosen": {"prompt": "Q: 2+2? A: ", "completion": "4"}, "rejected": {"prompt": "Q: 2+2? A: ", "completion": "5"}},
    ),
    "LLaMA-Factory, alpaca": ({"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5"}, PAIR_OF_TEXTS),
    "a question": ({"question": "2+2?", "chosen": "4", "rejected": "5"}, PAIR_OF_TEXTS),
    "an empty prompt": ({"prompt": "", "instruction": "2+2?", "chosen": "4", "rejected": "5"}, PAIR_OF_TEXTS),
    "a question and turns": ({"question": "2+2?", "chosen": [GOOD], "rejected": [BAD]}, PAIR_OF_CHATS),
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
    "equal": (
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        "column chosen and column rejected are equal",
    ),
    "empty": (
        {"prompt": "a", "chosen": "b", "rejected": ""},
        "column rejected is empty: a preference pair has two",
    ),
    "a missing half": (
        {"prompt": "a", "chosen": "b", "rejected": None},
        "column rejected is empty",
    ),
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


def test_functions_of_the_older_form_are_tools(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"messages": turns, "functions": [{"name": "weather"}]}) + "\n"
    )
    document = FilesDataset(str(tmp_path / "a.jsonl")).train[0]
    assert document["tools"] == [{"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize("prompt", ["q", [{"role": "user", "content": "q"}]])
@pytest.mark.parametrize(
    "answer",
    ["x", {"role": "assistant", "content": "x"}, [{"role": "assistant", "content": "x"}]],
    ids=["text", "message", "messages"],
)
def test_responses_of_all_kinds_after_a_prompt_of_both(prompt: Any, answer: Any) -> None:
    documents = responses({"prompt": prompt, "responses": [answer, answer]})["documents"]
    for document in documents:
        if "messages" in document:
            turns = [(turn["role"], turn["content"]) for turn in document["messages"]]
            assert turns == [("user", "q"), ("assistant", "x")]
        else:
            assert (document["prompt"], document["completion"]) == ("q", "x")
    with pytest.raises(DataError, match=r"responses\[1\]"):
        responses({"prompt": prompt, "responses": [answer, [7]]})
