"""What the model is read from, so that nodes and restarts with other files are noticed; in milliseconds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

_BLOCK_BYTES = 4096
_NUM_BLOCKS = 32  # of a file of weights; its header is the first


def model_files(pretrained: str | None, revision: str | None = None) -> dict[str, str]:
    """Returns name -> digest of each configuration and weight file of a folder, or of a hub model's cached snapshot.

    Small files are hashed whole, large ones by their size and 32 blocks spread over them, the header among them:
    weights that were trained further differ in each block. Empty for a model from scratch, or one that is not here.
    """
    folder = _folder_of(pretrained, revision) if pretrained else None
    if folder is None:
        return {}
    found = sorted(path for pattern in ("*.json", "*.safetensors", "*.bin") for path in folder.glob(pattern))
    return {path.name: sampled_digest(path) for path in found if not path.name.startswith(("tokenizer", "special_"))}


def sampled_digest(path: Path) -> str:
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


def _folder_of(pretrained: str, revision: str | None) -> Path | None:
    if Path(pretrained).is_dir():
        return Path(pretrained)
    try:
        cached = try_to_load_from_cache(pretrained, "config.json", revision=revision)
    except ValueError:  # no name that the hub could have
        return None
    return Path(cached).parent if isinstance(cached, str) else None
