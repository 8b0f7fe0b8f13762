"""The small files of a model's folder, looked at before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from automodel_lite.errors import ConfigError, one_line

# What transformers and peft read as a mapping: a damaged one ends in a traceback of theirs, or is
# left out in silence, as generation_config.json. tokenizer.json is large, and its reader says so.
NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "adapter_config.json",
    "model.safetensors.index.json",
)


def check_model_files(key: str, folder: Path) -> None:
    """Raises ConfigError for one that is no JSON object."""
    for path in filter(Path.exists, map(folder.joinpath, NAMES)):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            problem = "" if isinstance(found, dict) else "no object with names and values"
        except (OSError, ValueError, RecursionError) as error:
            problem = one_line(error)
        if problem:
            raise ConfigError(
                f"{key}={folder}: {path.name} is damaged ({problem}): download it again."
            )
