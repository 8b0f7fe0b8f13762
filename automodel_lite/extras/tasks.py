"""Tokenizing in tasks: many machines each tokenize some documents of a corpus, and one joins them.

    parts/<set>-<hash>   rows of the documents of one task, complete or absent (data/cache.py)
    tokens/<set>-<hash>  what training reads: the parts end to end, the same bytes as of one process

Tasks share the cache folder and nothing else: they may run anywhere, in any order, and again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from automodel_lite.config.schema import Config
from automodel_lite.config.sizes import ceil_div
from automodel_lite.data.cache import Key, build_once, cache_root, entry_folder, find_damage
from automodel_lite.data.prepare import build_documents
from automodel_lite.data.reading.documents import Documents, DocumentSet
from automodel_lite.data.tokens.chunks import CHUNK_DOCUMENTS, TokenizeJob
from automodel_lite.data.tokens.findings import Findings, check_set
from automodel_lite.data.tokens.token_rows import RowsWriter, load_rows, row_dataset
from automodel_lite.data.tokens.tokenize import (
    FINDINGS,
    HASHES,
    job_of,
    read_findings,
    rows_key,
    write_part,
)
from automodel_lite.errors import ConfigError, counted, listed
from automodel_lite.seed import BLOCK


def part_of(num_documents: int, task: int, tasks: int) -> range:
    """Returns the documents of a task, from 1 on: whole chunks, so that rows are those of one
    process.
    """
    num_chunks = ceil_div(num_documents, CHUNK_DOCUMENTS)
    first = num_chunks * (task - 1) // tasks * CHUNK_DOCUMENTS
    last = num_chunks * task // tasks * CHUNK_DOCUMENTS
    return range(min(first, num_documents), min(last, num_documents))


def tokenize_task(config: Config, task: int, tasks: int) -> str:
    """Tokenizes the documents of a task, or finds them done; returns a line on each set."""
    lines = []
    documents = build_documents(config)
    job = job_of(config, documents)
    root = cache_root(config.cache_dir)
    for name, key, rows, _ in _sets(documents, job):
        part = part_of(len(rows), task, tasks)
        write = partial(write_part, name=name, documents=rows, job=job, part=part)
        entry = build_once(root, "parts", name, _part_key(key, task, tasks), write)
        found = f"{read_findings(entry.folder).counts} · cache: {entry.note}"
        lines.append(f"{name}: task {task} of {tasks}: {counted(len(part), 'document')}, {found}")
    return "\n".join(lines)


def merge_tasks(config: Config, tasks: int) -> None:
    """Joins the parts of all tasks; raises ConfigError with the tasks that have not ended."""
    documents = build_documents(config)
    job = job_of(config, documents)
    root = cache_root(config.cache_dir)
    for name, key, _, kind in _sets(documents, job):
        keys = [_part_key(key, task, tasks) for task in range(1, tasks + 1)]
        folders = [entry_folder(root, "parts", name, part) for part in keys]
        target = entry_folder(root, "tokens", name, key)
        if target.is_dir() and find_damage(target) is None:
            continue
        missing = [str(i) for i, folder in enumerate(folders, start=1) if find_damage(folder)]
        if missing:
            raise ConfigError(
                f"{name}: {counted(len(missing), 'task', 'has', of=tasks)} not ended, or left "
                f"damaged files: {listed(missing)}. Run them again, automodel-lite prepare ... "
                f"--task {missing[0]} --tasks {tasks}, with the same cache_dir, data and settings."
            )
        join = partial(_join, folders=folders, name=name.partition("-")[2], kind=kind, job=job)
        build_once(root, "tokens", name, key, join)


def _sets(documents: Documents, job: TokenizeJob) -> Iterator[tuple[str, Key, DocumentSet, str]]:
    """Yields name and key of the cache, documents and kind of each set; those of a mixture too."""
    if (combining := row_dataset(documents)) is not None:
        for dataset in combining.datasets.values():
            yield from _sets(dataset, job)
        return
    sets = {"train": documents.train}
    sets |= {f"val/{name}": rows for name, rows in documents.val.items()}
    source = documents.identity.split("(")[0]
    for name, rows in sets.items():
        key = rows_key(documents.identity, job, documents.kind) | {"set": name}
        yield f"{source}-{name}", key, rows, documents.kind


def _part_key(key: Key, task: int, tasks: int) -> Key:
    return key | {"task": f"{task} of {tasks}"}


def _join(folder: Path, folders: list[Path], name: str, kind: str, job: TokenizeJob) -> None:
    """Writes the rows of all parts end to end, a million documents at a time, and judges them."""
    writer = RowsWriter(folder)
    found = Findings()
    with (folder / HASHES).open("wb") as hashes:
        for part in folders:
            rows = load_rows(part)
            for start in range(0, len(rows), BLOCK):
                stop = min(start + BLOCK, len(rows))
                tokens = slice(int(rows.offsets[start]), int(rows.offsets[stop]))
                columns = {name: values[tokens] for name, values in rows.columns.items()}
                groups = None if rows.groups is None else rows.groups[start:stop]
                writer.append(columns, rows.lengths[start:stop], groups)
            hashes.write((part / HASHES).read_bytes())
            found += read_findings(part)
    writer.close()
    check_set(name, kind, found, job.settings, job.tokenizer)
    (folder / FINDINGS).write_text(json.dumps(asdict(found)))
