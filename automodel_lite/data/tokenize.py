"""Documents to token rows, once: rendered, tokenised, masked, checked, counted and kept in the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from transformers import PreTrainedTokenizerFast

from automodel_lite.data.cache import CacheEntry, Key, build_once, default_cache_dir, short_hash
from automodel_lite.data.chat import TrainOn
from automodel_lite.data.documents import DocumentRows, Documents
from automodel_lite.data.memmap import MemmapCorpus, check_token_ids
from automodel_lite.data.mixture import Mixture, Rows, prefixed
from automodel_lite.data.progress import Progress
from automodel_lite.data.row_checks import RowCounts, Tally
from automodel_lite.data.streaming import StreamingDataset
from automodel_lite.data.token_rows import CONTENT_HASH, RowsWriter, load_rows
from automodel_lite.data.tokenize_chunks import Job, OnBadRow, tokenize_chunks
from automodel_lite.errors import ConfigError

RULES_VERSION = "2"  # of rendering and masking; raised when the same input gives other rows


@dataclass(frozen=True)
class TokenizedData:
    """Rows of a dataset: `train`, `val` by name, their `counts` (`"train"`, `"val/<name>"`), and notes to print."""

    train: Rows
    val: Mapping[str, Rows]
    counts: dict[str, RowCounts]
    notes: tuple[str, ...]
    fingerprint: str  # of the training rows' content: other documents, tokenizer, template or mask rule change it


def tokenize_documents(
    documents: Documents | MemmapCorpus | Mixture,
    tokenizer: PreTrainedTokenizerFast,
    *,
    train_on: TrainOn = "assistant",
    template_kwargs: Mapping[str, Any] | None = None,
    on_bad_row: OnBadRow = "error",
    max_bad_frac: float = 0.05,
    num_proc: int | None = None,
    cache_dir: str | Path | None = None,
) -> TokenizedData:
    """Tokenises a dataset, or takes it from the cache; any number of processes may call it at once.

    The datasets of a mixture are tokenised one by one, then mixed; a memory-mapped corpus is taken as it is.

    Args:
        train_on: of chats, the turns that carry labels: every assistant turn, the last one (`last_assistant`), those
            after the last user turn (`completion`), or every token (`all`). Plain text is trained on whole.
        template_kwargs: more variables for the chat template.
        on_bad_row: `skip` counts rows that cannot be read or rendered; `error` stops at the first.
        max_bad_frac: of the documents of a set may be bad, empty or without a trained token; 0..1.
        num_proc: processes; default all cores for large sets, and none for small ones.
        cache_dir: default `$AUTOMODEL_LITE_CACHE`, else `~/.cache/automodel_lite`.

    Raises:
        DataError: a bad row (names file, line and column), or a set in which nothing, or everything, is trained on, or
            whose answers do not end on a trained stop token (shows one sample).
    """
    for name, value, kind in (("train_on", train_on, TrainOn), ("on_bad_row", on_bad_row, OnBadRow)):
        if value not in get_args(kind):
            raise ConfigError(f"{name}={value} must be one of {', '.join(get_args(kind))}.")
    job = Job(tokenizer, train_on, dict(template_kwargs or {}), on_bad_row, max_bad_frac, num_proc)
    return _tokenize(documents, job, Path(cache_dir) if cache_dir is not None else default_cache_dir())


def tokenize_validation(
    stream: StreamingDataset, job: Job, cache_dir: str | Path | None = None
) -> tuple[dict[str, Rows], tuple[str, ...]]:
    """The validation sets of a stream, which are tokenised beforehand as any others, and notes to print."""
    root = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    entries = _tokenize_sets(f"{stream.identity} val", stream.kind, stream.val, job, root)
    return {name: load_rows(entry.folder) for name, entry in entries.items()}, _notes(entries)


def _tokenize(documents: Documents | MemmapCorpus | Mixture, job: Job, cache_dir: Path) -> TokenizedData:
    if isinstance(documents, Mixture):
        parts = {name: _tokenize(part.dataset, job, cache_dir) for name, part in documents.parts.items()}
        return _mixed(documents, parts)
    if isinstance(documents, MemmapCorpus):
        return _mapped(documents, len(job.tokenizer))
    sets = {"train": documents.train} | {f"val/{name}": rows for name, rows in documents.val.items()}
    entries = _tokenize_sets(documents.identity, documents.kind, sets, job, cache_dir)
    return TokenizedData(
        train=load_rows(entries["train"].folder),
        val={name.removeprefix("val/"): load_rows(e.folder) for name, e in entries.items() if name != "train"},
        counts={name: _read_counts(entry) for name, entry in entries.items()},
        notes=_notes(entries),
        fingerprint=(entries["train"].folder / CONTENT_HASH).read_text()[:16],
    )


def _tokenize_sets(
    identity: str, kind: str, sets: Mapping[str, DocumentRows], job: Job, cache_dir: Path
) -> dict[str, CacheEntry]:
    return {
        name: build_once(
            cache_dir,
            "tokens",
            f"{identity.split('(')[0]}-{name}",
            _key(identity, job) | {"set": name},
            partial(_build, name=name, kind=kind, rows=rows, job=job),
        )
        for name, rows in sets.items()
    }


def _notes(entries: Mapping[str, CacheEntry]) -> tuple[str, ...]:
    return tuple(f"{name}: {_read_counts(entry)} · cache: {entry.note}" for name, entry in entries.items())


def _mixed(mixture: Mixture, parts: Mapping[str, TokenizedData]) -> TokenizedData:
    train = mixture.mix({name: data.train for name, data in parts.items()})
    notes = [f"{name}: {note}" for name, data in parts.items() for note in data.notes]
    return TokenizedData(
        train=train,
        val={key: rows for name, data in parts.items() for key, rows in prefixed(name, data.val).items()},
        counts={f"{name}/{key}": counts for name, data in parts.items() for key, counts in data.counts.items()},
        notes=(*notes, *mixture.table(train)),
        fingerprint=short_hash(" ".join([mixture.identity, *(data.fingerprint for data in parts.values())])),
    )


def _mapped(corpus: MemmapCorpus, vocab_size: int) -> TokenizedData:
    sets = {"train": corpus.train} | {f"val/{name}": rows for name, rows in corpus.val.items()}
    for name, rows in sets.items():
        check_token_ids(rows, name, vocab_size)
    counts = {
        name: RowCounts(len(rows), len(rows), rows.num_tokens, int(np.maximum(rows.lengths - 1, 0).sum()))
        for name, rows in sets.items()
    }
    return TokenizedData(
        train=corpus.train,
        val=corpus.val,
        counts=counts,
        notes=tuple(f"{name}: {counts[name]}" for name in sets),
        fingerprint=short_hash(corpus.identity),
    )


def _key(identity: str, job: Job) -> Key:
    template = job.tokenizer.chat_template
    return {
        "dataset": identity,
        "tokenizer": short_hash(job.tokenizer.backend_tokenizer.to_str()),
        "tokenizer.special_tokens": json.dumps(job.tokenizer.special_tokens_map, sort_keys=True, default=str),
        "tokenizer.chat_template": short_hash(json.dumps(template, sort_keys=True)),
        "template_kwargs": json.dumps(dict(job.template_kwargs), sort_keys=True, default=str),
        "train_on": job.train_on,
        "on_bad_row": job.on_bad_row,
        "max_bad_frac": str(job.max_bad_frac),
        "rules": RULES_VERSION,
    }


def _read_counts(entry: CacheEntry) -> RowCounts:
    return RowCounts(**json.loads((entry.folder / "counts.json").read_text()))


def _build(folder: Path, name: str, kind: str, rows: DocumentRows, job: Job) -> None:
    """Writes the rows and counts of one set into `folder`."""
    writer = RowsWriter(folder)
    tally = Tally(job.tokenizer, kind, job.train_on, job.max_bad_frac)
    progress = Progress(f"tokenizing {name}", len(rows), "documents")
    for chunk in tokenize_chunks(rows, job):
        progress.add(chunk.counts.num_documents)
        writer.append(chunk.input_ids, chunk.labels, chunk.lengths)
        tally.add(chunk)
    writer.close()
    tally.finish(name)
    (folder / "counts.json").write_text(json.dumps(asdict(tally.counts)))
