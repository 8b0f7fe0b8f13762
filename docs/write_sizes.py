"""Writes the table of docs/planning.md: what a rank of each preset holds, by running its step under fake tensors.

python docs/write_sizes.py             (10 minutes on one core; python docs/write_sizes.py llama3_1_8b prints a row)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.parallel.mesh import mesh_shape
from automodel_lite.training.plan import build_parts
from automodel_lite.training.simulation import Simulation, simulate

PAGE = Path(__file__).resolve().parent / "planning.md"
BEGIN, END = "<!-- written by docs/write_sizes.py -->\n", "<!-- end -->\n"
SIZES = {
    "llama3_1_8b_lora": (1,),
    "llama3_1_8b_bf16": (1,),
    "llama3_1_8b": (8, 64),
    "qwen3_30b_a3b": (8, 64),
    "qwen3_32b": (8, 64),
    "llama3_1_70b_lora": (8,),
    "llama3_1_70b": (64, 1024),
    "llama3_1_405b": (256, 1024),
    "qwen3_8b_1m": (8,),
    "llama3_1_70b_131k": (64,),
}
"""Preset -> numbers of GPUs; the first is the one that its comment names."""
HEAD = (
    "| preset | GPUs | states | loads | trains | exports | fits GPUs of | largest tensors, except weights and states |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
)


def rows(presets: list[str]) -> Iterator[str]:
    for preset in presets:
        for gpus in SIZES[preset]:
            yield row(preset, gpus, simulated(preset, gpus))


def simulated(preset: str, gpus: int) -> Simulation:
    config = check_config(compose_config(preset, ["dataset.path=any"]))
    parts = build_parts(replace(config, attention={}))  # a kernel may need the GPU that is only planned
    shape, training = mesh_shape(replace(parts.mesh, dp_shard=-1), gpus), parts.training
    asked = training.global_batch_size
    if isinstance(asked, int) and asked % (training.micro_batch_size * shape.dp):  # more ranks bring a pack each
        training = replace(training, global_batch_size=None)
    return simulate(replace(parts, training=training), parts.model.described({}), shape)


def row(preset: str, gpus: int, found: Simulation) -> str:
    """Sizes in GiB."""
    states = found.weights + found.gradients + found.optimizer
    trains = max(found.peaks[phase] for phase in ("forward", "backward", "optimizer"))
    sizes = [f"{size / 2**30:.1f}" for size in (states, found.peaks["load"], trains, found.peaks["export"])]
    kind, held = next((k, v) for k, v in found.at_peak.items() if k not in ("weights", "optimizer states"))
    fits = f"{found.smallest_gpu_gb} GB" if found.smallest_gpu_gb else "none"
    return f"| `{preset}` | {gpus} | {' | '.join(sizes)} | {fits} | `{kind}` {held / 2**30:.1f} |"


if __name__ == "__main__":
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # the shapes that ship with the package are taken at once
    if sys.argv[1:]:
        print(*HEAD, *rows(sys.argv[1:]), sep="\n")
    else:
        before, rest = PAGE.read_text().split(BEGIN)
        table = "\n".join([*HEAD, *rows([*SIZES])]) + "\n"
        PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1])
