"""Which mesh, which batch, does it fit, and how fast: the best command for a model, its data and the GPUs at hand.

    python recipes/plan.py --gpus 8 --gpu h100-80 --config-name llama3_1_8b
    python recipes/plan.py --gpus 8 --nodes 4 --config-name finetune model.pretrained=/models/x dataset.path=chats.jsonl

No weights are read and no GPU is needed: steps of each layout are simulated, and their operations and messages take the
time that the GPU's rates give them. The configs of the presets' models ship with the package, so that their names work
without a network (HF_HUB_OFFLINE=0 asks the hub). Rates are the data sheet's, or those of --calibration.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the hub's client is imported

import argparse
import json
import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from automodel_lite.cli import argument_parser, compose_config, run_tool
from automodel_lite.config.check import check_config
from automodel_lite.config.rules import Range, argument
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.planned import PlannedPacks, epochs_of
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.launched import check_alone
from automodel_lite.telemetry.console import quiet_libraries
from automodel_lite.tools.planner import GPUS, SHOWN, Job, Outcome, Plan, calibrated, make_plans
from automodel_lite.training.plan import Parts, build_parts
from automodel_lite.training.recompute import recomputation_text
from automodel_lite.training.start import try_model

POSITIVE = argument(float, Range(above=0))
NOT_READ = "not read"


def main(argv: list[str] | None = None) -> int:
    """Prints the plans; returns 1 when none fits."""
    args, overrides = parser().parse_known_args(argv)
    check_alone()
    quiet_libraries()
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # advice on a simulated step
    config = composed(args.config_name, overrides)
    if args.write and (removed := [text for text in overrides if text.startswith("~")]):
        raise ConfigError(f"--write {args.write}: a preset cannot remove an option, as {removed[0]} does.")
    if args.gpu not in GPUS:
        raise ConfigError(f"--gpu {args.gpu}: choose one of {', '.join(GPUS)}.")
    gpu = calibrated(GPUS[args.gpu], args.calibration) if args.calibration else GPUS[args.gpu]

    def parts_of(more: Sequence[str]) -> Parts:
        changed = composed(args.config_name, [*overrides, *more]) if more else config
        return build_parts(replace(changed, attention={}))  # a kernel may need the GPU that is only planned

    base = parts_of(())
    try_model(base.model)
    data = data_of(config, base, args.document_tokens)
    world = (gpu, args.gpus, args.nodes)
    job = Job(base, base.model.described({"vocab_size": 8192}), *world, data.lengths, data.paths)
    print(f"{job.world} GPUs ({args.nodes} x {args.gpus} {args.gpu}), rates of {gpu.source}; {data.text}")
    outcome = make_plans(job)
    if not outcome.plans:
        print(f"no plan fits: {lost_text(outcome)}", *cures(job, parts_of), sep="\n")
        return 1
    best = outcome.plans[0]
    print("", table(outcome.plans), "", f"others: {lost_text(outcome)}", "", sep="\n")
    print(duration_text(best, job, config, data.num_packs, args.price_per_gpu_hour))
    print("", command(best, job, args.config_name, overrides), sep="\n")
    if args.json:
        found = {"plans": [plan.as_json() for plan in outcome.plans], "lost": dict(outcome.lost)}
        args.json.write_text(json.dumps(found, indent=1))
    if args.write:
        write_preset(args.write, args.config_name, config, [*overrides, *best.overrides])
    return 0


def composed(preset: str, overrides: Sequence[str]) -> Config:
    raw = compose_config(preset, [*overrides, "name=plan"])
    if OmegaConf.is_missing(raw.dataset, "path"):
        raw.dataset.path = NOT_READ
    return check_config(raw)


@dataclass(frozen=True)
class Data:
    """What a plan needs of the data.

    lengths, paths   as of `Job`
    num_packs        of an epoch; 0 = not known
    """

    lengths: np.ndarray
    paths: np.ndarray
    num_packs: int
    text: str


def data_of(config: Config, parts: Parts, assumed: int) -> Data:
    """Returns the documents and packs that training would read; without them, documents of `assumed` tokens."""
    length = np.full(1, min(assumed, parts.packed_sequence_size))
    unknown = Data(length, length, 0, f"documents of {length[0]:,} tokens are assumed")
    if config.dataset.get("path") == NOT_READ:
        return unknown
    try:
        alone = replace(config, mesh=replace(config.mesh, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1))
        data = prepare_data(alone, check_sizes(alone, 1), parts.packer)
    except (ConfigError, DataError) as error:
        return replace(unknown, text=f"{unknown.text}, as {error}")
    if not isinstance(data, PlannedPacks):
        return replace(unknown, text=f"a stream: {unknown.text}")
    rows, num_packs = data.tokens.train, len(data.packs_of(0))
    lengths, paths = (
        np.minimum(np.asarray(of), data.packer.packed_sequence_size) for of in (rows.lengths, rows.row_lengths)
    )
    trees = ", a tree as one" if data.has_trees else ""
    text = f"{len(lengths):,} documents{trees}, {int(lengths.sum()):,} tokens, mean {lengths.mean():,.0f}"
    return Data(lengths, paths, num_packs, f"{text}, {num_packs:,} packs")


def table(plans: list[Plan]) -> str:
    """Sizes in GiB of a GPU at its fullest, rates per GPU."""
    sizes = ("peak", "states", "rest", "step s", "tok/s", "MFU", "bound by", "loses by")
    head = ("mesh", "micro x steps", "recomputed", *sizes)
    rows = [head]
    for number, plan in enumerate(plans[:SHOWN]):
        step, layout = plan.step, plan.layout
        states = step.weights + step.gradients + step.optimizer
        rows.append(
            (
                str(layout),
                f"{layout.micro_batch} x {layout.micro_steps}",
                recomputation_text(plan.parts),
                *(f"{size / 2**30:.1f}" for size in (step.peak, states, max(step.peak - states, 0))),
                f"{plan.step_s:.3g}",
                f"{plan.tokens_per_s_per_gpu:,.0f}",
                f"{plan.mfu:.0%}",
                max(plan.seconds, key=plan.seconds.__getitem__),
                plan.loses_by(plans[0]) if number else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def lost_text(outcome: Outcome) -> str:
    return ", ".join(f"{number} {word}" for word, number in outcome.lost.most_common()) or "none"


def duration_text(best: Plan, job: Job, config: Config, num_packs: int, price: float | None) -> str:
    """How long the run takes, if the length of the data or max_steps is known."""
    training, batch = config.training, best.layout.global_batch
    steps = training.max_steps or num_packs * epochs_of(training, len(job.lengths))[0] / batch
    if not steps:
        return "hours: not known without the data (dataset.path, with a tokenizer)"
    hours = steps * best.step_s / 3600
    cost = f", {hours * job.world * price:,.2f} in money" if price else ""
    return f"{hours:.3g} hours, {hours * job.world:,.3g} GPU-hours{cost} for {steps:,.0f} steps of {batch} packs"


def command(best: Plan, job: Job, preset: str, overrides: Sequence[str]) -> str:
    nodes = f"--nnodes {job.nodes} --rdzv-backend c10d --rdzv-endpoint $HOST:29500 " if job.nodes > 1 else ""
    words = ["--config-name", preset, *overrides, *best.overrides]
    return f"torchrun --nproc-per-node {job.gpus_per_node} {nodes}recipes/train_ft.py {shlex.join(words)}"


def cures(job: Job, parts_of: Callable[[Sequence[str]], Parts], most_nodes: int = 1024) -> Iterator[str]:
    """Yields the smallest world and the largest pack that fit, and which other settings would."""

    def fits_with(change: str) -> bool:
        return bool(make_plans(replace(job, parts=parts_of([change]), more=(change,)), most=1).plans)

    # more GPUs on the node first, then more nodes
    worlds = [(gpus, 1) for gpus in (2, 4, 8) if job.nodes == 1 and gpus > job.gpus_per_node]
    worlds += [(max(job.gpus_per_node, 8), job.nodes * 2**n) for n in range(1, 11) if job.nodes * 2**n <= most_nodes]
    for gpus, nodes in worlds:
        if make_plans(replace(job, gpus_per_node=gpus, nodes=nodes), most=1).plans:
            yield f"  fits {nodes * gpus} GPUs (--gpus {gpus} --nodes {nodes})"
            break
    size = job.parts.packed_sequence_size // 2
    while size >= 512:
        if fits_with(f"packed_sequence.packed_sequence_size={size}"):
            yield f"  fits with packed_sequence.packed_sequence_size={size}"
            break
        size //= 2
    for change in ("optimizer=adamw_8bit", "peft=lora", "mesh.cpu_offload=true"):
        with suppress(ConfigError):
            if fits_with(change):
                yield f"  fits with {change}"


def write_preset(path: Path, preset: str, config: Config, overrides: Sequence[str]) -> None:
    """Writes a preset that starts from this one; choices of a group's option become its defaults."""
    chosen = dict(text.split("=", 1) for text in overrides)
    groups = {key: value for key, value in chosen.items() if isinstance(vars(config).get(key), dict)}
    lines = ["defaults:", f"  - {preset}", *(f"  - override {key}: {value}" for key, value in groups.items())]
    values = OmegaConf.from_dotlist([f"{key}={value}" for key, value in chosen.items() if key not in groups])
    OmegaConf.update(values, "name", path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "  - _self_"]) + "\n\n" + OmegaConf.to_yaml(values))
    print(f"\nwritten: --config-dir {path.parent} --config-name {path.stem}")


def parser() -> argparse.ArgumentParser:
    found = argument_parser(__doc__)
    found.add_argument("--config-name", required=True)
    found.add_argument("--gpus", type=argument(int, Range(1, 1024)), default=8, help="GPUs of a node")
    found.add_argument("--nodes", type=argument(int, Range(1, 10**5)), default=1)
    found.add_argument("--gpu", default="h100-80", help="a100-80, h100-80, h200-141, b200-192 ...")
    found.add_argument("--calibration", type=argument(Path), help="results.json of gpu_check, or a file of rates")
    found.add_argument("--document-tokens", type=argument(int, Range(1, 10**8)), default=1024, help="without data")
    found.add_argument("--price-per-gpu-hour", type=POSITIVE)
    found.add_argument("--json", type=argument(Path), help="write the plans, the best first")
    found.add_argument("--write", type=argument(Path), help="write the best plan as a preset: my_conf/mine.yaml")
    return found


if __name__ == "__main__":
    run_tool(main)
