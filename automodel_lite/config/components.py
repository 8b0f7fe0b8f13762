"""Parts of a configuration: `build` makes the object that a block with a `_target_` describes.

Objects that exist only at run time (the tokenizer, the model's parameters) are handed to `build(block, object,
name=object)`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from automodel_lite.errors import ConfigError, did_you_mean

EXTRAS = {  # optional package -> the extra that brings it
    "bitsandbytes": "qlora",
    "flash_attn": "flash",
    "liger_kernel": "liger",
    "matplotlib": "plots",
    "peft": "peft",
    "tensorboard": "tensorboard",
    "torchao": "ao",
    "trackio": "trackio",
    "transformer_engine": "te",
    "wandb": "wandb",
}


def missing_package(wanted_by: str, package: str) -> str:
    """One sentence with the pip line that brings an optional package."""
    return f"{wanted_by} needs the package {package}: pip install 'automodel-lite[{EXTRAS[package]}]'."


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
