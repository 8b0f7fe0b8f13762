"""What the model is read from, so that nodes and restarts with other files are noticed; in milliseconds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

_BLOCK_BYTES = 4096
_NUM_BLOCKS = 32  # of a file of weights; its header is the first


def local_folder(source: str | None, revision: str | None = None) -> Path | None:
    """Returns the folder of a model: `source`, or a hub model's cached snapshot; None for one that is not here."""
    if not source or Path(source).is_dir():
        return Path(source) if source else None
    try:
        cached = try_to_load_from_cache(source, "config.json", revision=revision)
    except ValueError:  # no name that the hub could have
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def model_files(pretrained: str | None, revision: str | None = None) -> dict[str, str]:
    """Returns name -> digest of each configuration and weight file of a `local_folder`; of large ones their size and 32
    blocks are hashed, the header among them: weights that were trained further differ in each block.
    """
    folder = local_folder(pretrained, revision)
    if folder is None:
        return {}
    found = sorted(path for pattern in ("*.json", "*.safetensors", "*.bin") for path in folder.glob(pattern))
    digests = {}
    for path in found:
        if path.name.startswith(("tokenizer", "special_")):
            continue
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with open(path, "rb") as file:
            if size <= _BLOCK_BYTES * _NUM_BLOCKS:
                digest.update(file.read())
            else:
                for number in range(_NUM_BLOCKS):
                    file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
                    digest.update(file.read(_BLOCK_BYTES))
        digests[path.name] = digest.hexdigest()[:16]
    return digests
