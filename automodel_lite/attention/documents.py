"""The documents of the forward that is running, and the layers that mix their tokens in other ways than attention.

`ThdBatch.model_inputs` gives them to the model's forward, which holds them while it runs; no layer is given them.
Families pass arguments on in their own ways, and a compiled layer's graph that contained the boundaries of one pack
would be compiled again for the next. A layer that is recomputed sees those of its first run, in whichever thread.

Other causal mixers (state spaces, delta rules, convolutions) run on the stream where their inner functions can
(mixer_functions.py). Any other gets the documents as right-padded rows (thd.py): exact by construction, on any device,
without code for single families. Which modules are mixers follows from
transformers' conventions: a token mixer takes a cache or a mask, and attention asks transformers' registry for its
function. The isolation probe finds what the conventions miss.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from automodel_lite.attention.mixer_functions import Recorded, patch_functions, running, split_at_documents
from automodel_lite.errors import ConfigError
from automodel_lite.thd import MixerPlan, ThdBatch

NOW: ContextVar[ThdBatch | None] = ContextVar("documents", default=None)
"""None outside a model, and in one that was called without boundaries."""


class InGraph:
    """What a compiled layer reads while it runs, as inputs of its graph: `AttentionPlan.sizes`; None = nothing, its
    attention breaks the graph and reads NOW.
    """

    sizes: tuple[Tensor, Tensor] | None = None


IN_GRAPH = InGraph()


class WithinDocuments:
    """A forward that holds the documents it is called with, and takes them out of the arguments."""

    def __init__(self, module: nn.Module) -> None:
        self.forward: Callable[..., Any] = module.forward
        # the modules that transformers gives a function for recomputation, by its own rule
        self.recomputing: list[Any] = [part for part in module.modules() if hasattr(part, "gradient_checkpointing")]
        # layers of Llama 4 that scale queries by their place in the stream
        self.placed: list[Any] = [part for part in module.modules() if vars(part).get("attn_temperature_tuning")]
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, packed: ThdBatch | None = None, **kwargs: Any) -> Any:
        if packed is None:
            self._scale_in_layers(NOW.get() is None)
            return self.forward(*args, **kwargs)
        # transformers' own gradient checkpointing, which may be turned on at any time.
        for module in self.recomputing:
            recompute = vars(module).get("_gradient_checkpointing_func")
            if recompute is not None and not isinstance(recompute, WithContext):
                module._gradient_checkpointing_func = WithContext(recompute)
        self._scale_in_layers(False)
        before = NOW.set(packed)
        try:
            return self.forward(*args, **kwargs)
        finally:
            NOW.reset(before)

    def _scale_in_layers(self, is_outside_packs: bool) -> None:
        """Who scales queries by their place: the layers, or for packs the attention (`positions.scale_queries`). It
        stays as it is after the call, for the recomputation of its layers.
        """
        for layer in self.placed:
            layer.attn_temperature_tuning = is_outside_packs


class WithContext:
    """A function that runs another one, now and later: the later run sees the documents of the first."""

    def __init__(self, recompute: Callable[..., Any]) -> None:
        self.recompute = recompute

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.recompute(functools.partial(contextvars.copy_context().run, function), *args, **kwargs)


def hold_documents(model: transformers.PreTrainedModel) -> None:
    """Makes `model`, and the models inside it, hold the documents they are called with, in place; idempotent."""
    for module in model.modules():
        is_model = isinstance(module, transformers.PreTrainedModel)
        if is_model and not isinstance(module.forward, WithinDocuments):
            module.forward = WithinDocuments(module)  # type: ignore[method-assign]


def layer_lists(module: nn.Module) -> list[nn.ModuleList]:
    """Returns the outermost lists of modules with parameters."""
    if isinstance(module, nn.ModuleList):
        has_parameters = next(module.parameters(), None) is not None
        return [module] if has_parameters else []
    return [found for child in module.children() for found in layer_lists(child)]


_OF_MIXERS = frozenset({"attention_mask", "cache_params", "past_key_values", "past_key_value"})
"""A module that has one of these parameters mixes tokens."""

FEW_TOKENS = 8


def install_mixers(model: nn.Module) -> None:
    """Makes all mixers of `model` keep documents apart, in place; idempotent."""
    for mixer in mixers_of(model):
        if not isinstance(mixer.forward, PackedMixer):
            mixer.forward = PackedMixer(mixer)  # type: ignore[method-assign]


def install_rows(model: transformers.PreTrainedModel) -> None:
    """Makes the decoder of `model`, which holds its documents, run on each of them separately; idempotent."""
    held = model.base_model.forward
    assert isinstance(held, WithinDocuments)
    if not isinstance(held.forward, DecoderByRows):
        held.forward = DecoderByRows(held.forward)


def runs_by_rows(model: transformers.PreTrainedModel) -> bool:
    """Does the whole decoder run on right-padded documents, because its attention is its own code (Falcon, Bloom)?"""
    return isinstance(getattr(model.base_model.forward, "forward", None), DecoderByRows)


def mixes_rows(model: transformers.PreTrainedModel) -> bool:
    """Does anything of it run on documents as right-padded rows?"""
    return runs_by_rows(model) or any(isinstance(vars(x).get("forward"), PackedMixer) for x in model.modules())


class DecoderByRows:
    """The forward of a decoder on documents as right-padded rows, with the attention of its family."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        functools.update_wrapper(self, forward)

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
            hidden: Tensor = out.last_hidden_state
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
                    f"{self.name} is recomputed without its documents: recompute whole layers, with "
                    "training.activation_checkpointing."
                )
            return self.forward(*args, **kwargs)
        assert documents.mixers is not None
        arguments = self.signature.bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        if arguments.get("attention_mask") is not None:
            raise ConfigError(
                f"{self.name} passes its own mask together with packed documents, which is not supported."
            )
        call = _Arguments.of(arguments)
        if self._splits_inside(call, documents.mixers):
            with running(split_at_documents(documents.mixers)):
                return self.forward(**arguments)
        rest: list[Any] = []  # what it returns beside the mixed tokens

        def mix(of_rows: list[Tensor]) -> Tensor:
            out = self.forward(**call.with_streams(of_rows))
            if isinstance(out, tuple):
                out, *rest[:] = out
            return out  # type: ignore[no-any-return]

        mixed = documents.mixers.map_rows(mix, call.streams)[None]
        return (mixed, *rest) if rest else mixed

    def _splits_inside(self, call: _Arguments, plan: MixerPlan) -> bool:
        """Are the inner functions split at documents, rather than the whole mixer? Where ranks share their heads, and
        where one of them works on a packed stream.
        """
        if self.called is None:  # from a few tokens; not in the graph
            self.called = Recorded()
            # transformers' own functions run here, once, and their numbers are dropped: some call `cumsum`, which has
            # no deterministic form on CUDA.
            is_deterministic = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(False)
            try:
                with torch.no_grad(), running(self.called):
                    self.forward(**call.with_streams([x[None, :FEW_TOKENS] for x in call.streams]))
            finally:
                torch.use_deterministic_algorithms(is_deterministic)
        if plan.exchange is not None:
            return self.called.divide(plan.exchange.size)
        return any(self.called.takes_streams)


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a mixer, and which of them are streams: tensors [1, T, ...], however nested."""

    leaves: list[Any]
    structure: Any
    places: list[int]

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> _Arguments:
        leaves, structure = pytree.tree_flatten(arguments)
        hidden = next(iter(arguments.values()))
        shape = hidden.shape[:2]
        if shape[0] != 1:
            raise ConfigError(f"a mixer got {shape[0]} rows: packed documents are one stream of tokens.")
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.ndim >= 2 and x.shape[:2] == shape]
        return cls(leaves, structure, places)

    @property
    def streams(self) -> list[Tensor]:
        """[T, ...] each."""
        return [self.leaves[place].squeeze(0) for place in self.places]

    def with_streams(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors):
            leaves[place] = tensor
        arguments: dict[str, Any] = pytree.tree_unflatten(leaves, self.structure)
        return arguments
