"""Files at a URL (`s3://bucket/chats.jsonl`, `hf://datasets/...`): copied into the cache, then read as any others."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec

from automodel_lite.data.cache import build_once, cache_root
from automodel_lite.errors import ConfigError, one_line
from automodel_lite.progress import activity


def fetch(address: str, key: str) -> str:
    """Returns the local copy of a remote file, or the folder with those of a folder or a pattern; copied again when the
    remote files have changed. Raises ConfigError when they cannot be read, or the package of the protocol is missing.
    """

    def copy(folder: Path) -> None:
        for path, name in names.items():
            (folder / "files" / name).parent.mkdir(parents=True, exist_ok=True)
            remote.get_file(path, str(folder / "files" / name))

    try:
        with activity(f"copying {address}"):
            remote, root = fsspec.url_to_fs(address)
            files = sorted(path for path in remote.expand_path(root, recursive=True) if remote.isfile(path))
            names = {path: os.path.relpath(path, os.path.commonpath(map(os.path.dirname, files))) for path in files}
            content = {"at": address} | {path: remote.ukey(path) for path in files}  # of its size, time or checksum
            folder = build_once(cache_root(), "fetched", os.path.basename(root), content, copy).folder / "files"
    except ConfigError:
        raise
    except Exception as error:  # of any protocol's package: no such file, no permission, no network, not installed
        raise ConfigError(f"{key}={address} cannot be read ({one_line(error) or type(error).__name__}).") from error
    return str(folder / names[root]) if files == [root] else str(folder)
