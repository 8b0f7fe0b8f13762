"""The small files of a model's folder, looked at before anything is loaded."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_lite.errors import ConfigError, one_line

if TYPE_CHECKING:
    from automodel_lite.config.schema import Config

INDEX = "model.safetensors.index.json"
# What transformers and peft read as a mapping: a damaged one ends in a traceback of theirs, or is
# left out in silence, as generation_config.json. tokenizer.json is large, and its reader says so,
# but for a prefix that merges lack: it cuts that off unseen, and ends the process.
NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "adapter_config.json",
    INDEX,
)
TOKENIZER = "tokenizer.json"
_PREFIX = re.compile(r'"continuing_subword_prefix"\s*:\s*"[^"]')


_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


SCORES = "ForSequenceClassification"
"""The end of the names of transformers' classes with a score head."""


def scores_documents(folder: Path) -> bool:
    """Returns whether a folder holds a model or an adapter whose head gives a document scores in
    place of tokens their likelihoods; a damaged file is another reader's to name.
    """
    for name in ("config.json", "adapter_config.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(found, dict):
            continue
        named = found.get("architectures")
        classes = named if isinstance(named, list) else []
        of_adapter = found.get("task_type") == "SEQ_CLS"
        if of_adapter or any(str(one).endswith(SCORES) for one in classes):
            return True
    return False


def base_of(folder: Path) -> str:
    """Returns the model that an adapter's folder names as its base; raises ConfigError where it
    names none, as an adapter of a model that was made in memory.
    """
    path = folder / "adapter_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({one_line(error)}): download it again.") from error
    base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{path} does not name the base of the adapter",
            cure='write its folder or hub name there, as "base_model_name_or_path"',
        )
    return base


def run_beside(folder: str) -> Path:
    """Returns the run that has exported a folder; of what no run has, the folder itself.

    >>> run_beside("runs/mine/hf")
    Path('runs/mine')
    """
    path = Path(folder)
    run = path.parent if path.name in ("hf", "adapter") else path
    return run if (run / "config.yaml").is_file() else path


def check_writes(source: str) -> None:
    """Raises ConfigError for a folder whose model scores documents and writes nothing."""
    if scores_documents(Path(source)):
        raise scores_alone(source)


def scores_alone(source: str) -> ConfigError:
    """Returns the error for a model that is asked to write; its cures can be typed as they are,
    but for the name of the file.

    source  the folder of a model, an adapter, or a run
    """
    folder = Path(source)
    model = shlex.quote(str(run_beside(source)))
    merged = f"automodel-lite export {model} merges the adapter, after which "
    is_merged = (folder / "config.json").is_file() or (folder / "hf/config.json").is_file()
    return ConfigError(
        f"{source} has a score head, which gives a document numbers and writes no text",
        key="model.head",
        cure=f"{'' if is_merged else merged}automodel-lite evaluate {model} FILE compares its "
        "scores with the labels or pairs of a file; transformers' pipeline('text-classification') "
        "scores a text",
    )


def check_model_files(key: str, folder: Path) -> None:
    """Raises ConfigError for one that is no JSON object, or holds what its reader cannot use; and
    for an adapter beside a model, with which transformers would load both.
    """
    for path in filter(Path.exists, map(folder.joinpath, (*NAMES, TOKENIZER))):
        try:
            text = path.read_text(encoding="utf-8")
            if path.name == TOKENIZER and not _PREFIX.search(text):
                continue
            problem = _problem(path.name, json.loads(text))
        except (OSError, ValueError, RecursionError) as error:
            problem = one_line(error)
        if problem:
            raise ConfigError(
                f"{key}={folder}: {path.name} is damaged ({problem}): download it again."
            )
    is_model = (folder / "config.json").is_file()
    if key.endswith(".pretrained") and is_model and (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{key}={folder} holds a model and an adapter, and would load both: move "
            "adapter_config.json and adapter_model.safetensors to a folder of their own, which "
            "peft.adapter continues, or remove config.json and the model's weights."
        )


def _problem(name: str, found: Any) -> str:
    """Returns what makes the reader of a file fail, or nothing."""
    if not isinstance(found, dict):
        return "no object with names and values"
    if name == TOKENIZER and not _have_prefix(found.get("model")):
        return "its merges lack the continuing_subword_prefix"
    if name == INDEX:
        files = found.get("weight_map")
        if not isinstance(files, dict) or not files or not all(map(_is_name, files.values())):
            return "its weight_map does not name a file for each weight"
        if not isinstance(found.get("metadata"), dict):
            return "its metadata are no object with names and values"
    if name == "tokenizer_config.json":
        most = found.get("model_max_length", 0)
        if most is not None and not isinstance(most, int | float):
            return f"model_max_length is {one_line(most)}, and must be a number"
    if name == "generation_config.json":
        for key in _IDS:
            value = found.get(key)
            ids = value if isinstance(value, list) else [value]
            if not all(one is None or isinstance(one, int) for one in ids):
                return f"{key} is {one_line(value)}, and must be a token id or a list of ids"
        for key, value in found.items():
            if key.startswith("output_") and not isinstance(value, bool | None):
                return f"{key} is {one_line(value)}, and must be true or false"
    return ""


def _have_prefix(model: Any) -> bool:
    """Returns whether the second part of each merge begins with the prefix; True for other models
    than BPE, and for kinds that the reader refuses.
    """
    if not isinstance(model, dict):
        return True
    prefix = str(model.get("continuing_subword_prefix") or "")
    merges = model.get("merges")
    for merge in merges if isinstance(merges, list) else []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        second = parts[-1] if isinstance(parts, list) and parts else None
        if isinstance(second, str) and not second.startswith(prefix):
            return False
    return True


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


_MOST_BYTES = 2**20  # of a line that is looked at
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def check_template(config: Config) -> None:
    """Raises ConfigError for a file of chats and a tokenizer's folder without a chat template,
    before anything is imported that reads them.
    """
    path = config.tokenizer.get("path")
    folder = Path(str(path)).expanduser()
    settings = folder / "tokenizer_config.json"
    if not path or not settings.is_file() or not (folder / "tokenizer.json").is_file():
        return
    is_given = "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    is_given = is_given or any((folder / name).exists() for name in _TEMPLATES)
    if not is_given and not config.tokenizer.get("chat_template") and _begins_with_a_chat(config):
        raise ConfigError(
            f"the data are chats, and the tokenizer {folder} has no chat template: set "
            "tokenizer.chat_template=template.jinja, or tokenizer.path to a chat model's tokenizer."
        )


def _begins_with_a_chat(config: Config) -> bool:
    """Returns whether the data are a file of lines, of which the first is plainly a chat."""
    data = config.dataset
    path = Path(str(data.get("path")))
    is_lines = path.suffix == ".jsonl" and path.is_file()
    if not is_lines or data.get("format") or data.get("columns"):
        return False
    with path.open("rb") as file:
        first = file.readline(_MOST_BYTES)
    try:
        row = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and isinstance(row.get("messages", row.get("conversations")), list)
