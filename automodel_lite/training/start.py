"""Before the first step: the settings that are found out, the model tried without weights, and the
world of ranks.

`try_settings` runs first in every run: the model is described by its config on the meta device,
where it has shapes and no weights, and run on a few tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from automodel_lite.config.components import locate
from automodel_lite.config.schema import Config, TrainingConfig
from automodel_lite.errors import ConfigError
from automodel_lite.models.settings import cannot_work
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parallel.mesh import (
    Mesh,
    init_mesh,
    threads_of,
)
from automodel_lite.run.checkpoint_folder import exported_folder
from automodel_lite.seed import use_deterministic
from automodel_lite.telemetry.console import Console
from automodel_lite.telemetry.metrics import STARTUP
from automodel_lite.training.plan import (
    AUTO,
    Parts,
    build_parts,
    check_parts,
)

AUTO_SETTINGS = "automodel_lite.parts.auto.resolve_auto"


def resolve_auto(config: Config, console: Console | None = None, has_data: bool = True) -> Config:
    """Returns the configuration with a number in place of each `auto` (parts/auto.py), which every
    program asks for first.

    has_data  False: rows come later, from memory
    """
    open_settings = (config.packed_sequence.get("packed_sequence_size"), config.optimizer.get("lr"))
    if AUTO not in open_settings and config.training.micro_batch_size:
        return config
    return locate(AUTO_SETTINGS)(config, console or Console(), has_data)


NUM_TOKENS = 4
_SHAPES = re.compile(
    r"reduction dim|must match the size|is invalid for input|cannot be multiplied|broadcast"
    r"|mismatch"
)
"""Errors of shapes. Others may be the meta device's own: it has no experts in fp32, no values to
look at.
"""


def checked_parts(config: Config) -> Parts:
    """Builds the parts of the configuration, and tries them; raises ConfigError."""
    parts = build_parts(config)
    try_settings(config, parts)
    return parts


def try_settings(config: Config, parts: Parts) -> None:
    """Raises one ConfigError with a line per part of the configuration that cannot work; nothing is
    loaded.
    """
    problems = []
    strategy = "fsdp" if parts.mesh.strategy == "auto" else parts.mesh.strategy
    takers = [
        f"logger.{name}.artifact" for name, part in config.logger.items() if part.get("artifact")
    ]
    if config.hub.push:
        takers.append("hub.push")
    if not config.checkpoint.export_hf:
        problems += [
            f"{key} takes the exported model, which checkpoint.export_hf=false does not write: "
            f"leave that out, or remove this, ~{key}."
            for key in takers
        ]
    for attempt in (
        lambda: build_on_meta(parts.model),
        # a missing argument is named before the weights are read
        lambda: parts.optimizer(nn.Linear(2, 2)),
        lambda: check_parts(parts, strategy, default_device()),
    ):
        try:
            attempt()
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def build_on_meta(source: CausalLM) -> None:
    """Builds the model without weights and, where settings change it, runs it.

    Raises ConfigError when a model of this config cannot be built or run. What the meta device
    cannot do (kernels of other packages, sizes that depend on values) is left to the real model.
    """
    if source.pretrained and not source.overrides:
        return  # its makers have run it
    ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    # one that is made from ids looks at values
    mask = torch.zeros(1, 1, NUM_TOKENS, NUM_TOKENS, device="meta")
    lm = None
    config = source.resolve_model_config({"vocab_size": 64})
    try:
        lm = describe(config).eval()
        with torch.no_grad():
            lm(input_ids=ids, attention_mask=mask, use_cache=False)
    except Exception as error:  # a model's code may raise anything
        if lm is None or not isinstance(error, RuntimeError) or _SHAPES.search(str(error)):
            raise cannot_work(error, source.overrides) from error


def from_run(config: Config) -> Config:
    """Replaces a run's folder in model.pretrained by what that run has exported: its model, or its
    adapter and base.

    Raises ConfigError for a run without an export, and for an adapter that nothing continues.
    """
    pretrained = config.model.get("pretrained")
    folder = exported_folder(pretrained) if pretrained else None
    if not pretrained or not folder or Path(folder) == Path(pretrained).expanduser():
        return config
    tokenizer = {
        key: folder if value == pretrained else value for key, value in config.tokenizer.items()
    }
    model = folder
    peft = config.peft
    settings = Path(folder) / "adapter_config.json"
    if settings.is_file():
        if not peft:
            raise ConfigError(
                f"model.pretrained={pretrained} holds an adapter: peft=lora continues it; to train "
                "the whole model, automodel-lite export merges it into its base first."
            )
        model = json.loads(settings.read_text())["base_model_name_or_path"]
        peft = peft | {"adapter": peft.get("adapter") or folder}
    return replace(
        config, model=config.model | {"pretrained": model}, tokenizer=tokenizer, peft=peft
    )


def open_world(config: Config) -> Mesh:
    """Opens the groups of ranks, and prepares this process; every rank calls it, once its data is
    there: ranks of a group wait only so long for each other.
    """
    mesh = init_mesh(config.mesh)
    STARTUP.lap("groups")
    prepare_process(config.training)
    return mesh


def prepare_process(config: TrainingConfig) -> None:
    """Threads and kernels of this process, before the first kernel runs, after its
    groups are open.
    """
    torch.set_num_threads(threads_of(config.num_threads)[0])
    use_deterministic(config.deterministic)
    if config.tf32:
        torch.set_float32_matmul_precision("high")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
