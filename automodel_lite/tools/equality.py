"""Do two ways of computing a step give the same loss and the same gradients? Differences, verdicts, a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Step:
    """Mean loss over the label tokens of a step, and its gradients by parameter name (fp32, whole)."""

    loss: float
    gradients: dict[str, Tensor]

    @property
    def grad_norm(self) -> float:
        return float(torch.stack([grad.double().norm() for grad in self.gradients.values()]).norm())


@dataclass(frozen=True)
class Difference:
    """Relative differences of two steps: of the loss, of the worst single gradient to the largest, of the norm."""

    loss: float
    gradients: float
    grad_norm: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients, self.grad_norm)


@dataclass(frozen=True)
class Check:
    """One row of the table.

    is_fault  the step was broken on purpose: the row passes when the difference shows it
    """

    name: str
    difference: Difference
    limit: float
    is_fault: bool = False

    @property
    def passed(self) -> bool:
        largest = self.difference.largest
        return largest > 10 * self.limit if self.is_fault else largest <= self.limit


def difference(step: Step, want: Step) -> Difference:
    """Raises ValueError when the two do not have gradients of the same parameters."""
    if step.gradients.keys() != want.gradients.keys():
        only = sorted(step.gradients.keys() ^ want.gradients.keys())
        raise ValueError(f"gradients of {only[:3]} exist in one of the two steps only.")
    largest = max(float(grad.abs().max()) for grad in want.gradients.values())
    worst = max(float((step.gradients[name] - grad).abs().max()) for name, grad in want.gradients.items())
    return Difference(
        loss=abs(step.loss - want.loss) / abs(want.loss),
        gradients=worst / largest,
        grad_norm=abs(step.grad_norm - want.grad_norm) / want.grad_norm,
    )


def take_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Copies of all gradients on the CPU in fp32, sharded ones gathered (a collective); clears them."""
    gradients = {}
    for name, parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            gradients[name] = whole.detach().float().cpu().clone()
        parameter.grad = None
    return gradients


def table(checks: Iterable[Check]) -> str:
    """Rows of relative differences, each with its limit and verdict."""
    checks = list(checks)
    width = max(len(check.name) for check in checks) + 2
    lines = [f"{'':{width}} {'loss':>8} {'gradients':>10} {'grad norm':>10} {'limit':>8}"]
    for check in checks:
        d = check.difference
        if check.is_fault:
            verdict = "noticed" if check.passed else "FAIL: not noticed"
            limit = ""
        else:
            verdict, limit = "PASS" if check.passed else "FAIL", f"{check.limit:.0e}"
        numbers = f"{d.loss:8.0e} {d.gradients:10.0e} {d.grad_norm:10.0e} {limit:>8}"
        lines.append(f"{check.name:{width}} {numbers}  {verdict}")
    return "\n".join(lines)


def names(documents: Mapping[str, int]) -> str:
    """`7 documents, 2 packs`, without plural when there is one."""
    return ", ".join(f"{count} {noun if count != 1 else noun.removesuffix('s')}" for noun, count in documents.items())
