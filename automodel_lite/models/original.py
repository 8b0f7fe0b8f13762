"""The checkpoint that a model came from, on the disk: what an export takes over from it.

Some of its weights are not part of the model that transformers builds (layers that predict several tokens), some are
stored in fp32 among bf16 ones (decays of state spaces, routers), and beside the weights lie files of which the model
knows nothing (how images are cut). Whoever serves the export, vLLM for one, expects to find them as they were.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_INDEX = "model.safetensors.index.json"
_NO_SETTINGS = frozenset({"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures"})
_OF_PROCESSORS = ("*processor*.json",)


def original_folder(lm: transformers.PreTrainedModel) -> Path | None:
    """Where the model's checkpoint lies, the hub's in its cache; None for a model from scratch."""
    source = lm.config._name_or_path
    if not source:
        return None
    if Path(source).is_dir():
        return Path(source)
    try:
        revision = getattr(lm.config, "_commit_hash", None)
        return Path(snapshot_download(source, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def weight_files(folder: Path) -> dict[str, Path]:
    """key -> the safetensors file that has it."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def stored_dtypes(model: transformers.PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each weight of `model` in an export of `dtype`, by the names of its state dict.

    fp32 for what the family keeps so, whatever is read (the biases by which routers choose), and for what the original
    checkpoint has in fp32.
    """
    plan = model._get_dtype_plan(dtype)
    kept = re.compile("|".join(key.replace("*", ".*") for key in plan)) if plan else None
    wide = _wide_keys(model) if dtype != torch.float32 else set()
    result = {}
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            continue
        is_kept = kept is not None and kept.search(name) is not None
        result[name] = torch.float32 if is_kept or (wide and _keys_of(model, name, value) <= wide) else dtype
    return result


def _wide_keys(model: transformers.PreTrainedModel) -> set[str]:
    """Keys of the original checkpoint in fp32, none if all of it is."""
    folder = original_folder(model)
    by_dtype: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder else ():
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                by_dtype.setdefault(file.get_slice(key).get_dtype(), set()).add(key)
    return by_dtype.get("F32", set()) if by_dtype.keys() - {"F32"} else set()


def _keys_of(model: transformers.PreTrainedModel, name: str, value: Tensor) -> set[str]:
    """Under which keys transformers saves a weight."""
    return set(as_saved(model, {name: torch.empty(value.shape, dtype=value.dtype, device="meta")}))


def as_saved(model: transformers.PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the model under the names, and in the parts, that its checkpoints have."""
    from transformers.core_model_loading import revert_weight_conversion  # brings the models' code

    saved: dict[str, Tensor] = revert_weight_conversion(model, weights)
    return saved


def take_over(lm: transformers.PreTrainedModel, folder: Path) -> None:
    """Gives an export what only the original checkpoint has: weights that are not part of the model, bit by bit, the
    settings of processors, and its own config.json where no setting was changed.
    """
    original = original_folder(lm)
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
    ignored = lm._keys_to_ignore_on_load_unexpected or ()
    is_quantized = getattr(lm.config, "quantization_config", None) is not None
    ours, theirs = weight_files(folder), weight_files(original)
    left = {key for key in theirs.keys() - ours.keys() if any(re.search(pattern, key) for pattern in ignored)}
    if left and not is_quantized:
        _add(folder, ours, {key: theirs[key] for key in left})


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Without what says nothing of the model."""
    kept = {key: value for key, value in config.items() if key not in _NO_SETTINGS}
    return {key: _settings(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _add(folder: Path, ours: dict[str, Path], theirs: dict[str, Path]) -> None:
    """One file more, and the index of all."""
    weights: dict[str, Tensor] = {}
    for path in sorted(set(theirs.values())):
        with safe_open(path, "pt") as file:
            weights |= {key: file.get_tensor(key) for key, at in theirs.items() if at == path}
    files = sorted(set(ours.values()))
    names = [f"model-{number:05d}-of-{len(files) + 1:05d}.safetensors" for number in range(1, len(files) + 2)]
    for path, name in zip(files, names):
        path.rename(folder / name)
    save_file(weights, folder / names[-1], metadata={"format": "pt"})
    renamed = dict(zip(files, names))
    places = {key: renamed[path] for key, path in ours.items()} | dict.fromkeys(weights, names[-1])
    total = sum((folder / name).stat().st_size for name in names)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))
