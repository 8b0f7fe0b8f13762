"""The schema of the configuration.

YAML holds constants. Scalars live here (type, default, unit); a part (dataset, model, optimizer ...) is a block with a
`_target_`, whose other keys are the arguments of that function or class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

Part = dict[str, Any]


@dataclass
class MeshConfig:
    """Axes of the device mesh; their product is the number of processes."""

    dp_replicate: int = 1  # replicas of the sharded model (HSDP); > 1 with dp_shard > 1
    dp_shard: int = -1  # processes over which parameters are sharded; -1 = all that remain
    cp: int = 1  # processes that share one pack (context parallel)
    strategy: str = "auto"  # fsdp | ddp | none | auto (fsdp with several processes or a GPU, else none)
    cp_exchange: str = "all_gather"  # all_gather | all_to_all | te (Transformer Engine's own)
    timeout_s: int = 600  # a collective that takes longer ends the run


@dataclass
class TokenizeConfig:
    """How documents become tokens, and which of them are trained on."""

    train_on: str = "assistant"  # assistant | last_assistant | completion | all
    on_bad_row: str = "error"  # error | skip
    max_bad_frac: float = 0.05  # bad, empty or fully masked documents that a set may have; more is an error
    num_proc: int | None = None  # processes; null = all cores for large sets
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # more variables for the chat template


@dataclass
class DataloaderConfig:
    """How packs are read."""

    num_workers: int = 0  # processes a rank that read packs ahead
    prefetch_factor: int = 4  # batches that each worker keeps ready
    pin_memory: bool = True  # page-locked batches (GPU only)
    shuffle: bool = True  # the order of packs is drawn anew each epoch from (seed, epoch)


@dataclass
class TrainingConfig:
    """How long, how much at a time, and how often something is said. Batch sizes are in packs."""

    max_steps: int | None = None  # optimizer steps; null = num_epochs decides
    num_epochs: int | None = None  # passes over the packs; null = max_steps decides
    micro_batch_size: int = 1  # packs a forward of one data-parallel rank
    global_batch_size: int | None = None  # packs an optimizer step over all ranks; null = micro_batch_size x ranks
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm; 0 = never
    log_every_steps: int = 10
    val_every_steps: int = 0  # 0 = only at the end
    precision: str = "auto"  # fp32 | bf16 (bf16 compute, fp32 master weights) | auto (bf16 on a GPU, else fp32)
    activation_checkpointing: str = "none"  # recompute in the backward pass: none | full layers | selective (cheap ops)
    recompute_every_layers: int = 1  # activation_checkpointing of every n-th layer only
    compile: bool = False  # torch.compile, decoder layer by decoder layer
    fp8: str = "none"  # linear layers: none | tensorwise | rowwise scales (torchao, GPU with fp8)
    num_threads: int = 0  # CPU threads a process; 0 = the cores divided by the processes of this host
    max_bad_steps: int = 3  # steps in a row with a non-finite loss or gradient that are skipped; one more ends the run
    max_time: str | int | None = (
        None  # "1:30:00", hours first: save and leave before so much time has passed; null = SLURM's
    )
    stop_margin_s: float = 60.0  # kept for the last save, besides the time that saves and steps have taken so far
    stuck_after_s: float = 120.0  # a step that takes longer has its stacks written to logs/; 0 = never


@dataclass
class CheckpointConfig:
    """When a checkpoint is written and which are kept."""

    every_steps: int = 0  # 0 = only at the end
    mode: str = "sync"  # sync | async (written behind the training, from a copy in host memory)
    keep_last: int = 2  # newest checkpoints kept
    keep_best: int = 0  # and those with the lowest validation loss
    keep_every: int = 0  # and those at multiples of so many steps; 0 = none
    checksums: bool = True  # of every file, compared when it is loaded
    accept_changes: bool = False  # continue although settings that shape the numbers changed since the run began
    export_hf: bool = True  # write hf/, a folder that from_pretrained loads, at the end


@dataclass
class SecurityConfig:
    """What a preset cannot grant: these keys are taken from the command line only."""

    allow_targets: list[str] = field(default_factory=list)  # packages whose code a `_target_` may name


@dataclass
class SamplesConfig:
    """What the model in training is asked at each validation."""

    prompts: list[str] = field(default_factory=list)  # ["What is the capital of France?"]; none = nothing is asked
    max_new_tokens: int = 48


@dataclass
class Config:
    """Everything a run is made of, in the order the data meets it."""

    name: str = MISSING  # the run's folder is output_dir
    seed: int = 0
    output_dir: str = "runs/${name}"
    dry_run: bool = False  # compose, check, count, estimate memory and steps, and stop
    cache_dir: str | None = None  # tokens and trained tokenizers; null = ~/.cache/automodel_lite
    dataset: Part = field(default_factory=dict)
    tokenizer: Part = field(default_factory=dict)
    tokenize: TokenizeConfig = field(default_factory=TokenizeConfig)
    packed_sequence: Part = field(default_factory=dict)
    dataloader: DataloaderConfig = field(default_factory=DataloaderConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: Part = field(default_factory=dict)
    attention: Part = field(default_factory=dict)
    peft: Part = field(default_factory=dict)
    loss: Part = field(default_factory=dict)
    optimizer: Part = field(default_factory=dict)
    lr_scheduler: Part = field(default_factory=dict)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    evaluation: Part = field(default_factory=dict)
    report: bool = True  # keep report.html, a page of the run that refreshes itself while the run goes on
    logger: Part = field(default_factory=dict)
    security: SecurityConfig = field(default_factory=SecurityConfig)


CHOICES = {
    "checkpoint.mode": ("sync", "async"),
    "mesh.strategy": ("auto", "fsdp", "ddp", "none"),
    "mesh.cp_exchange": ("all_gather", "all_to_all", "te"),
    "training.precision": ("auto", "fp32", "bf16"),
    "training.activation_checkpointing": ("none", "full", "selective"),
    "training.fp8": ("none", "tensorwise", "rowwise"),
    "tokenize.train_on": ("assistant", "last_assistant", "completion", "all"),
    "tokenize.on_bad_row": ("error", "skip"),
}
AT_LEAST = {
    "training.max_steps": 1,
    "training.num_epochs": 1,
    "training.micro_batch_size": 1,
    "training.global_batch_size": 1,
    "training.log_every_steps": 1,
    "training.val_every_steps": 0,
    "training.max_grad_norm": 0,
    "training.num_threads": 0,
    "training.recompute_every_layers": 1,
    "samples.max_new_tokens": 1,
    "checkpoint.every_steps": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": 0,
    "checkpoint.keep_every": 0,
    "training.max_bad_steps": 0,
    "training.stop_margin_s": 0,
    "dataloader.num_workers": 0,
    "dataloader.prefetch_factor": 1,
    "mesh.dp_replicate": 1,
    "mesh.cp": 1,
    "mesh.timeout_s": 1,
}
