"""The token rows of a dataset, made once: written, counted and kept in the cache, and read from it.

What makes them of documents is in chunks.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from automodel_lite.columns import COLUMNS
from automodel_lite.config.components import build, build_with
from automodel_lite.config.schema import Config, TokenizeConfig
from automodel_lite.data.cache import Key, build_once, cache_root, short_hash
from automodel_lite.data.reading.documents import Documents, DocumentSet
from automodel_lite.data.tokens.chunks import TokenizeJob, tokenize_chunks
from automodel_lite.data.tokens.decisions import DecisionStyle
from automodel_lite.data.tokens.findings import (
    NOTES,
    Findings,
    also_trained,
    check_set,
    hash_rows,
)
from automodel_lite.data.tokens.token_rows import (
    CONTENT_HASH,
    PAIRED,
    TREES,
    DocumentReader,
    RowCounts,
    RowsWriter,
    TokenizedData,
    TokenizedDocuments,
    load_rows,
    members_of,
    row_dataset,
)
from automodel_lite.data.tokens.tokenizer import check_vocabulary
from automodel_lite.data.tokens.trees import write_trees
from automodel_lite.errors import ConfigError, counted, listed, printable
from automodel_lite.progress import Progress


def job_of(
    config: Config, documents: Documents, tree: str = "off", most_tokens: int | None = None
) -> TokenizeJob:
    """The job of a run, whose tokenizer may be trained on its documents; `tree` and `most_tokens`
    are the packer's.
    """
    # which declares columns of its own
    loss = build(config.loss) if config.loss else None
    separates = loss is not None and loss.separates_rows
    mismatches = loss is not None and loss.step_mean is not None
    scores = loss is not None and loss.head == "score"
    if scores and config.tokenize.train_on != "assistant":
        raise ConfigError(
            f"tokenize.train_on={config.tokenize.train_on} chooses tokens to train on, and a "
            "document that is scored has one label",
            key="tokenize.train_on",
            cure="leave it out",
        )
    check_turns(config.tokenize, documents)
    tokenizer = build_with(config.tokenizer, documents=documents, cache_dir=config.cache_dir)
    pretrained = config.model.get("pretrained")
    if pretrained and config.tokenizer.get("path") != pretrained:
        check_vocabulary(pretrained, tokenizer)
    style = style_of(config)
    return TokenizeJob(
        tokenizer, config.tokenize, tree, most_tokens, separates, mismatches, style, scores
    )


def style_of(config: Config) -> DecisionStyle:
    """Returns how a run writes questions with fixed choices."""
    settings = config.tokenize
    asks_all = settings.unanswered == "ask"
    return DecisionStyle(settings.choice_prefix, settings.permute_choices, config.seed, asks_all)


def check_turns(settings: TokenizeConfig, documents: Documents) -> None:
    """Raises ConfigError for settings of turns where no document has any: all of a text is trained
    on, and what the labels of token ids say.
    """
    # a corpus of tokens has none
    datasets = members_of(documents).values() or [documents]
    kinds = {one.kind for one in datasets}
    if not kinds <= {"text", "tokens", "rows"}:
        return
    asked = []
    if settings.train_on not in ("assistant", "all"):
        asked.append(f"train_on={settings.train_on}")
    if settings.template_kwargs:
        asked.append(f"template_kwargs={settings.template_kwargs}")
    if asked:
        raise ConfigError(
            f"tokenize.{asked[0]} is of chats and answers, and the data are plain text or token "
            "ids: leave it out."
        )


FINDINGS = "findings.json"
HASHES = "hashes.bin"
# of rendering, masking and files; raised when the same input gives other rows, or other files
RULES_VERSION = "18"


def tokenize_documents(
    documents: Documents, job: TokenizeJob, cache_dir: str | Path | None = None
) -> TokenizedData:
    """Tokenizes a dataset, or takes it from the cache; any number of processes may call it at once.

    The datasets of a mixture are tokenized one by one, then mixed; a memory-mapped corpus is taken
    as it is. cache_dir: default `$AUTOMODEL_LITE_CACHE`, else `~/.cache/automodel_lite`.

    Raises DataError: a bad row (names file, line and column), or a set in which nothing, or
    everything, is trained on, or whose answers do not end on a trained stop token (shows an
    example).
    """
    if (combining := row_dataset(documents)) is not None:
        datasets = {
            name: tokenize_documents(dataset, job, cache_dir)
            for name, dataset in combining.datasets.items()
        }
        return combining.combine(datasets, len(job.tokenizer))
    sets = {"train": documents.train}
    sets |= {f"val/{name}": rows for name, rows in documents.val.items()}
    rows, counts, notes = tokenize_sets(sets, documents.identity, documents.kind, job, cache_dir)
    train = rows.pop("train")
    return TokenizedData(
        train=train,
        val={name.removeprefix("val/"): of_set for name, of_set in rows.items()},
        counts=counts,
        notes=notes,
        fingerprint=(Path(str(train.flat.folder)) / CONTENT_HASH).read_text()[:16],
    )


def rows_key(identity: str, job: TokenizeJob, kind: str) -> Key:
    """Returns what the token rows of a dataset of this kind depend on, beside the name of their
    set.
    """
    template = job.tokenizer.chat_template
    settings = job.settings
    key = {
        "dataset": identity,
        "tokenizer": short_hash(job.tokenizer.backend_tokenizer.to_str()),
        "tokenizer.special_tokens": json.dumps(
            job.tokenizer.special_tokens_map, sort_keys=True, default=str
        ),
        "tokenizer.chat_template": short_hash(json.dumps(template, sort_keys=True)),
        "template_kwargs": json.dumps(dict(settings.template_kwargs), sort_keys=True, default=str),
        "train_on": settings.train_on,
        "on_bad_row": settings.on_bad_row,
        "max_bad_frac": str(settings.max_bad_frac),
        "rules": RULES_VERSION,
        "columns": " ".join(f"{name}:{column.stored}" for name, column in COLUMNS.items()),
    }
    if job.mismatches:
        key["mismatches"] = "true"
    if kind == "decisions":
        key["decisions"] = str(job.decisions)
    if job.scores:
        key["scores"] = "true"
    return key


def _as_trees(
    rows: TokenizedDocuments, folder: Path, root: Path, label: str, job: TokenizeJob
) -> tuple[TokenizedDocuments, dict[str, Any]]:
    """Returns the rows that `folder` holds with their shared beginnings once, from the cache, and
    what is said of them.
    """
    key = {"rows": (folder / CONTENT_HASH).read_text(), "rules": RULES_VERSION}
    key |= {"tree": job.tree, "most_tokens": str(job.most_tokens)}
    grow = partial(write_trees, rows=rows, mode=job.tree, most_tokens=job.most_tokens)
    if job.separates:
        key["separates"] = "true"
        grow = partial(grow, separates=True)
    trees = build_once(root, "trees", label, key, grow)
    return load_rows(trees.folder), json.loads((trees.folder / TREES).read_text())


def tokenize_sets(
    sets: Mapping[str, DocumentSet],
    identity: str,
    kind: str,
    job: TokenizeJob,
    cache_dir: str | Path | None,
) -> tuple[dict[str, DocumentReader], dict[str, RowCounts], tuple[str, ...]]:
    """Returns the rows of each set, which the cache holds, their counts, and notes to print."""
    key = rows_key(identity, job, kind)
    rows: dict[str, DocumentReader] = {}
    counts = {}
    notes = []
    special = []
    of_trees = []
    source = identity.split("(")[0]
    root = cache_root(cache_dir)
    trained = np.zeros(0, np.uint64)
    for name, documents in sets.items():
        write = partial(_write_rows, name=name, kind=kind, documents=documents, job=job)
        entry = build_once(root, "tokens", f"{source}-{name}", key | {"set": name}, write)
        found = read_findings(entry.folder)
        flat = load_rows(entry.folder)
        counts[name] = found.counts
        # rows of one group may share a beginning, or any rows; pairs in every mode
        is_paired = not PAIRED.isdisjoint(flat.columns)
        if job.tree == "all" or (flat.groups is not None and (job.tree == "auto" or is_paired)):
            flat, facts = _as_trees(flat, entry.folder, root, f"{source}-{name}", job)
            of_trees += [f"{name}: {note}"] if (note := facts.pop("note")) else []
            counts[name] += RowCounts(**facts)
        rows[name] = flat
        notes.append(f"{name}: {counts[name]} · cache: {entry.note}")
        special += tokenization_notes(name, found)
        hashes = np.fromfile(entry.folder / HASHES, np.uint64)
        if name == "train":
            trained = hashes
        else:
            special += also_trained(name.removeprefix("val/"), hashes, trained)
    return rows, counts, (*notes, *special, *of_trees)


def _write_rows(
    folder: Path, name: str, kind: str, documents: DocumentSet, job: TokenizeJob
) -> None:
    """Tokenizes a set into a folder of the cache, and judges it."""
    found = write_part(folder, name, documents, job)
    check_set(name, kind, found, job.settings, job.tokenizer)


def write_part(
    folder: Path, name: str, documents: DocumentSet, job: TokenizeJob, part: range | None = None
) -> Findings:
    """Tokenizes a set, or a part of it, into a folder of the cache; returns what was found."""
    writer = RowsWriter(folder)
    found = Findings()
    part = range(len(documents)) if part is None else part
    progress = Progress(f"tokenizing {name}", len(part), "documents")
    with progress, (folder / HASHES).open("wb") as hashes:
        for chunk in tokenize_chunks(documents, job, part):
            progress.add(chunk.found.counts.num_documents)
            writer.append(chunk.columns, chunk.lengths, chunk.groups)
            # rows of the same words differ by their images
            ids = chunk.columns["input_ids"] ^ chunk.columns.get("image_stamp", 0)
            hashes.write(hash_rows(ids, chunk.lengths).data)
            found += chunk.found
    writer.close()
    (folder / FINDINGS).write_text(json.dumps(asdict(found)))
    return found


def read_findings(folder: Path) -> Findings:
    """Returns what was found when the rows of a folder were made."""
    stored = json.loads((folder / FINDINGS).read_text())
    return Findings(**stored | {"counts": RowCounts(**stored["counts"])})


def tokenization_notes(name: str, found: Findings) -> list[str]:
    """Returns notes on what was found in documents, on empty answers, and on what is not used."""
    notes = []
    for kind in sorted(found.num_noted, key=list(NOTES).index):
        documents = counted(found.num_noted[kind], "document", "has")
        text = NOTES[kind].format(documents=documents, first=found.first_noted[kind])
        notes.append(f"NOTE: {name}: {text}")
    if found.num_blank:
        notes.append(
            f"NOTE: {name}: {counted(found.num_blank, 'row', 'trains')} only the end of an answer: "
            "it is empty, or its one token begins the row, where nothing comes before it"
        )
    if found.unused:
        places = [f"{printable(what)} ({place})" for what, place in found.unused.items()]
        notes.append(f"NOTE: {name}: ignored, as nothing uses them: {listed(places, 5)}")
    return notes
