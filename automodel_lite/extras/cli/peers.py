"""What several keys of another framework are together, for `automodel-lite convert`.

foreign.yaml answers key by key. Here are the sums: the batch of a step, betas, a rate's floor,
adapted modules, files by the names that another framework has given them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from automodel_lite.errors import ConfigError, explained, format_value

Tree = Mapping[str, Any]
Set = Callable[[str, Any, str], None]  # (setting, value, where it comes from)
ROWS = {  # peer -> packs or rows of a forward pass
    "axolotl": "micro_batch_size",
    "llama_factory": "per_device_train_batch_size",
    "trl": "per_device_train_batch_size",
    "torchtune": "batch_size",
}
PASSES = "gradient_accumulation_steps"
BETAS = ("adam_beta1", "adam_beta2")
# layers of torchtune -> their names in transformers
MLP = ["gate_proj", "up_proj", "down_proj"]
LONGEST_TIMEOUT_S = 10_000_000


def value_at(tree: Tree, path: str) -> Any:
    """Returns the value of a dotted key, None where there is none."""
    node: Any = tree
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def number(value: Any) -> float | None:
    """Returns a finite number, of text such as 1e-5 too, which YAML reads as text; None of
    others.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    with suppress(ValueError, OverflowError):
        found = float(value)
        return found if math.isfinite(found) else None
    return None


def combine(peer: str, theirs: Tree, num_gpus: int | None, put: Set) -> Iterator[str]:
    """Sets what several keys are together; yields a line for each that cannot be held."""
    yield from _batch(peer, theirs, num_gpus, put)
    betas = [number(theirs.get(name)) for name in BETAS]
    if None not in betas:
        put("optimizer.betas", betas, "adam_beta1 and adam_beta2")
    if peer == "nemo_automodel":
        yield from _nemo(theirs, put)
    if peer == "torchtune":
        yield from _torchtune(theirs, put)
    seconds = number(theirs.get("ddp_timeout"))
    if seconds:
        put("mesh.timeout_s", min(int(seconds), LONGEST_TIMEOUT_S), "ddp_timeout")
    rank = number(theirs.get("lora_rank"))
    if peer == "llama_factory" and rank and not theirs.get("lora_alpha"):
        put("peft.alpha", 2 * int(rank), "llama_factory's default")
    yield from _modules(peer, theirs, put)
    yield from _held_out_frac(theirs, put)
    decay = number(value_at(theirs, "optimizer.weight_decay"))
    optimizers = [value_at(theirs, f"optimizer.{name}") for name in ("_component_", "_target_")]
    if decay and {"torch.optim.Adam", "torch.optim.adam.Adam"} & {*optimizers}:
        put("optimizer.weight_decay", 0, "Adam's is no decay of weights")
        yield (
            f"optimizer.weight_decay={decay}: none: torch.optim.Adam adds it to the gradient (L2), "
            "which then is divided by the gradient's size; AdamW takes it off the weight itself"
        )
    if peer == "trl":
        yield from _validation_of_trl(theirs, put)
    if peer == "llama_factory":
        yield from _template(theirs)
    if peer == "trl" and theirs.get("_train_on"):
        yield (
            "tokenize.train_on=all: of rows with a prompt and a completion TRL trains on the "
            "completion alone: tokenize.train_on=completion"
        )


def _batch(peer: str, theirs: Tree, num_gpus: int | None, put: Set) -> Iterator[str]:
    """The rows of a step, where the other framework multiplies them."""
    if peer not in ROWS or theirs.get("global_batch_size"):
        return
    # LLaMA-Factory's v1 has another name for them
    rows = ROWS[peer] if ROWS[peer] in theirs else "micro_batch_size"
    names = (rows, PASSES)
    size, passes = ((number(theirs.get(name)) or 0) for name in names)
    if size < 1 or passes < 1:
        given = ", ".join(f"{name}={format_value(theirs.get(name))}" for name in names)
        yield f"{given}: by hand: training.global_batch_size, as these are no numbers of rows"
        return
    ranks = 1
    for name in ("dp_shard_size", "dp_replicate_size", "data_parallel_shard_dim",
                 "data_parallel_replicate_dim"):  # fmt: skip
        ranks *= max(1, int(number(theirs.get(name)) or 1))
    is_named = num_gpus is not None or ranks > 1
    shared = 1
    for name in ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size",
                 "cp_size", "tensor_parallel_dim", "context_parallel_dim"):  # fmt: skip
        shared *= max(1, int(number(theirs.get(name)) or 1))
    if num_gpus is not None:
        ranks = max(1, num_gpus // shared)
    put("training.micro_batch_size", int(size), names[0])
    total = int(size) * int(passes) * ranks
    put(
        "training.global_batch_size",
        total,
        f"{names[0]} {int(size)} x {PASSES} {int(passes)} x {ranks} data-parallel ranks",
    )
    if not is_named:
        yield (
            f"training.global_batch_size={total}: for 1 GPU, as the file does not name their "
            "number: convert with --gpus N"
        )


def _validation_of_trl(theirs: Tree, put: Set) -> Iterator[str]:
    """Its scripts read the validation split where `eval_strategy` asks for it, and only there."""
    strategy = format_value(theirs.get("eval_strategy") or "no")
    if strategy == "no":
        for name in ("dataset_test_split", "eval_steps"):
            if value := theirs.get(name):
                yield f"{name}={format_value(value)}: without eval_strategy nothing is held out"
        return
    if not theirs.get("test_split_size"):
        put("dataset.val_split", theirs.get("dataset_test_split") or "test", "eval_strategy")
    steps = number(theirs.get("eval_steps") or theirs.get("logging_steps") or 500)
    if strategy == "steps" and steps and steps >= 1:
        put("training.val_every_steps", int(steps), "eval_steps")
    else:
        asked = f"eval_strategy={strategy}"
        asked += f" eval_steps={steps}" if strategy == "steps" else ""
        yield f"{asked}: by hand: training.val_every_steps; the dry run says how many an epoch has"


# Models whose own chat template writes what LLaMA-Factory's of this name does (0.9.5, compared text
# by text): others add a system turn, dates, or a block of thoughts, and base models bring none.
_OWN_TEMPLATES = {
    "llama3": r"(meta-)?llama-3-\d+b-instruct.*",
    "llama4": r"llama-4-.*-instruct.*",
    "qwen": r"qwen2\.5-(coder-)?[\d.]+b-instruct.*",
    "qwen3": r"qwen3-[\d.]+b(-a\d+b)?(-fp8)?",
    "qwen3_nothink": r"qwen3-.*-instruct-2507.*",
    "qwen3_5": r"qwen3\.5-(?!.*base).*",
    "qwen3_6": r"qwen3\.6-(?!.*base).*",
    "gemma": r"gemma-(1\.1-)?\d+b-it",
    "gemma3": r"gemma-3-\d+b-it.*",
    "gemma3n": r"gemma-3n-.*-it.*",
    "mistral": r"mistral-7b-instruct-v0\.[23]",
    "ministral": r"ministral-8b-instruct-2410",
    "falcon_h1": r"falcon-h1-.*-instruct.*",
}


def _template(theirs: Tree) -> Iterator[str]:
    """LLaMA-Factory's own templates: silent where it is the one that the model brings."""
    template = str(theirs.get("template") or "").lower()
    model = str(theirs.get("model_name_or_path") or theirs.get("model") or "").rpartition("/")[2]
    if not template or re.fullmatch(_OWN_TEMPLATES.get(template, "(?!)"), model.lower()):
        return
    if template.endswith("_nothink") and not re.search("base", model, re.IGNORECASE):
        yield (
            f"template={template}: by hand: it writes no block of thoughts, and the model's own "
            "template an empty one before the last answer: keep that one, with "
            "tokenize.template_kwargs.enable_thinking=false, or set tokenizer.chat_template=FILE"
        )
        return
    yield (
        f"template={template}: by hand: the tokenizer's own chat template is used, which may "
        "be another: compare them with automodel-lite inspect, or set "
        "tokenizer.chat_template=FILE"
    )


_OF_PAIRS = re.compile(
    "beta|precompute_ref.*|ref_model_.*|sync_ref_model|use_weighting|ld_alpha|discopop_tau"
    "|label_smoothing|loss_weights|f_.*|disable_dropout"
)
_OF_ANSWERS = re.compile(
    "packing|packing_strategy|eval_packing|assistant_only_loss|completion_only_loss"
    "|dataset_text_field"
)
_OF_JUDGED = frozenset(("desirable_weight", "undesirable_weight"))
METHODS = ("sft", "dpo", "orpo", "kto", "grpo", "rloo", "reward")


def method_of(theirs: Tree) -> str | None:
    """Returns which of TRL's trainers the keys of a configuration are of; None where all have
    them.
    """
    given = [key for key, value in theirs.items() if value is not None]
    kind = str(theirs.get("loss_type") or "nll")
    if "center_rewards_coefficient" in given:
        return "reward"
    if not _OF_JUDGED.isdisjoint(given) or kind in ("kto", "apo_zero_unpaired"):
        return "kto"
    if any(map(_OF_PAIRS.fullmatch, given)) or kind not in ("nll", "chunked_nll", "dft"):
        return "dpo"
    return "sft" if any(map(_OF_ANSWERS.fullmatch, given)) else None


def command_of_trl(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Returns the method and the keys of a command line of TRL's: `trl dpo --beta 0.1`, or that of
    one of its scripts, `accelerate launch ... dpo.py --beta 0.1`. `config` is a file with more of
    them, which the command line overrules.

    >>> command_of_trl(["trl", "sft", "--learning_rate", "1e-5", "--packing"])
    ('sft', {'learning_rate': '1e-5', 'packing': True})
    """
    stems = [Path(word).stem if word.endswith(".py") else word for word in words]
    place = next((place for place, stem in enumerate(stems) if stem in METHODS), None)
    if place is None:
        raise ConfigError(
            f"{' '.join(words)} is no command of TRL's: type it as it is, trl METHOD --key value, "
            f"with one of {', '.join(METHODS)}, or one file."
        )
    found: dict[str, Any] = {}
    name = ""
    for word in words[place + 1 :]:
        key, has_value, value = word.partition("=")
        if word.startswith("--"):
            name = key.removeprefix("--").replace("-", "_")
            found[name] = _typed(value) if has_value else True
        elif not name:
            raise ConfigError(f"{word}: stands before the first --key of {' '.join(words)}.")
        elif found[name] is True:
            found[name] = _typed(word)
        else:  # a list
            found[name] = [*(x if isinstance(x := found[name], list) else [x]), _typed(word)]
    return stems[place], found


def _typed(word: str) -> Any:
    with suppress(yaml.YAMLError):
        value = yaml.safe_load(word)
        if isinstance(value, bool | int | float | str):
            return value
    return word


def _nemo(theirs: Tree, put: Set) -> Iterator[str]:
    lr = number(value_at(theirs, "optimizer.lr"))
    floor = value_at(theirs, "lr_scheduler.min_lr")
    if lr and number(floor) is not None and theirs.get("lr_scheduler"):
        put("lr_scheduler.min_lr_frac", float(f"{float(floor) / lr:.6g}"), "min_lr / lr")
    minutes = number(value_at(theirs, "dist_env.timeout_minutes"))
    if minutes:
        put("mesh.timeout_s", int(minutes * 60), "dist_env.timeout_minutes")
    columns = value_at(theirs, "dataset.column_mapping")
    if isinstance(columns, Mapping):
        # the context is the system's turn there
        renamed = {{"context": "system"}.get(name, name): own for name, own in columns.items()}
        put("dataset.columns", renamed, "dataset.column_mapping")
    if value_at(theirs, "checkpoint.enabled") is False:
        put("checkpoint.every_steps", 0, "checkpoint.enabled")
        put("checkpoint.export_hf", False, "checkpoint.enabled")
    held_out = theirs.get("validation_dataset")
    if not isinstance(held_out, Mapping):
        return
    paths = ("path_or_dataset", "path_or_dataset_id", "dataset_name", "paths")
    ours, other = (
        next((part[name] for name in paths if part.get(name)), None)
        for part in (theirs.get("dataset") or {}, held_out)
    )
    split = held_out.get("split")
    if other is not None and other != ours:
        put("dataset.val_path", other, "validation_dataset")
        if split not in (None, "train"):
            yield f"validation_dataset.split={split}: dataset.val_path reads the split of training"
    elif split:
        put("dataset.val_split", split, "validation_dataset.split")


def _torchtune(theirs: Tree, put: Set) -> Iterator[str]:
    steps = number(theirs.get("max_steps_per_epoch"))
    epochs = number(theirs.get("epochs"))
    if steps:
        put("training.max_steps", int(steps * (epochs or 1)), "max_steps_per_epoch x epochs")
        put("training.num_epochs", None, "max_steps_per_epoch")
    column = value_at(theirs, "dataset.conversation_column") or ""
    if column and column not in ("messages", "conversations"):
        style = value_at(theirs, "dataset.conversation_style")
        name = "conversations" if style == "sharegpt" else "messages"
        put("dataset.columns", {name: column}, "dataset.conversation_column")
    split = value_at(theirs, "dataset_val.split")
    ours = value_at(theirs, "dataset.source")
    other = value_at(theirs, "dataset_val.source")
    files = value_at(theirs, "dataset_val.data_files")
    same = value_at(theirs, "dataset_val._component_") == value_at(theirs, "dataset._component_")
    if other not in (None, ours, "json", "csv", "text", "parquet"):
        put("dataset.val_path", other, "dataset_val.source")
    elif files and files != value_at(theirs, "dataset.data_files"):
        put("dataset.val_path", files, "dataset_val")
    elif split and (other == ours) and same:
        put("dataset.val_split", split, "dataset_val.split")
    elif theirs.get("dataset_val"):
        yield "dataset_val: name the held-out file, dataset.val_path, or a part, dataset.val_frac"


def _modules(peer: str, theirs: Tree, put: Set) -> Iterator[str]:
    """The layers that get an adapter."""
    if peer == "torchtune":
        model = theirs.get("model")
        if not isinstance(model, Mapping) or not isinstance(model.get("lora_attn_modules"), list):
            return
        modules = [str(name) for name in model["lora_attn_modules"]]
        if model.get("apply_lora_to_mlp"):
            modules += MLP
        if model.get("apply_lora_to_output"):
            modules.append("lm_head")
        modules = ["o_proj" if name == "output_proj" else name for name in modules]
        put("peft.target_modules", modules, "lora_attn_modules, apply_lora_to_mlp and _output")
        return
    names = (
        "peft.target_modules",
        "lora_target_modules",
        "lora_target",
        "peft_config.target_modules",
    )
    given = ((name, value_at(theirs, name)) for name in names)
    name, value = next((pair for pair in given if pair[1]), ("", None))
    all_linear = theirs.get("lora_target_linear") or value_at(theirs, "peft.match_all_linear")
    if all_linear or value in ("all", "all-linear", "all_linear", ["all-linear"]):
        put("peft.target_modules", "all-linear", name or "all linear layers")
        return
    if isinstance(value, str):
        value = re.split(r"\s*,\s*", value)
    if not isinstance(value, list):
        return
    plain = [str(part).lstrip("*.").removeprefix("*") for part in value]
    if all(re.fullmatch(r"\w+(\.\w+)*", part) for part in plain):
        put("peft.target_modules", plain, name)
    else:
        yield f"{name}={format_value(value)}: a pattern: name the layers, peft.target_modules=[...]"


def _held_out_frac(theirs: Tree, put: Set) -> Iterator[str]:
    """A fraction of the rows, or their number, which is not known here to be a fraction."""
    for name in ("val_set_size", "val_size"):
        size = number(theirs.get(name))
        if size is None or size <= 0:
            continue
        if size < 1:
            put("dataset.val_frac", size, name)
        else:
            yield f"{name}={int(size)}: a number of rows: dataset.val_frac is their share"


def named_datasets(theirs: Tree, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns LLaMA-Factory's datasets as settings of a dataset, by its list of names where the
    list is found, and a line for each name that it does not have.

    folder   of the configuration; its parents and the working directory are looked in
    """
    named = theirs.get("dataset") or theirs.get("train_dataset")
    names = named if isinstance(named, list) else str(named or "").split(",")
    data = str(theirs.get("dataset_dir") or "data")
    listed, folder = _listed_datasets(data, folder)
    found = []
    unsaid = []
    for name in filter(None, (str(name).strip() for name in names)):
        entry = listed.get(name)
        if isinstance(entry, Mapping):
            found.append(_listed_source(name, entry, folder))
            if others := _unknown_tags(entry.get("tags") or {}):
                unsaid.append(
                    f"dataset={name}: tags: {', '.join(others)} are not read: dataset.format"
                )
            continue
        found.append({"path": name})
        if not Path(name).suffix and "/" not in name:
            unsaid.append(
                f"dataset={name}: a name of {data}/dataset_info.json, which does not have it "
                "here: dataset.path=FILE"
            )
    return found, unsaid


def _listed_datasets(data: str, folder: Path) -> tuple[Tree, Path]:
    """Returns the list of datasets, empty where none is found, and the folder of their files."""
    for root in (Path(), folder, *folder.parents):
        path = root / data / "dataset_info.json"
        if not path.is_file():
            continue
        with explained(f"{path} is no JSON", ValueError):
            listed = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(listed, Mapping):
            raise ConfigError(f"{path} is no object with an entry for each dataset.")
        return listed, path.parent
    return {}, folder


def _listed_source(name: str, entry: Tree, folder: Path) -> dict[str, Any]:
    hub = entry.get("hf_hub_url") or entry.get("ms_hub_url") or name
    file = entry.get("file_name")
    source: dict[str, Any] = {"path": str(folder / str(file)) if file else hub}
    if entry.get("ranking"):
        source["format"] = "preference"
    standard = {"prompt": "instruction", "query": "input", "response": "output"}
    if entry.get("formatting") == "sharegpt":
        standard = {"messages": "conversations"}
    columns = {
        standard.get(key, key): column
        for key, column in (entry.get("columns") or {}).items()
        if column not in (standard.get(key, key), "messages", "conversations")
    }
    if columns:
        source["columns"] = columns
    return source


def _unknown_tags(tags: Tree) -> list[str]:
    known = {"from", "value", "role", "content", "human", "gpt", "user", "assistant", "system"}
    return sorted(str(value) for value in tags.values() if value not in known)
