"""Things that are built once and kept: readable keys, one builder at a time, complete or absent.

<cache_dir>/<kind>/<name>-<hash of the key>/
    key.json         what made it, in words, and size and checksum of every file: written last
    …                what was made
<cache_dir>/<kind>/<name>-<hash>.lock      held while it is made
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from automodel_lite.errors import ConfigError, explained
from automodel_lite.redact import scrub

KEY_FILE = "key.json"
_CANNOT_WRITE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}
CACHE_DIR: ContextVar[str | None] = ContextVar("CACHE_DIR", default=None)
"""The `cache_dir` of the run whose documents are opened (see `build_documents`)."""
Key = dict[str, str]
"""What made an entry: part name -> its value or the hash of its value."""


@dataclass(frozen=True)
class CacheEntry:
    """A complete folder of the cache, and one sentence on how it came about (`hit`, or
    `miss (changed: …)`).
    """

    folder: Path
    note: str


def short_hash(text: str) -> str:
    """Returns the first 12 hex digits of the SHA-256 of `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """The given folder, or `CACHE_DIR`, or `$AUTOMODEL_LITE_CACHE`, or `~/.cache/automodel_lite`
    (or below `$XDG_CACHE_HOME`).
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    default = os.environ.get("AUTOMODEL_LITE_CACHE") or Path(base) / "automodel_lite"
    return Path(cache_dir or CACHE_DIR.get() or default)


def entry_folder(cache_dir: Path, kind: str, name: str, key: Key) -> Path:
    """Returns where `build_once` puts the entry."""
    parts = {part: scrub(value) for part, value in key.items()}
    file_name = re.sub(r"[^\w.-]", "_", scrub(name))[-60:] or "data"
    return Path(cache_dir) / kind / f"{file_name}-{short_hash(json.dumps(parts, sort_keys=True))}"


def build_once(
    cache_dir: Path, kind: str, name: str, key: Key, build: Callable[[Path], object]
) -> CacheEntry:
    """Returns the folder that `key` names; when it is missing or damaged, `build(temporary folder)`
    makes it.

    Any number of processes, of one job or of several, may ask at once: one builds, the others wait
    and take what it made. An entry appears by one rename, so a killed builder leaves none. The
    files of an entry are compared with their checksums once per start and host.

    Raises ConfigError: a cache that cannot be written, or a damaged entry that cannot be replaced
    (names the folder to remove).
    """
    folder = entry_folder(cache_dir, kind, name, key)
    name = scrub(name)
    key = {part: scrub(value) for part, value in key.items()}
    if folder.is_dir() and find_damage(folder) is None:
        return CacheEntry(folder, "hit")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            return _build_alone(folder, name, key, build)
    except OSError as error:
        if error.errno == errno.EIO:  # of either end: rows are read while their entry is built
            raise ConfigError(
                f"cache_dir={cache_dir} or the data of {name}: a disk failed ({error.strerror}): "
                "set cache_dir (or AUTOMODEL_LITE_CACHE) to a folder on another disk, or copy the "
                "data to one."
            ) from error
        if error.errno not in _CANNOT_WRITE and folder.parent.is_dir():  # else below /proc
            raise
        raise ConfigError(
            f"cache_dir={cache_dir} cannot be written ({error.strerror}): make room there, or set "
            "cache_dir (or AUTOMODEL_LITE_CACHE) to another folder."
        ) from error


def _build_alone(folder: Path, name: str, key: Key, build: Callable[[Path], object]) -> CacheEntry:
    """Builds an entry in the process that holds its lock."""
    note = ""
    if folder.is_dir():
        damage = find_damage(folder)
        if damage is None:
            return CacheEntry(folder, "hit (built by another process)")
        # Renamed first: who has the old files open keeps them.
        aside = folder.with_name(f".{folder.name}.damaged-{os.getpid()}")
        sentence = f"{folder} is damaged ({damage}) and cannot be replaced"
        with explained(sentence, cure="remove this folder"):
            os.rename(folder, aside)
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"{folder} was damaged ({damage}) and is removed; others of this job may have "
                "opened it: start again."
            )
        note = f"rebuilt, it was damaged: {damage}"
        print(
            f"WARNING: {folder} was damaged ({damage}): it is rebuilt", file=sys.stderr, flush=True
        )
    note = note or f"miss ({_what_changed(folder.parent, name, key)})"
    # What killed builders of this entry left; its lock is held, so none is alive.
    for left in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        build(temporary)
        seal(temporary, name, key)
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return CacheEntry(folder, note)


def seal(folder: Path, name: str, key: Key, without: str = "") -> None:
    """Writes size and checksum of every file into the folder, and all of it to the disk.

    without  name of a file that is no part of the entry
    """
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sum": content_sum(path),
        }
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (KEY_FILE, without)
    }
    (folder / KEY_FILE).write_text(json.dumps({"name": name, "key": key, "files": files}, indent=1))
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def content_sum(path: Path) -> str:
    """Finds flipped bits and zeroed pages, not forgeries; faster than a disk reads."""
    total = 1
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            total = zlib.adler32(block, total)
    return f"{total:08x}"


def find_damage(folder: Path) -> str | None:
    """Returns what is wrong with an entry, or None: every file is there with its size and its
    content.

    Contents are read by one process of a host: a cache of 100 GB once, not eight times.
    """
    reads = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        files = json.loads((folder / KEY_FILE).read_text())["files"]
        for name, entry in files.items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
            if reads and content_sum(folder / name) != entry["sum"]:
                return f"{name} differs from what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(str(error.filename)).name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{KEY_FILE} is incomplete"
    return None


def _what_changed(parent: Path, name: str, key: Key) -> str:
    """Compares `key` with the most alike entry of the same name, the newest of equals."""
    changed = []
    for path in parent.glob(f"*/{KEY_FILE}"):
        try:
            entry = json.loads(path.read_text())
            other = dict(entry["key"])
            if entry["name"] == name:
                parts = [p for p in sorted({*key, *other}) if key.get(p) != other.get(p)]
                changed.append((len(parts), -path.stat().st_mtime_ns, parts))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # of a damaged one, or one that another job is about to rename, nothing
    return f"changed: {', '.join(min(changed)[2])}" if changed else "first time"
