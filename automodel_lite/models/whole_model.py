"""A model as plain `from_pretrained` gives it, to be asked or to carry an adapter."""

from __future__ import annotations

import torch
import transformers

from automodel_lite.models.source import model_class


def load_whole(
    folder: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> transformers.PreTrainedModel:
    """Loads a folder or hub name by plain `from_pretrained`, under its own class."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return model_class(config).from_pretrained(
        folder, dtype=dtype, trust_remote_code=trust_remote_code
    )
