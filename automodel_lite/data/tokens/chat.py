"""Chats to renderings, by whatever template the tokenizer brings.

A template with `{% generation %}` markers says itself what an assistant wrote. For the others (most
stock templates) growing prefixes of the chat are rendered, and an assistant turn is what its
rendering adds to the prompt before it:

    render(messages[:i], generation prompt)   <|user|>Hi<|end|><|assistant|>
    render(messages[:i + 1])                  <|user|>Hi<|end|><|assistant|>Hello<|end|>
                                                                            ^^^^^^^^^^^^ turn i

That only holds where each rendering is a prefix of the whole one, which is verified. Templates that
rewrite earlier turns (reasoning left out of the history, a system prompt that moves to the last
question) fail it; such a chat becomes one rendering for each trained turn, each as the model would
meet it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from automodel_lite.data.document import IMAGE, Message
from automodel_lite.data.formats.calls import parsed
from automodel_lite.data.formats.turns import TURN_TOOLS
from automodel_lite.data.tokens.rendering import Rendering, Span
from automodel_lite.data.tokens.stop_tokens import PROBE, token_behind
from automodel_lite.errors import ConfigError, DataError, is_limit

Render = Callable[..., str]  # turns -> text, by one of a tokenizer's templates

# End-of-turn tokens of other turns than a plain answer: Llama-3 tool calls, gpt-oss, Gemma-4,
# Cohere.
OTHER_END_TOKENS = (
    "<|eom_id|>",
    "<|call|>",
    "<|end|>",
    "<|return|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
)
_MARKER = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_MARKS = re.compile("[\ufdd0\ufdd1]")  # code points that Unicode keeps free for such use
ASSISTANTS = ("assistant", "model")
_TOOL_ROLES = ("tool", "ipython")  # of results, which templates may write as JSON
# keys of a turn's thoughts
REASONING = re.compile(r".*(reason|think|thought|rationale|scratchpad).*|cot|analysis")


class ChatRenderer:
    """Renders chats with a tokenizer's template; `template_kwargs` are more variables,
    `{"enable_thinking": False}`.

    Raises ConfigError: a template whose assistant turns end without a special token, after which no
    model could learn to stop.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        train_on: str,
        template_kwargs: dict[str, Any] | None = None,
    ):
        self._train_on = train_on
        self.unasked = ""  # the end of the last prompt that its answer does not begin with
        self._template_kwargs = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        plain = (tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}]))
        for name in template_kwargs or ():
            if not re.search(rf"\b{re.escape(name)}\b", "".join(plain)):
                raise ConfigError(
                    f"tokenize.template_kwargs: the chat template knows no {name}: leave it out, "
                    "or set tokenizer.chat_template to one that does."
                )
        # `{%- generation -%}` as a character that the rendering then holds, white space control
        # kept: a quarter faster than the tracker of transformers, which measures all the text so
        # far at each marker.
        marked = [
            _MARKER.sub(
                lambda m: (
                    f"{{%{m[1]} if true %}}{chr(0xFDD1 if m[2] else 0xFDD0)}{{% endif {m[3]}%}}"
                ),
                one,
            )
            for one in plain
        ]
        # (template, the same with marks; None where it has no markers), by whether the chat has
        # tools
        self._templates = [
            (one, other if other != one else None) for one, other in zip(plain, marked)
        ]
        self.stop_tokens, tail = self._probe_stop_tokens(
            {token.content for token in tokenizer.added_tokens_decoder.values()}
        )
        eos = [str(tokenizer.eos_token)] if tokenizer.eos_token else []
        # by which an answer of the data may end itself; the whole end of a turn before its parts
        self._own_ends = tuple(dict.fromkeys([tail, *self.stop_tokens, *eos]))
        self._complete_shapes: set[tuple[Any, ...]] = set()  # of chats that are written whole
        self._tools_written: dict[tuple[str, ...], bool] = {}  # by the roles of the first turns

    def renderings(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> list[Rendering]:
        """Returns the renderings of one chat: one, or one a trained turn when the template rewrites
        earlier turns.

        Raises DataError: no assistant turn, or the template refuses the chat or leaves a part of it
        out.
        """
        self.unasked = ""
        messages = [self.without_own_end(message) for message in messages]
        turns = self._trained_turns(messages)
        messages, given_tools = self._place_tools(messages, tools)
        messages = self._check_calls(messages, given_tools)
        renderings = self._render_whole_or_by_turn(messages, turns, given_tools)
        self._check_written(messages, turns, tools, renderings)
        if given_tools and renderings and not self._writes_tools(messages, given_tools):
            raise DataError(_NO_TOOLS)
        return renderings

    def whole(self, messages: Sequence[Message], tools: list[Any] | None = None) -> Rendering:
        """Returns a chat as the template writes it, of which nothing is trained on; raises
        DataError where the template refuses it or leaves a part of it out.
        """
        messages = [self.without_own_end(message) for message in messages]
        messages, given_tools = self._place_tools(messages, tools)
        messages = self._check_calls(messages, given_tools)
        render = partial(self._render, given_tools, self._templates[bool(given_tools)][0])
        text = render(messages)
        self._check_whole(render, messages, text, bool(given_tools))
        whole = Rendering(text, ())
        # thoughts of an earlier answer, of which a template leaves them out, are no loss
        last = len(messages) - 1
        answers = [last] if messages[last]["role"] in ASSISTANTS else []
        self._check_written(messages, answers, tools, [whole])
        if given_tools and not self._writes_tools(messages, given_tools):
            raise DataError(_NO_TOOLS)
        return whole

    def without_own_end(self, message: Message) -> Message:
        """Returns an assistant's message without an end token of its own, and white space behind
        it: the template writes one, and the second would be trained too.
        """
        said = message["content"].rstrip()
        if message["role"] not in ASSISTANTS or not said.endswith(self._own_ends):
            return message
        end = next(end for end in self._own_ends if said.endswith(end))
        return {**message, "content": said.removesuffix(end)}

    def _place_tools(
        self, messages: list[Message], tools: list[Any] | None
    ) -> tuple[list[Message], list[Any] | None]:
        """Returns the chat with its tools in one place: those of a turn are given to the template
        as the row's, unless it reads them in the turn, as GLM-4's does.
        """
        if not tools or not any(message.get(key) for message in messages for key in TURN_TOOLS):
            return messages, tools
        bare = [
            {key: value for key, value in message.items() if key not in TURN_TOOLS}
            for message in messages
        ]
        plain = self._templates[False][0]
        try:
            is_read = self._render(None, plain, messages) != self._render(None, plain, bare)
        except DataError:  # reads them in another form, or refuses the chat: said below
            is_read = False
        return (messages, None) if is_read else (bare, tools)

    def _check_calls(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """Returns the chat with its calls' arguments of the type that the template takes; raises
        DataError where it does not write calls, or only the first one of a turn.
        """
        calls = [place for place, message in enumerate(messages) if message.get("tool_calls")]
        if not calls:
            return messages
        if self._arguments_type is None:
            raise DataError(
                f"message {calls[0]} calls a tool, but the chat template does not render tool "
                "calls, so the turn would be trained on as if it were empty: use a template that "
                "renders them, tokenizer.chat_template=template.jinja."
            )
        messages = messages.copy()
        for place in calls if self._arguments_type is str else ():
            written = []
            for call in messages[place]["tool_calls"]:
                function = call["function"]
                arguments = json.dumps(function["arguments"])
                written.append({**call, "function": {**function, "arguments": arguments}})
            messages[place] = {**messages[place], "tool_calls": written}
        # gpt-oss's template writes the first one of a turn: the chat without the others is the same
        render = partial(self._render, tools, self._templates[bool(tools)][0])
        for place in calls:
            fewer = messages.copy()
            fewer[place] = {**messages[place], "tool_calls": messages[place]["tool_calls"][:1]}
            if fewer != messages and render(fewer) == render(messages):
                raise DataError(
                    f"message {place} has several tool calls, and the chat template writes one: "
                    "give each call a turn of its own, or use a template that writes them all, "
                    "tokenizer.chat_template=template.jinja."
                )
        return messages

    def _render_whole_or_by_turn(
        self, messages: list[Message], turns: list[int], tools: list[Any] | None
    ) -> list[Rendering]:
        """Returns one rendering of the chat where each trained turn stands in it as the model would
        meet it, else one for each trained turn.
        """
        # 1. By the template's own `generation` markers, where it has any.
        plain, marked = self._templates[bool(tools)]
        render = partial(self._render, tools, plain)
        whole = None
        if marked is not None and self._train_on != "all":
            text = self._render(tools, marked, messages)
            whole = self._marked(text, messages, turns)
        # 2. Else by the prefixes of the whole chat.
        if whole is not None:
            self._check_whole(render, messages, whole.text, bool(tools))
        else:
            text = render(messages)
            self._check_whole(render, messages, text, bool(tools))
            whole = self._whole(render, messages, text, turns)
        # 3. Else each turn by itself, as the last one of its chat.
        if whole is not None:
            # A turn whose thoughts are missing may have lost them as history: alone it is the last.
            is_lost = any(_lost(messages[turn], whole.text) for turn in turns)
            if self._train_on == "all" or not is_lost:
                return [whole]
        return [self._rendering_of_last_turn(render, messages[: turn + 1]) for turn in turns]

    def _check_written(
        self,
        messages: list[Message],
        turns: list[int],
        tools: list[Any] | None,
        renderings: list[Rendering],
    ) -> None:
        """Raises DataError for a part of a trained turn, or a tool, that its rendering lacks."""
        is_by_turn = len(renderings) == len(turns)
        for number, turn in enumerate(turns):
            rendering = renderings[number if is_by_turn else 0]
            if part := _lost(messages[turn], rendering.text):
                raise DataError(
                    f"message {turn} has {part} that the chat template does not write, so the turn "
                    "would be trained on without: use a template that writes it, "
                    "tokenizer.chat_template=template.jinja, or remove it."
                )
        names = []
        for tool in tools or []:
            if isinstance(tool, dict):
                names.append(tool.get("function", tool).get("name"))
        if renderings and any(name and str(name) not in renderings[0].text for name in names):
            raise DataError(_NO_TOOLS)

    def _writes_tools(self, messages: list[Message], tools: list[Any]) -> bool:
        """Returns whether the template writes the names of tools; found out once for chats that
        begin alike.

        A name that stands in a turn, too, as `search` does in a question, proves nothing: the tools
        are rendered under names that no text has.
        """
        begins = tuple(message["role"] for message in messages[:2])
        if begins not in self._tools_written:
            named: list[Any] = []
            for tool in tools:
                if isinstance(tool, dict):
                    name = {"name": f"probe_{len(named)}_of_tools"}
                    function = tool.get("function")
                    inner = {"function": {**function, **name}} if function else name
                    named.append({**tool, **inner})
            text = self._render(named, self._templates[True][0], messages)
            self._tools_written[begins] = all(f"probe_{i}_of" in text for i in range(len(named)))
        return self._tools_written[begins]

    def _check_whole(
        self, render: Render, messages: list[Message], text: str, has_tools: bool
    ) -> None:
        """Raises DataError for words of a turn that is not the assistant's of which the template
        wrote nothing: it knows no such role, or not in this place.
        """
        said = [place for place, one in enumerate(messages) if one["role"] not in ASSISTANTS]
        for place in said:
            is_result = messages[place]["role"] in _TOOL_ROLES
            for part in messages[place]["content"].split(IMAGE):
                if part.strip() in text or (is_result and _is_result_written(part, text)):
                    continue
                raise _omitted(place, messages[place])
        # A short text ("yes") may stand there for another reason: a chat of the same shape with
        # words that stand nowhere else shows what the template writes. Once per shape.
        shape = []
        for message in messages:
            content = message["content"]
            calls = bool(message.get("tool_calls"))
            shape.append((message["role"], bool(content.strip()), IMAGE in content, calls))
        if (key := (has_tools, *shape)) in self._complete_shapes:
            return
        probed = messages.copy()
        for place in said:
            content = messages[place]["content"]
            if content.strip() and IMAGE not in content:
                probed[place] = {**messages[place], "content": f"{PROBE}-{place}-"}
        self._complete_shapes.add(key)
        try:
            shown = render(probed)
        except DataError:  # a template that takes no other words in this place
            return
        for place in said:
            if probed[place] is not messages[place] and probed[place]["content"] not in shown:
                self._complete_shapes.remove(key)
                raise _omitted(place, messages[place])

    def _whole(
        self, render: Render, messages: list[Message], text: str, turns: list[int]
    ) -> Rendering | None:
        """Finds the spans in the whole chat; None when the template rewrites earlier turns, so that
        none of it is a prefix.
        """
        if self._train_on == "all":
            return Rendering(text, self._spans_of_all(render, messages, text))
        found = [self._span(render, messages, text, turn) for turn in turns]
        spans = tuple(span for span in found if span is not None)
        return Rendering(text, spans) if len(spans) == len(turns) else None

    def _spans_of_all(self, render: Render, messages: list[Message], text: str) -> tuple[Span, ...]:
        """Returns the spans between the messages of weight 0, up to the last stop token: the line
        break behind it, in half of the families, is not trained on.
        """
        begins = [0]
        ends = []
        for place, message in enumerate(messages):
            if message.get("weight", 1) == 0:
                start, stop = self._silent_span(render, messages, text, place)
                # its header begins behind the last stop token, or where a turn before it ends
                # without one, or with the text
                before = self._behind_stops(text[:start])
                if place:
                    shared = _common_prefix(render(messages[:place]), text)
                    before.append(len(text[:shared].rstrip()))
                ends.append(max(before, default=0))
                begins.append(stop)
        end = max(self._behind_stops(text), default=len(text))
        ends.append(len(text) if text[end:].strip() else end)
        return tuple((start, stop) for start, stop in zip(begins, ends) if start < stop)

    def _trained_turns(self, messages: list[Message]) -> list[int]:
        """Indices of the assistant messages that are trained on."""
        turns = [place for place, message in enumerate(messages) if message["role"] in ASSISTANTS]
        if not turns:
            raise DataError(
                "has no assistant message, so nothing is trained on", cure="add one", can_skip=True
            )
        if self._train_on == "last_assistant":
            turns = turns[-1:]
        if self._train_on == "completion":
            users = [
                index
                for index, message in enumerate(messages[: turns[-1]])
                if message["role"] == "user"
            ]
            turns = [turn for turn in turns if turn > max(users, default=-1)]
        return [turn for turn in turns if messages[turn].get("weight", 1) != 0]

    @cached_property
    def _arguments_type(self) -> type | None:
        """Returns the type that the template takes a tool call's arguments as: dict, str
        (DeepSeek), or None where it writes no calls.
        """
        arguments: Any
        for arguments in ({}, "{}"):
            call = {"type": "function", "function": {"name": PROBE, "arguments": arguments}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            asked: Any = [{"role": "user", "content": "Hi"}, turn]
            try:
                text = self._render(None, self._templates[0][0], asked)
            except DataError:
                continue
            return type(arguments) if PROBE in text else None
        return dict  # of a template that asks for more than a name: it knows calls

    def _render(
        self, tools: list[Any] | None, template: str, messages: list[Message], prompt: bool = False
    ) -> str:
        try:
            texts, _ = render_jinja_template(  # type: ignore[str-unpack]
                conversations=[messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                **self._template_kwargs,
            )
        except Exception as error:  # whatever a template does wrong
            if is_limit(error):
                raise
            raise DataError(
                f"the chat is refused by the chat template ({error}): change such chats, or set "
                "tokenizer.chat_template=template.jinja."
            ) from error
        return texts[0]

    def _marked(self, marked: str, messages: list[Message], turns: list[int]) -> Rendering | None:
        """Takes the spans from the template's own markers; None when they do not mark each
        assistant turn once.
        """
        parts = _MARKS.split(marked)
        assistants = [
            place for place, message in enumerate(messages) if message["role"] in ASSISTANTS
        ]
        if len(parts) != 2 * len(assistants) + 1:
            return None
        text = "".join(parts)
        edges = [0, *accumulate(map(len, parts))]
        spans = []
        for part in [2 * assistants.index(turn) + 1 for turn in turns]:
            # A span ends behind the end-of-turn token that follows it, or at one within it.
            end = edges[part + 1]
            trimmed = len(text[:end].rstrip())
            is_within = text[:trimmed].endswith(self.stop_tokens)
            spans.append((edges[part], trimmed if is_within else self._stop_behind(text, end)))
        return Rendering(text, tuple(spans))

    def _stop_behind(self, text: str, end: int) -> int:
        """Returns where the stop token behind `end` and white space ends; `end` without one."""
        rest = text[end:].lstrip()
        stop = next((token for token in self.stop_tokens if rest.startswith(token)), "")
        return len(text) - len(rest) + len(stop) if stop else end

    def _span(self, render: Render, messages: list[Message], text: str, turn: int) -> Span | None:
        """Where turn `turn` lies in `text`; None where the template writes the history
        otherwise.
        """
        is_last = turn == len(messages) - 1
        after = text if is_last else render(messages[: turn + 1])
        if not is_last and not text.startswith(after.rstrip()):
            return None
        if before := messages[:turn]:
            prompt = render(before, prompt=True)
        else:  # nobody has asked: where another turn would differ
            prompt = render([{"role": messages[0]["role"], "content": PROBE}])
        # They part early where the prompt opens with `<think>` and the turn has none: the turn
        # begins there.
        start = _common_prefix(prompt, text)
        self.unasked = prompt[start:] if before else ""
        if self.unasked and not text.startswith(render(before)):
            return None
        return start, min(len(text), max(self._behind_stops(after, start), default=len(after)))

    def _behind_stops(self, text: str, start: int = 0) -> list[int]:
        """Returns where the last stop token of each kind in text[start:] ends."""
        return [
            text.rfind(token, start) + len(token)
            for token in self.stop_tokens
            if token in text[start:]
        ]

    def _silent_span(self, render: Render, messages: list[Message], text: str, place: int) -> Span:
        """Where any message lies in `text`, its end token included; raises DataError where the
        template does not show it.
        """
        message = messages[place]
        before = messages[:place]
        content = message["content"].strip()
        at = -1
        if message["role"] not in ASSISTANTS:
            # of what is written up to its end token, which may hold its words too, the last
            said = text[: _common_prefix(render(messages[: place + 1]), text)].rstrip()
            for token in self.stop_tokens:
                said = said.removesuffix(token)
            at = said.rfind(content)
        elif span := self._span(render, messages, text, place):
            return span
        elif before and text.startswith(render(before)):  # no turn before it is rewritten
            at = text.find(content, _common_prefix(render(before, prompt=True), text))
        if not content or at < 0:
            raise DataError(
                f"message {place} has weight 0, and the chat template does not show where it is: "
                "use tokenize.train_on=assistant, or another template."
            )
        return at, self._stop_behind(text, at + len(content))

    def _rendering_of_last_turn(self, render: Render, messages: list[Message]) -> Rendering:
        text = render(messages)
        span = self._span(render, messages, text, len(messages) - 1)
        if span is None:
            prompt = render(messages[:-1], prompt=True)
            place = _common_prefix(prompt, text)
            raise DataError(
                f"message {len(messages) - 1}: the chat template changes the prompt once the "
                f"answer follows (from {prompt[place : place + 40]!r} to "
                f"{text[place : place + 40]!r}): use a template with {{% generation %}} markers"
            )
        return Rendering(text, (span,))

    def _probe_stop_tokens(self, specials: set[str]) -> tuple[tuple[str, ...], str]:
        """Returns the special token that follows the content of a last answer, then the other end
        tokens that there are; and all that stands between the content and the end of the turn.
        """
        question = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        text = self._render(None, self._templates[0][0], question)
        stop = token_behind(text, specials)
        tail = text[text.rfind(PROBE) + len(PROBE) :]
        if stop is None:
            raise ConfigError(
                f"the chat template ends an assistant turn with {tail!r}, without a special token, "
                f"so the model would never learn to stop: put {{{{ eos_token }}}} there, or set "
                "tokenizer.chat_template."
            )
        others = [token for token in OTHER_END_TOKENS if token in specials]
        end = tail.find(stop) + len(stop)
        return tuple(dict.fromkeys([stop, *others])), tail[:end].strip()


def _omitted(place: int, message: Message) -> DataError:
    return DataError(
        f"message {place} (role {message['role']}) is omitted by the chat template: use a "
        "template that supports the role, tokenizer.chat_template=template.jinja, or "
        "remove such messages."
    )


def _is_result_written(content: str, text: str) -> bool:
    """Returns whether a tool's result is in a text: as JSON text, or JSON by its values."""
    if is_written(content, text):
        return True
    try:
        value = parsed(content, "content")
    except DataError:
        return False
    return isinstance(value, (dict, list)) and is_written(value, text)


_NO_TOOLS = (
    "has tools that the chat template does not write, so calls would be learned of tools that the "
    "model cannot see: use a template that writes them, tokenizer.chat_template=template.jinja, "
    "or remove the tools."
)


def is_written(value: Any, text: str) -> bool:
    """Returns whether a value is in a text: a text as it is, or escaped as in JSON; an object or a
    list by its values. true, false and null are words of any template, and count as written.
    """
    if isinstance(value, dict):
        return all(is_written(item, text) for item in value.values())
    if isinstance(value, list):
        return all(is_written(item, text) for item in value)
    if value is None or isinstance(value, bool):
        return True
    if not isinstance(value, str):
        return str(value) in text or json.dumps(value, default=str) in text
    said = value.strip()
    escaped = (json.dumps(said, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    return said in text or any(one in text for one in escaped)


def _lost(message: Message, text: str) -> str:
    """Returns the part of a trained turn that is not in its text: the key of its thoughts, thoughts
    in its content, or words beside a call.
    """
    for key, thought in message.items():
        if REASONING.fullmatch(key) and isinstance(thought, str) and thought.strip() not in text:
            return key
    thoughts, is_thought, said = message["content"].rpartition("</think>")
    if is_thought and thoughts.rpartition("<think>")[2].strip() not in text:
        return "thoughts before </think>"
    is_beside = message.get("tool_calls") and said.strip() not in text
    return "content beside its tool calls" if is_beside else ""


def _common_prefix(left: str, right: str) -> int:
    """Returns the number of characters that the two texts have in common at the start."""
    return len(os.path.commonprefix([left, right]))  # noqa: RUF071 - of texts, not paths
