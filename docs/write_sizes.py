"""Writes the table of docs/planning.md: the planner's best plan of each preset on H100s of 80 GB.

python docs/write_sizes.py                (about 10 CPU-minutes)
python docs/write_sizes.py llama3_1_8b    (its rows alone)
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import numpy as np

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.extras.plan.planner import GPUS, Job, make_plans
from automodel_lite.extras.plan.recompute import recomputation_text
from automodel_lite.telemetry.console import Console
from automodel_lite.training.resolve import rates
from automodel_lite.training.settings import build_parts

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
HEAD = (
    "| preset | GPUs | mesh | recomputed | peak | tokens/s |",
    "| --- | --- | --- | --- | --- | --- |",
)


def row(preset: str) -> str:
    """The peak in GiB of a GPU, and the rate of one."""
    gpus = SIZES[preset]
    config = check_config(compose_config(preset, ["dataset.path=any"]))
    config = rates(config, Console(is_silent=True))
    # a kernel may need the GPU that is only planned
    parts = build_parts(replace(config, attention={}))
    length = np.array([min(1024, parts.packed_sequence_size)])
    world = min(gpus, 8), max(1, gpus // 8)
    job = Job(parts, parts.model.resolve_model_config({}), GPUS["h100-80"], *world, length, length)
    plans = make_plans(job).plans
    if not plans:
        return f"| `{preset}` | {gpus} | fits no H100s |" + " |" * 3
    best = plans[0]
    cells = (
        f"`{preset}`",
        str(gpus),
        str(best.layout),
        recomputation_text(best.parts),
        f"{best.step.peak / 2**30:.1f}",
        f"{best.tokens_per_s_per_gpu:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    # the shapes that ship with the package are taken at once
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    for preset in sys.argv[1:] or SIZES:
        before, rest = PAGE.read_text().split(BEGIN)
        table, after = rest.split(END)
        rows = {line.split("`")[1]: line for line in table.splitlines()[len(HEAD) :]}
        rows[preset] = row(preset)
        in_order = [rows[name] for name in SIZES if name in rows]
        PAGE.write_text(before + BEGIN + "\n".join([*HEAD, *in_order]) + "\n" + END + after)
