"""What the model is read from, so that nodes and restarts with other files are noticed; in milliseconds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

_BLOCK_BYTES = 4096
_NUM_BLOCKS = 32  # of a file of weights; its header is the first


def local_folder(source: str | None, revision: str | None = None) -> Path | None:
    """Returns the folder that holds a model: `source` itself, or a hub model's cached snapshot; None for a model from
    scratch, or one that is not here.
    """
    if not source or Path(source).is_dir():
        return Path(source) if source else None
    try:
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
    except ValueError:  # no name that the hub could have
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def model_files(pretrained: str | None, revision: str | None = None) -> dict[str, str]:
    """Returns name -> digest of each configuration and weight file of a `local_folder`.

    Small files are hashed whole, large ones by their size and 32 blocks spread over them, the header among them:
    weights that were trained further differ in each block.
    """
    folder = local_folder(pretrained, revision)
    if folder is None:
        return {}
    found = sorted(path for pattern in ("*.json", "*.safetensors", "*.bin") for path in folder.glob(pattern))
    return {path.name: _sampled_digest(path) for path in found if not path.name.startswith(("tokenizer", "special_"))}


def _sampled_digest(path: Path) -> str:
    """Returns 16 hex digits of a file's size and some of its blocks; all of them, when it is small."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= _BLOCK_BYTES * _NUM_BLOCKS:
            digest.update(file.read())
        else:
            for number in range(_NUM_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]
