"""Text from a trained model: an exported folder, an adapter or a hub name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from automodel_lite.attention.isolation import tolerance_std
from automodel_lite.attention.spec import config_value
from automodel_lite.data.tokens.stop_tokens import stop_ids
from automodel_lite.errors import (
    ConfigError,
    explained,
)
from automodel_lite.evaluation.questions import as_template_takes
from automodel_lite.models.source import (
    embedding_rows,
)

_PROBE_TOKENS = 12
ChatInputs = Callable[..., Any]
"""(chat, is_chat, tools) -> inputs of the model."""


@dataclass(frozen=True)
class Generator:
    """A model and its tokenizer, ready to answer.

    source           folder or hub name, of whose processor images are read
    template_kwargs  variables of the chat template beside its own, as the model was trained with
    most_pixels      of an image: larger ones are scaled down, as the model was trained with
    open_images      makes the function from a chat with images to inputs of the model; None: text
    """

    model: transformers.PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    most_pixels: int | None = None
    open_images: Callable[[Generator], ChatInputs] | None = None

    @torch.no_grad()
    def answers(
        self,
        chats: Sequence[list[dict[str, Any]]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        is_chat: bool = True,
        tools: Sequence[list[Any] | None] | None = None,
        write: Callable[[str], None] | None = None,
    ) -> list[str]:
        """Returns the model's turn after each of the chats, as one batch. temperature 0 = the
        likeliest token.

        is_chat   through the chat template; False: the last message's text is simply continued
        tools     of each chat, for its template
        write     gets the pieces of a single chat's answer as they come
        One at a time where padding would change an answer: a model that runs over it, or no room
        for it; and chats with images, whose contents are lists of parts.

        Raises ConfigError for a prompt that is empty or longer than the model's positions, and for
        one that its chat template or its embedding does not take.
        """
        of_chats = tools or [None] * len(chats)
        if any(map(has_images, chats)):
            # one after the other: pixels of many images fit no GPU
            batches = (self._inputs_of(chat, is_chat, own) for chat, own in zip(chats, of_chats))
        else:
            prompts = [
                torch.tensor(prompt_ids(self.tokenizer, chat, is_chat, own, self.template_kwargs))
                for chat, own in zip(chats, of_chats)
            ]
            # Left padding moves positions: an answer that ends at the model's length would be cut
            # short by its neighbor.
            has_room = min(map(self._room_tokens, prompts)) >= max_new_tokens
            is_batch = len(prompts) == 1 or (has_room and self.takes_padding)
            together = [prompts] if is_batch else [[ids] for ids in prompts]
            batches = (self._padded(batch) for batch in together)
        streamer: Any = None
        if write:  # gets the text as soon as it is whole words
            streamer = TextStreamer(
                cast(Any, self.tokenizer), skip_prompt=True, skip_special_tokens=True
            )
            streamer.on_finalized_text = lambda text, stream_end=False: write(
                text + "\n" * stream_end
            )
        # one answer to a prompt, token by token, whatever the model's generation_config.json says
        one = {"num_beams": 1, "num_return_sequences": 1}
        choice = one | {"do_sample": temperature > 0, "temperature": temperature or None}
        ends = stop_ids(self.model, self.tokenizer, self.template_kwargs)
        generate = cast(Any, self.model.generate)
        answers = list[str]()
        for inputs in batches:
            room = min(max_new_tokens, *map(self._room_tokens, inputs["input_ids"]))
            output = generate(
                **inputs,
                max_new_tokens=room,
                streamer=streamer,
                eos_token_id=ends or None,
                **choice,
            )
            # Prompts are padded on the left, so that all answers begin at the same column.
            new = output[:, inputs["input_ids"].shape[1] :].tolist()
            ended = [until_end(ids, ends) for ids in new]
            answers += self.tokenizer.batch_decode(ended, skip_special_tokens=True)
        return answers

    @cached_property
    def _inputs_of(self) -> ChatInputs:
        """What makes inputs of chats with images, with a processor that is read once."""
        if self.open_images is None:
            raise ConfigError("this model answers texts alone: load it with load_generator.")
        return self.open_images(self)

    @cached_property
    def takes_padding(self) -> bool:
        """Does left padding leave a prompt's continuation unchanged? Some recurrent layers run over
        the padding.
        """
        ids = torch.arange(_PROBE_TOKENS) % embedding_rows(self.model)

        def logits(prompts: list[Tensor]) -> Tensor:
            generate: Any = self.model.generate
            options = {
                "max_new_tokens": 1,
                "do_sample": False,
                "output_logits": True,
                "return_dict_in_generate": True,
            }
            return generate(**self._padded(prompts), **options).logits[0][0].float()

        alone = logits([ids])
        beside = logits([ids, torch.cat([ids, ids])])
        return bool((alone - beside).abs().max() <= tolerance_std(self.model.dtype) * alone.std())

    def _padded(self, prompts: list[Tensor]) -> dict[str, Tensor]:
        """Returns input_ids and attention_mask, int64 [B, longest], each prompt at the right end of
        its row.
        """
        longest = max(len(ids) for ids in prompts)
        pad_id = self.tokenizer.pad_token_id or 0  # masked: any id will do
        mask = torch.stack([torch.arange(longest) >= longest - len(ids) for ids in prompts])
        rows = torch.full(mask.shape, pad_id).masked_scatter(mask, torch.cat(prompts))
        return {
            "input_ids": rows.to(self.model.device),
            "attention_mask": mask.long().to(self.model.device),
        }

    def _room_tokens(self, ids: Tensor) -> int:
        """Returns how many tokens an answer to this prompt may have."""
        positions = config_value(
            self.model.config.get_text_config(), "max_position_embeddings", 2**31
        )
        if not len(ids):
            raise ConfigError("the prompt is empty: there is nothing to continue.")
        highest = int(ids.max())
        rows = embedding_rows(self.model)
        if highest >= rows:
            raise ConfigError(
                f"the tokenizer gives the id {highest}, and the model's embedding has {rows} rows."
            )
        if len(ids) >= positions:
            raise ConfigError(
                f"the prompt has {len(ids):,} tokens, and the model has {positions:,} positions "
                "for prompt and answer together: shorten the prompt."
            )
        return int(positions) - len(ids)


def has_images(chat: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether a turn of a chat is a list of parts, as those with images are."""
    return any(isinstance(turn["content"], list) for turn in chat)


def until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Returns an answer's tokens with the first that ends it: what a batch has behind that is
    padding, which may be a word of the tokenizer.
    """
    places = (place for place, token in enumerate(ids, 1) if token in ends)
    return ids[: next(places, None)]


def prompt_ids(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    is_chat: bool = True,
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Returns the token ids of a chat whose next turn is the model's; without a chat template, of
    the last message's text.
    """
    if not is_chat or tokenizer.chat_template is None:
        return tokenizer(messages[-1]["content"])["input_ids"]
    render = partial(tokenizer.apply_chat_template, tools=tools, **(template_kwargs or {}))
    # whatever a template does wrong
    cure = "use --raw to skip the template"
    with explained("the chat template refuses the prompt", Exception, cure=cure):
        inputs = render(
            as_template_takes(partial(render, tokenize=False), messages),
            add_generation_prompt=True,
            return_dict=True,
        )
    return inputs["input_ids"]
