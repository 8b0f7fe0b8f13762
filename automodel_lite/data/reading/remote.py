"""Files at an address (`s3://bucket/a.jsonl`, an archive at one), copied to the cache."""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import has_magic
from pathlib import Path
from typing import Any, NamedTuple

from automodel_lite.data.cache import build_once, cache_root
from automodel_lite.data.reading.compressed import MAX_RATIO, max_plain_bytes
from automodel_lite.data.reading.paths import (
    KINDS,
    MAX_ENTRIES,
    kind_of,
    left_out_note,
    without_held_out,
    without_twins,
)
from automodel_lite.data.reading.subsets import (
    CARD,
    MAX_CARD_BYTES,
    Asked,
    Settled,
    chosen_by_card,
    chosen_by_split,
    read_card,
    subset_folder,
)
from automodel_lite.errors import ConfigError, explained, printable
from automodel_lite.progress import activity

PROTOCOLS = ("s3", "gs", "hf", "https", "http", "file")  # of addresses
ARCHIVES = ("zip", "tar")


class Copied(NamedTuple):
    """The copy in the cache of a file at an address, or the folder with those of several.

    note  what was not copied
    how   what chose them
    """

    path: str
    note: str
    how: Settled


def fetch(asked: Asked) -> Copied:
    """Copies a file at a URL (`s3://bucket/a.jsonl`), or those of a folder, a pattern or an archive
    that are of the subset and the split asked for; again when the remote files have changed.

    A copy has a name of ours: that of an entry of an archive may lead out of any folder.

    Raises ConfigError when they cannot be read, or the package of the protocol is missing.
    """
    import fsspec  # most data are here

    def copy(folder: Path) -> None:
        _check_size(key, address, [remote.info(path) for path in copies], folder)
        for path, name in copies.items():
            (folder / "files" / name).parent.mkdir(parents=True, exist_ok=True)
            remote.get_file(path, str(folder / "files" / name))

    key = asked.key
    address = asked.path
    protocols = [part.partition("://")[0] for part in address.split("::")]
    unknown = [protocol for protocol in protocols if protocol not in (*PROTOCOLS, *ARCHIVES)]
    if unknown:
        raise ConfigError(
            f"{key}={address}: {unknown[0]} is not a protocol that data are read by: use "
            f"{', '.join(PROTOCOLS)}, an archive at one of them, "
            "zip://a.jsonl::https://host/a.zip, or copy the files to this machine."
        )
    # of any protocol's package: no such file, no permission, no network, not installed
    with explained(f"{key}={address} cannot be read", Exception), activity(f"copying {address}"):
        remote, root = fsspec.url_to_fs(address)
        found = [root]
        if protocols[0] not in ("http", "https"):  # whose pages are no folders
            found = [p for p in remote.expand_path(root, recursive=True) if remote.isfile(p)]
        if len(found) > MAX_ENTRIES:
            raise ConfigError(f"{key}={address} holds over {MAX_ENTRIES:,} files.")
        place = f"{root.rstrip('/')}/{CARD}".lstrip("/")
        cards = [path for path in found if path.lstrip("/") == place]
        text = remote.cat_file(cards[0], end=MAX_CARD_BYTES) if cards else b""
        copies, note, how = name_copies(found, root, asked, text.decode(errors="replace"))
        # of its size, time or checksum
        content = {"at": address, "as": "2"} | {path: remote.ukey(path) for path in copies}
        entry = build_once(cache_root(), "fetched", os.path.basename(root), content, copy)
    folder = entry.folder / "files"
    only = folder / copies[root] if [*copies] == [root] else folder
    return Copied(str(only), note, how)


def _check_size(key: str, address: str, entries: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Raises ConfigError for files that do not fit the cache, or entries that are far larger than
    they are packed.
    """
    total = sum(entry.get("size") or 0 for entry in entries)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise ConfigError(
            f"{key}={address} holds {total:,} bytes, and the cache in {folder.parent} has {free:,} "
            "free: set AUTOMODEL_LITE_CACHE to a larger disk."
        )
    for entry in entries:
        most = max_plain_bytes(entry.get("compress_size") or entry.get("size") or 0)
        if (entry.get("size") or 0) > most:
            raise ConfigError(
                f"{key}={address}: {printable(str(entry.get('name')))} unpacks to "
                f"{entry['size']:,} bytes, over {MAX_RATIO} times its packed size: unpack the "
                "archive yourself, and name the file."
            )


_PLAIN_NAME = re.compile(r"(\w[\w.=-]*/){0,3}\w[\w.=-]*")
_SAVED = ("state.json", "dataset_dict.json")  # in the folder of a saved dataset


def name_copies(
    found: Sequence[str], root: str, asked: Asked, card_text: str = ""
) -> tuple[dict[str, str], str, Settled]:
    """Returns path -> name of its copy for the files at an address that are data and asked for, a
    note on the others, and what chose them; by their names alone, which may be anything, and what
    the README there lists.

    >>> asked = Asked("dataset.path", "b")
    >>> name_copies(["b/train/x.jsonl", "b/test/x.jsonl", "b/../y"], "b", asked)[0]
    {'b/train/x.jsonl': 'train/00000-x.jsonl'}

    Raises ConfigError for a saved dataset with names that are not plain, or as `subsets` does.
    """
    key = asked.key
    if list(found) == [root]:
        return {root: _plain(root)}, "", Settled()
    inner = {path: path.removeprefix(root).lstrip("/") for path in sorted(found)}
    # the longest common folder is not part of the names
    common = os.path.commonpath([os.path.dirname(name) for name in inner.values()] or [""])
    inner = {path: name[len(common) :].lstrip("/") for path, name in inner.items()}
    is_named = asked.name in common.split("/")
    if is_named:
        asked = replace(asked, name=None)
    if any(name in _SAVED for name in inner.values()):
        strange = [name for name in inner.values() if not _PLAIN_NAME.fullmatch(name)]
        if strange:
            raise ConfigError(
                f"{key}: {printable(strange[0])} in a saved dataset is not a plain name."
            )
        return inner, "", Settled(by_name=is_named)
    left_out: dict[str, list[str]] = defaultdict(list)
    data = []
    for name in inner.values():
        if any(part.startswith(".") for part in name.split("/")):
            left_out["hidden"].append(name)
        elif kind_of(Path(name)) in KINDS:
            data.append(Path(name))
        else:
            left_out["of other kinds"].append(name)
    data = without_twins(data, left_out)
    how = Settled(by_name=is_named)
    # a pattern names its files itself
    if not has_magic(root):
        names = [str(path) for path in data]
        card = read_card(card_text, f"{asked.path}: {CARD}")
        subset = None if card else subset_folder(names, asked)
        if subset is not None:
            below = [path for path, name in inner.items() if name.startswith(f"{subset}/")]
            within = replace(asked, path=asked.below(subset), name=None)
            copies, note, how = name_copies(below, os.path.commonpath(below), within)
            return copies, note, how._replace(by_name=True)
        chosen = chosen_by_card(card, names, asked) if card else chosen_by_split(names, asked)
        data = [Path(name) for name in chosen.names]
        how = Settled(is_named or asked.name is not None, chosen.by_split)
        for reason, others in chosen.left_out.items():
            left_out[reason] += others
    if not how.by_split:
        data = without_held_out(data, Path(), key, left_out)
    taken = {str(path) for path in data}
    kept = [path for path, name in inner.items() if str(Path(name)) in taken]
    # In a folder "train", as nothing is to be left out of them a second time.
    copies = {path: f"train/{i:05d}-{_plain(path)}" for i, path in enumerate(kept)}
    return copies, left_out_note(left_out), how


def _plain(path: str) -> str:
    """Returns the name of a file, of letters, digits and `.-` alone, and at most 60 of them."""
    name = re.sub(r"[^\w.-]", "_", path.rpartition("/")[2])[-60:]
    return name.lstrip(".") or "file"
