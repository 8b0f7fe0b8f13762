"""Things that are built once and kept: readable keys, one builder at a time, complete or absent.

<cache_dir>/<kind>/<name>-<hash of the key>/
    key.json         what made it, in words
    …                what was made
<cache_dir>/<kind>/<name>-<hash>.lock      held while it is made
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from automodel_lite.errors import ConfigError, DataError
from automodel_lite.redact import scrub

KEY_FILE = "key.json"
Key = dict[str, str]
"""What made an entry: part name -> its value or the hash of its value."""


@dataclass(frozen=True)
class CacheEntry:
    """A complete folder of the cache, and one sentence on how it came about (`hit`, or `miss (changed: …)`)."""

    folder: Path
    hit: bool
    note: str


def short_hash(text: str | bytes) -> str:
    """The first 12 hex digits of the SHA-256 of `text`."""
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:12]


def default_cache_dir() -> Path:
    """`$AUTOMODEL_LITE_CACHE`, else `~/.cache/automodel_lite` (below `$XDG_CACHE_HOME` if that is set)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("AUTOMODEL_LITE_CACHE") or Path(base) / "automodel_lite")


def build_once(cache_dir: Path, kind: str, name: str, key: Key, build: Callable[[Path], None]) -> CacheEntry:
    """Returns the folder that `key` names; when it is missing, `build(temporary folder)` makes it.

    Any number of processes, of one job or of several, may ask at once: one builds, the others wait and take what it
    made. An entry appears by one rename, so a killed builder leaves none. When `build` fails for the user's reason,
    the processes that waited for it fail with the same sentence instead of repeating the work.

    Raises:
        DataError, ConfigError: what `build` raised, here or in the process that was waited for.
    """
    parent = Path(cache_dir) / kind
    folder = parent / f"{_file_name(name)}-{short_hash(json.dumps(key, sort_keys=True))}"
    if (folder / KEY_FILE).exists():
        return CacheEntry(folder, True, "hit")
    _make_folder(parent)
    asked = time.time()
    failure = Path(f"{folder}.failed")
    with FileLock(f"{folder}.lock"):
        if (folder / KEY_FILE).exists():
            return CacheEntry(folder, True, "hit (another process made it)")
        _raise_failure_after(failure, asked)
        note = f"miss ({_what_changed(parent, name, key)})"
        temporary = parent / f".{folder.name}.{os.getpid()}"
        _clear_abandoned(parent, folder.name)
        temporary.mkdir()
        try:
            build(temporary)
        except (DataError, ConfigError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            failure.write_text(json.dumps({"kind": type(error).__name__, "message": str(error)}))
            raise
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        (temporary / KEY_FILE).write_text(scrub(json.dumps({"name": name, "key": key}, indent=1)))
        _sync(temporary)
        os.replace(temporary, folder)
        failure.unlink(missing_ok=True)
    return CacheEntry(folder, False, note)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cache_dir={folder} cannot be made ({error.strerror}): set AUTOMODEL_LITE_CACHE to a folder you may write."
        ) from error


def _raise_failure_after(failure: Path, asked: float) -> None:
    """Raises what the builder raised that this process waited for; an older failure is no reason not to try."""
    if not failure.exists() or failure.stat().st_mtime < asked:
        return
    told = json.loads(failure.read_text())
    raise {"DataError": DataError, "ConfigError": ConfigError}[told["kind"]](told["message"])


def _what_changed(parent: Path, name: str, key: Key) -> str:
    """Compares `key` with the most alike entry of the same name, the newest of equals."""
    newest_first = sorted(parent.glob(f"*/{KEY_FILE}"), key=lambda path: -path.stat().st_mtime_ns)
    entries = [json.loads(path.read_text()) for path in newest_first]
    others: list[Key] = [entry["key"] for entry in entries if entry["name"] == name]
    if not others:
        return "first time"
    differing: list[list[str]] = [
        [part for part in sorted({*key, *other}) if key.get(part) != other.get(part)] for other in others
    ]
    fewest = min(len(parts) for parts in differing)
    return f"changed: {', '.join(next(parts for parts in differing if len(parts) == fewest))}"


def _clear_abandoned(parent: Path, folder_name: str) -> None:
    """Removes what killed builders of this entry left; the caller holds the entry's lock, so none is alive."""
    for left in parent.glob(f".{folder_name}.*"):
        shutil.rmtree(left, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[-60:] or "data"
