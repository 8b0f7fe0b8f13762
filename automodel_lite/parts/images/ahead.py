"""Which tokens of an image, or of a prompt, see those behind them: asked from the model's own mask
code, once, on a model without weights.

    types     0 1 1 1 0 | 1 1 0     (1: of an image)
    behind    0 2 1 0 0 | 1 0 0     tokens behind itself that a token sees
    before    0 0 1 2 0 | 0 1 0     tokens before itself that it sees though its window ends

Legend: T tokens of the stream.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention, within_reach
from automodel_lite.attention.spec import UNPACKED
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import text_decoder
from automodel_lite.thd import stream_of

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments by which models tell what a token is: 0 text, 1 image; of a prompt that sees itself,
0 prompt, 1 answer.
"""


class Rule(NamedTuple):
    """Tokens of a run of this type see each other; beyond the window too where the run `is_whole`.

    of_prompt  the type is 0, of what stands before an answer
    """

    of_prompt: bool
    is_whole: bool


Rules = dict[bool, Rule]
"""By kind of layer: windowed or not; a kind that is plainly causal is not there."""
_RULES = [Rule(of_prompt, is_whole) for of_prompt in (False, True) for is_whole in (False, True)]


def ahead_of(types: Tensor, starts: Tensor, rule: Rule) -> Tensor:
    """Returns int64 [T, 2]: how many tokens behind, and before, itself each token sees because
    they share a run.

    starts  bool [T]: where a document, or a branch of one, begins
    """
    places = torch.arange(len(types))
    begins = starts.clone()
    begins[0] = True
    begins[1:] |= types[1:] != types[:-1]
    first = begins.nonzero().squeeze(1)
    run = begins.cumsum(0) - 1
    last = torch.cat([first[1:], first.new_tensor([len(types)])]) - 1
    before = (places - first[run]) * rule.is_whole
    seen = torch.stack([last[run] - places, before], 1)
    return seen * (types == (0 if rule.of_prompt else 1))[:, None]


def types_of(image: Tensor, labels: Tensor, starts: Tensor, of_prompt: bool) -> Tensor:
    """Returns int64 [T]: 1 for a token of an image; `of_prompt`, 1 for an answer, from its first
    token on.
    """
    if not of_prompt:
        return (image > 0).long()
    is_trained = (labels != IGNORE_INDEX).long()
    before = is_trained.cumsum(0) - is_trained  # labels before a token
    at_start = before[starts.nonzero().squeeze(1)]
    return (before > at_start[starts.cumsum(0) - 1]).long()


def find_rules(described: transformers.PreTrainedModel) -> Rules:
    """Asks a model on the meta device, which is used up, what its layers without a window, and with
    one, let tokens see.

    The question is a document with two images; of a model for which it has no answer, a prompt and
    an answer. Raises ConfigError where a token's keys are not one run.
    """
    known = inspect.signature(type(described).forward).parameters
    if not any(name in known for name in TYPES):
        return {}
    install(described, _Asked())
    # weights of zeros on the host, which take no memory
    described._apply(lambda weight: torch.zeros((), dtype=weight.dtype).expand(weight.shape))
    # What the composite makes of images is made before its language model is called.
    hook = text_decoder(described).register_forward_pre_hook(_stop)
    window = getattr(described.config.get_text_config(), "sliding_window", None)
    tail = 4 + (window or 0)
    images = [0] * 3 + [1] * tail + [0] * 2 + [1] * 3 + [0] * tail
    prompt = [0] * 9 + [1] * tail
    try:
        answers = [
            _answer(described, torch.tensor(question), window) for question in (images, prompt)
        ]
    finally:
        hook.remove()
    of_images, of_prompt = answers
    if of_images is not None:
        return of_images
    # where two images see each other (Molmo 2), the second question has an answer, but is none
    if of_prompt is not None and all(rule.of_prompt for rule in of_prompt.values()):
        return of_prompt
    raise ConfigError(
        f"{type(described).__name__}: the keys that a token of an image sees are not one run: "
        f"{UNPACKED}."
    )


def _answer(model: transformers.PreTrainedModel, types: Tensor, window: int | None) -> Rules | None:
    """Returns the rule of each kind of layer, or None where no rule explains a mask."""
    # Called in place of a mask: asks the family's mask function for all pairs of places, and
    # compares its answer with that of each rule, None first (no rule: a causal mask).
    found: dict[bool, Rule | None] = {}
    unknown = []
    places = torch.arange(len(types))
    starts = places == 0

    def read(mask_function: Any, q_length: int, **kwargs: Any) -> None:
        zero = torch.zeros((), dtype=torch.long)
        visible = mask_function(zero, zero, places[:, None], places[None])
        visible = visible.expand(q_length, q_length)
        is_windowed = not bool(visible[-1, 0])  # the last place does not see the first
        for rule in (None, *_RULES):
            ahead = torch.zeros(q_length, 2) if rule is None else ahead_of(types, starts, rule)
            own = window if is_windowed else None
            at = places - (ahead[:, 1] + 1 - own).clamp(min=0) if own else places
            reach = torch.stack([places + ahead[:, 0], at], 1)
            if torch.equal(visible, within_reach(reach, q_length, own)):
                if found.setdefault(is_windowed, rule) != rule:
                    unknown.append(is_windowed)
                return
        unknown.append(is_windowed)

    # The model is called until its first mask is made, with `read` as its kernel.
    batch = stream_of([torch.full_like(types, 5)])
    inputs = batch.model_inputs()
    names = inspect.signature(type(model).forward).parameters
    inputs |= {name: types[None] for name in TYPES if name in names}
    ALL_MASK_ATTENTION_FUNCTIONS.register(_Asked.name, read)
    try:
        with torch.no_grad(), suppress(_StoppedError):
            model(**inputs)
    finally:
        del type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping[_Asked.name]
    if unknown:
        return None
    return {kind: rule for kind, rule in found.items() if rule is not None}


class _Asked(ReferenceAttention):
    name = "thd_asked"


class _StoppedError(Exception):
    pass


def _stop(*call: Any) -> None:
    raise _StoppedError
