"""Which files a path names, which of them are left out and why, and what tells one file from
another.

    find_files(["data"], "dataset.path")
    data/train.jsonl        taken
    data/train.jsonl.gz     left out: beside its unpacked twin
    data/test.jsonl         left out: a held-out split
    data/old -> /archive    left out: a linked folder
    data/README.txt         left out: about the data

A name is taken as it stands where something of that name is there: `part[1].jsonl` is a file before
it is a pattern.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from automodel_lite.config.rules import looks_local
from automodel_lite.data.cache import cache_root
from automodel_lite.data.reading.subsets import (
    CARD,
    MAX_CARD_BYTES,
    TRAIN,
    Asked,
    Settled,
    chosen_by_card,
    chosen_by_split,
    is_held_out,
    read_card,
    subset_folder,
)
from automodel_lite.errors import (
    ConfigError,
    DataError,
    did_you_mean_path,
    explained,
    listed,
    printable,
)

KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".lzma", ".zst")
MAX_ENTRIES = 200_000  # of a folder: more is a whole disk, named by mistake
_ABOUT = re.compile(
    r"(read.?me|licen[cs]e|copying|notice|changelog|authors|contributing|citation|requirement).*",
    re.I,
)
# what programs write beside the rows of a data set
_SIDECAR = re.compile(
    r"dataset_infos?\.json|(\w+_)?config\.json|tokenizer\w*\.json|special_tokens_map\.json|"
    r"added_tokens\.json|\w+_state\.json|croissant\.json|sample_submission\.csv",
    re.I,
)

_EDGE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 12
_NUM_BLOCKS = 16
LeftOut = dict[str, list[str]]  # reason -> names of files and folders


@dataclass(frozen=True)
class FileStamp:
    """What tells a file from another one, and from what it was before: a copy that kept its times
    is another file.
    """

    path: Path
    device: int
    inode: int
    size: int
    mtime_ns: int
    content: str  # hash of its head, its tail and some blocks between

    def __str__(self) -> str:
        return (
            f"{printable(str(self.path))} {self.size} B at {self.mtime_ns}, inode {self.inode}, "
            f"{self.content}"
        )

    def is_same(self, other: FileStamp) -> bool:
        """Returns whether both hold the same rows: one file under two names, or a copy of it."""
        if (self.device, self.inode) == (other.device, other.inode):
            return True
        return bool(self.size) and (self.size, self.content) == (other.size, other.content)


def stamp(path: Path) -> FileStamp:
    """Returns the stamp of a file; reads at most 192 KiB of it."""
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        digest = hashlib.sha256(os.pread(file.fileno(), _EDGE_BYTES, 0))
        digest.update(os.pread(file.fileno(), _EDGE_BYTES, max(0, stat.st_size - _EDGE_BYTES)))
        for number in range(1, _NUM_BLOCKS + 1):
            digest.update(
                os.pread(file.fileno(), _BLOCK_BYTES, stat.st_size * number // (_NUM_BLOCKS + 1))
            )
    return FileStamp(
        path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, digest.hexdigest()[:16]
    )


def stamps(path: Path) -> list[FileStamp]:
    """Returns the stamp of a file, or those of all files of a saved dataset."""
    return (
        [stamp(path)]
        if path.is_file()
        else [stamp(p) for p in sorted(path.rglob("*")) if p.is_file()]
    )


class WholeFile(FileIO):
    """A mapped file, whose size is compared before pages of it are read: one that was cut short
    meanwhile would end the process by SIGBUS. Its folder may be removed, as its pages stay.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.num_bytes = os.fstat(self.fileno()).st_size


def check_not_cut(files: Sequence[WholeFile]) -> None:
    """Raises DataError for a file that is shorter than when it was mapped."""
    for file in files:
        if os.fstat(file.fileno()).st_size < file.num_bytes:
            raise DataError(
                f"{file.name}: the file was truncated while it was being read: remove its folder, "
                "or restore it."
            )


def left_out_note(left_out: LeftOut) -> str:
    """Returns `left out: 2 held-out splits (test.jsonl, valid.jsonl), 1 linked folder (old)`, or
    nothing.
    """
    parts = []
    for reason, names in left_out.items():
        if names:
            parts.append(f"{len(names):,} {reason} ({listed([*map(printable, names)], 3)})")
    return f"left out: {', '.join(parts)}" if parts else ""


class Found(NamedTuple):
    """The files that paths name, in order (the folder of a saved dataset counts as one).

    note      what was left out
    by_name   whether the name of a subset chose any
    by_split  those that a split chose: they have no splits of their own
    """

    files: list[Path]
    note: str
    by_name: bool
    by_split: set[Path]


def find_files(
    paths: Sequence[str],
    key: str,
    held_out: Sequence[FileStamp] = (),
    name: str | None = None,
    split: str = TRAIN,
    settled: Mapping[str, Settled] = MappingProxyType({}),
) -> Found:
    """Finds the files that paths name, none for a name of the hub; of a folder those of the subset
    `name` and of the split, if it holds several; `settled` are folders of which they were chosen
    before.

    A file that is named twice, by links or in a folder and by itself, is taken once. For training,
    `held_out` files of validation are left out of folders and patterns.

    Raises ConfigError: a path where nothing is, a folder without data, or a file of validation that
    is named for training too.
    """
    left_out: LeftOut = defaultdict(list)
    taken: dict[tuple[int, int], Path] = {}
    missing = []
    by_name = False
    by_split: set[Path] = set()
    for path in paths or [""]:
        asked = Asked(key, path) if path in settled else Asked(key, path, name, split)
        files, is_named, how = _found(asked, left_out)
        how = settled.get(path, how)
        by_name = by_name or how.by_name
        if how.by_split:
            by_split.update(files)
        if not files:
            missing.append(path)
        for file in files:
            stat = file.stat()
            if (stat.st_dev, stat.st_ino) in taken:
                left_out["named twice"].append(str(file))
                continue
            shared = next((h for h in held_out for own in stamps(file) if own.is_same(h)), None)
            if shared is not None and is_named:
                raise ConfigError(
                    f"{key}={file} is also validated on, as {shared.path}: what was trained on "
                    "measures nothing; hold documents out by dataset.val_frac=0.05, or name other "
                    "files for validation."
                )
            if shared is not None:
                left_out["held out for validation"].append(file.name)
                continue
            taken[stat.st_dev, stat.st_ino] = file
    is_hub = len(paths) == 1 and kind_of(Path(paths[0])) not in KINDS and not looks_local(paths[0])
    if missing and not is_hub:
        raise ConfigError(
            f"{key}={', '.join(missing)} does not exist (looked in {Path.cwd()})"
            f"{did_you_mean_path(missing[0])}"
        )
    if left_out["held out for validation"] and not taken:
        raise ConfigError(
            f"{key}={', '.join(paths)} holds nothing but what is validated on: name files to train "
            "on."
        )
    return Found([*taken.values()], left_out_note(left_out), by_name, by_split)


def kind_of(path: Path) -> str:
    """Returns the ending that says what is in the file: `.jsonl` of `a.jsonl.gz`."""
    is_compressed = path.suffix.lower() in COMPRESSIONS and len(path.suffixes) > 1
    return (path.suffixes[-2] if is_compressed else path.suffix).lower()


def _found(asked: Asked, left_out: LeftOut) -> tuple[Sequence[Path], bool, Settled]:
    """Returns the files of one path, whether it names one, not a folder or a pattern, and what
    chose them.
    """
    key = asked.key
    path = asked.path
    if not path.strip():
        raise ConfigError(f"{key}= is empty: was a shell variable not set?")
    expanded = Path(path).expanduser()
    with explained(f"{key}={path} cannot be read"):
        if expanded.is_dir():
            return _in_folder(expanded, asked, left_out)
        if expanded.is_file():
            return [expanded], True, Settled()
        if expanded.exists():
            raise ConfigError(
                f"{key}={path} is neither a file nor a folder, and rows need random access to a "
                "file."
            )
        matches = list(islice(glob.iglob(str(expanded), recursive=True), MAX_ENTRIES))
        _check_number(len(matches), path, key)
        files = [Path(match) for match in matches if os.path.isfile(match)]
        return select_files(files, Path(), key, left_out), False, Settled()


def _in_folder(
    folder: Path, asked: Asked, left_out: LeftOut
) -> tuple[Sequence[Path], bool, Settled]:
    """Returns what `_found` does, of a folder."""
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return [folder], True, Settled()
    beside: LeftOut = defaultdict(list)
    walked = without_twins(_walk(folder, asked.path, asked.key, beside), beside)
    names = [str(file.relative_to(folder)) for file in walked]
    card = None
    if (folder / CARD).is_file():
        with (folder / CARD).open("rb") as file:
            text = file.read(MAX_CARD_BYTES).decode(errors="replace")
        card = read_card(text, str(folder / CARD))
    if card:
        found = chosen_by_card(card, names, asked)
    else:
        subset = subset_folder(names, asked)
        if subset is not None:
            reason = f"of subsets other than {printable(subset)}"
            left_out[reason] += [name for name in names if not name.startswith(f"{subset}/")]
            below = replace(asked, path=str(folder / subset), name=None)
            files, is_named, how = _in_folder(folder / subset, below, left_out)
            return files, is_named, how._replace(by_name=True)
        found = chosen_by_split(names, asked)
    for reason, others in [*beside.items(), *found.left_out.items()]:
        left_out[reason] += others
    files = [folder / name for name in found.names]
    if not found.by_split:
        files = without_held_out(files, folder, asked.key, left_out)
    if not files:
        why = f"; {note}" if (note := left_out_note(left_out)) else ""
        raise ConfigError(
            f"{asked.key}={asked.path} is a folder without data: it has no {', '.join(KINDS)} in "
            f"it{why}."
        )
    return files, False, Settled(asked.name is not None, found.by_split)


def _check_number(num_entries: int, path: str, key: str) -> None:
    if num_entries >= MAX_ENTRIES:
        raise ConfigError(
            f"{key}={path} holds over {MAX_ENTRIES:,} files and folders: name the one with the "
            "data."
        )


def _walk(folder: Path, path: str, key: str, left_out: LeftOut) -> list[Path]:
    """Lists the files of data below a folder. Links to folders are not followed: they may lead in a
    circle.
    """

    def refuse(error: OSError) -> None:
        raise error

    files = []
    num_entries = 0
    for parent, folders, names in os.walk(folder, onerror=refuse):
        num_entries += len(folders) + len(names)
        _check_number(num_entries, path, key)
        # The cache may lie inside the folder of the data.
        folders[:] = [name for name in folders if Path(parent, name) != cache_root()]
        linked = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        left_out["linked folders"] += linked
        left_out["hidden"] += [name for name in (*folders, *names) if name.startswith(".")]
        folders[:] = sorted(
            name for name in folders if name not in linked and not name.startswith(".")
        )
        for name in sorted(name for name in names if not name.startswith(".")):
            file = Path(parent, name)
            if not file.exists():
                left_out["links to nothing"].append(name)
            elif file.is_file() and kind_of(file) in KINDS:
                files.append(file)
            else:
                left_out["of other kinds"].append(name)
    return sorted(files)


def select_files(files: Sequence[Path], root: Path, key: str, left_out: LeftOut) -> list[Path]:
    """Leaves out what a folder or a pattern holds beside the data that is meant."""
    return without_held_out(without_twins(files, left_out), root, key, left_out)


def without_twins(files: Sequence[Path], left_out: LeftOut) -> list[Path]:
    """Leaves out compressed twins of other files, and what programs and people write about data."""
    kept = []
    unpacked = {file for file in files if file.suffix.lower() not in COMPRESSIONS}
    stems = set()
    for file in sorted(files, key=lambda file: (file not in unpacked, file)):
        stem = file if file in unpacked else file.with_suffix("")
        if stem in stems:
            left_out["compressed twins of others"].append(file.name)
        elif _SIDECAR.fullmatch(stem.name) or (
            kind_of(file) == ".txt" and _ABOUT.fullmatch(file.stem)
        ):
            left_out["about the data"].append(file.name)
        else:
            stems.add(stem)
            kept.append(file)
    return sorted(kept)


def without_held_out(files: Sequence[Path], root: Path, key: str, left_out: LeftOut) -> list[Path]:
    """Leaves out held-out splits, of what is trained on."""
    # Only beside others: a folder of nothing but test files was named for them.
    inside = {
        file: str(file.relative_to(root)) if root in file.parents else file.name for file in files
    }
    held = [file for file in files if is_held_out(inside[file])]
    if key != "dataset.path" or not 0 < len(held) < len(files):
        return sorted(files)
    left_out["of held-out splits"] += [file.name for file in sorted(held)]
    return sorted(file for file in files if file not in held)
