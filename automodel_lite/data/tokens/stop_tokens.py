"""What ends an answer: the ids at which every generation stops.

A base model's end is often not its chat template's. Qwen2.5's template closes a turn with
`<|im_end|>`, and its base model and tokenizer end at `<|endoftext|>`: what is trained on chats
writes `<|im_end|>`, and nothing but the template knows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from automodel_lite.errors import is_limit
from automodel_lite.models.layers import has_score_head

PROBE = "PROBE"


def stop_ids(
    lm: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Returns the tokenizer's end token, those of the model's own generation settings, and the one
    with which the chat template ends a turn, with these variables of it; each once.
    """
    settings = None if has_score_head(lm) else lm.generation_config
    own = settings.eos_token_id if settings else None
    found = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    if stop := template_end(tokenizer, variables):
        found.append(tokenizer.get_vocab()[stop])
    return [*dict.fromkeys(token for token in found if token is not None)]


def use_stop_ids(
    lm: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    variables: Mapping[str, Any] | None = None,
) -> list[str]:
    """Sets `stop_ids` in the model's generation settings, of which its export writes them; returns
    a note where the chat template brought one that neither the tokenizer nor the model knew.
    """
    if has_score_head(lm) or lm.generation_config is None:
        return []
    own = lm.generation_config.eos_token_id
    known = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    stops = stop_ids(lm, tokenizer, variables)
    lm.generation_config.eos_token_id = stops or None
    if set(stops) <= set(known):
        return []
    end = template_end(tokenizer, variables)
    return [
        f"NOTE: answers stop at {end} too, with which the chat template ends a turn: "
        f"the tokenizer's end is {tokenizer.eos_token}; the export's generation_config.json has "
        "both"
    ]


def template_end(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None
) -> str | None:
    """Returns the token with which the chat template ends an assistant's turn; None without a
    template, and of one that ends it with none or takes no such chat.

    variables  tokenize.template_kwargs: a template may refuse a chat without them
    """
    if tokenizer.chat_template is None:
        return None
    specials = {token.content for token in tokenizer.added_tokens_decoder.values()}
    content: Any
    # of a text, some templates of images write nothing
    for content in (PROBE, [{"type": "text", "text": PROBE}]):
        chat = [{"role": role, "content": content} for role in ("user", "assistant")]
        try:
            text = str(tokenizer.apply_chat_template(chat, tokenize=False, **(variables or {})))
        except Exception as error:  # whatever a template does wrong
            if is_limit(error):
                raise
            continue
        if PROBE in text and (stop := token_behind(text, specials)):
            return stop
    return None


def token_behind(text: str, specials: Set[str]) -> str | None:
    """Returns the special token that follows the last `PROBE`; None without one."""
    tail = text[text.rfind(PROBE) + len(PROBE) :]
    found = sorted((tail.find(token), -len(token), token) for token in specials if token in tail)
    if not found:
        return None
    place, _, stop = found[0]
    # Cohere closes its response and then the turn: of tokens that touch, the last one ends the
    # turn.
    while follower := next((t for at, _, t in found if at == place + len(stop)), None):
        place = place + len(stop)
        stop = follower
    return stop
