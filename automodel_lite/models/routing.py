"""What the routers of a mixture gave in a forward: their logits, of compiled layers, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn


class _Router:
    """A forward hook that keeps one of a module's outputs.

    In a graph it always does, as a condition would be another graph for the backward pass's
    recomputation; `RouterLogits.drop` is what lets go of it.
    """

    def __init__(self, recorder: RouterLogits, index: int) -> None:
        self.recorder = recorder
        self.index = index
        self.logits: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self.recorder.is_asked:
            self.logits = output[self.index] if isinstance(output, tuple) else output


class RouterLogits:
    """The logits of a decoder's routers, for which transformers' own recording reads a context
    variable that no graph can.

    is_found  False where transformers does not tell which modules they are
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.is_asked = False
        self.routers: list[_Router] = []
        for name, module in decoder.named_modules():
            for recorder in _recorders(decoder):
                inside = f".{recorder.layer_name}." if recorder.layer_name else ""
                if isinstance(module, recorder.target_class) and inside in f".{name}.":
                    self.routers.append(_Router(self, recorder.index))
                    module.register_forward_hook(self.routers[-1])

    @property
    def is_found(self) -> bool:
        return bool(self.routers)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records forwards inside; those of the backward pass, which come later, are not."""
        self.is_asked = True
        try:
            yield
        finally:
            self.is_asked = False
            self.drop()

    def taken(self) -> list[Tensor]:
        """Returns the logits of each router that the forward met."""
        found = [router.logits for router in self.routers if router.logits is not None]
        for router in self.routers:
            router.logits = None
        return found

    def drop(self) -> None:
        """Lets go of what nobody asked for: a tensor of a recomputed layer would keep all of it."""
        if not self.is_asked:
            self.taken()


def _recorders(decoder: Any) -> list[Any]:
    """Returns transformers' descriptions of where router logits are: class, index, name."""
    if not isinstance(decoder, transformers.PreTrainedModel):
        return []
    found = decoder.can_record_outputs.get("router_logits", [])
    return found if isinstance(found, list) else [found]
