"""Chats to text with the stretches that are trained on, by whatever template the tokenizer brings.

A template with `{% generation %}` markers says itself what an assistant wrote. For the others (most stock templates)
growing prefixes of the chat are rendered, and an assistant turn is what its rendering adds to the prompt before it:

    render(messages[:i], generation prompt)   <|user|>Hi<|end|><|assistant|>
    render(messages[:i + 1])                  <|user|>Hi<|end|><|assistant|>Hello<|end|>
                                                                            ^^^^^^^^^^^^ turn i

That only holds where each rendering is a prefix of the whole one, which is verified. Templates that rewrite earlier
turns (reasoning left out of the history, a system prompt that moves to the last question) fail it; such a chat
becomes one sample for each trained turn, each as the model would meet it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from automodel_lite.data.documents import Message
from automodel_lite.deadline import Deadline, DeadlineExceeded
from automodel_lite.errors import ConfigError, DataError

TrainOn = Literal["assistant", "last_assistant", "completion", "all"]
Span = tuple[int, int]

# End-of-turn tokens of other turns than a plain answer: Llama-3 tool calls, gpt-oss, Gemma-4, Cohere.
OTHER_END_TOKENS = ("<|eom_id|>", "<|call|>", "<|end|>", "<|return|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_MARKER = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_MARKS = re.compile("[\ufdd0\ufdd1]")  # code points that Unicode keeps free for such use
_PROBE = "PROBE"
_PROBE_CALL = {"type": "function", "function": {"name": _PROBE, "arguments": {}}}
_REWRITTEN_ROLES = ("assistant", "model", "tool", "ipython")  # templates take thoughts out, or write JSON
MAX_RENDER_S = 20.0  # of one chat, which takes a template some 0.0002 s


@dataclass(frozen=True)
class Sample:
    """Text to tokenise as it is (no special tokens are added) and the character spans that are trained on."""

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class _Template:
    """A chat template, and the same with its generation markers written out as two characters (None: it has none)."""

    plain: str
    marked: str | None


def no_template(tokenizer: PreTrainedTokenizerFast) -> str:
    """The sentence for a tokenizer that cannot write a chat."""
    return (
        f"the tokenizer {tokenizer.name_or_path} has no chat template: set tokenizer.chat_template=template.jinja, or "
        "tokenizer.path to a chat model's tokenizer."
    )


class ChatRenderer:
    """Renders chats with a tokenizer's template.

    Args:
        template_kwargs: more variables for the template, `{"enable_thinking": False}`.

    Raises:
        ConfigError: no template, or one whose assistant turns end without a special token, after which no model
            could learn to stop.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, train_on: TrainOn, template_kwargs: dict[str, Any] | None = None
    ):
        if tokenizer.chat_template is None:
            raise ConfigError(no_template(tokenizer))
        self._train_on = train_on
        self._template_kwargs = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        self._without_tools = _template(tokenizer.get_chat_template())
        self._with_tools = _template(tokenizer.get_chat_template(tools=[{}]))
        self._deadline = Deadline(MAX_RENDER_S)
        self.stop_tokens = self._probe_stop_tokens({token.content for token in tokenizer.added_tokens_decoder.values()})

    def samples(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[Sample]:
        """The samples of one chat: one, or one a trained turn when the template rewrites earlier turns.

        Raises:
            DataError: no assistant turn, or the template refuses the chat or leaves a part of it out.
        """
        messages = list(messages)
        self._check_tool_calls(messages)
        turns = self._trained_turns(messages)
        template = self._with_tools if tools else self._without_tools
        if self._train_on == "all":
            text = self._whole(messages, tools, template.plain)
            return [Sample(text, ((0, len(text)),))]
        if template.marked is not None:
            marked = self._marked(messages, tools, template.marked, turns)
            if marked is not None:
                _check_whole(messages, marked.text)
                return [marked]
        text = self._whole(messages, tools, template.plain)
        spans = [self._span(messages, tools, template.plain, text, turn) for turn in turns]
        if all(span is not None for span in spans):
            return [Sample(text, tuple(span for span in spans if span is not None))]
        return [self._last_turn_sample(messages[: turn + 1], tools, template.plain) for turn in turns]

    def _trained_turns(self, messages: list[Message]) -> list[int]:
        """Indices of the assistant messages that are trained on."""
        turns = _assistant_turns(messages)
        if not turns:
            raise DataError("has no assistant message")
        if self._train_on == "last_assistant":
            turns = turns[-1:]
        if self._train_on == "completion":
            users = [index for index, message in enumerate(messages) if message["role"] == "user"]
            answered = [index for index in users if index < turns[-1]]
            turns = [turn for turn in turns if not answered or turn > answered[-1]]
        return [turn for turn in turns if messages[turn].get("weight", 1) != 0]

    def _whole(self, messages: list[Message], tools: list[Any] | None, template: str) -> str:
        text = self._render(messages, tools, template)
        _check_whole(messages, text)
        return text

    def _check_tool_calls(self, messages: list[Message]) -> None:
        place = next((place for place, message in enumerate(messages) if message.get("tool_calls")), None)
        if place is not None and not self._writes_tool_calls:
            raise DataError(
                f"message {place} calls a tool, and the chat template writes no tool calls: the turn would be trained "
                "as if it were empty. Take a template that writes them, tokenizer.chat_template=template.jinja."
            )

    @cached_property
    def _writes_tool_calls(self) -> bool:
        question = {"role": "user", "content": "Hi"}
        call = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
        try:
            return _PROBE in self._render([question, call], None, self._without_tools.plain)
        except DataError:
            return True  # of a template that asks for more than a name: it knows calls

    def _render(self, messages: list[Message], tools: list[Any] | None, template: str, prompt: bool = False) -> str:
        try:
            with self._deadline:
                texts, _ = render_jinja_template(  # type: ignore[str-unpack]
                    conversations=[messages],
                    tools=tools,
                    chat_template=template,
                    add_generation_prompt=prompt,
                    **self._template_kwargs,
                )
        except DeadlineExceeded:
            raise DataError(
                f"the chat template was stopped after {MAX_RENDER_S:.0f} s: are there loops inside of loops in it?"
            ) from None
        except Exception as error:  # whatever a template does wrong
            raise DataError(f"is refused by the chat template: {error}") from error
        return texts[0]

    def _marked(
        self, messages: list[Message], tools: list[Any] | None, template: str, turns: list[int]
    ) -> Sample | None:
        """The sample by the template's own markers; None when they do not mark each assistant turn once."""
        parts = _MARKS.split(self._render(messages, tools, template))
        assistants = _assistant_turns(messages)
        if len(parts) != 2 * len(assistants) + 1:
            return None
        text = "".join(parts)
        edges = [0, *accumulate(map(len, parts))]
        chosen = [2 * assistants.index(turn) + 1 for turn in turns]
        return Sample(text, tuple((edges[part], self._include_stop(text, edges[part + 1])) for part in chosen))

    def _include_stop(self, text: str, end: int) -> int:
        """Moves the end of a marked span over the end-of-turn token that follows it."""
        if text[:end].endswith(self.stop_tokens):
            return end
        rest = text[end:].lstrip()
        for token in self.stop_tokens:
            if rest.startswith(token):
                return len(text) - len(rest) + len(token)
        return end

    def _span(
        self, messages: list[Message], tools: list[Any] | None, template: str, text: str, turn: int
    ) -> Span | None:
        """Where turn `turn` lies in `text`; None where the template writes the history otherwise."""
        is_last = turn == len(messages) - 1
        after = text if is_last else self._render(messages[: turn + 1], tools, template)
        if not is_last and not text.startswith(after.rstrip()):
            return None
        start = self._start(messages[:turn], tools, template, text)
        if start is None:
            return None
        stops = [after.rfind(token, start) + len(token) for token in self.stop_tokens if token in after[start:]]
        return start, min(len(text), max(stops, default=len(after)))

    def _start(self, before: list[Message], tools: list[Any] | None, template: str, text: str) -> int | None:
        """Where the assistant begins to write after the messages `before`: where their generation prompt ends."""
        if not before:
            return 0
        prompt = self._render(before, tools, template, prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        history = self._render(before, tools, template)
        if not text.startswith(history):
            return None
        return _common_prefix(prompt, text)  # a prompt that opens with `<think>` where the turn has none

    def _last_turn_sample(self, messages: list[Message], tools: list[Any] | None, template: str) -> Sample:
        text = self._render(messages, tools, template)
        span = self._span(messages, tools, template, text, len(messages) - 1)
        if span is None:
            prompt = self._render(messages[:-1], tools, template, prompt=True)
            place = _common_prefix(prompt, text)
            raise DataError(
                f"message {len(messages) - 1}: the chat template writes the prompt otherwise once the answer follows "
                f"(from {prompt[place : place + 40]!r} to {text[place : place + 40]!r}): use a template with "
                "{% generation %} markers"
            )
        return Sample(text, (span,))

    def _probe_stop_tokens(self, specials: set[str]) -> tuple[str, ...]:
        """The special token that follows the content of a last answer, then the other end tokens that there are."""
        question = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
        text = self._render(question, None, self._without_tools.plain)
        tail = text[text.rfind(_PROBE) + len(_PROBE) :]
        found = sorted((tail.find(token), -len(token), token) for token in specials if token in tail)
        if not found:
            raise ConfigError(
                f"the chat template ends an assistant turn with {tail!r}, without a special token, so the model would "
                "never learn to stop: put {{ eos_token }} there, or set tokenizer.chat_template."
            )
        return tuple(dict.fromkeys([found[0][2], *(token for token in OTHER_END_TOKENS if token in specials)]))


def _template(source: str) -> _Template:
    """Turns `{%- generation -%}` into a character that the rendering then holds, white space control kept.

    A quarter faster than the tracker of transformers, which measures all the text so far at each marker.
    """
    if not _MARKER.search(source):
        return _Template(source, None)

    def mark(found: re.Match[str]) -> str:
        before, end, after = found.groups()
        return f"{{%{before} if true %}}{chr(0xFDD1 if end else 0xFDD0)}{{% endif {after}%}}"

    return _Template(source, _MARKER.sub(mark, source))


def _check_whole(messages: Sequence[Message], text: str) -> None:
    """Raises DataError for a message of which the template wrote nothing: it knows no such role."""
    for place, message in enumerate(messages):
        if message["role"] not in _REWRITTEN_ROLES and message["content"].strip() not in text:
            raise DataError(
                f"message {place} (role {message['role']}) is left out by the chat template: take a template that "
                "knows the role, tokenizer.chat_template=template.jinja, or take such messages out of the data."
            )


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] in ("assistant", "model")]


def _common_prefix(left: str, right: str) -> int:
    """Characters that the two texts have in common at the start."""
    return next((place for place, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
