"""Which files of a data set's folder are meant, where it holds several subsets or splits, as the
hub's do: the same documents may stand in two of them.

    gsm8k/README.md                    configs: [{config_name: main, data_files: ...}, ...]
    gsm8k/main/train.jsonl             subset main, split train
    gsm8k/socratic/train.jsonl         subset socratic, split train
    chats/train_sft-00000-of-00002.parquet   split train_sft

A choice is named (`dataset.name=main`), or the card's own default, which is noted; else refused.
Everything here works on names relative to the folder, so that a folder at an address is read alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from automodel_lite.errors import ConfigError, listed, printable

CARD = "README.md"
MAX_CARD_BYTES = 2**20
_FRONT_MATTER = re.compile(r"\A\ufeff?---\s*?\n(.*?)\n---\s*?(\n|\Z)", re.DOTALL)
_SHARD = re.compile(r"(.+?)[-.]\d{5}-of-\d{5}(\..*)?")
# names of splits that need no numbers of shards to be known
_SPLITS = re.compile(r"train(ing)?|validation|valid|val|dev|eval|test", re.I)
TRAIN = "train"
_HELD_OUT = re.compile(
    r"(?<![a-z])(val|valid|validation|dev|eval|evaluation|test|testing|held.?out)(?![a-z])", re.I
)
_PLAIN = re.compile(r"(?!\d+$)[\w./*:@+%-]+", re.ASCII)  # what Hydra reads as one text
_TRAIN = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.I)


def is_held_out(name: str) -> bool:
    """Returns whether the name of a file or a split is that of one to test on."""
    return bool(_HELD_OUT.search(name)) and not _TRAIN.search(name)


@dataclass(frozen=True)
class Asked:
    """What a user asks of a folder: the setting that names it, the folder as typed, a subset and a
    split.
    """

    key: str
    path: str
    name: str | None = None
    split: str = TRAIN

    def choose(self, what: str, choices: Sequence[str], places: Sequence[str]) -> str:
        """Returns the end of a sentence: how one of several is chosen, `places` their paths below
        the folder.
        """
        if self.key == "dataset.val_path":
            cures = [_typed(self.key, self.below(place)) for place in places]
        else:
            cures = [_typed(f"dataset.{what}", printable(choice)) for choice in choices]
        return f"set {listed(cures, 4)}"

    def every(self, places: Sequence[str]) -> str:
        """Returns the setting that names all of these paths below the folder."""
        paths = [self.below(place) for place in places]
        listed_paths = [path if _PLAIN.fullmatch(path) else f'"{path}"' for path in paths]
        return f"'{self.key}=[{','.join(listed_paths)}]'"

    def below(self, place: str) -> str:
        """Returns a path below the folder as it is typed, in an archive at an address, too."""
        head, mark, rest = self.path.partition("::" if "://" in self.path else "\0")
        return f"{head}{'' if head.endswith('/') else '/'}{printable(place)}{mark}{rest}"

    @property
    def split_setting(self) -> str:
        """Returns the setting that names the split."""
        return self.key if self.key == "dataset.val_split" else "dataset.split"


def _typed(key: str, value: str) -> str:
    """Returns a setting as a shell takes it: in quotes where a plain one would mean several values,
    or other words.
    """
    if _PLAIN.fullmatch(value):
        return f"'{key}={value}'" if "*" in value else f"{key}={value}"
    return f"'{key}=\"{value}\"'"


class Settled(NamedTuple):
    """Whether a subset, and whether a split of its own, chose the files of a path."""

    by_name: bool = False
    by_split: bool = False


@dataclass(frozen=True)
class Subset:
    """One of a card: patterns of its files by split; None: all of `folder`."""

    patterns: Mapping[str, Sequence[str]] | None
    folder: str = ""


@dataclass(frozen=True)
class Card:
    """What the front matter of a README says of the files beside it."""

    subsets: Mapping[str, Subset]
    default: str | None


@dataclass(frozen=True)
class Chosen:
    """The files that are meant.

    left_out  reason -> the files beside them
    by_split  whether the split chose them: they have no others
    """

    names: Sequence[str]
    left_out: Mapping[str, Sequence[str]]
    by_split: bool = False


def read_card(text: str, place: str) -> Card | None:
    """Returns the subsets that a README lists in its front matter, None where it lists none; raises
    ConfigError for a list that the hub would refuse, too.
    """
    front = _FRONT_MATTER.match(text)
    if front is None or not re.search(r"^configs\s*:", front[1], re.MULTILINE):
        return None
    wrong = ConfigError(
        f"{place}: configs: must be a list of config_name and data_files, as on the hub: mend it, "
        "or name the files of data."
    )
    try:
        configs = yaml.safe_load(front[1])["configs"]
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise wrong from error
    if not isinstance(configs, list):
        raise wrong
    subsets = {}
    defaults = []
    for one in configs:
        if not isinstance(one, dict) or "config_name" not in one:
            raise wrong
        name = str(one["config_name"])
        folder = str(one.get("data_dir") or "").strip("/")
        subsets[name] = Subset(_patterns(one.get("data_files"), folder, wrong), folder)
        if name == "default" or one.get("default") is True:
            defaults.append(name)
    default = next(iter(subsets if len(subsets) == 1 else defaults), None)
    return Card(subsets, default) if subsets else None


def _patterns(
    data_files: Any, folder: str, wrong: ConfigError
) -> Mapping[str, Sequence[str]] | None:
    """Returns `data_files` of a card, a text, a list or a list of {split, path}, by split."""
    if data_files is None:
        return None
    items = data_files if isinstance(data_files, list) else [data_files]
    found: dict[str, list[str]] = {}
    for item in items:
        split = TRAIN
        paths = item
        if isinstance(item, dict):
            if item.keys() != {"split", "path"}:
                raise wrong
            split = str(item["split"])
            paths = item["path"]
        paths = paths if isinstance(paths, list) else [paths]
        if not all(isinstance(path, str) for path in paths):
            raise wrong
        below = [f"{folder}/{path}" if folder else path for path in paths]
        found.setdefault(split, []).extend(path.removeprefix("./") for path in below)
    return found


def chosen_by_card(card: Card, names: Sequence[str], asked: Asked) -> Chosen:
    """Chooses the files of a subset and a split that a card lists; raises ConfigError, with the
    choices, where none is asked for and none is its default, or for what it does not list.
    """
    has = ", ".join(map(printable, card.subsets))
    if asked.name is not None and asked.name not in card.subsets:
        raise ConfigError(
            f"dataset.name={asked.name} is not in {asked.path}, whose {CARD} lists {has}."
        )
    name = card.default if asked.name is None else asked.name
    if name is None:
        firsts = [
            next((n for n in names if n in _files_of(one, names)), choice)
            for choice, one in card.subsets.items()
        ]
        raise ConfigError(
            f"{asked.key}={asked.path} holds several subsets, {has}, by its {CARD}, which may be "
            f"the same documents again: {asked.choose('name', [*card.subsets], firsts)}."
        )
    subset = card.subsets[name]
    own = _files_of(subset, names)
    which = f"subsets other than {printable(name)}"
    which += ", the default" if asked.name is None and len(card.subsets) > 1 else ""
    others = [other for other in names if other not in own]
    left_out = {f"of {which}": others}
    if subset.patterns is None:
        found = chosen_by_split(sorted(own), asked)
        return Chosen(found.names, {**left_out, **found.left_out}, found.by_split)
    by_split = {split: _matching(pats, names) for split, pats in subset.patterns.items()}
    split = _split(list(by_split), asked, [min(of, default="") for of in by_split.values()])
    if not by_split[split]:
        raise ConfigError(
            f"{asked.path}/{CARD} names {listed(subset.patterns[split], 3)} for {printable(name)}, "
            f"split {printable(split)}, and no file of data there has such a name: copy the rest "
            "of the data set, or name the files that are there."
        )
    left_out[f"of splits other than {printable(split)}"] = sorted(own - by_split[split])
    return Chosen(sorted(by_split[split]), left_out, by_split=True)


def _split(splits: Sequence[str], asked: Asked, places: Sequence[str]) -> str:
    """Returns the split that is asked for; the only one, where none is. Raises ConfigError with the
    choices.
    """
    is_asked = asked.split != TRAIN and asked.key != "dataset.val_path"
    if asked.split in splits:
        return asked.split
    if len(splits) == 1 and not is_asked:
        return splits[0]
    has = ", ".join(map(printable, splits))
    told = f"{asked.split_setting}={asked.split} is not in {asked.path}, which has {has}"
    if is_asked:
        raise ConfigError(f"{told}.")
    raise ConfigError(f"{told}: {asked.choose('split', splits, places)}.")


def _files_of(subset: Subset, names: Sequence[str]) -> set[str]:
    if subset.patterns is None:
        prefix = f"{subset.folder}/" if subset.folder else ""
        return {name for name in names if name.startswith(prefix)}
    return _matching([one for patterns in subset.patterns.values() for one in patterns], names)


def _matching(patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """Returns the names that match: `*` within a folder, `**` over folders, as the hub reads it."""
    from fsspec.utils import glob_translate

    found: set[str] = set()
    for pattern in patterns:
        translated = re.compile(glob_translate(pattern))
        found.update(name for name in names if translated.match(name))
    return found


def subset_folder(names: Sequence[str], asked: Asked) -> str | None:
    """Returns the folder of the subset that is asked for, None where the files are of one.

    Folders that each hold a split of one name are subsets, unless their names differ in digits
    alone: parts of one. Raises ConfigError with the choices.
    """
    by_split: dict[str, set[str]] = {}
    for name in names:
        folder, split = _place(name)
        if folder and split:
            by_split.setdefault(split, set()).add(folder)
    several = [of for of in by_split.values() if len({re.sub(r"\d+", "", one) for one in of}) > 1]
    folders = sorted(set().union(*several))
    if asked.name is None:
        if folders:
            raise ConfigError(
                f"{asked.key}={asked.path} holds several subsets, {listed(folders, 4)}, which may "
                f"be the same documents again: {asked.choose('name', folders, folders)}, or all "
                f"of them, {asked.every(folders)}."
            )
        return None
    within = sorted({name.rpartition("/")[0] for name in names if "/" in name})
    # any folder may be named, by its path or by its last part
    all_folders = {parent for path in within for parent in _with_parents(path)}
    found = [one for one in all_folders if asked.name in (one, one.rpartition("/")[2])]
    if asked.name in found:
        return asked.name
    if len(found) == 1:
        return found[0]
    choices = folders or sorted(all_folders)
    has = f"which has {listed(choices, 8)}" if choices else "which has no folders: leave it out"
    raise ConfigError(f"dataset.name={asked.name} is not in {asked.path}, {has}.")


def _with_parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def chosen_by_split(names: Sequence[str], asked: Asked) -> Chosen:
    """Chooses the files of a split by their names, `train_sft-00000-of-00002.parquet`, where
    several are there; raises ConfigError with the choices.

    A split that is held out by its name is left to who selects the files.
    """
    by_split: dict[str, list[str]] = {}
    for name in names:
        split = _place(name)[1]
        if split:
            by_split.setdefault(split, []).append(name)
    own = {
        split: of
        for split, of in by_split.items()
        if not _SPLITS.fullmatch(split) and not (asked.key == "dataset.path" and is_held_out(split))
    }
    is_asked = asked.split != TRAIN and asked.key != "dataset.val_path"
    parts = {re.sub(r"\d+", "", split) for split in own}
    if is_asked and by_split:
        split = _split([*by_split], asked, [])
    elif own and TRAIN in by_split and asked.key == "dataset.path":
        split = TRAIN
    elif len(parts) > 1 and asked.split not in own:
        patterns = [_pattern(of) for of in own.values()]
        raise ConfigError(
            f"{asked.key}={asked.path} holds several splits, {listed([*own], 4)}, which may be the "
            f"same documents again: {asked.choose('split', [*own], patterns)}, or all of them, "
            f"{asked.every(patterns)}."
        )
    elif asked.split in own:
        split = asked.split
    else:
        return Chosen(names, {})
    others = [name for name in names if name not in by_split[split]]
    return Chosen(by_split[split], {f"of splits other than {printable(split)}": others}, True)


def _pattern(names: Sequence[str]) -> str:
    """Returns a pattern of the shards of one split: `train_sft-*`."""
    found = _SHARD.fullmatch(names[0])
    return f"{found[1]}-*" if found else names[0]


def _place(name: str) -> tuple[str, str]:
    """Returns the folder of a file's subset, "" for the whole, and its split, "" if its name tells
    none.

    >>> _place("main/train-00000-of-00001.parquet"), _place("main/test/a.jsonl")
    (('main', 'train'), ('main', 'test'))
    """
    folder, _, file = name.rpartition("/")
    above, _, last = folder.rpartition("/")
    if _SPLITS.fullmatch(last):
        return above, last
    shard = _SHARD.fullmatch(file)
    if shard:
        return folder, shard[1]
    stem = file.partition(".")[0]
    return folder, stem if _SPLITS.fullmatch(stem) else ""
