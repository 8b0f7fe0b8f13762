"""The documents of the forward that is running, and the layers that mix their tokens in other ways
than attention.

`ThdBatch.model_inputs` gives them to the model's forward, which holds them while it runs; no layer
is given them. Families pass arguments on in their own ways, and a compiled layer's graph that
contained the boundaries of one pack would be compiled again for the next. A layer that is
recomputed sees those of its first run, in whichever thread.

Other causal mixers (state spaces, delta rules, convolutions) run on the stream where their inner
functions can (attention/mixers/). Any other gets the documents as right-padded rows
(document_rows.py): exact by construction, on any device, without code for single families.
Which modules are mixers follows from transformers' conventions: a token mixer takes a cache or a
mask, and attention asks transformers' registry for its function. The isolation probe finds what the
conventions miss (isolation.py).
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from itertools import chain
from typing import Any

import transformers
from torch import Tensor, nn

from automodel_lite.thd import ThdBatch

NOW: ContextVar[ThdBatch | None] = ContextVar("documents", default=None)
"""None outside a model, and in one that was called without boundaries."""


class InGraph:
    """What a compiled layer takes as inputs of its graph; None: its attention breaks the graph, and
    reads NOW.
    """

    sizes: tuple[Tensor, Tensor] | None = None


IN_GRAPH = InGraph()


class WithinDocuments:
    """A forward that holds the documents it is called with, and takes them out of the arguments."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        # the modules that transformers gives a function for recomputation, by its own rule
        self.recomputing: list[Any] = [
            part for part in module.modules() if hasattr(part, "gradient_checkpointing")
        ]
        # layers of Llama 4 that scale queries by their place in the stream
        self.placed: list[Any] = [
            part for part in module.modules() if vars(part).get("attn_temperature_tuning")
        ]
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, packed: ThdBatch | None = None, **kwargs: Any) -> Any:
        # Who scales queries by their place: the layers, or for packs the attention
        # (`positions.scale_queries`). It stays as it is after the call, for the recomputation of
        # its layers.
        for layer in self.placed:
            layer.attn_temperature_tuning = packed is None and NOW.get() is None
        if packed is None:
            return self.forward(*args, **kwargs)
        # transformers' own gradient checkpointing, which may be turned on at any time.
        for module in self.recomputing:
            recompute = vars(module).get("_gradient_checkpointing_func")
            if recompute is not None and not isinstance(recompute, WithContext):
                module._gradient_checkpointing_func = WithContext(recompute)
        before = NOW.set(packed)
        try:
            return self.forward(*args, **kwargs)
        finally:
            NOW.reset(before)


class WithContext:
    """A function that runs another one, now and later: the later run sees the documents of the
    first.
    """

    def __init__(self, recompute: Callable[..., Any]) -> None:
        self.recompute = recompute

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.recompute(
            functools.partial(contextvars.copy_context().run, function), *args, **kwargs
        )


def replace_forwards(owners: Iterable[Any], kind: Any) -> None:
    """Replaces the forward of each by `kind(owner)`, which calls it, in place; idempotent.

    kind  a class
    """
    for owner in owners:
        if not isinstance(owner.forward, kind):
            owner.forward = kind(owner)


def layer_lists(module: nn.Module) -> list[nn.ModuleList]:
    """Returns the outermost lists of modules with parameters."""
    if isinstance(module, nn.ModuleList):
        has_parameters = next(module.parameters(), None) is not None
        return [module] if has_parameters else []
    return [found for child in module.children() for found in layer_lists(child)]


_OF_MIXERS = frozenset({"attention_mask", "cache_params", "past_key_values", "past_key_value"})
"""A module that has one of these parameters mixes tokens."""


def runs_by_rows(model: transformers.PreTrainedModel) -> bool:
    """Does the whole decoder run on right-padded documents, because its attention is its own code
    (Falcon, Bloom)?
    """
    return isinstance(getattr(model.base_model.forward, "forward", None), DecoderByRows)


class DecoderByRows:
    """The forward of a decoder, which holds its documents, on them as right-padded rows, with its
    own attention: one call per tensor of rows.

    A decoder whose `most_calls` is set is sharded: ranks gather its layers together, so all of them
    make as many calls as the one with the most, with a token more in each that they would not need.
    """

    def __init__(self, held: WithinDocuments) -> None:
        self.module = held.module
        self.forward = held.forward
        functools.update_wrapper(self, held.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        documents = NOW.get()
        if documents is None:
            return self.forward(*args, **kwargs)
        assert documents.mixers is not None
        ids_T = (args[0] if args else kwargs["input_ids"])[0]
        num_own = documents.mixers.num_calls
        most_calls = vars(self.module).get("most_calls")
        num_more = most_calls(num_own) - num_own if most_calls else 0
        kinds = []  # of output, which families have their own of

        def mix(of_rows: list[Tensor]) -> Tensor:
            out = self.forward(input_ids=of_rows[0], use_cache=False, return_dict=True)
            kinds.append(type(out))
            hidden = out.last_hidden_state
            # now, before ranks of one document wait for its rows; their gradients are zero
            for _ in range(num_more if len(kinds) == num_own else 0):
                hidden = hidden + 0 * mix([ids_T[None, :1]])
            return hidden

        before = NOW.set(None)
        try:
            hidden_TC = documents.mixers.map_rows(mix, [ids_T])
        finally:
            NOW.reset(before)
        return kinds[0](last_hidden_state=hidden_TC[None])


def mixers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules of the decoder layers that mix tokens and are not attention."""
    for layer in chain.from_iterable(layer_lists(model)):
        for child in layer.children():
            yield from _mixers_within(child)


def _mixers_within(module: nn.Module) -> Iterator[nn.Module]:
    if _is_attention(module):
        return
    inner = [mixer for child in module.children() for mixer in _mixers_within(child)]
    if inner or any(_is_attention(child) for child in module.modules()):
        yield from inner
    elif _OF_MIXERS & inspect.signature(module.forward).parameters.keys():
        yield module


def _is_attention(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


class MixerForward:
    """The forward of a mixer that keeps documents apart (attention/mixers/)."""
