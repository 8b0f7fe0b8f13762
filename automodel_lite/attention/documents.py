"""The documents of the forward that is running, and the layers that mix their tokens in other ways
than attention.

`ThdBatch.model_inputs` gives them to the model's forward, which holds them while it runs; no layer
is given them. Families pass arguments on in their own ways, and a compiled layer's graph that
contained the boundaries of one pack would be compiled again for the next. A layer that is
recomputed sees those of its first run, in whichever thread.

Other causal mixers (state spaces, delta rules, convolutions) run on the stream where their inner
functions can (mixer_functions.py). Any other gets the documents as right-padded rows (thd.py):
exact by construction, on any device, without code for single families. Which modules are mixers
follows from transformers' conventions: a token mixer takes a cache or a mask, and attention asks
transformers' registry for its function. The isolation probe finds what the conventions miss.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from automodel_lite.attention.mixer_functions import (
    Recorded,
    patch_functions,
    running,
    split_at_documents,
)
from automodel_lite.compat import pytree
from automodel_lite.errors import ConfigError
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


def replace_forwards(owners: Iterable[Any], kind: type) -> None:
    """Replaces the forward of each by `kind(owner)`, which calls it, in place; idempotent."""
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

FEW_TOKENS = 8


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
        kinds: list[Any] = []  # of output, which families have their own of

        def mix(of_rows: list[Tensor]) -> Tensor:
            out = self.forward(input_ids=of_rows[0], use_cache=False, return_dict=True)
            kinds.append(type(out))
            return out.last_hidden_state

        num_own = documents.mixers.num_calls
        most_calls = vars(self.module).get("most_calls")
        num_more = most_calls(num_own) - num_own if most_calls else 0
        before = NOW.set(None)
        try:
            hidden_TC = documents.mixers.map_rows(mix, [ids_T])
            # Behind the stream, from where they are taken off, they have gradients of zero.
            more = [mix([ids_T[None, :1]]).flatten(0, 1) for _ in range(num_more)]
            hidden_TC = torch.cat([hidden_TC, *more])[: len(hidden_TC)]
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


class PackedMixer:
    """The forward of a mixer, called with the stream [1, T, C], or with this rank's part of it."""

    def __init__(self, mixer: nn.Module) -> None:
        self.name = type(mixer).__name__
        self.forward: Callable[..., Any] = mixer.forward
        self.signature = inspect.signature(mixer.forward)
        self.__signature__ = self.signature
        self.called: Recorded | None = None
        self._outside_of_graphs = torch.compiler.disable(self._mix)
        patch_functions(mixer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outside_of_graphs(*args, **kwargs)

    def _mix(self, *args: Any, **kwargs: Any) -> Any:
        documents = NOW.get()
        if documents is None:
            if torch._C._current_graph_task_id() != -1:  # a forward inside a backward pass
                raise ConfigError(
                    f"{self.name} is recomputed without its documents: recompute whole layers, "
                    "with training.activation_checkpointing."
                )
            return self.forward(*args, **kwargs)
        assert documents.mixers is not None
        arguments = self.signature.bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        if arguments.get("attention_mask") is not None:
            raise ConfigError(
                f"{self.name} passes its own mask together with packed documents, which is not "
                "supported."
            )
        # Streams are the tensors [1, T, ...] among the arguments, however nested.
        leaves, structure = pytree.tree_flatten(arguments)
        shape = next(iter(arguments.values())).shape[:2]
        if shape[0] != 1:
            raise ConfigError(
                f"a mixer got {shape[0]} rows: packed documents are one stream of tokens."
            )
        places = [
            i
            for i, x in enumerate(leaves)
            if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[:2] == shape
        ]

        def forward(streams: list[Tensor]) -> Any:
            """The mixer, called with other streams in the places of its own."""
            given = dict(zip(places, streams))
            return self.forward(
                **pytree.tree_unflatten([given.get(i, x) for i, x in enumerate(leaves)], structure)
            )

        if self.called is None:
            self.called = _record(forward, [leaves[place][:, :FEW_TOKENS] for place in places])
        # Inner functions are split at documents where ranks share their heads, and where one of
        # them works on a packed stream; else the whole mixer is.
        plan = documents.mixers
        called = self.called
        if (
            any(called.takes_streams)
            if plan.exchange is None
            else called.divide(plan.exchange.size)
        ):
            with running(split_at_documents(plan)):
                return self.forward(**arguments)
        rest: list[Any] = []  # what it returns beside the mixed tokens

        def mix(of_rows: list[Tensor]) -> Tensor:
            out = forward(of_rows)
            if isinstance(out, tuple):
                out, *rest[:] = out
            return out

        mixed = plan.map_rows(mix, [leaves[place].squeeze(0) for place in places])[None]
        return (mixed, *rest) if rest else mixed


def _record(forward: Callable[[list[Tensor]], Any], few: list[Tensor]) -> Recorded:
    """Returns what a mixer calls, seen in a forward of a few tokens, outside the graph."""
    called = Recorded()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    # transformers' own functions run here, once, and their numbers are dropped: some call `cumsum`,
    # which has no deterministic form on CUDA.
    torch.use_deterministic_algorithms(False)
    try:
        with torch.no_grad(), running(called):
            forward(few)
    finally:
        torch.use_deterministic_algorithms(is_deterministic)
    return called
