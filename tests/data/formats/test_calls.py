"""Calls, arguments and tools of every shape are one shape, or a sentence that names the place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from automodel_lite.data.formats.calls import read_call, read_tools
from automodel_lite.data.formats.texts import conversations, messages
from automodel_lite.data.formats.turns import read_turns
from automodel_lite.errors import DataError

OSLO = {"city": "Oslo"}
WEATHER = {"type": "function", "function": {"name": "weather", "arguments": OSLO}}
SHAPES = {
    "OpenAI": {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
    "OpenAI, responses": {"type": "function_call", "name": "weather", "arguments": '{"city": "Oslo"}', "status": "completed"},
    "Llama": {"type": "function", "function": {"name": "weather", "parameters": OSLO}},
    "Llama, flat": {"name": "weather", "parameters": OSLO},
    "LangChain": {"name": "weather", "args": OSLO, "type": "tool_call"},
    "Anthropic": {"type": "tool_use", "name": "weather", "input": OSLO},
    "arguments beside the function": {"function": {"name": "weather"}, "arguments": OSLO},
    "an empty twin": {"name": "weather", "arguments": "", "input": OSLO},
    "the same twice": {"name": "weather", "arguments": OSLO, "input": '{"city": "Oslo"}'},
    "a text": '{"name": "weather", "arguments": {"city": "Oslo"}}',
    "a function that is a text": {"function": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
    "encoded twice": {"name": "weather", "arguments": json.dumps(json.dumps(OSLO))},
    "an Arrow map": {"name": "weather", "arguments": [("city", "Oslo")]},
    "an Arrow map in JSON": {"name": "weather", "arguments": [["city", "Oslo"]]},
    "empty keys": {"name": "weather", "arguments": OSLO, "custom": None, "extra": {}},
}  # fmt: skip


@pytest.mark.parametrize("call", SHAPES.values(), ids=SHAPES)
def test_calls_of_every_shape(call: Any) -> None:
    assert read_call(call, "here") == WEATHER


@pytest.mark.parametrize(
    "empty", ["", " \n", None, "null", " null ", '"null"', '""', "{}", {}, [], "[]"], ids=repr
)
def test_no_arguments_are_an_empty_object(empty: Any) -> None:
    none = {"name": "clock", "arguments": {}}
    assert read_call({"name": "clock", "arguments": empty}, "here")["function"] == none
    assert read_call({"name": "clock"}, "here")["function"] == none


def test_values_of_arguments_stay() -> None:
    text = '{"n": 12345678901234567890123, "x": 1.10, "s": "{\\"a\\": 1}", "z": null, "l": [], "m": ""}'
    function = read_call({"name": "f", "arguments": text}, "here")["function"]
    assert function["arguments"] == {
        "n": 12345678901234567890123,
        "x": 1.1,
        "s": '{"a": 1}',
        "z": None,
        "l": [],
        "m": "",
    }
    nested = {"name": "f", "arguments": {"by": [("a", 1)], "pairs": [["a", 1]]}}
    assert read_call(nested, "here")["function"]["arguments"] == {
        "by": {"a": 1},
        "pairs": [["a", 1]],
    }


def test_the_id_that_results_name_is_kept() -> None:
    assert read_call({"name": "f", "id": "a"}, "here")["id"] == "a"
    assert read_call({"name": "f", "id": "fc_1", "call_id": "call_1"}, "here")["id"] == "call_1"


WRONG = {
    "a number": ({"arguments": 5}, "here.arguments must be a JSON object, not int '5'"),
    "a text of a number": ({"arguments": "5"}, "here.arguments must be a JSON object, not int '5'"),
    "true": ({"arguments": "true"}, "here.arguments must be a JSON object, not bool 'True'"),
    "words": ({"arguments": "in Oslo"}, "here.arguments is not valid JSON"),
    "Python": ({"arguments": "{'city': 'Oslo'}"}, "here.arguments is not valid JSON"),
    "a list": ({"arguments": ["Oslo"]}, "here.arguments must be a JSON object, not list"),
    "NaN in a text": ({"arguments": '{"x": NaN}'}, "here.arguments.x holds nan"),
    "Infinity": ({"arguments": '{"x": [-Infinity]}'}, r"here.arguments.x\[0\] holds -inf"),
    "1e400": ({"arguments": '{"x": 1e400}'}, "here.arguments.x holds inf"),
    "NaN of a row": ({"arguments": {"x": float("nan")}}, "here.arguments.x holds nan"),
    "a key twice": ({"arguments": '{"x": 1, "x": 2}'}, "here.arguments .*the key 'x' is there twice"),
    "a key twice in a map": ({"arguments": [("x", 1), ("x", 2)]}, "here.arguments has the key 'x' twice"),
    "a key that is a number": ({"arguments": {1: 2}}, "here.arguments has the key 1: keys of JSON are texts"),
    "two arguments": ({"arguments": {"x": 1}, "input": {"x": 2}}, "here has several arguments, arguments and input"),
    "an unknown key": ({"kwargs": {"x": 1}}, "here.kwargs would be ignored: a call has a name and arguments"),
    "an unknown key of the function": ({"function": {"name": "f", "argument": {"x": 1}}}, "here.function.argument would be ignored"),
    "two names": ({"function": {"name": "g"}}, "here has two names, 'g' and 'f'"),
    "another kind": ({"type": "custom"}, "here.type='custom' is none of function"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "sentence"), WRONG.values(), ids=WRONG)
def test_what_is_no_call_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_call({"name": "f", **keys}, "here")


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_tools_of_every_shape() -> None:
    flat = {"name": "weather", "parameters": {"type": "object"}}
    for none in (None, "", "null", "[]", []):
        assert read_tools(none, "here") == []
    assert read_tools([json.dumps(TOOL), TOOL], "here") == [TOOL, TOOL]
    assert read_tools(json.dumps(json.dumps([TOOL])), "here") == [TOOL]
    assert read_tools([{**TOOL, "function": json.dumps(TOOL["function"])}], "here") == [TOOL]
    assert read_tools([{"name": "weather", "input_schema": {"type": "object"}}], "here") == [TOOL]
    assert read_tools([flat], "here") == [flat]


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ({"name": "f"}, "here must be a list, not dict"),
        ("f(x)", "here must be a list, not str"),
        ([7], r"here\[0\] must be an object with the name of a function, not int '7'"),
        ([TOOL, {}], r"here\[1\] must be an object with the name"),
        ([{"function": {"description": "x"}}], r"here\[0\] must be an object with the name"),
        ('[{"name": "f", "name": "g"}]', "here is not valid JSON .*'name' is there twice"),
        ([{"name": "f", "least": float("inf")}], r"here\[0\].least holds inf"),
    ],
)
def test_what_is_no_list_of_tools_is_refused(tools: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_tools(tools, "here")


ASKED = {"role": "user", "content": "rain?"}
SAID = {"role": "assistant", "content": "It rains."}
CALLED = {"role": "assistant", "content": "", "tool_calls": [WEATHER]}


def test_blocks_of_calls_and_results_are_turns() -> None:
    block = {"type": "tool_use", "id": "a", "name": "weather", "input": OSLO}
    parts = [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "yes"}], "is_error": False}, {"type": "text", "text": "So?"}]  # fmt: skip
    row = {
        "messages": [
            ASKED,
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, block]},
            {"role": "user", "content": parts},
            SAID,
        ]
    }
    assert messages(row)["messages"] == [
        ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": [{**WEATHER, "id": "a"}]},
        {"role": "tool", "content": "yes", "tool_call_id": "a"},
        {"role": "user", "content": "So?"},
        SAID,
    ]


def test_thoughts_of_anthropic_are_those_of_the_turn() -> None:
    thought = {"type": "thinking", "thinking": "Rain?", "signature": "Eq=="}
    said = {"type": "text", "text": "I look."}
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": OSLO}
    assert read_turns({"role": "assistant", "content": [thought, said, call]}, "here") == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Rain?",
            "tool_calls": [{**WEATHER, "id": "a"}],
        }
    ]
    (twice,) = read_turns({"role": "assistant", "content": [thought, thought, said]}, "here")
    assert twice["reasoning_content"] == "Rain?\n\nRain?"


THOUGHT = {"type": "thinking", "thinking": "Hm."}
TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("turn", "sentence"),
    [
        ({"content": [TEXT, THOUGHT]}, r"here.content\[1\] stands behind what is said"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}, TEXT]}, r"\[0\] .* encrypted: remove"),
        ({"role": "user", "content": [THOUGHT, TEXT]}, r"is a thought: put it into a turn of role assis"),
        ({"content": [THOUGHT, TEXT], "reasoning_content": "x"}, "here has thoughts in reasoning_content and"),
        ({"content": [{"type": "thinking", "thinking": 1}]}, "must hold a text under thinking"),
        ({"content": [{**THOUGHT, "tokens": 3}]}, "must hold a text under thinking, and a signature"),
    ],
    ids=["behind", "encrypted", "user", "twice", "number", "more"],
)  # fmt: skip
def test_thoughts_that_are_not_trained_are_named(turn: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_turns({"role": "assistant", **turn}, "here")


def test_calls_of_sharegpt_are_read_as_others() -> None:
    called = {
        "from": "function_call",
        "value": json.dumps([{"name": "weather", "parameters": OSLO}]),
    }
    turns = conversations({"conversations": [{"from": "human", "value": "rain?"}, called]})
    assert turns["messages"] == [ASKED, CALLED]
    (read,) = read_turns({"role": "function_call", "content": json.dumps({"name": "weather", "args": OSLO})}, "here")  # fmt: skip
    assert read == CALLED


@pytest.mark.parametrize("none", ["", "null", [], None])
def test_no_calls_are_none(none: Any) -> None:
    assert read_turns({**SAID, "tool_calls": none}, "here") == [SAID]


@pytest.mark.parametrize(
    ("turn", "sentence"),
    [
        ({**ASKED, "tool_calls": [WEATHER]}, "here.tool_calls would be ignored: a turn of role user"),
        ({**SAID, "tool_calls": [WEATHER], "function_call": {"name": "f"}}, "here has calls in tool_calls and function_call"),
        ({**SAID, "tool_calls": {"name": "f"}}, "here.tool_calls must be a list, not dict"),
        ({**SAID, "tool_calls": [{"name": "f", "arguments": "5"}]}, r"here.tool_calls\[0\].arguments must be a JSON object"),
        ({"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}, {"type": "text", "text": "a"}]}, r"here.content\[1\] stands behind a call"),
        ({"role": "assistant", "content": [{"type": "tool_result", "content": "a"}]}, r"here.content\[0\] is a tool_result: put it into a turn of role user"),
        ({"role": "user", "content": [{"type": "tool_use", "name": "f", "input": {}}]}, "here.tool_calls would be ignored"),
        ({"role": "user", "content": [{"type": "tool_result", "content": "a", "is_error": True}]}, r"here.content\[0\].is_error would be ignored"),
        ({**ASKED, "tools": "weather"}, "here.tools must be a list, not str"),
    ],
)  # fmt: skip
def test_turns_whose_calls_would_be_lost_are_refused(turn: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_turns(turn, "here")


def test_tools_of_a_turn_are_those_of_the_chat() -> None:
    turns = [{"role": "system", "content": "S", "tools": [TOOL]}, ASKED, CALLED]
    assert messages({"messages": turns})["tools"] == [TOOL]
    assert messages({"messages": turns, "tools": [TOOL]})["tools"] == [TOOL]
    old = {"role": "system", "content": "S", "functions": json.dumps([TOOL["function"]])}
    assert messages({"messages": [old, ASKED]})["tools"] == [TOOL]
    with pytest.raises(DataError, match=r"column tools and message 0.tools are several lists of"):
        messages({"messages": turns, "tools": [{"name": "other"}]})
