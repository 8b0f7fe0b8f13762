"""Are the planner's choices right? Its first three plans beside a search that leaves nothing out, and whole simulations.

    python -m benchmarks.plans                      all cases, each in a process of its own: about an hour of one core
    python -m benchmarks.plans 8b-8 moe-8           some of them

A case passes when the chosen plan fits as a whole (checkpoint and export included), the memory predicted of each of the
first three plans is within 3 % of the whole simulation, and the first three of all layouts, simulated whole and priced,
are the planner's in the same order. Left out of that search is only what cannot be among them: a layout whose step is
too slow even if nothing is recomputed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import huggingface_hub
import numpy as np
import torch

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from automodel_lite.extras.plan.capacity import usable
from automodel_lite.extras.plan.planner import (
    GPUS,
    Job,
    Layout,
    Plan,
    make_plans,
    placed,
    possible,
    priced,
)
from automodel_lite.extras.plan.recompute import NONE, least_recomputation, recomputation_text
from automodel_lite.extras.plan.simulation import (
    Simulation,
    layer_pattern,
    simulate,
    simulate_by_layers,
)
from automodel_lite.training.decide import decide_layout
from automodel_lite.training.plan import Decided, build_parts, with_recomputation

EIGHT_B = "model.pretrained=meta-llama/Llama-3.1-8B-Instruct"
HYBRID = [
    "tokenizer=bpe",
    "model=llama_tiny",
    "model.config={model_type: qwen3_next, hidden_size: 2048, num_hidden_layers: 24, intermediate_size: 5120, "
    "num_attention_heads: 16, num_key_value_heads: 2, head_dim: 256, num_experts: 0, vocab_size: 151936, "
    "mlp_only_layers: [], max_position_embeddings: 32768}",
]
OF_8B = [EIGHT_B, "packed_sequence.packed_sequence_size=8192"]
# preset, overrides, GPU, GPUs of a node, nodes
CASES: dict[str, tuple[str, list[str], str, int, int]] = {
    "0.6b-1": ("qwen3_0_6b", [], "rtx4090-24", 1, 1),
    "0.6b-8": ("qwen3_0_6b", [], "h100-80", 8, 1),
    "1b-2": ("llama3_2_1b", [], "l40s-48", 2, 1),
    "8b-8": ("llama3_1_8b", [], "h100-80", 8, 1),
    "lora-1": ("llama3_1_8b_lora", [], "h100-80", 1, 1),
    "dpo-8": ("dpo", OF_8B, "h100-80", 8, 1),
    "distill-8": (
        "distill",
        [*OF_8B, "teacher.pretrained=meta-llama/Llama-3.1-8B-Instruct"],
        "h100-80",
        8,
        1,
    ),
    "moe-8": ("qwen3_30b_a3b", [], "h100-80", 8, 1),
    "hybrid-8": ("finetune", HYBRID, "h100-80", 8, 1),
    "8b-64": ("llama3_1_8b", [], "h100-80", 8, 8),
    "70b-256": ("llama3_1_70b", [], "h100-80", 8, 32),
    "405b-1024": ("llama3_1_405b", [], "h100-80", 8, 128),
}
BYTES = 10 << 30  # of a case's address space
# of the third's seconds: steps by layers are that exact, so those beyond need no whole simulation
NEAR = 1.02


def job_of(name: str) -> Job:
    preset, overrides, gpu, gpus, nodes = CASES[name]
    config = check_config(compose_config(preset, [*overrides, "dataset.path=any", "name=plan"]))
    parts = build_parts(replace(config, attention={}))
    lengths = np.array([1024])
    return Job(
        parts,
        parts.model.resolve_model_config({"vocab_size": 8192}),
        GPUS[gpu],
        gpus,
        nodes,
        lengths,
        lengths,
    )


def planned(job: Job, layout: Layout) -> Decided:
    return decide_layout(placed(job, layout), job.config, layout.shape, torch.device("cuda"))


def per_pack(plan: Plan) -> float:
    return plan.step_s / plan.layout.global_batch


def unpruned(job: Job, third_s: float) -> list[Plan]:
    """Returns the plans of all layouts that may take at most `third_s` a pack, by their counted step."""
    pattern, capacity = layer_pattern(job.config), usable(int(job.gpu.gigabytes * 1e9))
    found = []
    for layout in possible(job):
        try:
            plan = planned(job, layout)
            kept = with_recomputation(plan, *NONE)
            if (
                per_pack(
                    priced(
                        job,
                        layout,
                        kept,
                        simulate_by_layers(kept, job.config, layout.shape, pattern),
                    )
                )
                > third_s
            ):
                continue
            chosen = least_recomputation(plan, capacity, pattern, 0 if job.parts.peft else None)
        except (ConfigError, NotImplementedError):
            continue
        if chosen is not None:
            found.append(priced(job, layout, *chosen))
    return [plan for plan in found if per_pack(plan) <= third_s]


def case(name: str) -> dict[str, Any]:
    """Plans a case, and searches it again without bounds."""
    job = job_of(name)
    began = time.process_time()
    plans = make_plans(job).plans
    planned_s = time.process_time() - began
    wholes: dict[Layout, Simulation] = {}

    def whole(plan: Plan) -> Plan:
        if plan.layout not in wholes:
            wholes[plan.layout] = simulate(plan.parts, job.config, plan.layout.shape)
        return priced(job, plan.layout, plan.parts, wholes[plan.layout])

    # the first plan holds its whole simulation already: what was predicted of its step is counted again
    pattern, capacity = layer_pattern(job.config), usable(int(job.gpu.gigabytes * 1e9))
    first = least_recomputation(
        planned(job, plans[0].layout), capacity, pattern, 0 if job.parts.peft else None
    )
    assert first is not None
    steps = [first[1], *(plan.step for plan in plans[1:3])]
    again = [whole(plan) for plan in plans[:3]]
    phases = ("load", "forward", "backward", "optimizer")  # what a step by layers has
    peaks = [max(one.step.peaks[phase] for phase in phases) for one in again]
    best = sorted(map(whole, unpruned(job, NEAR * max(map(per_pack, plans[:3])))), key=per_pack)
    # two layouts that take the same time are in no order
    is_same = all(
        abs(per_pack(ours) / per_pack(theirs) - 1) < 1e-3 for ours, theirs in zip(again, best)
    )
    return {
        "case": name,
        "gpus": job.world,
        "plan": f"{plans[0].layout}, {plans[0].layout.micro_batch} x {plans[0].layout.micro_steps}, "
        f"{recomputation_text(plans[0].parts)}",
        "whole_gib": again[0].step.peak / 2**30,
        "fits": again[0].step.peak <= capacity,
        "memory_off": [step.peak / peak - 1 for step, peak in zip(steps, peaks)],
        "seconds_off": [
            per_pack(ours) / per_pack(theirs) - 1 for ours, theirs in zip(plans, again)
        ],
        "order": "same"
        if is_same
        else "OTHER: " + ", ".join(f"{p.layout} {p.layout.micro_batch}" for p in best[:3]),
        "layouts": len(list(possible(job))),
        "planned_s": planned_s,
        "all_s": time.process_time() - began,
    }


def row(found: dict[str, Any]) -> str:
    off = [
        " ".join(f"{100 * part:+.1f}" for part in found[key])
        for key in ("memory_off", "seconds_off")
    ]
    cells = (
        found["case"],
        str(found["gpus"]),
        found["plan"],
        f"{found['whole_gib']:.1f}" + ("" if found["fits"] else " TOO MUCH"),
        *off,
        f"{found['order']} ({found['layouts']})",
        f"{found['planned_s']:.0f} ({found['all_s']:.0f})",
    )
    return f"| {' | '.join(cells)} |"


def alone(name: str) -> str:
    """Returns the row of a case, in a process of its own."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    return row(case(name))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", choices=[*CASES, []])
    args = parser.parse_args()
    print(
        "| case | GPUs | best plan | GiB, whole | memory off % | seconds off % | first three of all | CPU-s (of all) |"
    )
    print("|---|---|---|---|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        for line in pool.map(alone, args.cases or CASES):
            print(line, flush=True)


if __name__ == "__main__":
    main()
