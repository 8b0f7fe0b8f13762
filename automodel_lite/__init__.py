"""automodel_lite: fine-tune Hugging Face causal language models on packed sequences in THD format.

The names below are the package's Python interface (docs/python.md); each is imported when it is
first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from automodel_lite.version import __version__

if TYPE_CHECKING:
    from automodel_lite.data.packing.packs import PackedDataset, Packer
    from automodel_lite.data.packing.plan import plan_packs
    from automodel_lite.extras.api import hf_collater, install_attention, tokenize_chats, train
    from automodel_lite.extras.client import TrainingClient
    from automodel_lite.extras.client.sampling_client import SamplingClient
    from automodel_lite.nemo_api.collaters import packed_sequence_thd_collater
    from automodel_lite.nemo_api.packed_sequence import pack_dataset
    from automodel_lite.thd import to_thd
    from recipes.train_ft import TrainFinetuneRecipe

__all__ = [
    "PackedDataset",
    "Packer",
    "SamplingClient",
    "TrainFinetuneRecipe",
    "TrainingClient",
    "__version__",
    "hf_collater",
    "install_attention",
    "pack_dataset",
    "packed_sequence_thd_collater",
    "plan_packs",
    "to_thd",
    "tokenize_chats",
    "train",
]

_MODULES = {
    "PackedDataset": "data.packing.packs",
    "SamplingClient": "extras.client.sampling_client",
    "TrainingClient": "extras.client",
    "Packer": "data.packing.packs",
    "pack_dataset": "nemo_api.packed_sequence",
    "packed_sequence_thd_collater": "nemo_api.collaters",
    "plan_packs": "data.packing.plan",
    "to_thd": "thd",
}  # the others are functions of `extras.api`


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # recipes/ of a checkout is a part of the package once it is installed
    if name == "TrainFinetuneRecipe":
        return import_module(
            f"{import_module(f'{__name__}.cli.line').RECIPES_PACKAGE}.train_ft"
        ).TrainFinetuneRecipe
    return vars(import_module(f"{__name__}.{_MODULES.get(name, 'extras.api')}"))[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
