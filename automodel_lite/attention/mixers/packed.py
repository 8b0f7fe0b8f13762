"""A mixer on packed documents: its inner functions are split at documents where they can be, else
its whole forward gets the documents as right-padded rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from automodel_lite.attention.documents import NOW, MixerForward
from automodel_lite.attention.mixers.functions import (
    Recorded,
    patch_functions,
    running,
    split_at_documents,
)
from automodel_lite.compat import pytree
from automodel_lite.errors import ConfigError

FEW_TOKENS = 8


class PackedMixer(MixerForward):
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
