"""Mends, for as long as a checkpoint is read, what transformers' converters of weights do not meet.

ranks without an expert         6 experts over 4 ranks lie as 2, 2, 2, 0
errors in a converter           are named, where transformers refers to a report that is not shown
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, modeling_utils
from transformers.core_model_loading import WeightConverter

from automodel_lite.errors import CPU_MEMORY, ConfigError, one_line


@contextlib.contextmanager
def converting_exactly() -> Iterator[None]:
    """Converts checkpoints, inside, for ranks without experts, too; failures name their weight."""
    with (
        replaced(WeightConverter, "convert", _convert),
        replaced(modeling_utils, "log_state_dict_report", _raise_conversion_error),
    ):
        yield


_convert_all = WeightConverter.convert
_report = modeling_utils.log_state_dict_report


def _convert(
    converter: WeightConverter, layer_name: str, model: Any = None, **more: Any
) -> dict[str, Any]:
    """Converts as transformers does; a rank that holds no expert has nothing to stack, and gets its
    empty shard.
    """
    owner, _, last = layer_name.rpartition(".")
    shard: Any = (
        vars(model.get_submodule(owner))["_parameters"].get(last) if model is not None else None
    )
    # The engine hands each expert to the rank that owns it: a rank beyond the last one is handed
    # nothing.
    is_empty = isinstance(shard, DTensor) and shard.numel() and not shard.to_local().numel()
    if is_empty and len(converter.target_patterns) == 1:
        converter.materialize_tensors()  # none: other ranks take them
        return {layer_name: torch.empty_like(shard.to_local(), device="cpu")}
    return _convert_all(converter, layer_name, model=model, **more)


def _raise_conversion_error(
    *, pretrained_model_name_or_path: str, loading_info: Any, **more: Any
) -> None:
    for name, text in loading_info.conversion_errors.items():
        # transformers keeps the text of a converter's error and not the error: its kind is found
        # again by its name.
        if "OutOfMemoryError" in text or CPU_MEMORY.search(text):
            raise torch.OutOfMemoryError(f"while {name} was converted: {one_line(text[-300:])}")
        reason = text.partition("\nError: ")[0].strip().splitlines()[-1]
        raise ConfigError(
            f"model.pretrained={pretrained_model_name_or_path}: the weight {name} cannot be "
            f"converted: {one_line(reason)}"
        )
    _report(
        pretrained_model_name_or_path=pretrained_model_name_or_path,
        loading_info=loading_info,
        **more,
    )


@contextlib.contextmanager
def extending(extend: Callable[[PreTrainedModel], None]) -> Iterator[None]:
    """Extends a model that is loaded inside while it is on the meta device: its own weights and the
    others are read alike. transformers looks up a model's conversions between the two.
    """
    look_up = modeling_utils.get_model_conversion_mapping

    def extended(model: PreTrainedModel, *arguments: Any) -> Any:
        extend(model)
        return look_up(model, *arguments)

    with replaced(modeling_utils, "get_model_conversion_mapping", extended):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Replaces `owner.name` inside. transformers has some of these as methods that a model may
    override; here all models do, for as long as one is made.
    """
    is_own = name in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
