"""Chooses how much of the forward pass is computed again in the backward pass: the least that fits.

    none                              everything is kept
    every 8th, 4th, 3rd, 2nd layer    the others keep all, these their input alone
    full                              every layer
    offload                           as full, with the inputs in host memory

Each is slower than the one before it, and holds less; what each holds is counted by the simulation.
The planner chooses by the same search.
"""

from __future__ import annotations

from dataclasses import replace

from automodel_lite.data.feeding.order import batch_shape
from automodel_lite.errors import one_line
from automodel_lite.extras.plan.by_layers import (
    LayerPattern,
    layer_pattern,
    recompute_every,
    simulate_by_layers,
)
from automodel_lite.extras.plan.capacity import usable
from automodel_lite.extras.plan.heaviest import heaviest_batch
from automodel_lite.extras.plan.simulation import CountError, Simulation
from automodel_lite.thd import ThdBatch
from automodel_lite.training.memory import estimate_memory, gib
from automodel_lite.training.settings import Decided, RunParts, with_recomputation

NONE = ("none", 1)
FULL = ("full", 1)
OFFLOAD = ("offload", 1)
LADDER = (NONE, ("full", 8), ("full", 4), ("full", 3), ("full", 2), FULL, OFFLOAD)
_CERTAIN = 2.0  # the coarse formulas are never this far off
HOPELESS = 1.6  # share of the memory by the formulas beyond which a rung is not simulated


def recomputation_text(parts: RunParts) -> str:
    """`none`, `none, weights stay gathered`, `full`, `full, one layer of 2`, `offload`."""
    how = parts.training.activation_checkpointing
    every = parts.advanced.recompute_every_layers
    if how == "none":
        return (
            "none, weights stay gathered"
            if parts.advanced.reshard_after_forward is False
            else "none"
        )
    return f"{how}, one layer of {every}" if every > 1 else how


def least_recomputation(
    plan: Decided,
    capacity: float,
    pattern: LayerPattern,
    adapter: int | None = None,
    batch: ThdBatch | None = None,
) -> tuple[Decided, Simulation] | None:
    """Returns the first rung of the ladder whose step holds at most `capacity` bytes, and its step;
    None without one.

    batch  of a micro-batch; None = plain documents
    Where no rung fits, gradients are reduced after every micro-batch, unless that is set, to spare
    their unsharded sum.
    """
    rungs = {rung: with_recomputation(plan, *rung) for rung in LADDER}

    def counted(rung: tuple[str, int]) -> Simulation:
        return simulate_by_layers(rungs[rung], plan.config, plan.shape, pattern, batch)

    def may_fit(rung: tuple[str, int]) -> bool:
        return estimate_memory(rungs[rung], adapter).total <= HOPELESS * capacity

    kept = counted(NONE) if may_fit(NONE) else None
    if kept and kept.peak <= capacity:
        return rungs[NONE], kept
    # Full recomputation tells at once whether only offloading is left.
    full = counted(FULL) if may_fit(FULL) else None
    if full and full.peak <= capacity:
        kept = kept or counted(NONE)
        # what a layer is spared is counted of one micro-batch, not of two that take turns
        between = () if plan.mesh.ep_overlap else LADDER[1:-2]
        for rung in between:
            if (step := recompute_every(rung[1], kept, full, pattern)).peak <= capacity:
                return rungs[rung], step
        return rungs[FULL], full
    if may_fit(OFFLOAD) and (offloaded := counted(OFFLOAD)).peak <= capacity:
        return rungs[OFFLOAD], offloaded
    advanced = plan.advanced
    training = plan.training
    if (
        advanced.reduce_every_micro_batch != "auto"
        or batch_shape(training, plan.shape.dp).micro_steps == 1
    ):
        return None
    reduced = replace(plan, advanced=replace(advanced, reduce_every_micro_batch=True))
    return least_recomputation(reduced, capacity, pattern, adapter, batch)


def choose_recomputation(plan: Decided, gpu: int, adapter: int | None) -> tuple[Decided, str]:
    """Returns the parts with the least recomputation that fits, and why.

    gpu  bytes of the GPU
    No process group may exist: steps are simulated, where the coarse formulas leave a doubt.
    Where memory is left over, weights stay gathered from the forward to the backward pass, unless
    that is set.
    """
    capacity = usable(gpu)
    plain = with_recomputation(plan, *NONE)
    gathered = replace(plain, advanced=replace(plain.advanced, reshard_after_forward=False))
    asks = plan.advanced.reshard_after_forward == "auto" and plan.strategy == "fsdp"
    kept = estimate_memory(plain, adapter).total
    batch = heaviest_batch(plan)
    # the formulas know no images
    if (batch is None or batch.images is None) and _CERTAIN * kept <= capacity:
        fits = asks and _CERTAIN * kept + plan.dtype.itemsize * plan.size.parameters <= capacity
        chosen = gathered if fits else plain
        return (
            chosen,
            f"{recomputation_text(chosen)}: all that is kept is about {gib(kept)} of "
            f"{gib(capacity)}",
        )
    try:
        pattern = layer_pattern(plan.config)
        found = least_recomputation(plan, capacity, pattern, adapter, batch)
        if found is not None and asks and found[0] == plain:
            step = simulate_by_layers(gathered, plan.config, plan.shape, pattern, batch)
            found = (gathered, step) if step.peak <= capacity else found
    except (NotImplementedError, CountError) as error:
        return with_recomputation(
            plan, *FULL
        ), f"full: the step cannot be counted ({one_line(error, 200)})"
    if found is None:
        offloaded = with_recomputation(plan, *OFFLOAD)
        return offloaded, f"offload, which may still need more than {gib(capacity)}"
    chosen, step = found
    return (
        chosen,
        f"{recomputation_text(chosen)}: the least that fits, {gib(step.peak)} of {gib(capacity)} "
        "are counted",
    )
