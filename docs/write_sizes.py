"""Writes the table of docs/planning.md: a plan of each preset on H100s of 80 GB, with the
accumulation that people use.

python docs/write_sizes.py                (about 10 CPU-minutes)
python docs/write_sizes.py llama3_1_8b    (its rows alone)
python docs/write_sizes.py --again        (counts the meshes of the table again: 2 CPU-minutes)
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np
import torch

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.extras.plan.by_layers import layer_pattern, simulate_by_layers
from automodel_lite.extras.plan.capacity import usable
from automodel_lite.extras.plan.planner import (
    GPUS,
    Job,
    Plan,
    make_plans,
    placed,
    possible,
    priced,
)
from automodel_lite.extras.plan.recompute import LADDER, recomputation_text
from automodel_lite.telemetry.console import Console
from automodel_lite.training.decide import decide_layout
from automodel_lite.training.resolve import rates
from automodel_lite.training.settings import build_parts, with_recomputation

PAGE = Path(__file__).resolve().parent / "planning.md"
BEGIN, END = "<!-- written by docs/write_sizes.py -->\n", "<!-- end -->\n"
SIZES = {
    "llama3_1_8b_lora": 1,
    "llama3_1_8b_bf16": 1,
    "llama3_1_8b": 8,
    "qwen3_30b_a3b": 8,
    "qwen3_32b": 8,
    "llama3_1_70b_lora": 8,
    "llama3_1_70b": 64,
    "llama3_1_405b": 256,
    "qwen3_8b_1m": 8,
    "qwen3_32b_131k": 64,
    "llama3_1_70b_131k": 64,
}
"""Preset -> number of GPUs, the one that its comment names."""
PACKS = 16
"""Of a GPU in a step: weights are gathered for each micro-batch, the update is paid once."""
LONG_PACK = 16_384
"""Of more tokens a pack is a batch: those presets keep theirs."""
RECOMPUTED = ("none", "full", "offload")
HEAD = (
    "| preset | GPUs | mesh | packs x micro-batches | recomputed | peak | predicted | at most |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


def job_of(preset: str) -> Job:
    gpus = SIZES[preset]
    config = check_config(compose_config(preset, ["dataset.path=any"]))
    if int(config.packed_sequence["packed_sequence_size"]) <= LONG_PACK:
        batch = f"training.global_batch_size={PACKS * gpus}"
        config = check_config(compose_config(preset, ["dataset.path=any", batch]))
    config = rates(config, Console(is_silent=True))
    # a kernel may need the GPU that is only planned
    parts = build_parts(replace(config, attention={}))
    length = np.array([min(1024, parts.packed_sequence_size)])
    world = min(gpus, 8), max(1, gpus // 8)
    return Job(parts, parts.model.resolve_model_config({}), GPUS["h100-80"], *world, length, length)


def counted_again(job: Job, mesh: str, recomputed: str) -> Plan | None:
    """Returns the plan of a mesh with one pack in a micro-batch: with the recomputation it had,
    or more where that does not fit any more.
    """
    found = (one for one in possible(job) if str(one) == mesh and one.micro_batch == 1)
    layout = next(found)
    plan = decide_layout(placed(job, layout), job.config, layout.shape, torch.device("cuda"))
    capacity = usable(int(job.gpu.gigabytes * 1e9))
    ladder = [with_recomputation(plan, *rung) for rung in LADDER]
    known = [recomputation_text(rung) for rung in ladder]
    # gradients reduced after each micro-batch as the last resort, as the planner has it
    reduced = [
        replace(rung, advanced=replace(rung.advanced, reduce_every_micro_batch=True))
        for rung in ladder
    ]
    first = known.index(recomputed)
    for rung in (*ladder[first:], *reduced[first:]):
        step = simulate_by_layers(rung, job.config, layout.shape, layer_pattern(job.config))
        if step.peak <= capacity:
            return priced(job, layout, rung, step)
    return None


def row(preset: str, known: str | None) -> str:
    """Returns the peak in GiB of a GPU, and the rates of one.

    known  the row that is there, whose mesh is taken; None = the best one is searched
    """
    gpus = SIZES[preset]
    job = job_of(preset)
    if known:
        cells = [cell.strip() for cell in known.strip("|").split("|")]
        recomputed = next(cell for cell in cells[3:] if cell.split(",")[0] in RECOMPUTED)
        best = counted_again(job, cells[2], recomputed)
    else:
        best = next(iter(make_plans(job).plans), None)
    if best is None:
        return f"| `{preset}` | {gpus} | fits no H100s |" + " |" * 5
    cells = [
        f"`{preset}`",
        str(gpus),
        str(best.layout),
        f"{best.layout.micro_batch} x {best.layout.micro_steps}",
        recomputation_text(best.parts),
        f"{best.step.peak / 2**30:.1f}",
        f"{best.predicted_tokens_per_s_per_gpu or 0:,.0f}",
        f"{best.tokens_per_s_per_gpu:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    # the shapes that ship with the package are taken at once
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    again = "--again" in sys.argv
    for preset in [name for name in sys.argv[1:] if name != "--again"] or SIZES:
        before, rest = PAGE.read_text().split(BEGIN)
        table, after = rest.split(END)
        rows = {line.split("`")[1]: line for line in table.splitlines()[len(HEAD) :]}
        rows[preset] = row(preset, rows.get(preset) if again else None)
        in_order = [rows[name] for name in SIZES if name in rows]
        PAGE.write_text(before + BEGIN + "\n".join([*HEAD, *in_order]) + "\n" + END + after)
