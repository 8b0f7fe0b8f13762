"""Checkpoints by Tinker's paths, as folders.

tinker://RUN/weights/NAME           FOLDER/RUN/weights/NAME            weights and optimizer
tinker://RUN/sampler_weights/NAME   FOLDER/RUN/sampler_weights/NAME    weights
tinker://RUN/external_weights/NAME  FOLDER/RUN/external_weights/NAME   for `from_pretrained`
FOLDER/RUN/run.json                 base model, adapter, and what the script has told of itself
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinker import types

from automodel_lite.extras.client.folder import NAME_RULE, is_name
from automodel_lite.run import durable
from automodel_lite.run.checkpoint_folder import MANIFEST

SCHEME = "tinker://"
FACTS = "run.json"
KINDS = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
Metadata = dict[str, str] | None


def folder_of(root: Path, path: str) -> Path:
    """Returns the folder of a path; raises ValueError for one that is none."""
    parts = path.removeprefix(SCHEME).split("/")
    is_whole = path.startswith(SCHEME) and len(parts) == 3 and parts[1] in KINDS
    if not is_whole or not all(map(is_name, parts)):
        raise ValueError(
            f"Invalid tinker path: {path}: it is tinker://RUN/weights/NAME, or sampler_weights or "
            "external_weights in the middle; a model's name is base_model=...."
        )
    return root.joinpath(*parts)


def path_of(run: Path, kind: str, name: str) -> str:
    """Returns the path of a checkpoint's name; raises ValueError for a name that is none."""
    if not is_name(name):
        raise ValueError(f"name={name!r} {NAME_RULE}.")
    return f"{SCHEME}{run.name}/{kind}/{name}"


def check_base_model(given: str | None, facts: Mapping[str, Any], path: str) -> None:
    """Raises ValueError for a base model that is not the checkpoint's."""
    if given not in (None, facts["base_model"]):
        raise ValueError(
            f"base_model={given}, and {path} is of {facts['base_model']}: leave base_model out."
        )


def write_facts(run: Path, facts: Mapping[str, Any]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    durable.write_atomically(run / FACTS, json.dumps(dict(facts), indent=1))


def read_facts(run: Path) -> dict[str, Any]:
    """Returns what a run was made with; raises FileNotFoundError."""
    if not (run / FACTS).is_file():
        raise FileNotFoundError(f"{run} holds no run of Tinker's API: is the folder the right one?")
    found: dict[str, Any] = durable.read_json(run / FACTS)
    return found


def checkpoints(run: Path) -> list[types.Checkpoint]:
    """Returns the checkpoints of a run, the oldest first."""
    found = []
    for kind, of_type in KINDS.items():
        for folder in (run / kind).glob("*"):
            mark = folder / (MANIFEST if kind != "external_weights" else "config.json")
            marks = [mark, folder / "adapter_config.json"]
            if folder.name.startswith(".") or not any(x.is_file() for x in marks):
                continue
            files = [path for path in folder.rglob("*") if path.is_file()]
            when = max(path.stat().st_mtime for path in files)
            facts = folder.with_name(f".{folder.name}.json")
            found.append(
                types.Checkpoint(
                    checkpoint_id=f"{kind}/{folder.name}",
                    checkpoint_type=of_type,
                    time=datetime.fromtimestamp(when, UTC),
                    tinker_path=path_of(run, kind, folder.name),
                    size_bytes=sum(path.stat().st_size for path in files),
                    user_metadata=durable.read_json(facts) if facts.is_file() else None,
                )
            )
    return sorted(found, key=lambda checkpoint: checkpoint.time)


def write_metadata(folder: Path, metadata: Mapping[str, str] | None) -> None:
    """Keeps what a script has told of a checkpoint; None deletes what was there."""
    facts = folder.with_name(f".{folder.name}.json")
    if metadata:
        durable.write_atomically(facts, json.dumps(dict(metadata)))
    else:
        facts.unlink(missing_ok=True)


def delete(folder: Path) -> None:
    """Deletes a checkpoint; raises FileNotFoundError."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not there.")
    aside = folder.with_name(f".old-{folder.name}")
    durable.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)
    write_metadata(folder, None)
