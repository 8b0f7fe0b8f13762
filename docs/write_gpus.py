"""Writes the table of docs/steps_and_rates.md: which models one GPU of each size can train, and in
how many hours.

python docs/write_gpus.py                                (about 4 CPU-minutes)
python docs/write_gpus.py Qwen/Qwen3-0.6B                (its rows alone)

A step of each model and method is simulated with every layer recomputed, in packs of the least and
of the most tokens; what lies between is on the line. No GPU, no weights and no network are needed.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the shapes that ship with the package

import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.extras.plan.by_layers import interpolate, layer_pattern, simulate_by_layers
from automodel_lite.extras.plan.capacity import usable
from automodel_lite.extras.plan.planner import GPUS, Job, Layout, Plan, priced
from automodel_lite.extras.plan.simulation import Simulation
from automodel_lite.extras.plan.tracker import Operation
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.telemetry.console import Console
from automodel_lite.training.memory import NF4_BYTES
from automodel_lite.training.resolve import rates
from automodel_lite.training.settings import RunParts, build_parts

PAGE = Path(__file__).resolve().parent / "steps_and_rates.md"
BEGIN, END = "<!-- written by docs/write_gpus.py -->\n", "<!-- end -->\n"
MODELS = (
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
)
METHODS = {
    "full": (),
    "full, bf16": ("training.master_weights=bf16", "optimizer=adamw_8bit"),
    "LoRA": ("peft=lora",),
    "QLoRA": ("peft=lora",),  # counted as LoRA, with the base in 4 bits
}
"""Method -> its settings."""
CARDS = ("rtx4060-8", "rtx3060-12", "rtx4090-24", "l40s-48", "h100-80")
PACKS = (1024, 2048, 4096, 8192)
TOKENS = 10_000_000
"""Of the data: 10,000 documents of 1,000 tokens."""
DOCUMENT = 1000
STEP_TOKENS = 65_536
ALONE = MeshShape(1, 1, 1)


@cache
def parts_of(model: str, settings: tuple[str, ...], pack: int) -> RunParts:
    """The preset `finetune` on one GPU."""
    run = ["name=x", "dataset.path=any", f"model.pretrained={model}", *settings]
    sizes = [f"packed_sequence.packed_sequence_size={pack}", "training.precision=bf16"]
    # two micro-batches: all but the last of a step are alike
    sizes += ["training.global_batch_size=2", "training.activation_checkpointing=full"]
    config = check_config(compose_config("finetune", [*run, *sizes]))
    return build_parts(rates(replace(config, attention={}), Console(is_silent=True)))


@cache
def ends(model: str, settings: tuple[str, ...]) -> list[Simulation]:
    """Steps in packs of the least and of the most tokens."""
    found = []
    for pack in (PACKS[0], PACKS[-1]):
        parts = parts_of(model, settings, pack)
        config = parts.model.resolve_model_config({})
        found.append(simulate_by_layers(parts, config, ALONE, layer_pattern(config)))
    return found


def in_4_bits(step: Simulation, job: Job) -> Simulation:
    """Returns LoRA's step with the base of the layers in 4 bits, and the weights of the layer at
    work beside it.
    """
    size = job.size
    in_layers = size.parameters - size.embedding - size.towers
    spared = round((2 - NF4_BYTES) * in_layers - 2 * size.largest_layer)
    # read, and written in bf16, by the forward pass, where it is recomputed, and backward
    widened = Operation("other", 0.0, round((NF4_BYTES + 2) * in_layers))
    work = {part: Counter(counts) for part, counts in step.work.items()}
    work["micro"][widened] = work["last"][widened] = 3
    peaks = {phase: peak - spared for phase, peak in step.peaks.items()}
    return replace(step, peaks=peaks, weights=step.weights - spared, work=work)


def best(model: str, method: str, card: str) -> Plan | None:
    """Returns the plan of the longest pack that fits; None without one."""
    settings = METHODS[method]
    least, most = ends(model, settings)
    for pack in reversed(PACKS):
        parts = parts_of(model, settings, pack)
        length = np.array([min(DOCUMENT, pack)])
        config = parts.model.resolve_model_config({})
        job = Job(parts, config, GPUS[card], 1, 1, length, length)
        step = interpolate(least, most, (pack - PACKS[0]) / (PACKS[-1] - PACKS[0]))
        if method == "QLoRA":
            step = in_4_bits(step, job)
        if step.peak <= usable(int(job.gpu.gigabytes * 1e9)):
            return priced(job, Layout(ALONE, 1, STEP_TOKENS // pack), parts, step)
    return None


def cell(model: str, method: str, card: str) -> str:
    """The tokens of the longest pack, and the hours."""
    plan = best(model, method, card)
    if plan is None:
        return "-"
    seconds = (plan.predicted_s or plan.step_s) * TOKENS / plan.tokens
    hours = seconds / 3600
    text = f"{hours:.0f} h" if hours >= 10 else f"{hours:.1f} h" if hours >= 1 else f"{hours:.2f} h"
    return f"{plan.parts.packed_sequence_size:,}: {text}"


def rows(model: str) -> list[str]:
    name = model.split("/")[1].removesuffix("-Instruct")
    return [
        f"| {name} | {method} | {' | '.join(cell(model, method, card) for card in CARDS)} |"
        for method in METHODS
    ]


def head() -> list[str]:
    cells = []
    for card in CARDS:
        gpu = GPUS[card]
        kind = card.rsplit("-", 1)[0].upper().replace("RTX", "RTX ")
        how = "predicted" if gpu.measured else "at least"
        cells.append(f"{gpu.gigabytes:.0f} GB ({kind}, {how})")
    return [f"| model | method | {' | '.join(cells)} |", "| --- " * (len(CARDS) + 2) + "|"]


def main(models: list[str]) -> None:
    for model in models or MODELS:
        before, rest = PAGE.read_text().split(BEGIN)
        table, after = rest.split(END)
        known: dict[str, list[str]] = {}
        for line in table.splitlines()[2:]:
            known.setdefault(line.split(" | ")[0], []).append(line)
        fresh = rows(model)
        known[fresh[0].split(" | ")[0]] = fresh
        names = [f"| {each.split('/')[1].removesuffix('-Instruct')}" for each in MODELS]
        lines = [*head(), *(line for name in names for line in known.get(name, []))]
        PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)
        print(*fresh, sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
