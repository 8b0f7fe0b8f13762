"""Weights in the compute dtype on one process, without FSDP: what FSDP's mixed precision computes,
bit for bit, and no copy that only a gather needs.

    masters (fp32) ──cast once a step──▶ copies (bf16) ──forward, backward──▶ their gradients
       ▲                                                                            │
       └── the optimizer's step ◀── fp32 gradients ◀── added up as they are made ───┘

FSDP over a single rank casts each weight for each pass, copies what it has cast, and moves each
gradient twice: 24 bytes of traffic a weight, where this takes 12. With an optimizer that
`WritesCopies` it takes none: its step reads the bf16 gradients of a single micro-batch, which have
the same values, and writes the copies beside the masters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

LEAST_WRITTEN = 2**18
"""Values of a weight whose copy the optimizer writes: of smaller ones, as norms and adapters, one
launch for all takes less time than one for each.
"""


@runtime_checkable
class WritesCopies(Protocol):
    """An optimizer whose step takes gradients in other dtypes, and writes copies of parameters.

    copies  of some parameters, each of its parameter's shape
    """

    copies: Mapping[Tensor, Tensor]

    def writes_copy(self, parameter: Tensor) -> bool:
        """Is this a parameter whose copy it can write?"""


class ComputeWeights:
    """The copies of a model's weights, which stand in their modules while the model is called, and
    the masters at all other times: optimizers, checkpoints and exports meet these alone.

    model  its weights may still be without memory: copies are made by the first call, or for the
           optimizer
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model = model
        self.dtype = dtype
        self._places: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        self._masters: list[nn.Parameter] = []
        self._copies: list[Tensor] = []
        self._written: dict[Tensor, Tensor] = {}  # masters and copies that the optimizer writes
        self._sums: dict[nn.Parameter, Tensor] = {}  # of masters that are not fp32
        self._versions: list[int] | None = None
        self._depth = 0
        self._is_first = self._is_last = True  # of the micro-batches of a step

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The copies are in the modules inside, as they follow from the masters now; may be
        nested.
        """
        if not self._depth:
            self._refresh()
            for parameters, name, _, copy in self._places:
                parameters[name] = copy
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for parameters, name, master, _ in self._places:
                    parameters[name] = master

    @contextmanager
    def accumulating(self, is_last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: after the last one masters have the sum of
        all gradients.
        """
        self._is_last = is_last
        try:
            with self.computing():
                yield
            # some have a gradient in earlier micro-batches only
            for parameter in [*self._sums] if is_last else ():
                parameter.grad = self._sums.pop(parameter).to(parameter.dtype)
        except BaseException:
            self._sums.clear()
            self._is_first = True
            raise
        self._is_first = is_last

    def written_by(self, optimizer: WritesCopies, least: int = LEAST_WRITTEN) -> None:
        """Leaves the copies of weights of at least so many values to an optimizer; `stepped` is
        called behind its steps.
        """
        if self._versions is None:
            self._make()
        self._written = {}
        for master, copy in zip(self._masters, self._copies):
            is_large = master.requires_grad and master.numel() >= least
            if is_large and optimizer.writes_copy(master):
                self._written[master] = copy
                master.grad_dtype = None  # any
        optimizer.copies = self._written

    def stepped(self) -> None:
        """Notes which copies the optimizer has written: gradients are still there, and versions
        raised.
        """
        if self._versions is None:
            return
        for number, master in enumerate(self._masters):
            if master in self._written and master.grad is not None:
                self._versions[number] = master._version

    def _refresh(self) -> None:
        """Casts those masters again that have changed. Whatever writes into a weight raises its
        tensor's version.
        """
        if self._versions is None:  # weights have their memory by now
            self._make()
        assert self._versions is not None
        versions = [master._version for master in self._masters]
        changed = [i for i, version in enumerate(versions) if version != self._versions[i]]
        if changed:
            copies = [self._copies[i] for i in changed]
            with torch.no_grad():
                torch._foreach_copy_(copies, [self._masters[i] for i in changed])
        self._versions = versions

    def _make(self) -> None:
        """Gives each weight of another dtype a copy, and each that is trained what adds up its
        gradients. A tied weight has one, in all its places.
        """
        known: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.model.modules():
            parameters: dict[str, Any] = module._parameters
            for name, master in parameters.items():
                if master is None or not master.is_floating_point():
                    continue
                if master.dtype == self.dtype:
                    if master.requires_grad and master not in known:
                        known[master] = master
                        master.register_post_accumulate_grad_hook(self._add_up)
                    continue
                if master not in known:
                    copy = nn.Parameter(torch.empty_like(master, dtype=self.dtype), False)
                    if master.requires_grad:
                        copy.requires_grad_().register_post_accumulate_grad_hook(
                            partial(self._hand_over, master)
                        )
                    known[master] = copy
                    self._masters.append(master)
                    self._copies.append(copy.detach())
                self._places.append((parameters, name, master, known[master]))
        self._versions = [-1] * len(self._masters)

    @torch.no_grad()
    def _hand_over(self, master: nn.Parameter, copy: Tensor) -> None:
        """Adds a copy's gradient to its master's, in the master's dtype, and frees it. That of a
        single micro-batch stays as it is for an optimizer that takes it so.
        """
        gradient = copy.grad
        assert gradient is not None
        is_single = self._is_first and self._is_last and master.grad is None
        if is_single and master in self._written:
            master.grad = gradient
        elif master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad = master.grad.to(master.dtype).add_(gradient)
        copy.grad = None

    @torch.no_grad()
    def _add_up(self, parameter: Tensor) -> None:
        """Sums gradients of a weight that is trained in the compute dtype in fp32, over the
        micro-batches of a step.
        """
        assert parameter.grad is not None
        assert isinstance(parameter, nn.Parameter)
        if self._is_first and self._is_last:
            return
        total = self._sums.pop(parameter, None)
        total = parameter.grad.float() if total is None else total.add_(parameter.grad)
        parameter.grad = None
        if self._is_last:
            parameter.grad = total.to(parameter.dtype)
        else:
            self._sums[parameter] = total
