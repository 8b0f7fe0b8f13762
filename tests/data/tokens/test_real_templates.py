"""The chat templates that published models ship: what is trained on, or a sentence that says what a template cannot do."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.data.formats.turns import read_turns
from automodel_lite.data.tokens.chat import ChatRenderer
from automodel_lite.data.tokens.rendering import Rendering
from automodel_lite.errors import ConfigError, DataError
from tests.data.templates import Family, byte_tokenizer

TEMPLATES = {
    path.stem: path
    for path in sorted((Path(__file__).parents[1] / "chat_templates").glob("*.jinja"))
}
SPECIAL = re.compile(
    r"<\|[^|<>\s'\"]+\|?>|<[a-z_]+\|>|<｜[^｜]+｜>|</?(?:start|end)_of_turn>|\[\|?[a-zA-Z_/]+\|?\]|</s>"
)
STOPS = (
    "<|im_end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|end|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
)

SYSTEM = {"role": "system", "content": "Be kind."}
HI, HELLO = (
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello friend!"},
)
SUM, FOUR = (
    {"role": "user", "content": "Two plus two?"},
    {"role": "assistant", "content": "It is four."},
)
THOUGHT = [
    HI,
    {**HELLO, "reasoning_content": "Why not."},
    SUM,
    {**FOUR, "reasoning_content": "Adding."},
]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "where"}},
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "now", "parameters": PARAMETERS},
    }
]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Rome"}},
}
SUNNY = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "sunny"}
CALLED = [HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}, SUNNY, FOUR]

# templates that write no stop token behind an answer: the next turn ends it
ENDLESS = {"glm4moe"}
# the latter two write one before a question alone
NO_SYSTEM = {"gemma", "mistral_v2v3", "mistral_v3_tekken"}
# where a chat with tool calls, or with thoughts, is trained; everywhere else it is refused by name
CALLS = frozenset(
    [
        "command_a_tool_use",
        "deepseekv3",
        "exaone4",
        "gemma4",
        "gemma4_v5",
        "gptoss",
        "jamba",
        "lfm2_2_5_v2",
        "llama3_1",
        "llama3_2",
        "llama4",
        "mistral_v2v3",
        "mistral_v3_tekken",
        "muse_glimmer",
        "nemotron_3_nano",
        "nemotron_3_ultra",
        "qwen2_5",
        "qwen3",
        "qwen3_5_nothink",
        "qwen3_5_think",
        "qwen3_6",
        "qwen3_8",
        "qwen3_instruct_2507",
    ]
)
ONE_CALL = {
    "gptoss": "message 1 has several tool calls, and the chat template writes one",
    **dict.fromkeys(["llama3_1", "llama3_2"], "only supports single tool-calls at once"),
}
THOUGHTS = frozenset(
    [
        "gemma4_v5",
        "gptoss",
        "lfm2_2_5_v2",
        "muse_glimmer",
        "nemotron_3_nano",
        "nemotron_3_ultra",
        "qwen3",
        "qwen3_5_nothink",
        "qwen3_5_think",
        "qwen3_6",
        "qwen3_8",
    ]
)


def tools_of(name: str) -> list[dict[str, Any]] | None:
    """DeepSeek V3's template writes calls, and no tools."""
    return None if name == "deepseekv3" else TOOLS


def test_tools_are_refused_by_a_template_that_writes_calls_alone() -> None:
    """The names in the calls were taken for the tools."""
    with pytest.raises(DataError, match=r"^has tools that the chat template does not write"):
        renderer("deepseekv3").renderings(CALLED, TOOLS)


def renderer(name: str, train_on: str = "assistant") -> ChatRenderer:
    source = TEMPLATES[name].read_text()
    specials = tuple(dict.fromkeys([*SPECIAL.findall(source), "<s>", "</s>"]))
    stop = next((token for token in STOPS if token in source), "</s>")
    return ChatRenderer(byte_tokenizer(Family(source, specials, stop, "<s>")), train_on)


def turns(found: list[Rendering]) -> list[str]:
    """What is trained on, turn by turn."""
    return [one.text[start:stop] for one in found for start, stop in one.spans]


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - ENDLESS))
def test_answers_are_trained_up_to_their_stop_token(name: str) -> None:
    chat = renderer(name)
    for messages in (
        [HI, HELLO, SUM, FOUR],
        *([[SYSTEM, HI, HELLO, SUM, FOUR]] if name not in NO_SYSTEM else []),
    ):
        found = chat.renderings(messages)
        first, second = turns(found)
        assert "Hello friend!" in first
        assert "It is four." in second
        for turn in (first, second):
            assert turn.endswith(chat.stop_tokens)
            assert not any(text in turn for text in ("Hi there", "Two plus two?", "Be kind."))
        assert all(
            text in found[-1].text for text in ("Hi there", "Hello friend!", "Two plus two?")
        )


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - ENDLESS))
def test_all_is_trained_up_to_the_last_stop_token(name: str) -> None:
    chat = renderer(name, "all")
    (found,) = chat.renderings([HI, HELLO, SUM, FOUR])
    (trained,) = turns([found])
    assert found.text.startswith(trained)
    assert trained.endswith(chat.stop_tokens)
    assert found.text[len(trained) :].strip() == ""


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - ENDLESS))
def test_tool_calls_are_trained_and_results_are_not(name: str) -> None:
    chat = renderer(name)
    if name not in CALLS:
        with pytest.raises(
            DataError, match=r"calls a tool, but|that the chat template does not write"
        ):
            chat.renderings(CALLED, tools_of(name))
        return
    found = chat.renderings(CALLED, tools_of(name))
    call, answer = turns(found)
    assert "get_weather" in call
    assert "Rome" in call
    assert "It is four." in answer
    assert "sunny" in found[-1].text
    assert "sunny" not in call + answer


ARGUMENTS = {
    "city": "Rome",
    "days": 3,
    "note": 'say "hi"',
    "by": {"unit": "C"},
    "parts": ["a", "b"],
}
CALL_KEYS = ("arguments", "parameters", "args", "input")


def objects_in(text: str) -> list[Any]:
    """Every JSON object that a text holds, the inner ones too."""
    found = []
    for match in re.finditer(r"\{", text):
        with suppress(ValueError):
            found.append(json.JSONDecoder().raw_decode(text[match.start() :])[0])
    return found


def called_in(text: str) -> list[Any]:
    """What a reader of any family's calls finds: JSON, XML parameters, Python calls, Gemma's."""
    found = objects_in(text)
    found += objects_in(text.replace('\\"', '"'))
    parameters = re.findall(r"<parameter=(\w+)>\n?(.*?)\n?</parameter>", text, re.DOTALL)
    parameters += re.findall(
        r'<(?:\w+:)?parameter name="(\w+)"[^>]*>(.*?)</(?:\w+:)?parameter>', text, re.DOTALL
    )
    found.append({key: value_of(value) for key, value in parameters})
    if call := re.search(r"\[(get_weather\(.*\))\]", text, re.DOTALL):
        keywords = ast.parse(call[1], mode="eval").body.keywords  # type: ignore[attr-defined]
        found.append({one.arg: ast.literal_eval(one.value) for one in keywords})
    if call := re.search(r"call:get_weather(\{.*\})", text, re.DOTALL):
        quoted = call[1].split('<|"|>')
        quoted[1::2] = map(json.dumps, quoted[1::2])
        quoted[::2] = [re.sub(r"(\w+):", r'"\1":', part) for part in quoted[::2]]
        found += objects_in("".join(quoted))
    return found


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS), json.dumps(json.dumps(ARGUMENTS))], ids=["object", "text", "text of text"])  # fmt: skip
@pytest.mark.parametrize("key", CALL_KEYS)
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_trained_call_is_its_source(name: str, key: str, arguments: Any) -> None:
    turns_read = []
    for turn in CALLED:
        if "tool_calls" in turn:
            function = {"name": "get_weather", key: arguments}
            turn = {**turn, "tool_calls": [{**CALL, "function": function}]}
        turns_read += read_turns(turn, "here")
    called, _ = turns(renderer(name).renderings(turns_read, tools_of(name)))
    assert ARGUMENTS in called_in(called), called


@pytest.mark.parametrize("empty", ["", " ", "null", None, "{}", []], ids=repr)
@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_without_arguments_is_written_as_one(name: str, empty: Any) -> None:
    def called(arguments: Any) -> str:
        call = {**CALL, "function": {"name": "get_weather", "arguments": arguments}}
        (turn,) = read_turns({"role": "assistant", "tool_calls": [call]}, "here")
        return turns(renderer(name).renderings([HI, turn, SUNNY, FOUR], tools_of(name)))[0]

    assert called(empty) == called({})
    assert "null" not in called(empty)


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - ENDLESS))
def test_a_result_is_written_or_refused(name: str) -> None:
    """Also behind an answer that is no call."""
    said = {"role": "assistant", "content": "CALL weather(Rome)"}
    chat = renderer(name)
    texts = []
    for result in ("heavy rain until nine", "e", "q"):
        with suppress(DataError):
            observed = {"role": "tool", "content": result}
            texts.append(chat.renderings([HI, said, observed, FOUR])[-1].text)
            assert result in texts[-1]
    assert len(set(texts)) in (0, 3)  # refused, or written


@pytest.mark.parametrize("name", sorted(CALLS))
def test_calls_side_by_side_are_trained_or_refused(name: str) -> None:
    oslo = {"id": "bcdefghij", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    both = [CALL, {**CALL, **oslo}]
    rainy = {**SUNNY, "tool_call_id": "bcdefghij", "content": "rainy"}
    chat = [HI, {"role": "assistant", "content": "", "tool_calls": both}, SUNNY, rainy, FOUR]
    if name in ONE_CALL:
        with pytest.raises(DataError, match=ONE_CALL[name]):
            renderer(name).renderings(chat, tools_of(name))
        return
    called, answer = turns(renderer(name).renderings(chat, tools_of(name)))
    assert "Rome" in called
    assert "Oslo" in called
    assert "It is four." in answer


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - ENDLESS))
def test_thoughts_are_trained_or_refused(name: str) -> None:
    chat = renderer(name)
    if name not in THOUGHTS:
        with pytest.raises(
            DataError, match="reasoning_content that the chat template does not write"
        ):
            chat.renderings(THOUGHT)
        return
    first, second = turns(chat.renderings(THOUGHT))
    assert "Why not." in first
    assert "Adding." in second


def inline(turn: dict[str, str], thought: str) -> dict[str, str]:
    return {**turn, "content": f"<think>\n{thought}\n</think>\n\n{turn['content']}"}


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "lfm2_2_5_v2", "qwen2_5"])
def test_thoughts_in_an_answer_are_trained_in_each_turn(name: str) -> None:
    """Also where the template leaves them out of the history."""
    first, second = turns(
        renderer(name).renderings([HI, inline(HELLO, "Why not."), SUM, inline(FOUR, "Adding.")])
    )
    assert "Why not." in first
    assert "Adding." in second


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3", "exaone4"])
def test_thoughts_that_are_cut_out_of_an_answer_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="message 1 has thoughts before </think> that the chat"):
        renderer(name).renderings([HI, inline(HELLO, "Why not.")])


@pytest.mark.parametrize("name", ["qwen2_5", "command_a", "phi_4", "llama3_1"])
def test_a_chat_that_the_assistant_begins(name: str) -> None:
    """What stands before its first words, a default system prompt, is not trained on."""
    first, second = turns(renderer(name).renderings([HELLO, SUM, FOUR]))
    assert first.startswith("Hello friend!")
    assert second.startswith("It is four.")


@pytest.mark.parametrize("name", sorted(NO_SYSTEM))
def test_a_system_prompt_that_is_not_written_is_refused(name: str) -> None:
    with pytest.raises(
        DataError, match=r"System role not supported|role system\) is omitted by the chat template"
    ):
        renderer(name).renderings([SYSTEM, HI, HELLO])


def test_cohere_turns_end_with_the_turn_not_the_response() -> None:
    (turn,) = turns(renderer("cohere2").renderings([HI, HELLO]))
    assert turn.endswith("Hello friend!<|END_RESPONSE|><|END_OF_TURN_TOKEN|>")


def test_a_line_break_behind_a_marked_turn_is_not_trained() -> None:
    assert turns(renderer("lfm2_2_5_v2").renderings([HI, HELLO])) == ["Hello friend!<|im_end|>"]


@pytest.mark.parametrize("name", sorted(ENDLESS))
def test_a_template_without_a_stop_token_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match="without a special token, so the model would never learn to stop"
    ):
        renderer(name)
