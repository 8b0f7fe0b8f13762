"""A model's weights as safetensors files under the names of its family's checkpoints, written by
all ranks together.

One parameter after the other is gathered, so that a rank holds its shards, one whole tensor, and on
the host the file that it writes next; different ranks write at the same time.

An export also takes over things from the checkpoint that the model came from. Some of its weights
are not part of the model that transformers builds (layers that predict several tokens), some are
stored in fp32 among bf16 ones (decays of state spaces, routers), and beside the weights lie files
of which the model knows nothing (how images are cut). Whoever serves the export, vLLM for one,
expects to find them as they were.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from automodel_lite.models.mtp import copies_of_trained
from automodel_lite.models.source import heads_apart, quantization_of
from automodel_lite.run import durable

_NO_SETTINGS = frozenset(
    {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures"}
)
INDEX = "model.safetensors.index.json"
_OF_PROCESSORS = ("*processor*.json",)
_OF_TOKENIZERS = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates/*",
)
_BLOCK_BYTES = 4096
_NUM_BLOCKS = 32  # of a file of weights; its header is the first
Tensors = dict[str, Tensor]  # by name
Dtypes = dict[str, torch.dtype]


def local_folder(source: str | None, revision: str | None = None) -> Path | None:
    """Returns the folder of a model: `source`, or a hub model's cached snapshot; None for one that
    is not here.
    """
    if not source or Path(source).is_dir():
        return Path(source) if source else None
    try:
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
    except ValueError:  # no name that the hub could have
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def model_files(pretrained: str | None, revision: str | None = None) -> dict[str, str]:
    """Returns name -> digest of each configuration, weight and code file of a `local_folder`; of
    large ones their size and 32 blocks are hashed, the header among them: weights that were trained
    further differ in each block.
    """
    folder = local_folder(pretrained, revision)
    if folder is None:
        return {}
    found = sorted(
        path
        for pattern in ("*.json", "*.safetensors", "*.bin", "*.py")
        for path in folder.glob(pattern)
    )
    return {
        path.name: _sampled_digest(path)
        for path in found
        if path.is_file() and not path.name.startswith(("tokenizer", "special_"))
    }


def adapter_files(adapter: str) -> dict[str, str]:
    """Returns the same of an adapter's folder, or a run's with one."""
    folder = Path(adapter).expanduser()
    return model_files(str(folder / "adapter")) or model_files(str(folder))


def tokenizer_files(source: str) -> dict[str, str]:
    """Returns the same of a tokenizer's files and templates, beside a model's or alone."""
    folder = local_folder(str(Path(source).expanduser()) if source.startswith("~") else source)
    if folder is None:
        return {}
    found = sorted({path for pattern in _OF_TOKENIZERS for path in folder.glob(pattern)})
    return {
        path.relative_to(folder).as_posix(): _whole_digest(path) for path in found if path.is_file()
    }


def _whole_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _sampled_digest(path: Path) -> str:
    """Returns 16 hex digits of a file's size and some of its blocks; all of them, when
    it is small.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb", buffering=0) as file:  # nothing is read ahead
        if size <= _BLOCK_BYTES * _NUM_BLOCKS:
            digest.update(file.read())
        else:
            for number in range(_NUM_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def weight_files(folder: Path) -> dict[str, Path]:
    """key -> the safetensors file that has it."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def read_weights(places: Mapping[str, Path]) -> Tensors:
    """Reads weights by their names, each from the safetensors file that has it."""
    weights: Tensors = {}
    for path in sorted(set(places.values())):
        with safe_open(path, "pt") as file:
            weights |= {key: file.get_tensor(key) for key in sorted(places) if places[key] == path}
    return weights


def _original(lm: transformers.PreTrainedModel) -> Path | None:
    """Returns where the checkpoint lies that the model came from; None for a model from scratch."""
    return local_folder(lm.config._name_or_path, getattr(lm.config, "_commit_hash", None))


def stored_dtypes(model: transformers.PreTrainedModel, dtype: torch.dtype) -> Dtypes:
    """The dtype of each weight in an export of `dtype`, by the names of the state dict: fp32 for
    what the family keeps so (the biases by which routers choose), and for what the original
    checkpoint has in fp32.
    """
    plan = model._get_dtype_plan(dtype)
    kept = re.compile("|".join(key.replace("*", ".*") for key in plan)) if plan else None
    # keys of the original checkpoint in fp32, none if all of it is
    folder = _original(model) if dtype != torch.float32 else None
    by_dtype: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder else ():
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                by_dtype.setdefault(file.get_slice(key).get_dtype(), set()).add(key)
    wide = by_dtype.get("F32", set()) if by_dtype.keys() - {"F32"} else set()
    result = {}
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            continue
        keys = {name}  # under which it is saved; of one that is saved with others alone, its own
        with suppress(ValueError):
            keys = set(as_saved(model, {name: value.to("meta")})) if wide else keys
        is_wide = bool(kept and kept.search(name)) or keys <= wide
        result[name] = torch.float32 if is_wide else dtype
    return result


def as_saved(model: transformers.PreTrainedModel, weights: Tensors) -> Tensors:
    """Weights of the model under the names, and in the parts, that its checkpoints have."""
    from transformers.core_model_loading import revert_weight_conversion  # brings the models' code

    return revert_weight_conversion(model, weights)


def take_over(lm: transformers.PreTrainedModel, folder: Path) -> None:
    """Gives an export what only the original checkpoint has: see the top of this file; config.json
    where unchanged.
    """
    original = _original(lm)
    if original is None or original == folder:
        return
    is_trusted = type(lm.config).__module__.startswith("transformers_modules.")
    config = transformers.AutoConfig.from_pretrained(original, trust_remote_code=is_trusted)
    if _settings(config.to_dict()) == _settings(lm.config.to_dict()):
        shutil.copy(original / "config.json", folder / "config.json")
    for pattern in _OF_PROCESSORS:
        for path in original.glob(pattern):
            if not (folder / path.name).exists():
                shutil.copy(path, folder / path.name)
    _add_weights(lm, folder, original)


def _add_weights(lm: transformers.PreTrainedModel, folder: Path, original: Path) -> None:
    """Writes the weights that the family's model leaves out into a file more of an export, and the
    index of all.
    """
    ignored = lm._keys_to_ignore_on_load_unexpected or ()
    ours = weight_files(folder)
    theirs = weight_files(original)
    left = {
        key
        for key in theirs.keys() - ours.keys()
        if any(re.search(pattern, key) for pattern in ignored)
    }
    left |= heads_apart(theirs.keys(), lm.config) - ours.keys()
    if not left or quantization_of(lm.config):
        return
    weights = read_weights({key: theirs[key] for key in left})
    if any(".eh_proj." in key for key in ours):  # of heads that were trained
        copies = copies_of_trained(weights, ours)
        trained = read_weights({name: ours[name] for name in copies.values()})
        weights |= {key: trained[name] for key, name in copies.items()}
    files = sorted(set(ours.values()))
    names = _file_names(len(files) + 1)
    for path, name in zip(files, names):
        path.rename(folder / name)
    save_file(weights, folder / names[-1], metadata={"format": "pt"})
    renamed = dict(zip(files, names))
    places = {key: renamed[path] for key, path in ours.items()} | dict.fromkeys(weights, names[-1])
    metadata = {"total_size": sum((folder / name).stat().st_size for name in names)}
    index = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that do not describe the model."""
    kept = {key: value for key, value in config.items() if key not in _NO_SETTINGS}
    return {
        key: _settings(value) if isinstance(value, dict) else value for key, value in kept.items()
    }


LARGEST_FILE_BYTES = 1 << 30
LEAST_FILE_BYTES = 64 << 20
"""A model is split so far that each rank has a file to write, but into no smaller ones."""
_LAYER = re.compile(r".*?\.\d+\.")
"""`model.layers.3.` of a parameter's name."""


@dataclass(frozen=True)
class Group:
    """Parameters that become weights of the files together: nearly always one, which may be fused
    of many weights.
    """

    parameters: list[str]
    weights: Tensors  # on the meta device, in their dtypes

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())


@dataclass(frozen=True)
class WeightFile:
    name: str
    writer: int  # rank
    groups: list[Group]


def write_weights(
    folder: Path,
    lm: transformers.PreTrainedModel,
    dtypes: Dtypes,
    is_alone: bool = False,
) -> None:
    """Writes `lm`, whose parameters may be sharded, into a folder that exists; every rank of the
    job calls it.

    dtypes     of the parameters, by their names in the model
    is_alone   one rank calls it, which has the whole model
    Raises OSError for a file that cannot be written, when all ranks have gathered the rest.
    """
    rank, ranks = (
        (dist.get_rank(), dist.get_world_size())
        if dist.is_initialized() and not is_alone
        else (0, 1)
    )
    files = plan_files(groups_of(lm, dtypes), ranks)
    failure = ""
    for file, weights in gathered_files(lm, files, dtypes, rank, ranks):
        try:
            save_file(weights, folder / file.name, metadata={"format": "pt"})
            durable.sync(folder / file.name)
        except (OSError, SafetensorError) as error:
            failure = failure or f"{file.name} could not be written: {error}"
    if failure:
        raise OSError(failure)
    if rank == 0 and len(files) > 1:
        names = {
            name: file.name for file in files for group in file.groups for name in group.weights
        }
        size = sum(group.num_bytes for file in files for group in file.groups)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
        durable.write_file(folder / INDEX, json.dumps(index, indent=2))


def plan_files(groups: list[Group], ranks: int) -> list[WeightFile]:
    """Groups in order, distributed to files of about the same size, and these to the ranks."""
    total = sum(group.num_bytes for group in groups)
    wanted = max(math.ceil(total / LARGEST_FILE_BYTES), min(ranks, total // LEAST_FILE_BYTES), 1)
    parts: list[list[Group]] = [[] for _ in range(wanted)]
    before = 0
    for group in groups:
        parts[min(before * wanted // max(total, 1), wanted - 1)].append(group)
        before += group.num_bytes
    parts = [part for part in parts if part]
    names = _file_names(len(parts))
    return [WeightFile(name, i % ranks, part) for i, (name, part) in enumerate(zip(names, parts))]


def _file_names(count: int) -> list[str]:
    """Returns those that transformers gives to a model in so many files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def gathered_files(
    lm: transformers.PreTrainedModel,
    files: list[WeightFile],
    dtypes: Dtypes,
    rank: int,
    ranks: int,
) -> Iterator[tuple[WeightFile, Tensors]]:
    """Gathers one group after the other (a collective); yields the files of `rank`, with their
    weights on the host.
    """
    state = unique_weights(lm)
    # In rounds of a file for each rank, the first group of each, then the second: all are full at
    # the same time, so that a rank which writes keeps nobody waiting for its part of the next
    # gather.
    for start in range(0, len(files), ranks):
        now = files[start : start + ranks]
        weights = Tensors()
        for groups in zip_longest(*(file.groups for file in now)):
            for file, group in zip(now, groups):
                if group is None:
                    continue
                whole = {}
                for name in group.parameters:
                    # a shard travels as it is stored
                    value = state[name].to(dtypes.get(name, state[name].dtype))
                    value = value.full_tensor() if isinstance(value, DTensor) else value
                    whole[name] = value.cpu() if file.writer == rank else value.new_empty(0)
                if file.writer == rank:
                    saved = as_saved(lm, whole)
                    weights |= {
                        name: saved[name].to(meta.dtype).contiguous()
                        for name, meta in group.weights.items()
                    }
                del whole  # before the next is gathered
        yield from ((file, weights) for file in now if file.writer == rank)


def unique_weights(lm: transformers.PreTrainedModel) -> Tensors:
    """Parameters and persistent buffers; of tied ones the first."""
    ignored = lm._keys_to_ignore_on_save or set()
    seen = set()
    state = {}
    for name, value in lm.state_dict(keep_vars=True).items():
        if name not in ignored and id(value) not in seen:
            seen.add(id(value))
            state[name] = value.detach()
    return state


def groups_of(lm: transformers.PreTrainedModel, dtypes: Dtypes) -> list[Group]:
    """One for each layer, whose parameters a checkpoint may fuse (Ernie's experts), and each
    parameter beside them.
    """
    described = {
        name: torch.empty(x.shape, dtype=dtypes.get(name, x.dtype), device="meta")
        for name, x in unique_weights(lm).items()
    }
    together = as_saved(lm, described)
    of_layers: dict[str, list[str]] = {}
    for name in described:
        layer = _LAYER.match(name)
        of_layers.setdefault(layer[0] if layer else name, []).append(name)
    groups = [
        Group(names, as_saved(lm, {name: described[name] for name in names}))
        for names in of_layers.values()
    ]
    apart = {name: weight.shape for group in groups for name, weight in group.weights.items()}
    if apart != {name: weight.shape for name, weight in together.items()}:
        return [Group(list(described), together)]
    return groups


def whole_weights(lm: transformers.PreTrainedModel, dtypes: Dtypes) -> Iterator[tuple[str, Tensor]]:
    """Yields name and whole tensor of every weight, as files have them, one after the other; every
    rank of the job iterates.
    """
    state = unique_weights(lm)
    for group in groups_of(lm, dtypes):
        whole = {}
        for name in group.parameters:
            value = state[name].to(dtypes.get(name, state[name].dtype))
            whole[name] = value.full_tensor() if isinstance(value, DTensor) else value
        saved = as_saved(lm, whole)
        yield from ((name, saved[name].to(meta.dtype)) for name, meta in group.weights.items())
