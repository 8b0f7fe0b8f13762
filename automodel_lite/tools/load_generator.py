"""Loads a trained model to answer: from an exported folder, an adapter or by a hub name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from automodel_lite.config.components import naming_package
from automodel_lite.config.model_files import check_model_files, check_writes, scores_alone
from automodel_lite.data.tokens.tokenizer import use_processors_template
from automodel_lite.errors import ConfigError, did_you_mean_path, is_limit, one_line
from automodel_lite.evaluation.generator import Generator
from automodel_lite.extras.load_run import load_trained
from automodel_lite.models.reading import (
    ask_no_hub_without_network,
    check_finite,
    check_source,
    hub_reason,
)
from automodel_lite.models.source import load_whole
from automodel_lite.parts.images import open_images
from automodel_lite.run.checkpoint_folder import exported_folder
from automodel_lite.run.folder import saved_config
from automodel_lite.telemetry.console import quiet_libraries


def load_exported(
    model: str,
    trust_remote_code: bool = False,
    on_cpu: bool = False,
    checkpoint: str | None = None,
) -> Generator:
    """Loads what a run has exported, a folder or a name of the hub, to answer as it was trained.

    checkpoint  which one of a run the export must be of: best, latest or a name; None = the newest

    Raises ConfigError for a run without such an export.
    """
    folder = exported_folder(model, checkpoint)
    quiet_libraries()
    saved = settings_of(Path(model).expanduser())
    generator = load_generator(folder, trust_remote_code, on_cpu, template_kwargs_of(saved))
    return replace(generator, most_pixels=most_pixels_of(saved))


def load_checkpoint(run: Path, name: str, on_cpu: bool = False) -> Generator:
    """Loads a checkpoint of a run that has not exported it, to answer texts; on a GPU in bf16,
    unless `on_cpu`.
    """
    quiet_libraries()
    if settings_of(run).get("model", {}).get("head") == "score":
        raise scores_alone(str(run))
    trained = load_trained(run, name, is_alone=True)
    model = trained.model.lm.eval()
    if torch.cuda.is_available() and not on_cpu:
        model = model.to("cuda", torch.bfloat16)
    return Generator(model, trained.tokenizer, template_kwargs=template_kwargs_of(settings_of(run)))


def settings_of(run: Path) -> dict[str, Any]:
    """Returns what a run was trained with; nothing of a folder without a config.yaml."""
    path = run / "config.yaml"
    return saved_config(path) if path.is_file() else {}


def template_kwargs_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables of the chat template that a run was trained with."""
    found: dict[str, Any] = saved.get("tokenize", {}).get("template_kwargs", {})
    return found


def most_pixels_of(saved: Mapping[str, Any]) -> int | None:
    """Returns how many pixels of an image a run was trained on, of a mixture the most of its sets
    of images; None: as many as the processor takes.
    """
    dataset = saved.get("dataset", {})
    sets = [dataset, *(one["dataset"] for one in dataset.get("sources", {}).values())]
    of_images = [one for one in sets if ".images." in one.get("_target_", "")]
    found = [one.get("max_image_pixels") for one in of_images]
    return None if None in found else max(found, default=None)


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
        if is_limit(error):
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
    check_writes(source)
    use_processors_template(tokenizer, Path(source))
    has_gpu = torch.cuda.is_available() and not on_cpu
    load: Any = load_whole
    if is_adapter:
        with naming_package(source):
            from automodel_lite.parts.adapters.adapter import load_adapted as load  # with peft
    dtype = torch.bfloat16 if has_gpu else torch.float32
    try:
        model = load(source, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:
        if is_limit(error):
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
