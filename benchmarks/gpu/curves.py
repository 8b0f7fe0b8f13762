"""Do the fast ways learn what the slow ones learn? Loss curves and gradients on one card, on data that can be learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.documents import SEED, batches_of
from benchmarks.gpu.machine import check_computes
from benchmarks.gpu.steps import Trainer, loss_of
from benchmarks.gpu.variant import Variant

WAYS = {
    "bf16": {},
    "bf16 compiled": {"compiled": True},
    "fp32": {"computes": "fp32"},
    "bf16 weights": {"weights": "bf16"},
}


def learnable(variant: Variant, vocabulary: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Each token is followed by one of four: the loss falls from the logarithm of the vocabulary towards that of 4."""
    rng = np.random.default_rng(SEED)
    next_of = torch.from_numpy(rng.integers(3, vocabulary, (vocabulary, 4)))
    for batch, lens in batches_of(variant, vocabulary):
        ids = batch["input_ids"]
        draws = torch.from_numpy(rng.integers(0, 4, ids.shape))
        for column in range(1, ids.shape[1]):
            ids[:, column] = next_of[ids[:, column - 1], draws[:, column]]
        labels = ids.roll(-1, 1)
        labels[batch["labels"] == -100] = -100
        yield batch | {"labels": labels}, lens


def curves(device: str, is_tiny: bool = False) -> dict[str, Any]:
    """200 steps of one model by each way, from the same weights on the same packs: the losses, and the largest
    difference from fp32 over the last quarter.
    """
    steps = 8 if is_tiny else 200
    losses: dict[str, list[float]] = {}
    shape, pack = ("tiny", 128) if is_tiny else ("small", 4096)
    for name, settings in WAYS.items():
        if is_tiny and "compiled" in settings:
            continue  # a minute of a C++ compiler
        variant = Variant(shape, pack, **settings)  # type: ignore[arg-type]
        batches = learnable(variant, 512 if is_tiny else 8192)
        trainer = Trainer(variant, device, batches)
        for group in trainer.optimizer.param_groups:
            group["lr"] = 1e-3
        of_way = []
        for micro_batches in trainer.drawn(steps):
            trainer.step(micro_batches)
            of_way.append(trainer.mean_loss)
        losses[name] = [float(loss) for loss in of_way]
    check_computes(device)
    last = steps - steps // 4
    exact = losses["fp32"]
    apart = {}
    for name in losses.keys() - {"fp32"}:
        ratios = np.array(losses[name][last:]) / np.array(exact[last:])
        apart[name] = float(np.abs(ratios - 1).max())
    verdict = "pass" if exact[-1] < exact[0] and max(apart.values()) < 0.02 else "FAIL"
    shown = {name: of[:: max(1, steps // 20)] for name, of in losses.items()}
    return {"verdict": verdict, "apart_frac": apart, "losses": shown}


def gradients(device: str, shape: str = "1b") -> dict[str, Any]:
    """Of one pack of a whole model in bf16 against fp32: the relative norm of the difference, of all weights together
    and of the worst.
    """
    found = []
    for computes in ("fp32", "bf16"):
        variant = Variant(shape, 256 if shape == "tiny" else 4096, computes=computes)
        trainer = Trainer(variant, device)
        inputs, num_labels, _ = trainer.drawn(1)[0][0]
        rounds = computes == "bf16"
        with torch.autocast(device, torch.bfloat16, enabled=rounds, cache_enabled=False):
            loss = loss_of(variant, trainer.model, inputs, device)
        (loss / num_labels).backward()
        found.append({name: p.grad.float() for name, p in trainer.model.named_parameters()})
        del trainer
    check_computes(device)
    want, got = found
    errors = {name: float((got[name] - want[name]).norm()) for name in want}
    norms = {name: float(want[name].norm()) for name in want}
    whole = (sum(e**2 for e in errors.values()) / sum(n**2 for n in norms.values())) ** 0.5
    worst = max((errors[name] / norms[name], name) for name in want if norms[name])
    verdict = "pass" if whole < 0.05 else "FAIL"
    return {"verdict": verdict, "gradient_error_frac": whole, "worst": worst}
