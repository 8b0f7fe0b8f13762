"""What the ranks of a job have alike, and a continued run as before, whoever drives it: settings
and versions, and the files that shape the numbers beside the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from automodel_lite.config.components import flatten
from automodel_lite.config.rules import read_template
from automodel_lite.config.schema import Config
from automodel_lite.models.source import CausalLM
from automodel_lite.parallel.peers import Peers, flat, versions
from automodel_lite.run.folder import plain
from automodel_lite.run.weight_files import adapter_files, model_files, tokenizer_files
from automodel_lite.training.settings import RunParts

_WEIGHTS = (".safetensors", ".bin", "index.json")
# What checkpoints of earlier versions do not tell; the settings, which they tell, name the files.
_LATER = ("adapter", "code", "processor", "template", "tokenizer")


def compare_settings(peers: Peers, config: Config, more: Mapping[str, Any] | None = None) -> None:
    """Raises ConfigError on all ranks unless all have the same settings and versions."""
    peers.compare("settings", versions() | flat(plain(config)) | dict(more or {}))


def files_read(config: Config, parts: RunParts, keeps_start: bool) -> dict[str, str]:
    """Returns a digest of each file that shapes the numbers and is not data, by what it is for and
    its name; of a package of the user's, which `security.allow_targets` names, one of all its code.

    keeps_start  the start model is asked later, too: its weights count though they are trained

    >>> files_read(config, parts, keeps_start=False)
    {'model config.json': '0f…', 'adapter adapter_config.json': '7c…', 'code my_parts': '11…'}
    """
    files = {"model": _files(parts.model)}
    if parts.teacher:
        files["teacher"] = _files(parts.teacher)
    if parts.loss.scored_by:
        files["loss.teacher"] = model_files(parts.loss.scored_by)
    if parts.peft and parts.peft.adapter:
        files["adapter"] = adapter_files(parts.peft.adapter)
    if keeps_start or parts.loss.needs_reference:
        files["reference"] = files["model"] | files.get("adapter", {})
    for path in _processors(config.dataset):
        found = model_files(path) | tokenizer_files(path)
        files.setdefault("processor", {}).update(
            {name: digest for name, digest in found.items() if not name.endswith(_WEIGHTS)}
        )
    if source := config.tokenizer.get("path"):
        files["tokenizer"] = tokenizer_files(str(source))
    if template := config.tokenizer.get("chat_template"):
        text = read_template(str(template))
        name = "tokenizer.chat_template" if text == template else Path(str(template)).name
        files["template"] = {name: hashlib.sha256(text.encode()).hexdigest()[:16]}
    files["code"] = dict(_code(config.security.allow_targets))
    return {
        f"{topic} {name}": digest
        for topic, of_topic in files.items()
        for name, digest in of_topic.items()
    }


def changed_files(before: Mapping[str, str], now: Mapping[str, str], has_frozen: bool) -> list[str]:
    """Returns the names of files that are others than those of a checkpoint, and that the next step
    depends on.

    has_frozen  weights of the model are read from its files, as under an adapter; trained ones come
                from the checkpoint
    """
    known = {key.partition(" ")[0] for key in before}
    changed = []
    for key in sorted({key for key, _ in before.items() ^ now.items()}):
        topic = key.partition(" ")[0]
        is_trained = topic == "adapter" or (topic == "model" and not has_frozen)
        is_unknown = topic in _LATER and topic not in known
        if not is_unknown and not (is_trained and key.endswith(_WEIGHTS)):
            changed.append(key)
    return changed


def _files(model: CausalLM) -> dict[str, str]:
    return model_files(model.pretrained, str(model.source["revision"]))


def _processors(dataset: Mapping[str, Any]) -> list[str]:
    """Returns the folders of processors that a dataset names, or the sets of a mixture."""
    found = set()
    for key, value in flatten(dict(dataset)):
        if value and key.rpartition(".")[2] == "processor":
            found.add(str(value))
    return sorted(found)


def _code(packages: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields name and digest of the user's packages: the Python files of each, whether they are
    imported or not, as one may import another later.
    """
    for package in sorted({name.partition(".")[0] for name in packages}):
        spec = None
        with suppress(ImportError, ValueError):  # a part that is missing has its own sentence
            spec = find_spec(package)
        if spec is None:
            continue
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        found = [(file.relative_to(one), file) for one in folders for file in one.rglob("*.py")]
        if not folders and spec.origin and spec.origin.endswith(".py"):
            found = [(Path(spec.origin).name, Path(spec.origin))]  # type: ignore[list-item]
        if not found:  # compiled into Python
            continue
        code = hashlib.sha256()
        for name, file in sorted(found):
            code.update(f"{name}\n".encode() + file.read_bytes())
        yield package, code.hexdigest()[:16]
