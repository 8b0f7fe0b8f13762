"""Layers that mix tokens in other ways than attention (state spaces, delta rules, convolutions), document by document.

Any causal mixer gets the documents of the stream as right-padded rows (document_rows.py): exact by construction, on any
device, with no line for any family. Which modules are mixers follows from transformers' conventions: a token mixer
takes a cache or a mask, and attention asks transformers' registry for its function. What the conventions miss, the
isolation probe finds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from automodel_lite.attention.documents import NOW, is_recomputed, layers_of
from automodel_lite.document_rows import DocumentRows
from automodel_lite.errors import ConfigError

_OF_MIXERS = frozenset({"attention_mask", "cache_params", "past_key_values", "past_key_value"})
"""A module that has one of these parameters mixes tokens."""


def install_mixers(model: nn.Module) -> None:
    """Makes all mixers of `model` keep documents apart. Changes the model in place; a second time changes nothing."""
    for mixer in mixers_of(model):
        if not isinstance(mixer.forward, PackedMixer):
            mixer.forward = PackedMixer(mixer)  # type: ignore[method-assign]


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
    """The forward of a mixer, called with the stream [1, T, C]."""

    def __init__(self, mixer: nn.Module) -> None:
        self.name = type(mixer).__name__
        self.forward: Callable[..., Any] = mixer.forward
        self.signature = inspect.signature(mixer.forward)
        self.__signature__ = self.signature

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
        return self._by_documents(documents.mixer_plan.stream, arguments)

    def _by_documents(self, rows: DocumentRows, arguments: dict[str, Any]) -> Any:
        """Every tensor [1, T, ...] among the arguments goes in as rows, and the output comes back as [1, T, ...]."""
        leaves, structure = pytree.tree_flatten(arguments)
        num_tokens = rows.to_stream.shape[0]
        places = [i for i, leaf in enumerate(leaves) if _is_stream(leaf, num_tokens)]
        rest: list[Any] = []

        def mix(of_rows: list[Tensor]) -> Tensor:
            for place, tensor in zip(places, of_rows):
                leaves[place] = tensor
            out = self.forward(**pytree.tree_unflatten(leaves, structure))
            if isinstance(out, tuple):
                rest[:] = out[1:]
                out = out[0]
            mixed: Tensor = out
            return mixed

        out = rows.each(mix, [leaves[place][0] for place in places])[None]
        return (out, *rest) if rest else out


def _is_stream(value: Any, num_tokens: int) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == (1, num_tokens)
