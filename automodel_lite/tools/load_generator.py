"""Loads a trained model to answer: from an exported folder, an adapter or by a hub name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from automodel_lite.config.components import naming_package
from automodel_lite.config.model_files import check_model_files
from automodel_lite.data.tokens.tokenizer import use_processors_template
from automodel_lite.errors import (
    ConfigError,
    did_you_mean_path,
    is_out_of_memory,
    is_out_of_threads,
    one_line,
)
from automodel_lite.evaluation.generator import Generator
from automodel_lite.models.source import (
    ask_no_hub_without_network,
    check_finite,
    check_source,
    hub_reason,
    load_whole,
)
from automodel_lite.parts.images import open_images


def load_generator(
    source: str,
    trust_remote_code: bool = False,
    on_cpu: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Generator:
    """Loads from a model or adapter folder, or by a hub name; on a GPU in bf16, unless `on_cpu`.

    Raises ConfigError for a model of code that is not trusted.
    """
    is_adapter = (Path(source) / "adapter_config.json").is_file()
    if is_adapter:
        check_model_files("model", Path(source))
        ask_no_hub_without_network()  # for its base
    else:
        check_source("model", source)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file makes of its reader
        if is_out_of_memory(error) or is_out_of_threads(error):
            raise
        if isinstance(error, OSError) and not Path(source).is_dir():
            raise ConfigError(
                f"model={source}: no folder has that name{did_you_mean_path(source)} As a "
                f"name of the hub: {hub_reason(error)}"
            ) from error
        if "instantiate the backend tokenizer" in str(error):
            raise ConfigError(
                f"{source}: the folder has no tokenizer.json: copy it from the model that was "
                "trained."
            ) from None
        raise ConfigError(f"{source} cannot be loaded as a tokenizer: {one_line(error)}") from error
    use_processors_template(tokenizer, Path(source))
    has_gpu = torch.cuda.is_available() and not on_cpu
    load: Any = load_whole
    if is_adapter:
        with naming_package(source):
            from automodel_lite.parts.adapters.lora import load_adapted as load  # with peft
    dtype = torch.bfloat16 if has_gpu else torch.float32
    try:
        model = load(source, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:
        if is_out_of_memory(error) or is_out_of_threads(error):
            raise
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise ConfigError(
                f"{source} cannot be loaded as a model: {hub_reason(error)}"
            ) from error
        raise ConfigError(
            f"{source} runs its own code: review it, and allow it with --trust-remote-code."
        ) from None
    check_finite(model, source)
    model = model.eval().to("cuda" if has_gpu else "cpu")
    return Generator(model, tokenizer, source, template_kwargs or {}, open_images=open_images)
