"""The schema of the configuration.

YAML holds constants. Scalars live here (type, default, unit, and whether they shape the numbers); a
part (dataset, model, optimizer ...) is a block with a `_target_`, whose other keys are the
arguments of that function or class. What a value may be stands in its type (rules.py), here and in
the signatures of the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

from omegaconf import MISSING

from automodel_lite.config.rules import (
    DURATION,
    FIRST_AND_LAST,
    FOLDER_NAME,
    PACKAGES,
    PLAUSIBLE,
    REPO_NAME,
    UP_TO_THE_CORES,
    Auto,
    Count,
    Fraction,
    OneOf,
    Only,
    PathStr,
    Positive,
    Range,
    Seconds,
    Seed,
    Size,
)

Part = dict[str, Any]
BoolOrAuto = Annotated[bool | str, OneOf(("auto", "true", "false"))]


def resumable(default: Any) -> Any:
    """Returns a field that does not shape the numbers: a run may resume with another value; of a
    group, its class.
    """
    if isinstance(default, type):
        return field(default_factory=default, metadata={"is_resumable": True})
    return field(default=default, metadata={"is_resumable": True})


EXCHANGES = ("auto", "all_gather", "all_to_all", "ring")


@dataclass
class MeshConfig:
    """Axes of the device mesh; their product is the number of processes."""

    dp_replicate: Positive = 1  # replicas of the sharded model (HSDP)
    # processes that shard the parameters; -1 = all remaining
    dp_shard: Annotated[int, Range(-1), PLAUSIBLE] = -1
    cp: Positive = 1  # processes that share one pack (context parallel)
    tp: Positive = 1  # processes that share each layer's heads and columns (tensor parallel)
    # processes, out of dp_shard x cp x tp, that share the experts (expert parallel)
    ep: Positive = 1
    # send rows to experts under another micro-batch's products; never measured on a GPU
    ep_overlap: bool = False
    # auto = fsdp, or none with one process whose weights are not offloaded
    strategy: Annotated[str, OneOf(("auto", "fsdp", "ddp", "none"))] = "auto"
    cp_exchange: Annotated[str, OneOf(EXCHANGES, takes_code=True)] = "auto"
    cpu_offload: bool = False  # keep FSDP's shards, gradients and optimizer states in host memory
    timeout_s: Annotated[int, Range(1, 10**7)] = 600  # a longer collective ends the run


TRAIN_ON = OneOf(("assistant", "last_assistant", "completion", "all"))
TrainOn = Annotated[str, TRAIN_ON]


@dataclass
class TokenizeConfig:
    """How documents become tokens, and which of them are trained on."""

    train_on: TrainOn = "assistant"
    on_bad_row: Annotated[str, OneOf(("error", "skip"))] = "error"
    # largest allowed fraction of bad, empty or fully masked documents
    max_bad_frac: Fraction = 0.05
    # null = all cores for large data
    num_proc: Annotated[int, Range(1), UP_TO_THE_CORES] | None = resumable(None)
    # additional variables for the chat template
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    # of decisions: what stands before the letter of a choice
    choice_prefix: str = "choice#"
    # of decisions: write their choices in an order that follows from the seed
    permute_choices: bool = True
    # of decisions: questions without an answer are left out, or read without a loss
    unanswered: Annotated[str, OneOf(("skip", "ask"))] = "skip"


@dataclass
class DataloaderConfig:
    """How packs are read."""

    # processes per rank that prefetch packs
    num_workers: Annotated[int, Range(0), UP_TO_THE_CORES] = resumable(0)
    shuffle: bool = True  # shuffle the packs in each epoch, from (seed, epoch)


@dataclass
class TrainingConfig:
    """Length of the run, batch sizes (in packs), logging, precision and memory."""

    max_steps: Positive | None = None  # optimizer steps; null = given by num_epochs
    num_epochs: Annotated[int, Range(1, 10_000)] | None = (
        # passes over the packs; null = given by max_steps, without it 3 under 10,000 documents,
        # else 1
        None
    )
    allow_few_steps: bool = resumable(False)  # epochs may be fewer than 10 optimizer steps
    # packs per forward pass of a data-parallel rank; 0 = as many as have at most 4,096 tokens
    micro_batch_size: Annotated[int, Range(0, 2**17)] = resumable(1)
    global_batch_size: Annotated[int, Range(1, 10**6)] | Auto | None = (
        # packs per optimizer step; null = micro_batch_size x ranks; auto = 8, or fewer for at least
        # 50 steps
        None
    )
    # documents (rows, pairs) per optimizer step, in as many whole packs as hold about so many:
    # instead of global_batch_size; null = that counts
    global_batch_documents: Annotated[int, Range(1, 10**7)] | None = None
    max_grad_norm: Annotated[float, Range(0)] = 1.0  # clip gradients to this norm; 0 = never
    # of averaged weights, validated and exported; 0 = none
    ema_decay: Annotated[float, Range(0, below=1)] = 0.0
    # NEFTune: noise on the embeddings of tokens, within alpha / sqrt(tokens of the document x model
    # dim); 5 is usual, 0 = none
    neftune_noise_alpha: Annotated[float, Range(0, 1000)] = 0.0
    log_every_steps: Positive = resumable(10)
    val_every_steps: Count = resumable(0)  # steps between validations; 0 = only at the end
    # of compute; auto = bf16 on GPUs
    precision: Annotated[str, OneOf(("auto", "fp32", "bf16"))] = "auto"
    # and gradients; bf16: adamw_bf16, adamw_8bit
    master_weights: Annotated[str, OneOf(("fp32", "bf16"))] = "fp32"
    activation_checkpointing: Annotated[
        str, OneOf(("auto", "none", "full", "selective", "offload"))
    ] = resumable(
        # auto = the least that fits; selective = recompute cheap ops; offload = full, inputs in
        # host memory
        "auto"
    )
    compile: BoolOrAuto = "auto"  # auto = on GPUs
    # scaling of linear layers (torchao)
    fp8: Annotated[str, OneOf(("none", "tensorwise", "rowwise"))] = "none"
    # products of fp32 matrices in TF32 on GPUs: 10 bits of mantissa, several times faster
    tf32: bool = False
    # bitwise reproducible (and resumable) runs on a GPU, with slower kernels
    deterministic: bool = False
    # [10, 12]: profile these steps
    profile_steps: Annotated[list[int], FIRST_AND_LAST] | None = resumable(None)
    # 0 = OMP_NUM_THREADS, else cores / processes of this host
    num_threads: Annotated[int, Range(0), UP_TO_THE_CORES] = resumable(0)
    # skipped in a row (loss or gradient) before the run ends
    max_nonfinite_steps: Count = resumable(3)
    # "1:30:00", saves before; null = SLURM's
    max_time: Annotated[str | int, DURATION] | None = resumable(None)
    hang_timeout_s: Seconds = resumable(120.0)  # stacks to logs/ if a step takes longer; 0 = never


@dataclass
class AdvancedConfig:
    """What the hardware may want and hardly anybody sets; the planner does."""

    # free gathered layers; auto = unless all of them fit the GPU
    reshard_after_forward: BoolOrAuto = "auto"
    # of gradients; auto = if their unsharded sum takes over a quarter of the GPU
    reduce_every_micro_batch: BoolOrAuto = "auto"
    # apply training.activation_checkpointing only to every n-th layer
    recompute_every_layers: Positive = 1
    stop_margin_s: Seconds = 60.0  # for the save before training.max_time, plus measured times


@dataclass
class CheckpointConfig:
    """When checkpoints are written, and which ones are kept."""

    every_steps: Count = 0  # steps between checkpoints; 0 = only at the end
    # async = in the background, from a copy
    mode: Annotated[str, OneOf(("sync", "async"))] = "sync"
    keep_last: Positive = 2  # number of newest checkpoints to keep
    # also keep this many with the best best_metric; the best is exported at the end
    keep_best: Count = 0
    # a number of validations: val_loss, val_token_accuracy, task_score (a mean over the tasks),
    # task_pass_at_4/sums ...
    best_metric: Annotated[str, Only("keep_best")] = "val_loss"
    # the highest is the best; null = known by its name
    best_rises: Annotated[bool | None, Only("keep_best")] = None
    # also keep those at multiples of this many steps; 0 = none
    keep_every: Annotated[Count, Only("every_steps")] = 0
    accept_changes: bool = False  # continue although settings that affect the numbers have changed
    export_hf: bool = True  # export hf/, a folder that from_pretrained loads, at the end


@dataclass
class HubConfig:
    """Upload to the Hugging Face hub at the end of the run."""

    # repository to upload the exported model to; null = none
    push: Annotated[str, REPO_NAME] | None = None
    private: bool = True  # if the repository is created


@dataclass
class SecurityConfig:
    """Permissions, which only the command line can grant."""

    # packages that a `_target_` may name
    allow_targets: Annotated[list[str], PACKAGES] = field(default_factory=list)
    # variables of the environment that a file may send to addresses, hubs and trackers
    allow_env: list[str] = field(default_factory=list)


@dataclass
class SamplesConfig:
    """Prompts that the model answers at each validation."""

    # ["What is the capital of France?"]; `![](a.png)` is an image; empty = no samples
    prompts: list[str] = field(default_factory=list)
    max_new_tokens: Annotated[Size, Only("prompts")] = 48


@dataclass
class Config:
    """Everything a run is made of, in the order the data meets it."""

    name: Annotated[str, FOLDER_NAME] = resumable(MISSING)  # of the run; its folder is output_dir
    seed: Seed = 0
    output_dir: PathStr = resumable("runs/${name}")
    dry_run: bool = resumable(False)  # check the run, compute its steps and memory, and exit
    # tokens, trained tokenizers, copies of data; null = $AUTOMODEL_LITE_CACHE, else
    # ~/.cache/automodel_lite
    cache_dir: PathStr | None = resumable(None)
    dataset: Part = field(default_factory=dict)
    tokenizer: Part = field(default_factory=dict)
    tokenize: TokenizeConfig = field(default_factory=TokenizeConfig)
    packed_sequence: Part = field(default_factory=dict)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    mesh: MeshConfig = resumable(MeshConfig)
    model: Part = field(default_factory=dict)
    attention: Part = resumable(dict)
    peft: Part = field(default_factory=dict)
    teacher: Part = field(default_factory=dict)
    loss: Part = field(default_factory=dict)
    optimizer: Part = field(default_factory=dict)
    lr_scheduler: Part = field(default_factory=dict)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    advanced: AdvancedConfig = resumable(AdvancedConfig)
    checkpoint: CheckpointConfig = resumable(CheckpointConfig)
    samples: SamplesConfig = resumable(SamplesConfig)
    tasks: Part = resumable(dict)
    evaluation: Part = resumable(dict)
    report: bool = resumable(True)  # write report.html, a page that refreshes during the run
    logger: Part = resumable(dict)
    callbacks: Part = field(default_factory=dict)
    # keys of a recipe of your own, by its dataclass
    extra: dict[str, Any] = field(default_factory=dict)
    hub: HubConfig = resumable(HubConfig)
    security: SecurityConfig = resumable(SecurityConfig)


def resumable_settings(group: type = Config, prefix: str = "") -> Iterator[str]:
    """Yields keys, and groups of keys, that do not shape the numbers."""
    for setting in fields(group):
        path = f"{prefix}{setting.name}"
        if setting.metadata.get("is_resumable"):
            yield path
        elif is_dataclass(setting.default_factory):
            yield from resumable_settings(setting.default_factory, f"{path}.")
