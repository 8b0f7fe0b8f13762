"""The configuration: a typed schema, the check before anything is loaded, and `build`, which makes a part from its
block.

YAML holds constants. Scalars live in the schema below (type, default, unit); a part (dataset, model, optimizer ...)
is a block with a `_target_`, whose other keys are the arguments of that function or class. Objects that exist only at
run time (the tokenizer, the model's parameters) are handed to `build(block, object, name=object)`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automodel_lite.errors import ConfigError
from automodel_lite.targets import check_origin, own_targets, target_problem

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
    report: bool = True  # draw report.html and report.png at the end (needs matplotlib)
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


EXTRAS = {  # optional package -> the extra that brings it
    "bitsandbytes": "qlora",
    "flash_attn": "flash",
    "matplotlib": "plots",
    "peft": "peft",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "transformer_engine": "te",
    "wandb": "wandb",
}


def missing_package(wanted_by: str, package: str) -> str:
    """One sentence with the pip line that brings an optional package."""
    return f"{wanted_by} needs the package {package}: pip install 'automodel-lite[{EXTRAS[package]}]'."


# ---------------------------------------------------------------------------------------------------------- building
def build(part: Mapping[str, Any], *args: Any, **runtime: Any) -> Any:
    """Calls the part's `_target_` with its constants, then `args` and `runtime`; nested parts are built first.

    Plain Python values reach the target, never OmegaConf containers. The signature is checked before any work.
    Raises ConfigError: unknown target or argument, with the closest name.

    >>> build({"_target_": "torch.optim.AdamW", "lr": 1e-3}, model.parameters())
    """
    target = locate(part["_target_"])
    constants = {key: _build_nested(value) for key, value in part.items() if key != "_target_"}
    try:
        inspect.signature(target).bind(*args, **constants, **runtime)
    except TypeError as error:
        raise ConfigError(f"{part['_target_']}: {error}.") from None
    return target(*args, **constants, **runtime)


def build_with(part: Mapping[str, Any], **offered: Any) -> Any:
    """`build`, handing over those of the offered objects that the target asks for."""
    wanted = inspect.signature(locate(part["_target_"])).parameters
    return build(part, **{name: value for name, value in offered.items() if name in wanted})


def _build_nested(value: Any) -> Any:
    if isinstance(value, dict):
        return build(value) if "_target_" in value else {key: _build_nested(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_build_nested(item) for item in value]
    return value


def locate(path: str) -> Callable[..., Any]:
    """The function or class of a dotted path: `torch.optim.AdamW`."""
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue
            if error.name and error.name.split(".")[0] in EXTRAS:
                raise ConfigError(missing_package(path, error.name.split(".")[0])) from None
            raise
        for name in parts[cut:]:
            if name not in dir(found):
                raise ConfigError(
                    f"_target_={path}: {found.__name__} has no {name}{did_you_mean(name, dir(found)) or '.'}"
                )
            found = getattr(found, name)
        return found
    raise ConfigError(f"_target_={path}: there is no module {parts[0]}.")


# ---------------------------------------------------------------------------------------------------------- checking
def check_config(raw: DictConfig) -> Config:
    """A composed configuration -> the typed one; raises one ConfigError that lists every problem, a line each.

    Finds unknown keys, wrong types, missing values, unset environment variables and broken `${}` before anything is
    loaded.
    """
    problems = list(_unresolved(raw))
    if problems:
        raise ConfigError("\n".join(problems))
    plain: Any = OmegaConf.to_container(raw, resolve=True)
    problems = [*_schema_problems(plain, Config, ""), *_target_problems(plain)]
    problems += [*_choice_problems(plain), *_range_problems(plain), *_name_problems(plain)]
    if not any("_target_" in problem for problem in problems):
        for key, part in _parts(plain):
            problems += _part_problems(key, part)
    if problems:
        raise ConfigError("\n".join(problems))
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    assert isinstance(config, Config)
    return config


def with_defaults(raw: DictConfig) -> DictConfig:
    """The configuration with the schema's defaults filled in; keys that the schema does not know stay."""
    merged = OmegaConf.merge(OmegaConf.to_container(OmegaConf.structured(Config)), raw)
    assert isinstance(merged, DictConfig)
    return merged


def _unresolved(raw: DictConfig) -> Iterator[str]:
    """Missing values (`???`) and interpolations that do not resolve, each with its key."""

    def walk(node: Any, literal: Any, prefix: str) -> Iterator[str]:
        for key in node.keys() if isinstance(node, DictConfig) else range(len(node)):
            path = prefix + str(key)
            if OmegaConf.is_missing(node, key):
                yield f"{path} has no value: set {path}=..."
                continue
            try:
                child = node[key]
            except OmegaConfBaseException as error:
                text = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ")
                cause = text.strip('"').rstrip(".")
                yield f"{path}={literal[key]}: {cause}."
                continue
            if OmegaConf.is_config(child) and not isinstance(literal[key], str):
                yield from walk(child, literal[key], f"{path}.")

    yield from walk(raw, OmegaConf.to_container(raw, resolve=False), "")


def _schema_problems(node: Mapping[str, Any], schema: type, prefix: str) -> Iterator[str]:
    hints = typing.get_type_hints(schema)
    for key, value in node.items():
        path = f"{prefix}{key}"
        if key not in hints:
            leaf, shown = _first_leaf(path, value)
            yield f"{leaf}={_show(shown)}: unknown key{did_you_mean(leaf, known_keys()) or '.'}"
        elif is_dataclass(hints[key]):
            if isinstance(value, dict):
                yield from _schema_problems(value, hints[key], f"{path}.")
            else:
                yield f"{path}={_show(value)} is a group of keys: set {path}.{fields(hints[key])[0].name}=..."
        elif hints[key] == Part:
            if not isinstance(value, dict):
                yield f"{path}={_show(value)}: {path} is a part with options, such as {path}.{_first_option(path)}=..."
        elif not matches(value, hints[key]):
            yield f"{path}={_show(value)} must be {describe(hints[key])}."


def _choice_problems(plain: dict[str, Any]) -> Iterator[str]:
    for key, choices in CHOICES.items():
        value = _lookup(plain, key)
        if value is not None and value not in choices:
            yield f"{key}={_show(value)} must be one of {', '.join(choices)}{did_you_mean(str(value), choices) or '.'}"


def _range_problems(plain: dict[str, Any]) -> Iterator[str]:
    for key, least in AT_LEAST.items():
        value = _lookup(plain, key)
        if isinstance(value, (int, float)) and value < least:
            yield f"{key}={value} must be at least {least}."


def _name_problems(plain: dict[str, Any]) -> Iterator[str]:
    name = str(plain["name"])
    if not re.fullmatch(r"[\w][\w.,=+@ -]*", name):
        yield f"name={name!r} must be a plain folder name (letters, digits, _-.=+@): set output_dir=... for a path."


def _target_problems(plain: dict[str, Any]) -> Iterator[str]:
    """Targets that are not allowed; nothing is imported before this is known."""
    allowed = _lookup(plain, "security.allow_targets") or []
    refused = False
    for key, part in _parts(plain):
        if problem := target_problem(part["_target_"], allowed):
            refused = True
            yield f"{key}.{problem}"
    if refused:
        return
    for key, part in _parts(plain):
        if part["_target_"] not in own_targets():
            try:
                check_origin(part["_target_"], locate(part["_target_"]), allowed)
            except ConfigError as error:
                yield f"{key}.{error}"


def _part_problems(key: str, part: dict[str, Any]) -> Iterator[str]:
    """Arguments that the part's target does not take, or takes as another type."""
    try:
        target = locate(part["_target_"])
    except ConfigError as error:
        text, path = str(error), part["_target_"]
        if text.startswith(f"{path} needs the package"):
            text = f"{key}{text.removeprefix(path)}"
        yield text if text.startswith(key) else f"{key}.{text}"
        return
    parameters = inspect.signature(target).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = _parameter_hints(target)
    for name, value in part.items():
        path = f"{key}.{name}"
        if name == "_target_" or (takes_any and name not in parameters):
            continue
        if name not in parameters:
            options = [f"{key}.{p}" for p in parameters]
            near = did_you_mean(path, options) or f"; if the preset sets it, ~{path} takes it out."
            yield f"{path}={_show(value)}: unknown key{near}"
        elif (
            name in hints and not (isinstance(value, dict) and "_target_" in value) and not matches(value, hints[name])
        ):
            yield f"{path}={_show(value)} must be {describe(hints[name])}."


def _parameter_hints(target: Callable[..., Any]) -> dict[str, Any]:
    annotated = target.__init__ if inspect.isclass(target) else target  # type: ignore[misc]
    try:
        return typing.get_type_hints(annotated)
    except (NameError, TypeError):  # annotations of another library that only exist for its type checker
        return {}


def _parts(node: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every block with a `_target_`, with its key."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield prefix, node
        for key, value in node.items():
            yield from _parts(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _parts(value, f"{prefix}.{index}")


def known_keys() -> list[str]:
    """Every key of the schema, dotted: `training.max_steps`."""

    def walk(schema: type, prefix: str) -> Iterator[str]:
        for name, hint in typing.get_type_hints(schema).items():
            yield prefix + name
            if is_dataclass(hint):
                yield from walk(typing.cast(type, hint), f"{prefix}{name}.")

    return list(walk(Config, ""))


def matches(value: Any, hint: Any) -> bool:
    """Does a YAML value fit a type annotation? An int serves as a float; annotations of objects take anything."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, arg) for arg in args)
    if origin is typing.Literal:
        return value in args
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if (origin or hint) in (list, tuple):
        item = args[0] if args else Any
        return isinstance(value, (list, tuple)) and all(matches(v, item) for v in value)
    if (origin or hint) is dict:
        return isinstance(value, dict)
    return True


def describe(hint: Any) -> str:
    """A type annotation in words: `int | None` -> `a whole number or null`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, args))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(hint, "a list" if (origin or hint) in (list, tuple) else "a group of keys")


def _lookup(plain: Mapping[str, Any], key: str) -> Any:
    node: Any = plain
    for step in key.split("."):
        if not isinstance(node, dict) or step not in node:
            return None
        node = node[step]
    return node


def _first_leaf(path: str, value: Any) -> tuple[str, Any]:
    """`optimizr`, {"lr": 1} -> `optimizr.lr`, 1: the key as it was typed."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}"
    return path, value


def _first_option(key: str) -> str:
    return {"model": "pretrained", "dataset": "path", "optimizer": "lr"}.get(key, "_target_")


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def did_you_mean(name: str, known: typing.Iterable[str]) -> str:
    """`; did you mean X?` or nothing: the closest last part in the same group, then the closest group, then any
    group.
    """
    known = [k for k in known if not k.split(".")[-1].startswith("_")]
    group, _, last = name.rpartition(".")
    here = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == group}
    tops = {k.split(".")[0] for k in known}
    anywhere = {k.rpartition(".")[2]: k for k in known}
    top, _, rest = name.partition(".")
    if close := difflib.get_close_matches(last, here, n=1, cutoff=0.6):
        near = here[close[0]]
    elif rest and top not in tops and (close := difflib.get_close_matches(top, tops, n=1, cutoff=0.6)):
        near = f"{close[0]}.{rest}"
    elif close := difflib.get_close_matches(last, anywhere, n=1, cutoff=0.75):
        near = anywhere[close[0]]
    else:
        return ""
    return f"; did you mean {near}?"
