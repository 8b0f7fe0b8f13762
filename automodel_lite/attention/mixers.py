"""Layers that mix tokens in other ways than attention (state spaces, delta rules, convolutions), document by document.

Any causal mixer gets the documents of the stream as right-padded rows (thd.py): exact by construction, on any
device, with no line for any family. Which modules are mixers follows from transformers' conventions: a token mixer
takes a cache or a mask, and attention asks transformers' registry for its function. What the conventions miss, the
isolation probe finds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from automodel_lite.attention.documents import NOW, WithinDocuments, is_recomputed, layers_of
from automodel_lite.attention.mixer_functions import Recorded, patch_functions, running, split_at_documents
from automodel_lite.errors import ConfigError
from automodel_lite.thd import MixerPlan

_OF_MIXERS = frozenset({"attention_mask", "cache_params", "past_key_values", "past_key_value"})
"""A module that has one of these parameters mixes tokens."""

FEW_TOKENS = 8


def install_mixers(model: nn.Module) -> None:
    """Makes all mixers of `model` keep documents apart. Changes the model in place; a second time changes nothing."""
    for mixer in mixers_of(model):
        if not isinstance(mixer.forward, PackedMixer):
            mixer.forward = PackedMixer(mixer)  # type: ignore[method-assign]


def install_rows(model: transformers.PreTrainedModel) -> None:
    """Makes the decoder of `model`, which holds its documents, run on each of them by itself; a second time changes
    nothing.
    """
    held = model.base_model.forward
    assert isinstance(held, WithinDocuments)
    if not isinstance(held.forward, DecoderByRows):
        held.forward = DecoderByRows(held.forward)


def runs_by_rows(model: transformers.PreTrainedModel) -> bool:
    """Does the whole decoder run on right-padded documents, because its attention is its own code (Falcon, Bloom)?"""
    return isinstance(getattr(model.base_model.forward, "forward", None), DecoderByRows)


class DecoderByRows:
    """The forward of a decoder on documents as right-padded rows, with the attention of its family."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        documents = NOW.get()
        if documents is None:
            return self.forward(*args, **kwargs)
        assert documents.mixer_plan is not None
        ids_T = (args[0] if args else kwargs["input_ids"])[0]
        before = NOW.set(None)
        try:
            hidden_TC = by_documents(self._mix, [ids_T], documents.mixer_plan)
        finally:
            NOW.reset(before)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_TC[None])

    def _mix(self, of_rows: list[Tensor]) -> Tensor:
        hidden: Tensor = self.forward(input_ids=of_rows[0], use_cache=False, return_dict=True).last_hidden_state
        return hidden


def by_documents(mix: Callable[[list[Tensor]], Tensor], streams: list[Tensor], plan: MixerPlan) -> Tensor:
    """`mix` on rows of `streams` [T, ...]; under context parallelism on those of the documents that this rank owns."""
    if plan.exchange is None:
        return plan.stream.each(mix, streams)
    owned = [plan.exchange.to_owner(x) for x in streams]
    return plan.exchange.from_owner(plan.exchange.owned.each(mix, owned))


def mixers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost modules of the decoder layers that mix tokens and are not attention."""
    for layer in layers_of(model):
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
            if is_recomputed():
                raise ConfigError(
                    f"{self.name} is recomputed without its documents: recompute whole layers, with "
                    "training.activation_checkpointing."
                )
            return self.forward(*args, **kwargs)
        assert documents.mixer_plan is not None
        arguments = self.signature.bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        if arguments.get("attention_mask") is not None:
            raise ConfigError(f"{self.name} brings a mask of its own to packed documents, which it cannot have.")
        call = _Arguments.of(arguments)
        if self._splits_inside(call, documents.mixer_plan):
            with running(split_at_documents(documents.mixer_plan)):
                return self.forward(**arguments)
        return self._by_documents(call, documents.mixer_plan)

    def _splits_inside(self, call: _Arguments, plan: MixerPlan) -> bool:
        """Are the inner functions split at documents, rather than the whole mixer? Where ranks share their heads, and
        where a package's kernel takes the boundaries.
        """
        if plan.exchange is None and not call.streams[0].is_cuda:
            return False
        if self.called is None:  # from a few tokens; not in the graph
            self.called = Recorded()
            with torch.no_grad(), running(self.called):
                self.forward(**call.with_streams([x[None, :FEW_TOKENS] for x in call.streams]))
        if plan.exchange is not None:
            return self.called.divide(plan.exchange.size)
        return any(self.called.takes_boundaries)

    def _by_documents(self, call: _Arguments, plan: MixerPlan) -> Any:
        """The whole mixer on rows."""
        rest: list[Any] = []

        def mix(of_rows: list[Tensor]) -> Tensor:
            out = self.forward(**call.with_streams(of_rows))
            if isinstance(out, tuple):
                rest[:] = out[1:]
                out = out[0]
            mixed: Tensor = out
            return mixed

        out = by_documents(mix, call.streams, plan)
        return (out[None], *rest) if rest else out[None]


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
        return [self.leaves[place][0] for place in self.places]

    def with_streams(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors):
            leaves[place] = tensor
        arguments: dict[str, Any] = pytree.tree_unflatten(leaves, self.structure)
        return arguments
