"""Reads a model's config and weights from a folder or the hub, and names the cause of what goes
wrong there.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub
import transformers
from safetensors import SafetensorError
from transformers import PretrainedConfig
from transformers.utils import logging as transformers_logging

from automodel_lite.config.rules import check_folder
from automodel_lite.errors import (
    ConfigError,
    folders_with,
    is_limit,
    is_lost_peer,
    is_out_of_memory,
    is_out_of_threads,
    one_line,
)
from automodel_lite.models.layers import local

SHAPES = Path(__file__).parent / "shapes"
"""config.json of the presets' models: sizes are estimated without a network."""


def check_source(key: str, source: str) -> None:
    """Raises ConfigError for a folder that holds no model, or that is not there."""
    if not check_folder(key, source):
        ask_no_hub_without_network()
    elif not (Path(source).expanduser() / "config.json").is_file():
        near = folders_with("config.json", Path(source).expanduser())
        raise ConfigError(f"{key}={source}: the folder has no config.json{near}")


def ask_no_hub_without_network() -> None:
    """Lets the hub's library answer from its cache alone where the hub's name does not resolve: it
    would ask for half a minute.
    """
    host = urlsplit(huggingface_hub.constants.ENDPOINT).hostname
    if host is None or getproxies():
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def load_config(source: str, options: dict[str, Any], key: str) -> PretrainedConfig:
    shape = SHAPES / f"{source.replace('/', '--')}.json"
    try:
        # Without a network each question to the hub is retried for 26 s: the stored shape answers
        # where nothing is cached.
        config: PretrainedConfig = transformers.AutoConfig.from_pretrained(
            source,
            local_files_only=shape.is_file() and options["revision"] == "main",
            **options,
        )
    except OSError as error:
        if not shape.is_file():
            raise _not_there(source, error) from None
        config = transformers.AutoConfig.from_pretrained(shape)
        config._name_or_path = source
    except Exception as error:  # whatever a damaged or unknown config.json makes of its reader
        if is_limit(error):
            raise
        # trusted code fails for reasons of its own, whatever its words
        if options["trust_remote_code"] or "trust_remote_code" not in str(error):
            raise ConfigError(f"the model {source} cannot be loaded: {one_line(error)}") from error
        raise ConfigError(
            f"{key}.pretrained={source} runs its own code: review it, and allow it on the command "
            f"line with {key}.trust_remote_code=true and its commit as {key}.revision=... ."
        ) from None
    drop_kernels(config)
    return config


def drop_kernels(config: PretrainedConfig) -> None:
    """Takes the attention and the experts that a config.json names out of it, and of its parts:
    they may be the name of a repository whose code transformers would load. The settings
    `attention` and `model.experts` choose them.
    """
    config._attn_implementation = None
    config._experts_implementation = None


def hub_reason(error: Exception) -> str:
    """Returns a sentence on why the hub has no such model."""
    reason = one_line(error)
    if "couldn't connect" in reason:
        return "the hub cannot be reached, and its cache has no such model."
    return reason


def _not_there(source: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"the model {source} cannot be loaded: {hub_reason(error)} Use a folder, or "
        f"download the model where there is a network: hf download {source}."
    )


@contextmanager
def loading_errors(
    source: str, config: PretrainedConfig, quantization: dict[str, Any] | None
) -> Iterator[None]:
    """Names the cause of what goes wrong inside, where weights are read."""
    # Its load report is a table of terminal escapes; what matters in it is an error or a note.
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except OSError as error:
        raise _not_there(source, error) from None
    except SafetensorError as error:
        raise ConfigError(
            f"the model {source}: the weights are truncated or not safetensors ({error}): "
            "download them again."
        ) from None
    except pickle.UnpicklingError:
        # torch's own text explains how to run the code that is in the file
        raise ConfigError(
            f"the model {source}: its weights are a pickle that holds more than tensors, "
            "which may be a program: use a checkpoint in safetensors."
        ) from None
    except ValueError as error:  # converters of the family that the quantizer cannot extend
        if isinstance(error, ConfigError) or not quantization:
            raise
        raise ConfigError(
            f"the model {source}: transformers cannot read {quantization['quant_method']} "
            f"weights of {config.model_type} ({one_line(error, 100)}): use the original checkpoint."
        ) from None
    except RuntimeError as error:  # shapes that do not fit
        if is_out_of_memory(error) or is_out_of_threads(error) or is_lost_peer(error):
            # no setting is at fault: these have exit codes of their own, and a job may start again
            raise
        raise ConfigError(f"the model {source}: {one_line(error, 500)}") from None
    finally:
        transformers_logging.set_verbosity(verbosity)


def check_finite(model: transformers.PreTrainedModel, source: str) -> None:
    """Raises ConfigError when a loaded weight is infinite or not a number: every loss would be."""
    damaged = []
    for name, weight in model.named_parameters():
        # The extremes are infinite or NaN when any value is, and need no mask as large as the
        # weight.
        here = local(weight.detach())
        if (
            here.is_floating_point()
            and here.numel()
            and not all(bool(value.isfinite()) for value in here.aminmax())
        ):
            damaged.append(name)
    if damaged:
        raise ConfigError(
            f"{source}: {len(damaged)} weights hold values that are not finite (inf or NaN), "
            f"{damaged[0]} first: the file is damaged, or its training diverged; download it again."
        )
