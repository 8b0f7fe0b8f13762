"""Which mesh, which batch, does it fit, and how fast: the best command for a model, its data and
the GPUs at hand.

    python recipes/plan.py --gpus 8 --gpu h100-80 --config-name llama3_1_8b
    python recipes/plan.py --gpus 8 --gpu h100-80 /models/x chats.jsonl
    python recipes/plan.py --gpus 8 --nodes 4 --config-name finetune model.pretrained=/models/x \\
        dataset.path=chats.jsonl

No weights are read and no GPU is needed: steps of each layout are simulated, and their operations
and messages take the time that the GPU's rates give them. The configs of the presets' models ship
with the package, so that their names work without a network (HF_HUB_OFFLINE=0 asks the hub). Rates
are the data sheet's, or those of --calibration.
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
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from omegaconf import OmegaConf

from automodel_lite.cli import Recipe, argument_parser, compose_config, run_tool
from automodel_lite.cli.job import DATA, job_of, takes_words
from automodel_lite.cli.line import is_word, rewrite_program_name
from automodel_lite.cli.sources import Sources
from automodel_lite.config.check import check_config
from automodel_lite.config.components import locate
from automodel_lite.config.rules import Range, argument
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.planned import PlannedPacks, epochs_of
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.errors import ConfigError, DataError, counted, meant, nearest, one_line
from automodel_lite.extras.plan.by_layers import layer_pattern, simulate_by_layers
from automodel_lite.extras.plan.capacity import usable
from automodel_lite.extras.plan.measured import MeasuredRates
from automodel_lite.extras.plan.planner import (
    AXES,
    GPUS,
    SHOWN,
    Gpu,
    Job,
    Outcome,
    Plan,
    coarsely,
    make_plans,
    plain_documents,
)
from automodel_lite.extras.plan.recompute import HOPELESS, recomputation_text
from automodel_lite.launched import check_alone
from automodel_lite.models.source import describe
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.results import RESULTS
from automodel_lite.run.durable import write_named
from automodel_lite.telemetry.console import Console, quiet_libraries
from automodel_lite.thd import ThdBatch
from automodel_lite.training.compiling import worst_case_batch
from automodel_lite.training.memory import three_digits
from automodel_lite.training.resolve import (
    MOST_PACK,
    SIZE,
    from_run,
    rates,
    resolve_auto,
    with_micro_batch,
)
from automodel_lite.training.rules import build_on_meta
from automodel_lite.training.settings import AUTO, RunParts, build_parts

POSITIVE = argument(float, Range(above=0))
NOT_READ = "not read"
UNNAMED = "unnamed-plan"
# what gpu_check measures -> the field of `Gpu`, and its unit; one card has no links to measure
MEASURED = (
    ("bf16_tflops", "flops", 1e12),
    ("memory_tb_per_s", "bytes_per_s", 1e12),
    ("link_gb_per_s", "node_bytes_per_s", 1e9),
)
# of gpu_check's part `rates`: what `MeasuredRates` is made of
STEP_RATES = ("product_tflops", "attention_tflops", "step_tb_per_s")
LEGEND = """\
peak, states, rest   GiB of a GPU at its fullest: weights, gradients and moments, and all else
step s               the least seconds of an optimizer step; tok/s per GPU and MFU are at most these
predicted            tok/s per GPU by rates that this kind of card was measured to reach
bound by, loses by   what takes longest; where the layout is slower than the first
"""


def main(argv: list[str] | None = None) -> int:
    """Prints the plans; returns 1 when none fits."""
    args, overrides = parser().parse_known_args(argv)
    check_alone()
    quiet_libraries()
    # advice on simulated steps, of each layout again
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    args.config_name, overrides = named_job(args.config_name, overrides)
    config = composed(args.config_name, overrides)
    if config.packed_sequence.get("packed_sequence_size") == AUTO:
        overrides = [*overrides, f"{SIZE}={pack_size(config)}"]
        config = composed(args.config_name, overrides)
    if args.write and (removed := [text for text in overrides if text.startswith("~")]):
        raise ConfigError(
            f"--write {args.write}: a preset cannot remove an option, as {removed[0]} does."
        )
    if args.gpu not in GPUS:
        of_kind = [gpu for gpu in GPUS if gpu.startswith(args.gpu.lower())]
        near = meant(" or ".join(of_kind) or nearest(args.gpu, GPUS))
        raise ConfigError(f"--gpu {args.gpu}: not known{near} Choose one of {', '.join(GPUS)}.")
    gpu = calibrated(GPUS[args.gpu], args.calibration) if args.calibration else GPUS[args.gpu]

    def parts_of(more: Sequence[str]) -> RunParts:
        changed = composed(args.config_name, [*overrides, *more]) if more else config
        # a kernel may need the GPU that is only planned
        changed = rates(replace(changed, attention={}), Console(is_silent=True))
        return build_parts(changed)

    base = parts_of(())
    build_on_meta(base.model)
    data = data_of(config, base, args.document_tokens)
    world = (gpu, args.gpus, args.nodes)
    job = Job(
        base,
        base.model.resolve_model_config({"vocab_size": 8192}),
        *world,
        data.lengths,
        data.paths,
        data.batch,
    )
    print(
        f"{job.world} GPU{'s' if job.world > 1 else ''} ({args.nodes} x {args.gpus} {args.gpu}), "
        f"rates of {gpu.source}; {data.text}"
    )
    print(predicted_text(gpu, job.world))
    print(coarse_text(job), flush=True)
    outcome = make_plans(job, say=lambda line: print(f"  {line}", flush=True))
    RESULTS.update(plans=[as_json(plan) for plan in outcome.plans], lost=dict(outcome.lost))
    if not outcome.plans:
        print("fits: no")
        print(f"no plan fits: {lost_text(outcome)}", *suggestions(job, parts_of), sep="\n")
        return 1
    best = outcome.plans[0]
    print("fits: yes", "", sep="\n")
    text = command(best, job, args.config_name, [*overrides, *missing(config)])
    print(rewrite_program_name(text))
    print(duration_text(best, job, config, data.num_packs, args.price_per_gpu_hour))
    print("", table(outcome.plans), "", LEGEND, f"others: {lost_text(outcome)}", sep="\n")
    if args.write:
        write_preset(args.write, args.config_name, config, [*overrides, *overrides_of(best)])
    return 0


def named_job(preset: str | None, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the preset and the overrides, where words name a model and its data those that they
    stand for; raises ConfigError without either.
    """
    recipe = Recipe("recipes.plan:main")
    words = [text for text in overrides if is_word(text) and not text.startswith("-")]
    if takes_words(recipe, words, preset):
        job = job_of(recipe, Sources.of(recipe=recipe), overrides, preset)
        # without data, sizes of documents are assumed
        problems = [one for one in job.problems if len(words) > 1 or one.key != DATA]
        if problems:
            raise ConfigError.of(problems)
        for line in job.lines:
            print(f"job        {line}")
        return job.preset, [*job.chosen, *(text for text in overrides if text not in words)]
    if preset is None:
        raise ConfigError(
            "a plan is of a preset, or of a model and its data",
            key="--config-name",
            cure="automodel-lite plan MODEL DATA, or automodel-lite plan --config-name PRESET",
        )
    return preset, [*overrides]


def predicted_text(gpu: Gpu, world: int) -> str:
    """Says by which rates a time is predicted, or why none is."""
    if gpu.measured is None:
        return (
            "predicted: no, as this card has no measured rates: on it, benchmarks/gpu_check.py "
            "--only ceilings rates writes a gpu_calibration.json for --calibration"
        )
    links = ", links by the data sheet" if world > 1 else ""
    return f"predicted: by rates of {gpu.measured.source}{links}"


def coarse_text(job: Job) -> str:
    """A first answer, at once."""
    least = min((held for held, _, _ in coarsely(job)), default=0.0)
    most = usable(int(job.gpu.gigabytes * 1e9))
    verdict = "likely fits"
    if least > HOPELESS * most:
        verdict = "no: does not fit"
    elif least > most:
        verdict = "hardly fits"
    return (
        f"by arithmetic: {verdict}; the smallest layout takes about "
        f"{three_digits(least / 2**30)} of {most / 2**30:.1f} GiB; simulating layouts:"
    )


def composed(preset: str, overrides: Sequence[str]) -> Config:
    raw = compose_config(preset, overrides)
    if OmegaConf.is_missing(raw, "name"):
        raw.name = UNNAMED
    if OmegaConf.is_missing(raw.dataset, "path"):
        raw.dataset.path = NOT_READ
    config = check_config(raw)
    # a run is planned as what it has exported
    config = from_run(config)
    # 0: each layout has its own
    return with_micro_batch(config, config.training.micro_batch_size or 1)


def pack_size(config: Config) -> int:
    """Returns the tokens of a pack that `auto` means; without readable data, which `data_of`
    explains, the longest that is chosen for short documents.
    """
    if config.dataset.get("path") != NOT_READ:
        with suppress(ConfigError, DataError):
            return int(resolve_auto(config).packed_sequence["packed_sequence_size"])
    return MOST_PACK


def missing(config: Config) -> list[str]:
    """Returns what a run needs beside what a plan does: a name, and its data."""
    names = ["name=mine"] if config.name == UNNAMED else []
    return [*names, "dataset.path=..."] if config.dataset.get("path") == NOT_READ else names


def measured_rates(found: dict[str, Any], path: Path) -> MeasuredRates | None:
    """Returns the rates of a step that gpu_check's part `rates` has measured; None without all of
    them.
    """
    if not all(found.get(key) for key in STEP_RATES):
        return None
    attention = found["attention_tflops"]
    try:
        by_keys = {float(keys): float(tflops) * 1e12 for keys, tflops in attention.items()}
        is_positive = min([*by_keys, *by_keys.values()]) > 0
    except (AttributeError, TypeError, ValueError):
        is_positive = False
    if not is_positive:
        raise ConfigError(
            f"--calibration {path}: attention_tflops is {one_line(attention, 60)}, and must be an "
            'object such as {"620": 230}: keys that a query sees, TFLOP/s.'
        )
    return MeasuredRates(
        product_flops=found["product_tflops"] * 1e12,
        attention_flops=by_keys,
        bytes_per_s=found["step_tb_per_s"] * 1e12,
        source=str(path),
    )


def calibrated(gpu: Gpu, path: Path) -> Gpu:
    """Returns the GPU with the rates of a file: gpu_calibration.json, as gpu_check writes it, or
    fields of `Gpu`.
    """
    cure = "give the gpu_calibration.json that gpu_check wrote"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--calibration {path}: {one_line(error, 120)}: {cure}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--calibration {path}: no object with names and values: {cure}.")
    known = {field.name for field in fields(Gpu)} - {"measured"}
    values = {key: value for key, value in found.items() if key in known}
    numbers = (*(name for name, _, _ in MEASURED), "product_tflops", "step_tb_per_s")
    for key in (*values, *numbers):
        if not isinstance(found.get(key, 0.0), int | float | None) and key != "source":
            value = one_line(found[key], 60)
            raise ConfigError(f"--calibration {path}: {key} is {value}, and must be a number.")
    for name, key, unit in MEASURED:
        if found.get(name):
            values[key] = found[name] * unit
    if not (values or measured_rates(found, path)):
        raise ConfigError(
            f"--calibration {path}: it has neither bf16_tflops, as the gpu_calibration.json of "
            "gpu_check, nor a rate such as flops."
        )
    # of this card, which may be slower than the one of the table
    values["measured"] = measured_rates(found, path)
    return replace(gpu, **{"source": f"measured, {path}", **values})


@dataclass(frozen=True)
class Data:
    """What a plan needs of the data.

    lengths, paths   as of `Job`: what a pack holds of a document counts as one
    batch            as of `Job`
    num_packs        of all epochs; 0 = not known
    """

    lengths: np.ndarray
    paths: np.ndarray
    num_packs: int
    text: str
    batch: Callable[[RunParts], ThdBatch | None] = plain_documents


def images_of(data: PlannedPacks, base: RunParts) -> Callable[[RunParts], ThdBatch | None]:
    """Returns what makes micro-batches with the images of the packs that have most of them."""
    packs: Any = data.packs_of(0)
    work = packs.tower_flops()
    if not np.any(work):
        return plain_documents
    from automodel_lite.parts.images.assumed import with_images  # with Pillow
    from automodel_lite.parts.images.packs import Share

    config = base.model.resolve_model_config({"vocab_size": 8192})

    @lru_cache(maxsize=8)
    def of(size: int, cp: int) -> Any:
        most = np.argsort(work, kind="stable")[-size:]
        shared = copy(packs)
        shared.reader = replace(packs.reader, share=Share(0, cp) if cp > 1 else None)
        return shared.__getitems__(most).row["images"]

    def batch(parts: RunParts) -> ThdBatch:
        images = of(parts.training.micro_batch_size, parts.mesh.cp)
        return with_images(worst_case_batch(parts, num_ids=1), images, config)

    return batch


def assumed_images(config: Config, base: RunParts) -> tuple[Callable[[RunParts], ThdBatch], str]:
    """Returns what makes micro-batches half of whose tokens are of images, and what those are."""
    locate(config.dataset["_target_"])  # names a package that is missing
    from automodel_lite.parts.images.assumed import AssumedImages, with_images  # with Pillow

    model_config = base.model.resolve_model_config({"vocab_size": 8192})
    described = describe(model_config)
    base.model.dtype = torch.float32
    base.model.freeze_weights(described)
    if base.peft:
        described.requires_grad_(False)
    pixels = config.dataset.get("max_image_pixels")
    images = AssumedImages(described, pixels, base.packed_sequence_size // 2)

    def batch(parts: RunParts) -> ThdBatch:
        text = worst_case_batch(parts, num_ids=1)
        return with_images(text, images.of(len(text.labels), parts.mesh.cp), model_config)

    return batch, f", half of their tokens {images}"


def data_of(config: Config, parts: RunParts, assumed: int) -> Data:
    """Returns the documents and packs that training would read; without them, documents of
    `assumed` tokens.
    """
    length = np.full(1, min(assumed, parts.packed_sequence_size))
    unknown = Data(length, length, 0, f"documents of {length[0]:,} tokens are assumed")
    if "max_image_pixels" in config.dataset:
        batch, more = assumed_images(config, parts)
        unknown = replace(unknown, text=unknown.text + more, batch=batch)
    if config.dataset.get("path") == NOT_READ:
        return unknown
    try:
        alone = replace(
            config, mesh=replace(config.mesh, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1)
        )
        data = prepare_data(alone, check_sizes(alone, 1), parts.packer).planned
    except (ConfigError, DataError) as error:
        return replace(unknown, text=f"{unknown.text}, as {error}")
    if data is None:
        return replace(unknown, text=f"a stream: {unknown.text}")
    rows = data.tokens.train
    plan = data.packs_of(0).plan
    lengths = plan.piece_lengths(np.asarray(rows.lengths))
    paths = plan.piece_lengths(np.asarray(rows.row_lengths))
    text = packs_text(data, lengths)
    batch = images_of(data, parts)
    if batch is not plain_documents:
        text += ", planned as the ones with the most images"
    num_packs = len(plan) * epochs_of(config.training, len(rows))[0]
    return Data(lengths, paths, num_packs, text, batch)


def packs_text(data: PlannedPacks, lengths: np.ndarray) -> str:
    """Returns a line on the documents and packs of the first epoch.

    lengths  of the pieces that are packed
    """
    rows = data.tokens.train
    plan = data.packs_of(0).plan
    num = plan.counts.packed_documents
    whole = int((lengths == rows.lengths[plan.doc_ids]).sum())
    text = f"{num:,}"
    if num < len(rows):
        text += f" of {len(rows):,}"
    text += " documents"
    if data.has_trees:
        text += ", a tree as one"
    if whole < num:
        pieces = len(lengths) - whole
        text += f" ({whole:,} whole, {num - whole:,} cut into {pieces:,} pieces)"
    tokens = int(lengths.sum())
    return f"{text}, {tokens:,} tokens, mean {lengths.mean():,.0f}, {counted(len(plan), 'pack')}"


def table(plans: list[Plan]) -> str:
    """Sizes in GiB of a GPU at its fullest, rates per GPU."""
    sizes = ("peak", "states", "rest", "step s", "<= tok/s", "predicted", "<= MFU")
    head = ("mesh", "micro x steps", "recomputed", *sizes, "bound by", "loses by")
    rows = [head]
    for number, plan in enumerate(plans[:SHOWN]):
        step = plan.step
        layout = plan.layout
        states = step.weights + step.gradients + step.optimizer
        rate = plan.predicted_tokens_per_s_per_gpu
        rows.append(
            (
                str(layout),
                f"{layout.micro_batch} x {layout.micro_steps}",
                recomputation_text(plan.parts),
                three_digits(step.peak / 2**30),
                three_digits(states / 2**30),
                three_digits(max(step.peak - states, 0) / 2**30),
                f"{plan.step_s:.3g}",
                f"{plan.tokens_per_s_per_gpu:,.0f}",
                f"{rate:,.0f}" if rate else "-",
                f"{plan.mfu:.0%}",
                max(plan.seconds, key=plan.seconds.__getitem__),
                loses_by(plan, plans[0]) if number else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def loses_by(plan: Plan, best: Plan) -> str:
    """Returns, in a word, where a token takes longer than in the best plan."""
    excess = {
        key: s / plan.tokens - best.seconds[key] / best.tokens for key, s in plan.seconds.items()
    }
    worst = max(excess, key=excess.__getitem__)
    is_recomputed = recomputation_text(plan.parts) != recomputation_text(best.parts)
    return "recomputation" if worst in ("products", "memory") and is_recomputed else worst


def overrides_of(plan: Plan) -> list[str]:
    """Returns what makes the preset this plan; an axis or a rung that is the default
    is left out.
    """
    layout = plan.layout
    training = plan.parts.training
    advanced = plan.parts.advanced
    every = advanced.recompute_every_layers
    is_reduced = advanced.reduce_every_micro_batch is True
    found = []
    for axis in AXES:
        size = getattr(layout.shape, axis)
        if size > 1 or axis == "dp_shard":
            found.append(f"mesh.{axis}={size}")
    if layout.micro_steps > 1:
        found.append(f"advanced.reduce_every_micro_batch={str(is_reduced).lower()}")
    found.append(f"training.micro_batch_size={layout.micro_batch}")
    if not training.global_batch_documents:  # which decide the packs of a step
        found.append(f"training.global_batch_size={layout.global_batch}")
    found += [
        f"training.activation_checkpointing={training.activation_checkpointing}",
    ]
    if every > 1:
        found.append(f"advanced.recompute_every_layers={every}")
    return found


def as_json(plan: Plan) -> dict[str, Any]:
    """Returns a row of `--json`; bytes of one GPU."""
    return {
        "overrides": overrides_of(plan),
        "peak_bytes": plan.step.peak,
        "step_s": plan.step_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "predicted_step_s": plan.predicted_s,
        "predicted_tokens_per_s_per_gpu": plan.predicted_tokens_per_s_per_gpu,
        "mfu": plan.mfu,
        "seconds": plan.seconds,
        "weights_bytes": plan.step.weights,
        "gradients_bytes": plan.step.gradients,
        "optimizer_bytes": plan.step.optimizer,
    }


def lost_text(outcome: Outcome) -> str:
    return ", ".join(f"{number} {word}" for word, number in outcome.lost.most_common()) or "none"


def duration_text(best: Plan, job: Job, config: Config, num_packs: int, price: float | None) -> str:
    """How long the run takes, if the length of the data or max_steps is known."""
    training = config.training
    batch = best.layout.global_batch
    steps = training.max_steps or num_packs / batch
    if not steps:
        return "hours: not known without the data (dataset.path, with a tokenizer)"
    least = steps * best.step_s / 3600
    hours = least
    how = "at least"
    also = ""
    if best.predicted_s:
        hours = steps * best.predicted_s / 3600
        how = "predicted:"
        also = f" (at least {least:.3g} hours)"
    cost = f", {hours * job.world * price:,.2f} in money" if price else ""
    return (
        f"{how} {hours:.3g} hours{also}, {hours * job.world:,.3g} GPU-hours{cost} for "
        f"{steps:,.0f} steps of {counted(batch, 'pack')}"
    )


def command(best: Plan, job: Job, preset: str, overrides: Sequence[str]) -> str:
    nodes = (
        f"--nnodes {job.nodes} --rdzv-backend c10d --rdzv-endpoint $HOST:29500 "
        if job.nodes > 1
        else ""
    )
    words = ["--config-name", preset, *overrides, *overrides_of(best)]
    return (
        f"torchrun --nproc-per-node {job.gpus_per_node} {nodes}recipes/train_ft.py "
        f"{shlex.join(words)}"
    )


def suggestions(
    job: Job, parts_of: Callable[[Sequence[str]], RunParts], most_nodes: int = 1024
) -> Iterator[str]:
    """Yields the smallest world and the largest pack that fit, and which other settings would."""

    def fits_with(change: str) -> bool:
        return fits(replace(job, parts=parts_of([change])))

    # more GPUs on the node first, then more nodes
    worlds = [(gpus, 1) for gpus in (2, 4, 8) if job.nodes == 1 and gpus > job.gpus_per_node]
    worlds += [
        (max(job.gpus_per_node, 8), job.nodes * 2**n)
        for n in range(1, 11)
        if job.nodes * 2**n <= most_nodes
    ]
    for gpus, nodes in worlds:
        if fits(replace(job, gpus_per_node=gpus, nodes=nodes)):
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


def fits(job: Job, tried: int = 2) -> bool:
    """Does a plan fit? Of the world's layouts, those that hold least by the coarse formulas are
    simulated: some whose steps have one micro-batch and some with several, as a sum of gradients is
    what the formulas know least about.
    """
    pattern = layer_pattern(job.config)
    capacity = usable(int(job.gpu.gigabytes * 1e9))
    one_or_several: dict[bool, list[tuple[float, RunParts, MeshShape]]] = {True: [], False: []}
    for held, layout, parts in coarsely(job):
        if held <= HOPELESS * capacity:
            one_or_several[layout.micro_steps == 1].append((held, parts, layout.shape))
    for found in one_or_several.values():
        for _, parts, shape in sorted(found, key=lambda one: one[0])[:tried]:
            with suppress(ConfigError, NotImplementedError):
                if simulate_by_layers(parts, job.config, shape, pattern).peak <= capacity:
                    return True
    return False


def write_preset(path: Path, preset: str, config: Config, overrides: Sequence[str]) -> None:
    """Writes a preset that starts from this one; choices of a group's option become
    its defaults.
    """
    chosen = dict(text.split("=", 1) for text in overrides)
    groups = {
        key: value for key, value in chosen.items() if isinstance(vars(config).get(key), dict)
    }
    lines = [
        "defaults:",
        f"  - {preset}",
        *(f"  - override {key}: {value}" for key, value in groups.items()),
    ]
    values = OmegaConf.from_dotlist(
        [f"{key}={value}" for key, value in chosen.items() if key not in groups]
    )
    OmegaConf.update(values, "name", path.stem)
    text = "\n".join([*lines, "  - _self_"])
    write_named(path, f"{text}\n\n{OmegaConf.to_yaml(values)}")
    print(f"\nwritten: --config-dir {path.parent} --config-name {path.stem}")


def parser() -> argparse.ArgumentParser:
    found = argument_parser(__doc__, has_results=True)
    found.add_argument("--config-name", help="a preset; MODEL DATA choose one by the rows")
    found.add_argument(
        "--gpus", type=argument(int, Range(1, 1024)), default=8, help="GPUs of a node"
    )
    found.add_argument("--nodes", type=argument(int, Range(1, 10**5)), default=1)
    found.add_argument("--gpu", default="h100-80", help="a100-80, h100-80, h200-141, b200-192 ...")
    found.add_argument(
        "--calibration",
        type=argument(Path),
        help="gpu_calibration.json of gpu_check, or a file of rates",
    )
    found.add_argument(
        "--document-tokens", type=argument(int, Range(1, 10**8)), default=1024, help="without data"
    )
    found.add_argument("--price-per-gpu-hour", type=POSITIVE)
    found.add_argument(
        "--write", type=argument(Path), help="write the best plan as a preset: my_conf/mine.yaml"
    )
    return found


if __name__ == "__main__":
    run_tool(main)
