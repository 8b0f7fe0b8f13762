"""The documents of the forward that is running, where attention and the other mixers find them.

`ThdBatch.model_inputs` gives them to the model's forward as keyword arguments, and every family passes those on to its
decoder layers, Mamba excepted. Some layers drop them (Nemotron, StableLM), some mixers hand them to kernels that take
other names. So the model holds them while it runs, and so does each decoder layer, once more when it is recomputed, and
in whichever thread that happens. A compiled layer is compiled without them: a graph that saw the boundaries of one pack
would be made anew for the next.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from automodel_lite.thd import Exchange, MixerPlan


@dataclass(frozen=True)
class Documents:
    """What `ThdBatch.model_inputs` gives to the layers, under the same names."""

    cu_seq_lens_q: Tensor
    cu_seq_lens_k: Tensor
    max_length_q: int
    max_length_k: int
    mixer_plan: MixerPlan | None = None
    cp_exchange: Exchange | None = None

    @functools.cached_property
    def _cuts(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def segments(self, chunk: int | None) -> tuple[Tensor, Tensor, int, int]:
        """What attention runs over: (cu_q, cu_k, max_q, max_k); for a layer with chunked attention its chunks, the same
        tensors for all such layers of a forward.
        """
        if chunk is None:
            return self.cu_seq_lens_q, self.cu_seq_lens_k, self.max_length_q, self.max_length_k
        if chunk not in self._cuts:
            self._cuts[chunk] = cut_at_chunks(self.cu_seq_lens_q, self.cu_seq_lens_k, self.max_length_k, chunk)
        return *self._cuts[chunk], min(self.max_length_q, chunk), min(self.max_length_k, chunk)


def cut_at_chunks(cu_q: Tensor, cu_k: Tensor, max_k: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Segments cut at multiples of `chunk` inside each document, so that queries see the keys of their own chunk only.

    A document has as many pieces as the longest one, the last of them empty: the number of pieces is known without
    waiting for the device. Queries are the last ones of their keys (context parallelism): early pieces may have none.

        cu [0, 5, 7], chunk 2 -> [0, 2, 4, 5, 7, 7, 7]      (pieces of 2, 2, 1 and 2, 0, 0)
    """
    starts = torch.arange(0, max_k, chunk, device=cu_k.device, dtype=cu_k.dtype)
    q_lens, k_lens = cu_q.diff()[:, None], cu_k.diff()[:, None]
    cut_k = torch.cat([(cu_k[:-1, None] + starts.minimum(k_lens)).flatten(), cu_k[-1:]])
    if cu_k is cu_q:
        return cut_k, cut_k
    within = (starts - (k_lens - q_lens)).clamp(min=0).minimum(q_lens)
    return torch.cat([(cu_q[:-1, None] + within).flatten(), cu_q[-1:]]), cut_k


_ARGUMENTS = tuple(field.name for field in fields(Documents))

NOW: ContextVar[Documents | None] = ContextVar("documents", default=None)
"""None outside a model, and in one that was called without boundaries."""


class WithinDocuments:
    """A forward that holds the documents it is called with, and takes them out of the arguments.

    passes_on  leaves them in the arguments too: of the model, whose layers take them out
    """

    def __init__(self, module: nn.Module, passes_on: bool = False) -> None:
        self.forward: Callable[..., Any] = module.forward
        self.module = module
        self.passes_on = passes_on
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs[name] for name in _ARGUMENTS if name in kwargs}
        self._keep_for_recomputation()
        if "cu_seq_lens_q" not in given:
            return self.forward(*args, **kwargs)
        if not self.passes_on:
            kwargs = {name: value for name, value in kwargs.items() if name not in given}
        before = NOW.set(Documents(**given))
        try:
            return self.forward(*args, **kwargs)
        finally:
            NOW.reset(before)

    def _keep_for_recomputation(self) -> None:
        """transformers' own gradient checkpointing recomputes what is inside this forward."""
        recompute = vars(self.module).get("_gradient_checkpointing_func")
        if recompute is not None and not isinstance(recompute, WithContext):
            self.module._gradient_checkpointing_func = WithContext(recompute)  # type: ignore[assignment]


class WithContext:
    """A function that runs another one, now and later: the later run sees the documents of the first."""

    def __init__(self, recompute: Callable[..., Any]) -> None:
        self.recompute = recompute

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.recompute(functools.partial(contextvars.copy_context().run, function), *args, **kwargs)


def hold_documents(model: transformers.PreTrainedModel) -> None:
    """Makes `model` and its layers hold their documents. Changes the model in place; a second time changes nothing."""
    outer = (model, model.base_model)
    for module in (*outer, *layers_of(model)):
        if not isinstance(module.forward, WithinDocuments):
            module.forward = WithinDocuments(module, passes_on=module in outer)  # type: ignore[method-assign]


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost ModuleLists."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers_of(child)


def is_recomputed() -> bool:
    """Is this a forward inside a backward pass?"""
    return torch._C._current_graph_task_id() != -1
