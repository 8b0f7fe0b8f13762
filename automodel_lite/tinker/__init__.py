"""Tinker's Python API in process: its scripts run on the training client, without its service.

    python -m automodel_lite.tinker SCRIPT ...        or, in a script, before its first client:
    automodel_lite.tinker.install()

The types (`Datum`, `ModelInput`, `AdamParams`, ...) are those of the package `tinker`, which the
extra `automodel-lite[tinker]` brings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from automodel_lite.config.components import naming_package

__all__ = ["install"]


def install(
    models: Mapping[str, Sequence[str]] | None = None,
    folder: str | Path | None = None,
    settings: Sequence[str] = (),
    sampler: str | None = None,
    sampler_folder: str | Path | None = None,
) -> None:
    """Puts these clients in place of the service's, for the rest of the process; raises
    MissingPackageError without the package `tinker`.

    models    what a base model's name stands for: overrides, and first, if it is not `policy`, a
              preset: {"Qwen/Qwen3-8B": ["model.pretrained=/models/qwen3-8b", "mesh.dp_shard=2"]}.
              Other names are folders or hub names
    folder    of the runs, in which checkpoints are; None = runs/tinker
    settings  overrides for all models
    sampler   address of a vLLM or SGLang server, which draws in place of the models in memory
    sampler_folder  that the server sees, too, for the weights; None = inside `folder`
    """
    with naming_package("Tinker's API"):
        from tinker.lib import public_interfaces
    from automodel_lite.tinker import cookbook
    from automodel_lite.tinker.engines import SETTINGS
    from automodel_lite.tinker.rest import RestClient
    from automodel_lite.tinker.sampling import SamplingClient
    from automodel_lite.tinker.service import ServiceClient
    from automodel_lite.tinker.training import TrainingClient

    SETTINGS.models.update({name: tuple(given) for name, given in (models or {}).items()})
    if folder is not None:
        SETTINGS.folder = Path(folder)
    if settings:
        SETTINGS.overrides = tuple(settings)
    if sampler is not None:
        SETTINGS.sampler = sampler
    if sampler_folder is not None:
        SETTINGS.sampler_folder = Path(sampler_folder)
    cookbook.adapt(models or {}, SETTINGS.folder)
    for client in (RestClient, SamplingClient, ServiceClient, TrainingClient):
        name = client.__name__
        theirs = getattr(public_interfaces, name)
        # wherever its name was imported already, also in the script
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is theirs:
                setattr(module, name, client)
