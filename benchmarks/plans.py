"""Are the planner's choices right? For each case the three best plans are simulated whole and priced again.

python -m benchmarks.plans                         (all cases: about 30 CPU-minutes; appends nothing, prints a table)
python -m benchmarks.plans 8b-8 moe-8              (some of them)

A case passes when the chosen plan fits as a whole, each plan's memory is within 3 % of its whole simulation, and the
whole simulations, priced, are in the planner's order.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import huggingface_hub
import numpy as np

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.tools.planner import GPUS, Job, make_plans, priced
from automodel_lite.training.memory import usable
from automodel_lite.training.plan import build_parts
from automodel_lite.training.recompute import recomputation_text
from automodel_lite.training.simulation import layer_pattern, simulate, simulate_by_layers

EIGHT_B = "model.pretrained=meta-llama/Llama-3.1-8B-Instruct"
HYBRID = [
    "tokenizer=bpe",
    "model=llama_tiny",
    "model.config={model_type: qwen3_next, hidden_size: 2048, num_hidden_layers: 24, intermediate_size: 5120, "
    "num_attention_heads: 16, num_key_value_heads: 2, head_dim: 256, num_experts: 0, vocab_size: 151936, "
    "mlp_only_layers: [], max_position_embeddings: 32768}",
]
CASES: dict[str, tuple[str, list[str], str, int, int]] = {  # preset, overrides, GPU, GPUs of a node, nodes
    "0.6b-1": ("qwen3_0_6b", [], "rtx4090-24", 1, 1),
    "0.6b-8": ("qwen3_0_6b", [], "h100-80", 8, 1),
    "1b-2": ("llama3_2_1b", [], "l40s-48", 2, 1),
    "8b-8": ("llama3_1_8b", [], "h100-80", 8, 1),
    "8b-64": ("llama3_1_8b", [], "h100-80", 8, 8),
    "lora-1": ("llama3_1_8b_lora", [], "h100-80", 1, 1),
    "dpo-8": ("dpo", [EIGHT_B, "packed_sequence.packed_sequence_size=8192"], "h100-80", 8, 1),
    "distill-8": (
        "distill",
        [EIGHT_B, "teacher.pretrained=meta-llama/Llama-3.1-8B-Instruct", "packed_sequence.packed_sequence_size=8192"],
        "h100-80",
        8,
        1,
    ),
    "moe-8": ("qwen3_30b_a3b", [], "h100-80", 8, 1),
    "hybrid-8": ("finetune", HYBRID, "h100-80", 8, 1),
    "70b-256": ("llama3_1_70b", [], "h100-80", 8, 32),
    "405b-1024": ("llama3_1_405b", [], "h100-80", 8, 128),
}


def job_of(name: str) -> Job:
    preset, overrides, gpu, gpus, nodes = CASES[name]
    config = check_config(compose_config(preset, [*overrides, "dataset.path=any", "name=plan"]))
    parts = build_parts(replace(config, attention={}))
    lengths = np.array([1024])
    return Job(parts, parts.model.described({"vocab_size": 8192}), GPUS[gpu], gpus, nodes, lengths, lengths)


def row(name: str) -> str:
    """A line of the table: plan, memory against the whole, order, CPU seconds of planning."""
    job, began = job_of(name), time.process_time()
    plans = make_plans(job).plans
    took_s = time.process_time() - began
    wholes = [simulate(plan.parts, job.config, plan.layout.shape) for plan in plans[:3]]
    fits = wholes[0].peak <= usable(int(job.gpu.gigabytes * 1e9))
    # the first plan holds its whole simulation already: what was predicted of its step is counted again
    first = simulate_by_layers(plans[0].parts, job.config, plans[0].layout.shape, layer_pattern(job.config))
    steps = [first, *(plan.step for plan in plans[1:3])]
    off = [step.peak / max(whole.peaks[phase] for phase in step.peaks) - 1 for step, whole in zip(steps, wholes)]
    again = [priced(job, p.layout, p.parts, w).step_s / p.layout.global_batch for p, w in zip(plans, wholes)]
    seconds = [plan.step_s / plan.layout.global_batch for plan in plans[:3]]
    order = "same" if again == sorted(again) else "OTHER"
    best = plans[0]
    cells = (
        name,
        f"{job.world}",
        f"{best.layout}, {best.layout.micro_batch} x {best.layout.micro_steps}, {recomputation_text(best.parts)}",
        f"{wholes[0].peak / 2**30:.1f}" + ("" if fits else " TOO MUCH"),
        " ".join(f"{100 * part:+.1f}" for part in off),
        " ".join(f"{100 * (s / a - 1):+.1f}" for s, a in zip(seconds, again)),
        order,
        f"{took_s:.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    print("| case | GPUs | best plan | whole GiB | memory off % | seconds off % | order of three | planned in CPU-s |")
    print("|---|---|---|---|---|---|---|---|")
    for case in sys.argv[1:] or CASES:
        print(row(case), flush=True)
