"""Checkpoints on disk: which are complete, which are kept, how one comes and goes, and whether an
export is of the newest one. No torch, one process.

checkpoints/
    step_00000100/
        tensors/         model and optimizer (sharded_files.py)
        state.json       step, position in the data, validation loss, what the loggers keep
        config.yaml      the resolved configuration
        COMPLETE.json    size in bytes, CRC-32 and SHA-256 of every file: written last
        val_loss.json    of a checkpoint that was saved before its validation was over
    .tmp-*-step_00000200 being written; the next start removes it
    .old-step_00000000   being deleted; the next start removes it
    unreadable-step_*    did not load, and another one was taken; for a person to look at
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from automodel_lite.config.schema import CheckpointConfig
from automodel_lite.errors import ConfigError
from automodel_lite.run import durable

MANIFEST = "COMPLETE.json"
# of an exported folder: {"step": 500, "newest_step": 700, "files": [...]}
MARK = "automodel_lite.json"
LATEST = "latest"
BEST = "best"
STATE = "state.json"
RATING = "val_loss.json"
TENSORS = "tensors"
_STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Rating:
    """What the best checkpoint is chosen by: a number of its step's validation, and which way that
    gets better.
    """

    metric: str
    value: float
    rises: bool = False

    @property
    def cost(self) -> float:
        """Returns the number as one that is the better the lower it is."""
        return -self.value if self.rises else self.value

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def text(self) -> str:
        """Returns what the best one has: `the highest task_score (0.75)`."""
        name = "validation loss" if self.metric == "val_loss" else self.metric
        return f"the {'highest' if self.rises else 'lowest'} {name}"


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Returns the step of a checkpoint's folder; None for anything else."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def clean(folder: Path) -> None:
    """Removes what killed saves and deletions have left."""
    for leftover in (*folder.glob(".tmp-*"), *folder.glob(".old-*")):
        shutil.rmtree(leftover, ignore_errors=True)


def survey(folder: Path) -> tuple[list[Path], list[str]]:
    """Complete checkpoints, newest first, and a sentence on each folder that is not one."""
    complete = []
    skipped = []
    by_step = {step: path for path in folder.glob("step_*") if (step := step_of(path)) is not None}
    for _, path in sorted(by_step.items(), reverse=True):
        reason = why_incomplete(path)
        if reason:
            skipped.append(f"{path.name} is skipped: {reason}")
        else:
            complete.append(path)
    return complete, skipped


def why_incomplete(checkpoint: Path) -> str | None:
    """None when every file of the manifest is there with its size."""
    if checkpoint.is_symlink():
        return "it is a link"
    try:
        files = durable.read_json(checkpoint / MANIFEST)["files"]
        for name, entry in files.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                return f"its manifest names {name!r}, which leads out of it"
            found = os.lstat(checkpoint / name)
            if not stat.S_ISREG(found.st_mode):
                return f"{name} is not a plain file"
            if found.st_size != entry["bytes"]:
                return f"{name} has {found.st_size} bytes instead of {entry['bytes']}"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its manifest cannot be read ({error})"
    return (
        None
        if f"{TENSORS}/index.json" in files and STATE in files
        else "its manifest is incomplete"
    )


def broken_files(checkpoint: Path, share: int, num_shares: int) -> list[str]:
    """Files whose checksum is not the manifest's; the files are shared out over `num_shares`
    readers.
    """
    files = durable.read_json(checkpoint / MANIFEST)["files"]
    mine = sorted(files)[share::num_shares]
    return [name for name in mine if files[name]["crc32"] != durable.checksum(checkpoint / name)]


def begin(temporary: Path, num_bytes: int) -> None:
    """Makes the temporary folder; raises OSError (no space) when the checkpoint would not fit."""
    temporary.parent.mkdir(parents=True, exist_ok=True)
    free = durable.free_bytes(temporary.parent)
    needed = int(num_bytes * 1.02) + (1 << 20)
    if free < needed:
        raise OSError(
            28,
            f"no space: the checkpoint needs {needed / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB "
            "are free",
        )
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / TENSORS).mkdir(parents=True)


def complete(
    temporary: Path,
    final: Path,
    texts: Mapping[str, str],
    digests: Mapping[str, durable.Digests],
    fence: Callable[[], None],
    replaces: bool = False,
) -> None:
    """Adds the small files and the manifest, syncs everything, reads it back, and renames the
    folder to its name.

    texts     contents by path in the folder
    digests   of the files in tensors/, from those who wrote them
    fence     raises RunStoppedError when the run's folder is another job's by now
    replaces  a complete one of that name
    """
    for name, text in texts.items():
        durable.write_file(temporary / name, text)
    files = {
        path.relative_to(temporary).as_posix(): {
            "bytes": path.stat().st_size,
            **(digests.get(path.name) or durable.digests(path)),
        }
        for path in sorted(temporary.rglob("*"))
        if path.is_file()
    }
    texts = {**texts, MANIFEST: json.dumps({"version": 1, "files": files}, indent=1)}
    durable.write_file(temporary / MANIFEST, texts[MANIFEST])
    durable.sync(temporary / TENSORS)
    durable.sync(temporary)
    # a network disk may lose what it has taken without an error: what is not read back as it was
    # gets no name
    reason = why_incomplete(temporary)
    for name, text in texts.items():
        if (temporary / name).read_text(encoding="utf-8") != text:
            reason = f"{name} has different content"
    if reason:
        raise OSError(errno.EIO, f"the checkpoint does not read back as it was written: {reason}")
    fence()
    old = _old_of(final)
    if final.exists() and replaces and why_incomplete(final) is None:
        shutil.rmtree(old, ignore_errors=True)
        durable.rename(final, old)
    elif final.exists():
        set_aside(final)
    durable.rename(temporary, final)
    shutil.rmtree(old, ignore_errors=True)


def restore_replaced(final: Path) -> None:
    """Gives back its name to what a killed save was about to replace."""
    old = _old_of(final)
    if old.is_dir() and not final.exists():
        durable.rename(old, final)


def _old_of(final: Path) -> Path:
    return final.with_name(f".replaced-{final.name}")


def set_aside(checkpoint: Path) -> None:
    """Keeps what cannot be read under another name, for a person to look at: no rule counts it."""
    aside = checkpoint.with_name(f"unreadable-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    durable.rename(checkpoint, aside)


def delete_old(folder: Path, rules: CheckpointConfig) -> None:
    """Deletes the complete checkpoints that no rule keeps."""
    costs = costs_of(ratings_of(folder))
    for step in steps_to_delete(costs, rules):
        path = folder / name_of(step)
        # what has its own name is always whole
        durable.rename(path, aside := path.with_name(f".old-{path.name}"))
        shutil.rmtree(aside, ignore_errors=True)


def steps_to_delete(costs: Mapping[int, float | None], rules: CheckpointConfig) -> list[int]:
    """Returns the steps that no rule keeps; `costs` has each step's validation loss, or what is
    compared in its place, the lowest being the best; None where none was taken.
    """
    steps = sorted(costs)
    kept = {*steps[-rules.keep_last :], *best_first(costs)[: rules.keep_best]}
    if rules.keep_every:
        kept |= {step for step in steps if step % rules.keep_every == 0}
    return [step for step in steps if step not in kept]


def rating_of(checkpoint: Path) -> Rating | None:
    """Returns what was taken at the validation of its step; None where none was."""
    rating = checkpoint / RATING
    saved = durable.read_json(rating if rating.is_file() else checkpoint / STATE)
    if saved.get("rating"):
        return Rating(**saved["rating"])
    loss: float | None = saved.get("val_loss")
    return None if loss is None else Rating("val_loss", loss)


def ratings_of(folder: Path) -> dict[int, Rating | None]:
    """Returns those of the complete checkpoints, by step; None for one that was rated by another
    metric than the newest of them.
    """
    found = {step_of(path) or 0: rating_of(path) for path in survey(folder)[0]}
    rated = [found[step] for step in sorted(found) if found[step] is not None]
    metric = rated[-1].metric if rated and rated[-1] else ""
    return {step: x if x and x.metric == metric else None for step, x in found.items()}


def costs_of(ratings: Mapping[int, Rating | None]) -> dict[int, float | None]:
    return {step: None if x is None else x.cost for step, x in ratings.items()}


def best_first(costs: Mapping[int, float | None]) -> list[int]:
    """Returns the steps that were rated, the lowest cost first; of equal ones the earlier."""
    return [
        step
        for cost, step in sorted(
            (cost, step) for step, cost in costs.items() if cost is not None and cost == cost
        )
    ]


def best_checkpoint(folder: Path) -> tuple[Path, Rating] | None:
    """Returns the best complete checkpoint, and by what it is; None without."""
    ratings = ratings_of(folder)
    for step in best_first(costs_of(ratings)):
        rating = ratings[step]
        assert rating is not None
        return folder / name_of(step), rating
    return None


def named_checkpoint(run: Path, name: str | None) -> Path:
    """Returns a complete checkpoint of a run by its name: `latest` (and None), `best`, which is
    that of the lowest validation loss, or the best `checkpoint.best_metric`, or `step_00000500`.
    Nothing is cleaned up, as the run may be going on.

    Raises ConfigError where there is none, and where another one would be chosen if all folders
    were whole.
    """
    found, skipped = survey(run / "checkpoints")
    if not found:
        raise ConfigError("\n".join([f"{run} has no complete checkpoint.", *skipped]))
    rated = best_checkpoint(run / "checkpoints")
    if name in (None, LATEST):
        if newer := [text for text in skipped if text > found[0].name]:
            cure = f"To use the one before it, choose --checkpoint {found[0].name}."
            raise ConfigError("\n".join([*newer, cure]))
        return found[0]
    names = [path.name for path in found]
    if name == BEST and rated is None:
        raise ConfigError(
            f"{run} has no checkpoint of a validated step, so none is known as the best: choose "
            f"--checkpoint {LATEST} or one of {', '.join(names)}; a run validates what it saves "
            "with held-out data, dataset.val_frac=0.05, and training.val_every_steps equal to "
            "checkpoint.every_steps."
        )
    if name == BEST and rated is not None:
        if skipped:  # one of them may be the best
            cure = f"The best of the others is --checkpoint {rated[0].name}."
            raise ConfigError("\n".join([*skipped, cure]))
        return rated[0]
    if name not in names:
        reasons = [text for text in skipped if text.startswith(f"{name} ")]
        known = [*names, LATEST, *([BEST] if rated else [])]
        text = f"{run} has no complete checkpoint {name}: there are {', '.join(known)}."
        raise ConfigError("\n".join([*reasons, text]))
    return run / "checkpoints" / str(name)


def exported_folder(source: str, checkpoint: str | None = None) -> str:
    """`runs/x` -> `runs/x/hf` or `runs/x/adapter`, whichever was written last of the newest
    checkpoint, or is of the one that is named; anything else as it is.

    Raises ConfigError for a run that has exported nothing, nothing since it was trained further,
    or not this checkpoint; for a checkpoint of what is not a run, and for a checkpoint's folder.
    """
    run = Path(source).expanduser()
    if owner := run_of_checkpoint(run):
        raise ConfigError(
            f"{source} is a checkpoint of a run, not a model: automodel-lite export "
            f"{shlex.quote(str(owner))} --checkpoint {run.resolve().name} --to MODEL writes it as "
            "one."
        )
    if not (run / "config.yaml").is_file():
        if checkpoint:
            raise ConfigError(
                f"--checkpoint {checkpoint}: {source} is not the folder of a run: name one, or "
                "leave the flag out."
            )
        return str(run) if run.is_dir() else source
    wanted = step_of(named_checkpoint(run, checkpoint)) if checkpoint else None
    for path in (run / "hf/config.json", run / "adapter/adapter_config.json"):
        if not path.is_file():
            continue
        if exported_step(path.parent) == wanted or (wanted is None and not is_stale(path.parent)):
            return str(path.parent)
    typed = shlex.quote(source)
    if wanted is not None:
        name = name_of(wanted)
        raise ConfigError(
            f"{source} has no hf/ or adapter/ of {name}: automodel-lite export {typed} "
            f"--checkpoint {name} writes it."
        )
    raise ConfigError(
        f"{source} has no hf/ or adapter/ of its newest checkpoint: automodel-lite export "
        f"{typed} writes it."
    )


def run_of_checkpoint(folder: Path) -> Path | None:
    """Returns the run that the folder is a checkpoint of; None for any other folder."""
    if not (folder / MANIFEST).is_file():
        return None
    run = folder.parent.parent if folder.parent.name == "checkpoints" else None
    return run if run and (run / "config.yaml").is_file() else None


def is_stale(folder: Path) -> bool:
    """Returns whether a checkpoint has come since the export was written. Of one without a mark
    nobody knows.
    """
    return newest_step(folder.parent) > max(_marked(folder, "newest_step"), exported_step(folder))


def newest_step(run: Path) -> int:
    """Returns the step of a run's newest checkpoint; 0 without one."""
    steps = [step_of(path.parent) or 0 for path in run.glob(f"checkpoints/*/{MANIFEST}")]
    return max(steps, default=0)


def exported_step(folder: Path) -> int:
    """Returns the step of the checkpoint that an export was made of; 0 without a mark."""
    return _marked(folder, "step")


def older_export(folder: Path) -> str | None:
    """Returns the sentence for an export of another step than the newest checkpoint's, as the best
    one is; None for any other folder.
    """
    step = exported_step(folder)
    if not 0 < step < newest_step(folder.parent):
        return None
    return f"{folder} is of {name_of(step)}; the newest is {name_of(newest_step(folder.parent))}"


def _marked(folder: Path, key: str) -> int:
    try:
        return int(durable.read_json(folder / MARK)[key])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0
