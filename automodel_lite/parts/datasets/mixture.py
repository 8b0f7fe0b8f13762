"""Several datasets as one: by weights, repeats or caps, drawn anew each epoch, reproducible to the
document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from automodel_lite.config.rules import Range, Seed
from automodel_lite.config.schema import Config
from automodel_lite.data.cache import short_hash
from automodel_lite.data.feeding.source import Reading, adapted, packing_dataset
from automodel_lite.data.reading.documents import Documents, DocumentSet, Question
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.reading.readers import ConcatenatedRows
from automodel_lite.data.tokens.token_rows import DocumentReader, TokenizedData
from automodel_lite.errors import ConfigError, format_value

Stop = Literal["first_exhausted", "all_exhausted"]
MOST_REPEATS = 1000  # more is a typing mistake, and takes memory for each time
_RULES = {"weight": Range(above=0), "repeat": Range(above=0, most=MOST_REPEATS)}


@dataclass(frozen=True)
class Source:
    """One dataset of a mixture: `weight` or `repeat`."""

    dataset: Documents
    weight: float | None = None
    repeat: float = 1.0


class Mixture:
    """Datasets by name.

    sources: name -> `{dataset, weight}` or `{dataset, repeat}`. Weights are shares of the tokens of
    an epoch, of any
        sum. A repeat of 2 takes every document twice, 0.5 takes half of them, drawn by `seed`.
    stop: with weights, how long an epoch is: until the first dataset has been taken whole
    (`first_exhausted`,
        nothing is repeated), or until every one has (`all_exhausted`, small ones are repeated).

    Every dataset has its own validation sets and its own counts. Documents that are not all taken
    are drawn anew in every epoch, from (seed, epoch) alone.

    Raises ConfigError: weights for some datasets only, or a number that cannot be.
    """

    def __init__(
        self,
        sources: Mapping[str, Mapping[str, Any]],
        # first_exhausted | all_exhausted: which set, taken whole, ends an epoch
        stop: Stop = "first_exhausted",
        seed: Seed = 0,  # samples partly used datasets, and shuffles the order
    ):
        self.sources = {name: _source(name, source) for name, source in sources.items()}
        if not self.sources:
            raise ConfigError("dataset.sources={} must name at least one dataset.")
        weighted = [name for name, source in self.sources.items() if source.weight is not None]
        if weighted and len(weighted) < len(self.sources):
            other = next(name for name in self.sources if name not in weighted)
            raise ConfigError(
                f"dataset.sources.{other}.weight=null: give all datasets weights, or none."
            )
        if stop != "first_exhausted" and not weighted:
            raise ConfigError(
                f"dataset.stop={stop} ends an epoch of weights, and the sources have none: give "
                "each a weight, or leave it out."
            )
        self.stop = stop
        self.seed = seed
        self.kind = "mixture"
        self.datasets = _with_same_sets(
            {name: source.dataset for name, source in self.sources.items()}
        )
        self._check_held_out()
        self._join()
        self.questions: Sequence[Question] = [
            q for dataset in self.datasets.values() for q in dataset.questions
        ]
        self.description = "; ".join(
            f"{name} = {dataset.description}" for name, dataset in self.datasets.items()
        )
        rules = [
            f"{name}: {self.datasets[name].identity} {s.weight} {s.repeat}"
            for name, s in self.sources.items()
        ]
        self.identity = f"mixture({'; '.join(rules)}; {stop}, seed={seed})"

    def _check_held_out(self) -> None:
        """Raises ConfigError for a file that one source trains on and another one validates on."""
        files = {
            name: dataset
            for name, dataset in self.datasets.items()
            if isinstance(dataset, FilesDataset)
        }
        for name, dataset in files.items():
            for other, trained in files.items():
                # The part that one source holds out of a file is trained on where another one takes
                # it whole.
                held = dataset.val_files + (
                    dataset.train_files if dataset.val_frac and other != name else []
                )
                shared = next(
                    (one for one in trained.train_files for h in held if one.is_same(h)), None
                )
                if shared is not None:
                    raise ConfigError(
                        f"dataset.sources.{other} trains on {shared.path}, which "
                        f"dataset.sources.{name} validates on: hold documents out by val_frac in a "
                        "source of their own, or name other files."
                    )

    def _join(self) -> None:
        """Takes the documents of all datasets, one after the other, as a tokenizer is trained on
        them.
        """
        sets = self.datasets
        self.train: DocumentSet = ConcatenatedRows([dataset.train for dataset in sets.values()])
        self.val = _prefixed({name: dataset.val for name, dataset in sets.items()})

    def adapt(self, config: Config, reading: Reading) -> Reading:
        """See `AdaptingDataset`: what one dataset asks for, such as images, reads them all."""
        mixture = copy(self)
        mixture.datasets = {}
        for name, dataset in self.datasets.items():
            reading = adapted(config, replace(reading, documents=dataset))
            mixture.datasets[name] = reading.documents
        mixture._join()
        return replace(reading, documents=mixture)

    def combine(self, datasets: Mapping[str, TokenizedData], vocab_size: int) -> TokenizedData:
        rows = {name: data.train for name, data in datasets.items()}
        train = self.mix(rows)
        differs_by_epoch = any(
            source.weight is not None or source.repeat % 1 for source in self.sources.values()
        )
        notes = [f"{name}: {note}" for name, data in datasets.items() for note in data.notes]
        pairs = [(name, *pair) for name, data in datasets.items() for pair in data.counts.items()]
        return TokenizedData(
            train=train,
            val=_prefixed({name: data.val for name, data in datasets.items()}),
            counts={f"{name}/{key}": counts for name, key, counts in pairs},
            notes=(*notes, *self.table(train)),
            fingerprint=short_hash(
                " ".join([self.identity, *(data.fingerprint for data in datasets.values())])
            ),
            drawn=partial(self.mix, rows) if differs_by_epoch else None,
            longest=max(int(of_source.row_lengths.max(initial=0)) for of_source in rows.values()),
        )

    def mix(self, rows: Mapping[str, DocumentReader], epoch: int = 0) -> MixedRows:
        """Draws and shuffles the rows of an epoch; raises ConfigError for weights that take a
        dataset too often.
        """
        tokens = {name: source_rows.num_tokens for name, source_rows in rows.items()}
        wanted = {
            name: num_tokens * self.sources[name].repeat for name, num_tokens in tokens.items()
        }
        weights = {name: s.weight for name, s in self.sources.items() if s.weight is not None}
        if weights:
            sizes = [tokens[name] / weight for name, weight in weights.items()]
            of_epoch = min(sizes) if self.stop == "first_exhausted" else max(sizes)
            wanted = {name: of_epoch * weight for name, weight in weights.items()}
        for name, num_tokens in wanted.items():
            if num_tokens > MOST_REPEATS * tokens[name]:
                times = num_tokens / max(1, tokens[name])
                raise ConfigError(
                    f"dataset.sources.{name}: an epoch would take it {times:,.0f} times: set "
                    "dataset.stop=first_exhausted, or weights that are closer to one another."
                )
        drawn_by = [self.seed, epoch] if epoch else [self.seed]
        chosen = [
            choose_documents(
                source_rows.lengths, wanted[name], np.random.default_rng([*drawn_by, number])
            )
            for number, (name, source_rows) in enumerate(rows.items())
        ]
        source_ids = np.repeat(np.arange(len(chosen)), [len(ids) for ids in chosen])
        order = np.random.default_rng([*drawn_by, len(chosen)]).permutation(len(source_ids))
        return MixedRows(
            tuple(rows.values()), tuple(rows), source_ids[order], np.concatenate(chosen)[order]
        )

    def table(self, mixed: MixedRows) -> Iterator[str]:
        """Yields a line per dataset: what an epoch takes of it."""
        taken = mixed.tokens_by_source()
        total = max(1, sum(taken.values()))
        for name, rows in zip(mixed.names, mixed.sources):
            tokens = taken[name]
            times = taken[name] / max(1, rows.num_tokens)
            share = f"{tokens:,} tokens an epoch, {tokens / total:.1%} of all"
            yield f"{name}: {share}, {times:.2f} x its {rows.num_tokens:,}"


class MixedRows(DocumentReader):
    """Rows of several sets in one order: row i is row `row_ids[i]` of set `source_ids[i]`."""

    def __init__(
        self,
        sources: Sequence[DocumentReader],
        names: Sequence[str],
        source_ids: np.ndarray,
        row_ids: np.ndarray,
    ):
        self.sources = sources
        self.names = names
        self.source_ids = source_ids
        self.row_ids = row_ids
        self.lengths, self.row_lengths = np.zeros((2, len(row_ids)), np.int64)
        for number, rows in enumerate(sources):
            mine = source_ids == number
            self.lengths[mine] = rows.lengths[row_ids[mine]]
            self.row_lengths[mine] = rows.row_lengths[row_ids[mine]]

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self.sources[self.source_ids[index]][int(self.row_ids[index])]

    def no_tokens(self) -> Mapping[str, np.ndarray]:
        return {name: x for rows in self.sources for name, x in rows.no_tokens().items()}

    def tokens_by_source(self) -> dict[str, int]:
        """Returns tokens that an epoch takes of each set."""
        sums = np.bincount(self.source_ids, weights=self.lengths, minlength=len(self.names))
        return {name: int(tokens) for name, tokens in zip(self.names, sums)}


def choose_documents(
    lengths: np.ndarray, num_tokens: float, rng: np.random.Generator
) -> np.ndarray:
    """Returns documents of about `num_tokens` tokens: all of them as often as they fit, then some
    that `rng` draws.

    >>> choose_documents(np.array([2, 2]), 6, np.random.default_rng(0))
    array([0, 1, 1])
    """
    total = int(lengths.sum())
    if total == 0:
        return np.zeros(0, np.int64)
    num_whole = int(num_tokens / total + 1e-9)
    whole = np.tile(np.arange(len(lengths)), num_whole)
    drawn = rng.permutation(len(lengths))
    taken = lengths[drawn]
    rest = num_tokens - num_whole * total
    # a document is in when at least half of it is
    return np.concatenate([whole, np.sort(drawn[taken.cumsum() - taken / 2 <= rest])])


def _with_same_sets(datasets: Mapping[str, Documents]) -> dict[str, Documents]:
    """Returns the datasets with the same sets of classes, where a row has several classes: each
    has found those of its own rows. Datasets of other names of classes stay as they are.
    """
    labeled = {
        name: dataset
        for name, dataset in datasets.items()
        if isinstance(dataset, FilesDataset) and dataset.found_classes is not None
    }
    found = [dataset.found_classes for dataset in labeled.values()]
    if len({(one.kind, one.names) for one in found if one}) != 1:
        return dict(datasets)
    sets = sorted({members for one in found if one for members in one.sets})
    joined = dict(datasets)
    for name, dataset in labeled.items():
        if dataset.found_classes and dataset.found_classes.sets != tuple(sets):
            joined[name] = dataset.with_sets(sets)
    return joined


def _source(name: str, settings: Any) -> Source:
    if not isinstance(settings, Mapping):  # the dataset itself, or a path
        settings = {}
    unknown = [key for key in settings if key not in ("dataset", "weight", "repeat")]
    if unknown or "dataset" not in settings:
        what = f"unknown key {unknown[0]}" if unknown else "dataset is missing"
        raise ConfigError(
            f"dataset.sources.{name}: {what}; a source has dataset, and weight or repeat."
        )
    source = Source(
        **{key: value for key, value in settings.items() if value is not None or key == "dataset"}
    )
    if isinstance(source.dataset, Mapping | str | None):
        raise ConfigError(
            f"dataset.sources.{name}.dataset={format_value(source.dataset)} must be a block with a "
            f"_target_, such as {{_target_: automodel_lite.data.reading.files.FilesDataset, path: "
            f"chat.jsonl}}."
        )
    if packing_dataset(source.dataset) is not None:
        raise ConfigError(
            f"dataset.sources.{name} is a stream, whose tokens are not known: use dataset=files "
            "for it."
        )
    if source.weight is not None and "repeat" in settings:
        raise ConfigError(
            f"dataset.sources.{name} has weight={source.weight} and repeat={source.repeat}: give "
            "one of them."
        )
    for key, rule in _RULES.items():
        value = settings.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or rule.problem(value):
            raise ConfigError(
                f"dataset.sources.{name}.{key}={format_value(value)} must be a number {rule}."
            )
    return source


def _prefixed(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Sets of every source under the mixture's names: its `val` is called like the source, others
    `source/name`.
    """
    return {
        name if key == "val" else f"{name}/{key}": value
        for name, own in sets.items()
        for key, value in own.items()
    }
