"""Tinker's Python API in process: its scripts run on the training client, without its service.

    python -m automodel_lite.tinker SCRIPT ...        or, in a script, before its first client:
    automodel_lite.tinker.install()

The types (`Datum`, `ModelInput`, `AdamParams`, ...) are those of the package `tinker`, which the
extra `automodel-lite[tinker]` brings.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer

from automodel_lite.config.components import naming_package
from automodel_lite.errors import MissingPackageError

try:
    with naming_package("Tinker's API"):
        import tinker
except MissingPackageError as error:
    if sys.argv[0] != "-m":
        raise
    # as a command: its module is not even found yet, and nothing else would catch the sentence
    print(error, file=sys.stderr)
    sys.exit(2)

from automodel_lite.tinker.engines import SETTINGS
from automodel_lite.tinker.rest import RestClient
from automodel_lite.tinker.sampling import SamplingClient
from automodel_lite.tinker.service import ServiceClient
from automodel_lite.tinker.training import TrainingClient

__all__ = ["RestClient", "SamplingClient", "ServiceClient", "TrainingClient", "install"]
CLIENTS = (RestClient, SamplingClient, ServiceClient, TrainingClient)


def install(
    models: Mapping[str, Sequence[str]] | None = None,
    folder: str | Path | None = None,
    settings: Sequence[str] = (),
) -> None:
    """Puts these clients in place of the service's, for the rest of the process.

    models    what a base model's name stands for: overrides, and first, if it is not `policy`, a
              preset: {"Qwen/Qwen3-8B": ["model.pretrained=/models/qwen3-8b", "mesh.dp_shard=2"]}.
              Other names are folders or hub names
    folder    of the runs, in which checkpoints are; None = runs/tinker
    settings  overrides for all models
    """
    SETTINGS.models.update({name: tuple(given) for name, given in (models or {}).items()})
    if folder is not None:
        SETTINGS.folder = Path(folder)
    if settings:
        SETTINGS.overrides = tuple(settings)
    _register_tokenizers(models or {})
    # names that others have imported from the package's modules, too
    ours = {client.__name__: client for client in CLIENTS}
    for module in [tinker, *map(sys.modules.get, sorted(sys.modules))]:
        if getattr(module, "__name__", "").partition(".")[0] == tinker.__name__:
            for name, client in ours.items():
                if name in vars(module):
                    setattr(module, name, client)


def _register_tokenizers(models: Mapping[str, Sequence[str]]) -> None:
    """Lets the cookbook find the tokenizers of names that stand for folders."""
    if find_spec("tinker_cookbook") is None:
        return
    from tinker_cookbook.tokenizer_utils import register_tokenizer

    for name, given in models.items():
        for override in given:
            key, _, source = override.partition("=")
            if key == "model.pretrained":
                register_tokenizer(name, partial(AutoTokenizer.from_pretrained, source))
