"""The exported folders of a run, hf/ and adapter/: which step they are of, and which files in them are ours.

    hf/automodel_lite.json   {"step": 500, "files": ["config.json", "model.safetensors", ...]}

Every other file in hf/ is the user's own: it stays when the next export takes the old one's place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from automodel_lite.errors import ConfigError
from automodel_lite.run.checkpoint_folder import MANIFEST, step_of
from automodel_lite.run.durable import write_file

MARK = "automodel_lite.json"
_WEIGHTS = re.compile(r"(model|adapter_model|pytorch_model).*\.(safetensors|bin|index\.json)")


def fresh(folder: Path) -> Path:
    """An unused name beside `folder`, to write under; puts an old export back that a killed process had set aside."""
    folder = folder.resolve()
    temporary, aside = temporary_of(folder), _aside(folder)
    if aside.exists() and not folder.exists():
        os.rename(aside, folder)
    shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)
    return temporary


def temporary_of(folder: Path) -> Path:
    """What `fresh` gives, known to every rank."""
    folder = folder.resolve()
    return folder.with_name(f".tmp-{folder.name}")


def replace(temporary: Path, folder: Path, step: int) -> None:
    """Gives a complete export its name; the user's own files in the folder come along."""
    folder = folder.resolve()  # hf/ may be a link to a larger disk
    ours = sorted(path.name for path in temporary.iterdir())
    write_file(temporary / MARK, json.dumps({"step": step, "files": ours}))
    aside = _aside(folder)
    if folder.is_dir():
        for path in _users_own(folder, ours):
            _copy(path, temporary / path.name)
        os.rename(folder, aside)
    os.rename(temporary, folder)
    shutil.rmtree(aside, ignore_errors=True)


def exported_folder(source: str) -> str:
    """`runs/x` -> `runs/x/hf` or `runs/x/adapter`, whichever is of the newest checkpoint; anything else as it is.

    Raises ConfigError for a run that has exported nothing, or nothing since it was trained further.
    """
    run = Path(source).expanduser()
    if not (run / "config.yaml").is_file():
        return str(run) if run.is_dir() else source
    found = [
        folder for folder in (run / "hf", run / "adapter") if (folder / "config.json").is_file() or _is_adapter(folder)
    ]
    for folder in found:
        if not is_stale(folder):
            return str(folder)
    if found:
        raise ConfigError(
            f"{found[0]} is of {_describe(found[0])}, and {source} was trained further since: "
            f"python recipes/export_hf.py {source} writes it anew."
        )
    raise ConfigError(f"{source} has no hf/ or adapter/ yet: python recipes/export_hf.py {source} writes them.")


def is_stale(folder: Path) -> bool:
    """Is there a checkpoint of a later step than the export's? Without a mark, one that was written later."""
    manifests = {
        step: path for path in folder.parent.glob(f"checkpoints/*/{MANIFEST}") if (step := step_of(path.parent))
    }
    if not manifests:
        return False
    newest = max(manifests)
    step = _step(folder)
    if step is not None:
        return newest > step
    return manifests[newest].stat().st_mtime > max(path.stat().st_mtime for path in folder.iterdir())


def _step(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / MARK).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _describe(folder: Path) -> str:
    step = _step(folder)
    return "an earlier step" if step is None else f"step {step}"


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def _users_own(folder: Path, ours: list[str]) -> list[Path]:
    """What is neither of the old export nor of the new one; of an export without a mark, weights are ours too."""
    try:
        before = set(json.loads((folder / MARK).read_text(encoding="utf-8"))["files"])
        names = {path.name for path in folder.iterdir()} - before
    except (OSError, ValueError, KeyError, TypeError):
        names = {path.name for path in folder.iterdir() if not _WEIGHTS.fullmatch(path.name)}
    return [folder / name for name in sorted(names - {*ours, MARK})]


def _copy(path: Path, target: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        shutil.copy2(path, target, follow_symlinks=False)
    else:
        shutil.copytree(path, target, symlinks=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".old-{folder.name}")
