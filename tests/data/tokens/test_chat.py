"""Which characters of a chat are trained on, family by family, as literals: ⟦ ⟧ enclose them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.formats.turns import read_turns
from automodel_lite.data.tokens.chat import ChatRenderer
from automodel_lite.data.tokens.encode import Renderer
from automodel_lite.data.tokens.rendering import Rendering
from automodel_lite.data.tokens.tokenizer import CHAT_TEMPLATE
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.extras.api import tokenize_chats
from tests.data.templates import FAMILIES, LLAMA3, MARKED, MISTRAL, QWEN3, Family, byte_tokenizer

SYSTEM = {"role": "system", "content": "Be kind."}
HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
ALL = TokenizeConfig(train_on="all")
SUM, FOUR = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


def marked(rendering: Rendering) -> str:
    text = rendering.text
    for start, stop in sorted(rendering.spans, reverse=True):
        text = f"{text[:start]}⟦{text[start:stop]}⟧{text[stop:]}"
    return text


def rendered(
    family: str, messages: list[dict], train_on: str = "assistant", **template_kwargs: object
) -> list[str]:
    renderer = ChatRenderer(byte_tokenizer(FAMILIES[family]), train_on, template_kwargs)
    return [marked(rendering) for rendering in renderer.renderings(messages)]


ONE_TURN = {
    "llama3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧",
    "qwen3": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nHello!<|im_end|>⟧\n",
    "gemma3": "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n",
    "mistral": "<s>[INST]Hi[/INST]⟦Hello!</s>⟧",
    "gpt_oss": "<|start|>user<|message|>Hi<|end|><|start|>assistant⟦<|channel|>final<|message|>Hello!<|return|>⟧",
    "marked": "<|user|>Hi<|end|><|assistant|>⟦Hello!<|end|>⟧",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_turn(family: str) -> None:
    assert rendered(family, [HI, HELLO]) == [ONE_TURN[family]]


TWO_TURNS = {
    "llama3": [
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦4<|eot_id|>⟧"
    ],
    # the history loses its empty thoughts: one row a turn, each as the model would meet it
    "qwen3": [
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nHello!<|im_end|>⟧\n",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\n4<|im_end|>⟧\n",
    ],
    "gemma3": [
        "<bos><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n⟦4<end_of_turn>⟧\n"
    ],
    "mistral": [  # the system prompt moves to the last question: one row a turn
        "<s>[INST]Be kind.\n\nHi[/INST]⟦Hello!</s>⟧",
        "<s>[INST]Hi[/INST]Hello!</s>[INST]Be kind.\n\n2+2?[/INST]⟦4</s>⟧",
    ],
    "gpt_oss": [  # an answer ends in <|return|>, in the history in <|end|>
        "<|start|>system<|message|>Be kind.<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Hello!<|return|>⟧",
        "<|start|>system<|message|>Be kind.<|end|><|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello!<|end|><|start|>user<|message|>2+2?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>4<|return|>⟧",
    ],
    "marked": [
        "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>⟦Hello!<|end|>⟧"
        "<|user|>2+2?<|end|><|assistant|>⟦4<|end|>⟧"
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_turns_after_a_system_prompt(family: str) -> None:
    assert rendered(family, [SYSTEM, HI, HELLO, SUM, FOUR]) == TWO_TURNS[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_last_assistant_trains_the_last_turn_alone(family: str) -> None:
    (text,) = rendered(family, [HI, HELLO, SUM, FOUR], "last_assistant")
    assert text.count("⟦") == 1
    assert text.rindex("⟦") > text.index("2+2?")
    assert "4" in text[text.index("⟦") :]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_trains_up_to_the_last_stop_token(family: str) -> None:
    """Qwen and Gemma put a line break behind it, which would be the last thing that a model learns to write."""
    (text,) = rendered(family, [HI, HELLO, SUM, FOUR], "all")
    assert text[0] == "⟦"
    assert text.rstrip().endswith("⟧")
    assert text.count("⟦") == 1
    (chat,) = ([HI, HELLO],)
    found = tokenize_chats([chat], byte_tokenizer(FAMILIES[family]), train_on="all")
    assert int(found[0]["labels"][found[0]["labels"] != -100][-1]) >= 256  # a special token


DROPPED = {
    "thoughts": (
        {**HELLO, "reasoning_content": "Hm."},
        None,
        "message 1 has reasoning_content that the chat template",
    ),
    "other thoughts": (
        {**HELLO, "thinking": "Hm."},
        None,
        "message 1 has thinking that the chat template does not",
    ),
    "words beside a call": (
        {**HELLO, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
        [{"type": "function", "function": {"name": "f"}}],
        "message 1 has content beside its tool calls that the chat template does not write",
    ),
}


@pytest.mark.parametrize("case", DROPPED)
def test_parts_that_a_template_drops_are_refused(case: str) -> None:
    answer, tools, message = DROPPED[case]
    renderer = ChatRenderer(byte_tokenizer(LLAMA3), "assistant")
    with pytest.raises(DataError, match=message):
        renderer.renderings([HI, answer], tools)


def test_tools_that_a_template_drops_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    with pytest.raises(DataError, match="has tools that the chat template does not write"):
        ChatRenderer(byte_tokenizer(MARKED), "assistant").renderings([HI, HELLO], tools)
    assert ChatRenderer(byte_tokenizer(LLAMA3), "assistant").renderings([HI, HELLO], tools)
    # a question that has the name in it was taken for the tool
    asked = {"role": "user", "content": "get_weather, what does it do?"}
    with pytest.raises(DataError, match="has tools that the chat template does not write"):
        ChatRenderer(byte_tokenizer(MARKED), "assistant").renderings([asked, HELLO], tools)
    assert ChatRenderer(byte_tokenizer(LLAMA3), "assistant").renderings([asked, HELLO], tools)


def test_thoughts_of_earlier_turns_make_a_row_each() -> None:
    """A marked template that drops the history's thoughts would train the first turn without its own."""
    marks = QWEN3.template.replace(
        "{{- message.content + '<|im_end|>\\n' -}}",
        "{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}",
    )
    marks = marks.replace(
        "{%- set thought",
        "{%- if message.role != 'assistant' -%}{{- message.content + '<|im_end|>\\n' -}}{%- else -%}{%- set thought",
    ).replace("{{- '\\n' -}}\n{%- endfor -%}", "{{- '\\n' -}}{%- endif -%}\n{%- endfor -%}")
    tokenizer = byte_tokenizer(Family(marks, QWEN3.specials, QWEN3.eos))
    chat = [
        HI,
        {**HELLO, "reasoning_content": "First."},
        SUM,
        {**FOUR, "reasoning_content": "Second."},
    ]
    texts = [rendering.text for rendering in ChatRenderer(tokenizer, "assistant").renderings(chat)]
    assert ["First." in text for text in texts] == [True, False]
    assert ["Second." in text for text in texts] == [False, True]


def test_the_template_of_trained_tokenizers_writes_every_part() -> None:
    template = Family(CHAT_TEMPLATE, MARKED.specials, MARKED.eos)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    chat = [HI, {**HELLO, "reasoning_content": "Hm.", "tool_calls": [call]}]
    (whole,) = ChatRenderer(byte_tokenizer(template), "assistant").renderings(chat, [{"name": "f"}])
    assert marked(whole) == (
        '<|system|>Tools: [{"name": "f"}]<|end|><|user|>Hi<|end|><|assistant|>⟦<think>Hm.</think>Hello!'
        '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|end|>⟧'
    )


@pytest.mark.parametrize(
    ("document", "token"),
    [
        ({"messages": [{**HI, "content": "a<|end|><|assistant|>b"}, HELLO]}, "<|end|>"),
        ({"messages": [HI, {**HELLO, "content": "a<|user|>"}]}, ""),
        ({"prompt": "<|user|>", "completion": "x"}, "<|user|>"),
        ({"text": "x<|system|>"}, "<|system|>"),
        ({"documents": [{"prompt": "<|user|>", "completion": "x"}]}, "<|user|>"),
    ],
    ids=["user", "assistant", "prompt", "text", "several answers"],
)
def test_special_tokens_in_a_text_are_found(document: dict, token: str) -> None:
    assert (
        Renderer(byte_tokenizer(MARKED), "assistant", {}).remarks(document, []).noted["special"]
        == token
    )


@pytest.mark.parametrize(
    ("document", "token"),
    [
        ({"messages": [HI, {**HELLO, "content": "<|assistant|>yo"}]}, "<|assistant|>"),
        ({"messages": [HI, {**HELLO, "content": "yo<|end|>\n"}]}, ""),
        ({"messages": [HI, {**HELLO, "content": "yo<|end|><|end|>"}]}, "<|end|>"),
        ({"messages": [HI, {**HELLO, "reasoning_content": "a<|user|>"}]}, "<|user|>"),
        ({"messages": [{**HI, "content": "<|end|>"}, HELLO]}, ""),
        ({"prompt": "a", "completion": "b<|user|>c"}, "<|user|>"),
        ({"chosen": {"messages": [HI, {**HELLO, "content": "<|user|>"}]}, "rejected": {"messages": [HI, HELLO]}}, "<|user|>"),
    ],
    ids=["header", "its own end", "two ends", "thoughts", "question", "completion", "pair"],
)  # fmt: skip
def test_special_tokens_in_an_answer_are_found(document: dict, token: str) -> None:
    remarks = Renderer(byte_tokenizer(MARKED), "assistant", {}).remarks(document, [])
    assert remarks.noted["trained_special"] == token


@pytest.mark.parametrize("end", ["<|end|>", "<|end|>\n", "<|end|> \n\n"])
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_an_answer_that_ends_itself_ends_once(end: str, train_on: str) -> None:
    ended = {**HELLO, "content": HELLO["content"] + end}
    assert rendered("marked", [HI, ended], train_on) == rendered("marked", [HI, HELLO], train_on)
    pair = {"prompt": "Hi", "completion": HELLO["content"] + end}
    (found,) = Renderer(byte_tokenizer(MARKED), train_on, {}).renderings(pair)
    assert found.text == "<|user|>Hi<|end|><|assistant|>Hello!<|end|>"


@pytest.mark.parametrize("end", ["", "<|end|>", "<|end|>\n\n"])
def test_a_text_that_ends_itself_ends_once(end: str) -> None:
    tokenizer = byte_tokenizer(MARKED)
    tokenizer.chat_template = None
    renderer = Renderer(tokenizer, "assistant", {})
    (text,) = renderer.renderings({"text": f"abc{end}"})
    (answer,) = renderer.renderings({"prompt": "a", "completion": f"abc{end}"})
    assert (text.text, text.spans) == ("abc<|end|>", ((0, 10),))
    assert (answer.text, answer.spans) == ("a\nabc<|end|>", ((2, 12),))


def test_tools_of_a_turn_are_written_once() -> None:
    """As the row's, or where the template reads them in the turn."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = {**SUM, "tools": tools}
    own = "{% for m in messages %}<|{{ m.role }}|>{{ m.tools | tojson if m.tools else '' }}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    reads = ChatRenderer(byte_tokenizer(replace(MARKED, template=own)), "assistant")
    (in_turn,) = reads.renderings([asked, FOUR], tools)
    assert in_turn.text.count('"add"') == 1
    assert in_turn.text.startswith("<|user|>[{")
    (as_row,) = ChatRenderer(byte_tokenizer(LLAMA3), "assistant").renderings([asked, FOUR], tools)
    assert as_row.text.count('"add"') == 1
    with pytest.raises(DataError, match=r"^has tools that the chat template does not write"):
        ChatRenderer(byte_tokenizer(MARKED), "assistant").renderings([asked, FOUR], tools)


def test_keys_of_a_turn_that_are_not_written_are_named() -> None:
    turn = {
        **HI,
        "documents": [{"title": "x"}],
        "when": 1234,
        "name": "Hi",
        "empty": [],
        "done": True,
    }
    document = {"messages": [turn, HELLO]}
    renderer = Renderer(byte_tokenizer(MARKED), "assistant", {})
    remarks = renderer.remarks(document, [Rendering("<|user|>Hi<|end|>", ())])
    assert sorted(remarks.unused) == ["documents of a turn", "when of a turn"]


WITHOUT_TOOL = MARKED.template.replace(
    "{%- else %}\n    {{- message.content + '<|end|>' }}",
    "{%- elif message.role != 'tool' %}\n    {{- message.content + '<|end|>' }}",
)


@pytest.mark.parametrize("result", ["heavy rain", "e", '{"sky": "grey"}', "Hello!"])
def test_a_result_that_is_not_written_is_refused(result: str) -> None:
    """Also one whose word stands there for another reason."""
    assert MARKED.template != WITHOUT_TOOL
    renderer = ChatRenderer(byte_tokenizer(replace(MARKED, template=WITHOUT_TOOL)), "assistant")
    with pytest.raises(
        DataError, match=r"^message 2 \(role tool\) is omitted by the chat template"
    ):
        renderer.renderings([HI, HELLO, {"role": "tool", "content": result}, FOUR])


@pytest.mark.parametrize(
    "written",
    [
        "message.content | tojson",
        "message.content",
        "message.content | replace('{', '') | replace('}', '')",
    ],
    ids=["escaped", "as it is", "by its values"],
)
def test_a_result_may_be_written_as_json(written: str) -> None:
    template = MARKED.template.replace(
        "{%- else %}\n", "{%- elif message.role == 'tool' %}{{ " + written + " }}{%- else %}\n"
    )
    renderer = ChatRenderer(byte_tokenizer(replace(MARKED, template=template)), "assistant")
    result = '{"sky": "say \\"grey\\"", "t": 3, "on": true}'
    (found,) = renderer.renderings([HI, HELLO, {"role": "tool", "content": result}, FOUR])
    assert "grey" in found.text


def test_reasoning_of_earlier_turns_is_trained_in_its_place() -> None:
    thought = {**HELLO, "reasoning_content": "A greeting."}
    assert rendered("qwen3", [HI, thought, SUM, FOUR]) == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nA greeting.\n</think>\n\nHello!<|im_end|>⟧\n",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\n4<|im_end|>⟧\n",
    ]
    assert rendered("gpt_oss", [HI, thought]) == [
        "<|start|>user<|message|>Hi<|end|><|start|>assistant⟦<|channel|>analysis<|message|>A greeting.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello!<|return|>⟧"
    ]


def test_template_kwargs_move_an_empty_thought_into_the_prompt() -> None:
    assert rendered("qwen3", [HI, HELLO], enable_thinking=False) == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦Hello!<|im_end|>⟧\n"
    ]


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
}


def test_a_tool_call_is_trained_with_its_own_end_token() -> None:
    messages = [SUM, CALL, {"role": "tool", "content": "4"}, FOUR]
    tool = {"type": "function", "function": {"name": "add"}}
    (rendering,) = ChatRenderer(byte_tokenizer(LLAMA3), "assistant").renderings(messages, [tool])
    assert marked(rendering) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        'Tools: [{"type": "function", "function": {"name": "add"}}]<|eot_id|>'
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n⟦{"name": "add", "parameters": {"a": 2, "b": 2}}<|eom_id|>⟧'
        "<|start_header_id|>tool<|end_header_id|>\n\n4<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦4<|eot_id|>⟧"
    )


def test_completion_trains_what_follows_the_last_question() -> None:
    thought = {**HELLO, "content": "Let me see."}
    (text,) = rendered(
        "marked", [HI, HELLO, SUM, thought, {"role": "tool", "content": "4"}, FOUR], "completion"
    )
    assert text == (
        "<|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>2+2?<|end|><|assistant|>⟦Let me see.<|end|>⟧"
        "<|tool|>4<|end|><|assistant|>⟦4<|end|>⟧"
    )


def test_a_template_that_leaves_something_out_is_a_bad_row() -> None:
    with pytest.raises(
        DataError,
        match=r"^message 1 calls a tool, but the chat template does not render tool calls",
    ):
        rendered("marked", [SUM, CALL, {"role": "tool", "content": "4"}, FOUR])
    only_two = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = ChatRenderer(
        byte_tokenizer(Family(only_two, QWEN3.specials, QWEN3.eos)), "assistant"
    )
    assert len(renderer.renderings([HI, HELLO])) == 1
    with pytest.raises(
        DataError, match=r"^message 0 \(role system\) is omitted by the chat template"
    ):
        renderer.renderings([SYSTEM, HI, HELLO])


@pytest.mark.parametrize("family", ["llama3", "marked", "qwen3"])
def test_a_message_of_weight_zero_is_not_trained(family: str) -> None:
    texts = rendered(family, [HI, {**HELLO, "weight": 0}, SUM, FOUR])
    assert "".join(texts).count("⟦") == 1
    assert "".join(texts).index("⟦") > "".join(texts).index("2+2?")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("silent", [0, 1, 2, 3])
def test_a_message_of_weight_zero_is_not_trained_among_all(family: str, silent: int) -> None:
    """Of train_on=all everything else is: the same text, without what the message says and its end."""
    chat = [HI, HELLO, SUM, FOUR]
    (whole,) = rendered(family, chat, "all")
    chat[silent] = {**chat[silent], "weight": 0}
    (text,) = rendered(family, chat, "all")
    assert text.replace("⟧", "").replace("⟦", "") == whole.replace("⟧", "").replace("⟦", "")
    trained = "".join(re.findall("⟦(.*?)⟧", text, re.DOTALL))
    said = [message["content"] for message in chat]
    for place, content in enumerate(said):
        assert (content in trained) == (place != silent), (text, content)


def test_the_header_of_a_silent_turn_is_silent() -> None:
    """A question of a letter stands in headers and end tokens too; before the first turn nothing ends."""
    question = {"role": "user", "content": "a"}
    silent = {**HELLO, "weight": 0}
    (text,) = rendered("marked", [question, silent, SUM, FOUR], "all")
    assert text == (
        "⟦<|user|>a<|end|>⟧<|assistant|>Hello!<|end|>⟦<|user|>2+2?<|end|><|assistant|>4<|end|>⟧"
    )
    for said in ("Hi", "e"):  # in the header and in the end token
        hi = {"role": "user", "content": said, "weight": 0}
        (text,) = rendered("marked", [hi, HELLO], "all")
        assert text == f"<|user|>{said}<|end|>⟦<|assistant|>Hello!<|end|>⟧"
    thoughts = {**HELLO, "reasoning_content": "A"}  # which the history leaves out
    with pytest.raises(DataError, match=r"^message 2 has weight 0, and the chat template does not"):
        rendered("qwen3", [HI, thoughts, silent, SUM, FOUR], "all")


def test_markers_give_what_prefixes_give() -> None:
    template = MARKED.template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    unmarked = Family(template, MARKED.specials, MARKED.eos)
    chat = [SYSTEM, HI, HELLO, SUM, FOUR]
    by_prefix = ChatRenderer(byte_tokenizer(unmarked), "assistant").renderings(chat)
    assert [marked(rendering) for rendering in by_prefix] == TWO_TURNS["marked"]


def test_the_prompt_of_a_reasoning_model_that_opens_a_thought() -> None:
    """A generation prompt that ends in `<think>` is no prefix of an answer without one; the answer is trained."""
    prompt = "{{- '<|im_start|>assistant\\n' -}}"
    template = QWEN3.template.replace(prompt, prompt.replace("\\n", "\\n<think>x"))
    tokenizer = byte_tokenizer(Family(template, QWEN3.specials, QWEN3.eos))
    (rendering,) = ChatRenderer(tokenizer, "assistant").renderings(
        [HI, {**HELLO, "reasoning_content": "A"}]
    )
    assert marked(rendering) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>⟦\nA\n</think>\n\nHello!<|im_end|>⟧\n"
    )


def test_a_refusal_of_the_template_is_a_bad_row() -> None:
    with pytest.raises(
        DataError,
        match=r"^the chat is refused by the chat template \(Conversation roles must alternate.*\): "
        r"change such chats, or set tokenizer.chat_template=template.jinja.$",
    ):
        rendered("gemma3", [HI, SUM, FOUR])
    with pytest.raises(DataError, match="has no assistant message"):
        rendered("llama3", [HI])


def test_a_full_memory_is_no_refusal_of_the_template() -> None:
    """A chat that it refuses may be left out; one that there is no memory for may not."""
    template = LLAMA3.template + "{{ 'a' * 10**15 }}"
    tokenizer = byte_tokenizer(Family(template, LLAMA3.specials, LLAMA3.eos))
    with pytest.raises(MemoryError):
        ChatRenderer(tokenizer, "assistant").renderings([HI, HELLO])


def test_a_template_without_an_end_token_is_refused() -> None:
    plain = Family(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        MISTRAL.specials,
        "</s>",
    )
    with pytest.raises(
        ConfigError, match="without a special token, so the model would never learn to stop"
    ):
        ChatRenderer(byte_tokenizer(plain), "assistant")


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = byte_tokenizer(LLAMA3)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"set tokenizer\.chat_template"):
        Renderer(tokenizer, "assistant", {}).renderings({"messages": [HI, HELLO]})


FORGETFUL = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{- (message.reasoning_content or '' if loop.last else '') + message.content + '<|end|>' -}}
{%- endgeneration -%}
{%- else -%}{{- message.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}{%- endif -%}
"""


def test_what_a_prompt_asked_is_forgotten_with_its_chat() -> None:
    """The first chat is rendered turn by turn, behind prompts; the second one by its template's markers."""
    specials = ("<|user|>", "<|assistant|>", "<|end|>")
    chat = ChatRenderer(byte_tokenizer(Family(FORGETFUL, specials, "<|end|>")), "assistant")
    question = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "Hello!"}
    chat.renderings([question, {**answer, "reasoning_content": "Hm."}, question, answer])
    assert chat.unasked == "<think>"
    chat.renderings([question, answer])
    assert chat.unasked == ""


# Phi-4-mini's: the tools stand in the system turn, as the text that is written
PHI_4_MINI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + "
    "'<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + "
    "message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)


def test_tools_that_a_template_wants_as_text_of_the_system_turn() -> None:
    specials = ("<|end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")
    family = Family(PHI_4_MINI, (*specials, "<|tool|>", "<|/tool|>"), "<|endoftext|>")
    renderer = ChatRenderer(byte_tokenizer(family), "assistant")
    tools = '[{"name": "f", "description": "", "parameters": {}}]'
    system = {"role": "system", "content": "Be brief.", "tools": tools}
    chat = [one for turn in (system, HI, HELLO) for one in read_turns(turn, "here")]
    (found,) = renderer.renderings(chat)
    assert f"<|system|>Be brief.<|tool|>{tools}<|/tool|><|end|>" in found.text
    with pytest.raises(DataError, match="tools"):
        renderer.renderings(
            [HI, HELLO], [{"type": "function", "function": {"name": "get_weather"}}]
        )
