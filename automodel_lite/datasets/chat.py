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
from typing import Any, Literal

import jinja2
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from automodel_lite.errors import ConfigError, DataError

TrainOn = Literal["assistant", "last_assistant", "completion", "all"]
Message = dict[str, Any]
Span = tuple[int, int]

# End-of-turn tokens of other turns than a plain answer: Llama-3 tool calls, gpt-oss, Gemma-4, Cohere.
OTHER_END_TOKENS = ("<|eom_id|>", "<|call|>", "<|end|>", "<|return|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "PROBE"


@dataclass(frozen=True)
class Sample:
    """Text to tokenise as it is (no special tokens are added) and the character spans that are trained on."""

    text: str
    spans: tuple[Span, ...]


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
            raise ConfigError("the tokenizer has no chat template: set tokenizer.chat_template to a Jinja file.")
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._template_kwargs = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        specials = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self.stop_tokens = self._probe_stop_tokens(specials)
        self.num_split = 0  # chats that became one sample a turn

    def samples(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[Sample]:
        """The samples of one chat: one, or one a trained turn when the template rewrites earlier turns.

        Raises:
            DataError: no assistant turn, or the template refuses the chat.
        """
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        turns = self._trained_turns(messages)
        template = self._tokenizer.get_chat_template(tools=tools)
        if self._train_on != "all" and _MARKER.search(template):
            marked = self._marked(messages, tools, template, turns)
            if marked is not None:
                return [marked]
        text = self._render(messages, tools, template)
        if self._train_on == "all":
            return [Sample(text, ((0, len(text)),))]
        spans = [self._span(messages, tools, template, text, turn) for turn in turns]
        if all(span is not None for span in spans):
            return [Sample(text, tuple(span for span in spans if span is not None))]
        self.num_split += 1
        return [self._last_turn_sample(messages[: turn + 1], tools, template) for turn in turns]

    def _trained_turns(self, messages: list[Message]) -> list[int]:
        """Indices of the assistant messages that are trained on."""
        turns = [index for index, message in enumerate(messages) if message["role"] in ("assistant", "model")]
        if not turns:
            raise DataError("has no assistant message")
        if self._train_on == "last_assistant":
            turns = turns[-1:]
        if self._train_on == "completion":
            users = [index for index, message in enumerate(messages) if message["role"] == "user"]
            answered = [index for index in users if index < turns[-1]]
            turns = [turn for turn in turns if not answered or turn > answered[-1]]
        return [turn for turn in turns if messages[turn].get("weight", 1) != 0]

    def _render(self, messages: list[Message], tools: list[Any] | None, template: str, prompt: bool = False) -> str:
        return self._render_marked(messages, tools, template, prompt, marked=False)[0]

    def _render_marked(
        self, messages: list[Message], tools: list[Any] | None, template: str, prompt: bool, marked: bool
    ) -> tuple[str, list[Span]]:
        """The text of a chat and, with `marked`, what the template's generation markers enclose."""
        spans: list[list[Span]]
        try:
            texts, spans = render_jinja_template(  # type: ignore[str-unpack, assignment]
                conversations=[messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **self._template_kwargs,
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise DataError(f"is refused by the chat template: {error}") from error
        return str(texts[0]), spans[0] if marked else []

    def _marked(
        self, messages: list[Message], tools: list[Any] | None, template: str, turns: list[int]
    ) -> Sample | None:
        """The sample by the template's own markers; None when they do not mark each assistant turn once."""
        text, spans = self._render_marked(messages, tools, template, prompt=False, marked=True)
        assistants = [index for index, message in enumerate(messages) if message["role"] in ("assistant", "model")]
        if len(spans) != len(assistants):
            return None
        chosen = [spans[assistants.index(turn)] for turn in turns]
        return Sample(text, tuple((start, self._include_stop(text, end)) for start, end in chosen))

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
        text = self._render(question, None, self._tokenizer.get_chat_template())
        tail = text[text.rfind(_PROBE) + len(_PROBE) :]
        found = sorted((tail.find(token), -len(token), token) for token in specials if token in tail)
        if not found:
            raise ConfigError(
                f"the chat template ends an assistant turn with {tail!r}, without a special token, so the model would "
                "never learn to stop: put {{ eos_token }} there, or set tokenizer.chat_template."
            )
        return tuple(dict.fromkeys([found[0][2], *(token for token in OTHER_END_TOKENS if token in specials)]))


def _common_prefix(left: str, right: str) -> int:
    """Characters that the two texts have in common at the start."""
    return next((place for place, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))
