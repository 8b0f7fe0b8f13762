"""A job named by its model and its data: what the command leaves open is chosen from the rows.

    automodel-lite train /models/SmolLM2-135M chats.jsonl

    MODEL               model.pretrained
    DATA ...            dataset.path, of several words a list: what a shell makes of *.jsonl
    the preset          from the rows: chats and text, pairs, images, policies, tokenized corpora
    name                of both; the same words are the same run, which the command continues
    dataset.val_frac    a part that is kept aside, and asked at the end

What is typed as KEY=VALUE stands, and is not chosen.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from automodel_lite.cli.line import RECIPES, is_word, split
from automodel_lite.cli.recipes import Recipe
from automodel_lite.cli.sources import Sources, groups_of, presets_of
from automodel_lite.config.check import key_of
from automodel_lite.config.model_files import INDEX, scores_documents
from automodel_lite.data.reading.paths import KINDS, find_files, kind_of
from automodel_lite.errors import ConfigError, DataError, counted, did_you_mean_path

MODEL, DATA = "model.pretrained", "dataset.path"
HELD_OUT_FRAC = 0.05
LEAST_HELD_OUT, MOST_HELD_OUT = 8, 200  # documents, of sets that have enough
_GENERIC = re.compile(r"hf|adapter|(pre)?train(ing)?|data(set)?|main|default|\d+", re.IGNORECASE)
_MODEL_FILES = ("config.json", "config.yaml", "adapter_config.json", INDEX)
_TOKENIZED = (".bin", ".idx")
_ARCHIVE = ".tar"
_PREPARES = ("train_ft", "inspect_data", "prepare_data")  # the same documents are held out in all


@dataclass(frozen=True)
class Job:
    """What two words stand for.

    chosen    overrides that are not typed
    lines     what was chosen, and why: for the screen
    problems  what is wrong with the words or the rows; the rest of the command is checked beside
    """

    preset: str
    chosen: tuple[str, ...]
    lines: tuple[str, ...] = ()
    problems: tuple[ConfigError | DataError, ...] = ()


@dataclass(frozen=True)
class Rows:
    """What the rows of a file say of the job.

    kind     words for them: `chats`
    options  overrides that they need
    asks     whether held-out rows are questions that can be asked
    count    documents; 0 where it is not known
    """

    preset: str
    kind: str
    options: tuple[str, ...] = ()
    asks: bool = False
    count: int = 0


def takes_words(recipe: Recipe, words: Sequence[str], config_name: str | None) -> bool:
    """Returns whether words without `=` are a model and its data: not a setting whose `=` was
    forgotten, a preset's file, or one word beside a preset.
    """
    if not recipe.is_ours or (config_name and len(words) != 2):
        return False
    is_setting = any(word.startswith("-") or key_of(word) == word for word in words)
    is_preset = any(Path(word).suffix in (".yaml", ".yml") for word in words)
    return bool(words) and not is_setting and not is_preset


def job_of(
    recipe: Recipe, sources: Sources, overrides: Sequence[str], config_name: str | None
) -> Job:
    """Returns the job that the words among the overrides name."""
    words = [*filter(is_word, overrides)]
    typed = {key: value for key, value in map(split, overrides) if value is not None}
    verb = next(verb for verb, (module, _) in RECIPES.items() if module == recipe.name)
    if len(words) == 1 and words[0] in presets_of(sources) and not Path(words[0]).exists():
        raise ConfigError(f"{words[0]}: a preset is chosen with --config-name {words[0]}.")
    places, problems = _places(words, typed, f"automodel-lite {verb}")
    data = places.get(DATA)
    for key, given in places.items():
        problems += _near(key, [given] if key == MODEL else given, sources)
    model = str(places.get(MODEL, typed.get(MODEL, "")))
    is_scored = _has_score_head(model)
    rows = Rows(config_name or ("classify" if is_scored else "finetune"), "documents")
    is_there = all(problem.key != DATA for problem in problems)
    if data and is_there and not config_name and "dataset" not in typed:
        try:
            rows = rows_of(data, typed, is_scored)
        except (ConfigError, DataError) as error:
            # without a loss there is nothing to compute of them, which the recipe says
            if recipe.name != RECIPES["score"][0] or "loss" in typed:
                problems.append(error)
    preset = config_name or rows.preset
    chosen = [f"{MODEL}={_quoted(places[MODEL])}"] if MODEL in places else []
    if data:
        chosen.append(f"{DATA}={_listed(data)}")
    if not config_name:
        chosen += [text for text in rows.options if split(text)[0] not in typed]
    lines = []
    if not config_name and not problems:
        known = f", {counted(rows.count, 'document')}" if rows.count else ""
        lines.append(f"--config-name {preset}: the rows are {rows.kind}{known}")
    name = name_of(str(places.get(MODEL, _from_scratch(typed))), data[0] if data else "")
    if recipe.writes_a_run and "name" not in typed and name:
        chosen.append(f"name={_quoted(name)}")
        lines += [f"name={name}: the same command continues this run"] if lines else []
    if recipe.name in _PREPARES and not config_name and rows.count > 1:
        held_out, line = _held_out(rows, typed)
        chosen += held_out
        lines += [line] if line else []
    return Job(preset, tuple(chosen), tuple(lines), tuple(problems))


def _places(
    words: Sequence[str], typed: dict[str, str], command: str
) -> tuple[dict[str, Any], list[ConfigError | DataError]]:
    """Returns the model and the data that the words name, as far as they do, and what is wrong with
    them.
    """
    problems: list[ConfigError | DataError] = []
    if len(words) == 1:
        word = words[0]
        has_model = MODEL in typed or _from_scratch(typed) != ""
        if has_model or (DATA not in typed and _is_data(word)):
            if not has_model:
                text = f"MODEL is missing, a folder or a hub name: {command} MODEL {word}"
                problems.append(ConfigError(f"{text}.", key=MODEL))
            return {DATA: [word]}, problems
        if DATA not in typed:
            text = f"DATA is missing: {command} {word} DATA"
            problems.append(ConfigError(f"{text}.", key=DATA))
        return {MODEL: word}, problems
    model, *data = words
    if MODEL in typed:
        return {DATA: list(words)}, []
    if DATA in typed:
        given = typed[DATA]
        return {MODEL: model}, [ConfigError(f"{data[0]}: the data are {DATA}={given} already.")]
    if _is_data(model) and len(data) == 1 and _is_model(data[0]):
        swapped = f"{command} {data[0]} {model}"
        text = f"{model} is data, and {data[0]} a model: the model stands first, {swapped}."
        return {MODEL: data[0], DATA: [model]}, [ConfigError(text, key=MODEL)]
    return {MODEL: model, DATA: data}, []


def _from_scratch(typed: Mapping[str, str]) -> str:
    """Returns the option that `model=llama_tiny` chooses, whose weights are drawn; "" for none."""
    option = typed.get("model", "")
    return "" if option == "pretrained" else option


def _near(key: str, words: Sequence[str], sources: Sources) -> Iterator[ConfigError]:
    """Yields a problem for a plain word that is nothing here, where something has nearly its name:
    it would be looked for on the hub, whose full names are owner/name.
    """
    presets = presets_of(sources)
    models = groups_of(sources).get("model", [])
    for word in words:
        if Path(word).expanduser().exists():
            continue
        near = did_you_mean_path(word)
        parts = [part.strip() for part in word.split(",")]
        if word in presets:
            yield ConfigError(f"{word}: a preset is chosen with --config-name {word}.", key=key)
        elif key == MODEL and word in models:
            yield ConfigError(
                f"{word} is a model from scratch",
                key=key,
                cure=f"write model={word} tokenizer=bpe in its place",
            )
        elif len(parts) > 1 and all(Path(part).exists() for part in parts):
            cure = f"name them one after the other, {' '.join(parts)}"
            yield ConfigError(f"{key}={word}: several files: {cure}.", key=key)
        elif "/" not in word and near.startswith(";"):
            yield ConfigError(
                f"{key}={word} does not exist (looked in {Path.cwd()}){near}", key=key
            )


def _is_data(word: str) -> bool:
    """Is it a file of rows, a pattern, or a folder that holds no model?"""
    path = Path(word).expanduser()
    return path.is_file() or kind_of(path) in KINDS or (path.is_dir() and not _is_model(word))


def _is_model(word: str) -> bool:
    folder = Path(word).expanduser()
    inside = (folder, folder / "hf", folder / "adapter")
    return any((place / name).is_file() for place in inside for name in _MODEL_FILES)


def _has_score_head(word: str) -> bool:
    """Returns whether a model's folder, or what a run has exported, gives documents scores."""
    folder = Path(word).expanduser()
    return bool(word) and any(
        scores_documents(place) for place in (folder, folder / "hf", folder / "adapter")
    )


def rows_of(paths: Sequence[str], typed: dict[str, str], is_scored: bool = False) -> Rows:
    """Returns what the rows of these files are; raises ConfigError or DataError for rows that no
    preset trains on.

    typed      settings of the command, of which those of the dataset say how rows are read
    is_scored  the model has a score head, which learns labels of documents and pairs alone
    """
    ends = {path.suffix for path in _files(paths)}
    if ends and ends <= {*_TOKENIZED}:
        corpora = sorted(str(path) for path in _files(paths) if path.suffix == ".bin")
        # the preset is for long runs
        free = ("training.global_batch_size=auto", "lr_scheduler.warmup_steps=null")
        options = (*free, "optimizer.lr=auto", f"{DATA}={_listed(corpora)}")
        return Rows("pretrain", "a tokenized corpus", options)
    if _ARCHIVE in ends:
        return Rows("finetune", "samples with images", ("dataset=images",), asks=True)
    if all(not Path(path).expanduser().exists() for path in paths):
        find_files(paths, DATA)  # names what is not there; what remains is on the hub
    # of a job that has data alone
    from automodel_lite.data.reading.columns import detect
    from automodel_lite.data.reading.files import ReadOptions, open_rows, sniff_columns
    from automodel_lite.data.reading.readers import placed

    given = {key: _value(text) for key, text in typed.items() if key.startswith("dataset.")}
    read_as = {name: given[f"dataset.{name}"] for name in _READ_AS if f"dataset.{name}" in given}
    split_name = str(given.get("dataset.split", "train"))
    opened = open_rows(paths, given.get("dataset.name"), split_name, DATA, ReadOptions(**read_as))
    columns = sniff_columns(placed(opened.rows), f"{opened.description}: the file")
    count = len(opened.rows)
    renames = _renames(given)
    names = {*columns, *renames}
    if is_scored and {"chosen", "rejected"} <= names:
        return Rows("reward", "pairs of answers, and the model has a score head", count=count)
    if is_scored:
        return Rows("classify", "documents for a model with a score head", count=count)
    if "dataset.format" in given:
        return Rows("finetune", f"read as {given['dataset.format']}", asks=True, count=count)
    first = [row for _, row in islice(placed(opened.rows), 20) if not isinstance(row, DataError)]
    has_images = any(_has_images(row) for row in first)
    if "state" in names and not {"question", "questions"}.isdisjoint(names):
        what = f"questions with fixed choices{' about images' * has_images}"
        return Rows("decisions", what, ("dataset=images",) * has_images, count=count)
    if has_images:
        return Rows("finetune", "chats with images", ("dataset=images",), True, count)
    if {"chosen", "rejected"} <= names:
        return Rows("dpo", "pairs of a chosen and a rejected answer", count=count)
    if _is_judged(names, renames, first):
        return Rows("kto", "answers with a label, good or bad", count=count)
    if {"input_ids", "advantages"} <= names:
        return Rows("policy", "tokens with advantages", count=count)
    kind = detect(columns, None, renames).format.kind
    return Rows("finetune", _KINDS.get(kind, kind), asks=kind in _ASKED, count=count)


def _renames(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns canonical name -> column, as `dataset.columns` has it, whole or key by key."""
    whole = given.get("dataset.columns")
    found = dict(whole) if isinstance(whole, dict) else {}
    for key, column in given.items():
        if key.startswith("dataset.columns."):
            found[key.removeprefix("dataset.columns.")] = column
    return {str(name): str(column) for name, column in found.items()}


# one batch, on a CPU beside a full GPU; answers that are longer are judged as far as they go
_ASKED_AT_THE_END = ("evaluation.num_questions=8", "evaluation.max_new_tokens=128")
_READ_AS = ("encoding", "text_unit")
_ASKED = ("messages", "prompt_completion")
_KINDS = {
    "messages": "chats",
    "prompt_completion": "prompts with answers",
    "text": "plain text",
    "tokens": "token ids",
}


def _is_judged(
    names: Collection[str], renames: Mapping[str, str], first: Sequence[Mapping[str, Any]]
) -> bool:
    """Returns whether rows say of an answer whether it is good, by true or false.

    names  of the columns, and what the renamed ones are here
    """
    from automodel_lite.data.formats.verdict import READERS
    from automodel_lite.data.reading.beside import VERDICTS

    labels = [renames.get(name, name) for name in VERDICTS if name in names]
    has_answer = not {*READERS}.isdisjoint(names)
    values = [row.get(label) for label in labels for row in first]
    return has_answer and bool(values) and all(isinstance(value, bool) for value in values)


def _files(paths: Sequence[str]) -> Iterator[Path]:
    """Yields the files of the paths, of a folder those at its top."""
    for path in map(Path, paths):
        folder = path.expanduser()
        yield from folder.iterdir() if folder.is_dir() else [folder]


def _has_images(row: dict[str, Any]) -> bool:
    """Returns whether a raw row has a column of images, or a part of a turn that is one."""
    if any(row.get(name) not in (None, "", []) for name in ("image", "images")):
        return True
    turns = row.get("messages") or row.get("conversations") or ()
    return any(
        isinstance(part, dict) and str(part.get("type")) in ("image", "image_url", "input_image")
        for turn in (turns if isinstance(turns, list) else ())
        if isinstance(turn, dict) and isinstance(turn.get("content"), list)
        for part in turn["content"]
    )


def _held_out(rows: Rows, typed: dict[str, str]) -> tuple[list[str], str]:
    """Returns the overrides that keep documents aside and ask them at the end, and words for it."""
    if rows.preset in ("policy", "pretrain"):
        return [], ""
    named = [key for key in ("val_path", "val_split", "val_frac") if f"dataset.{key}" in typed]
    chosen = []
    most = _value(typed.get("dataset.max_documents", "null"))
    # another kind of value is refused with the other settings
    count = min(rows.count, most) if isinstance(most, int) and most > 0 else rows.count
    # one in twenty, of small sets more: the answers of two documents say little
    wanted = min(
        max(round(count * HELD_OUT_FRAC), min(LEAST_HELD_OUT, count // 6), 1), MOST_HELD_OUT
    )
    if not named:
        chosen.append(f"dataset.val_frac={wanted / count:.4g}")
    if rows.asks and "evaluation" not in typed:
        chosen += ["evaluation=exact_match", *_ASKED_AT_THE_END]
    if named:
        return chosen, ""
    asked = ", and asked at the end" if rows.asks else ""
    return chosen, f"{chosen[0]}: {counted(wanted, 'document', 'is')} kept aside{asked}"


def name_of(model: str, data: str) -> str:
    """Returns the name of the run of a model and its data.

    >>> name_of("HuggingFaceTB/SmolLM2-135M", "data/chats.jsonl")
    'SmolLM2-135M-chats'
    >>> name_of("runs/first/hf", "gsm8k/train.jsonl")
    'first-gsm8k'
    """
    names = [_last_name(path) for path in (model, data)]
    return "-".join(filter(None, names))[:120]


def _last_name(path: str) -> str:
    """Returns the last part of a path that says something, without its endings."""
    parts = [part for part in re.split(r"[/\\]", path) if part.strip(".~*? ")]
    for part in reversed(parts):
        stem = part
        while kind_of(Path(stem)) in KINDS or Path(stem).suffix in (".gz", *_TOKENIZED, _ARCHIVE):
            stem = Path(stem).stem
        plain = re.sub(r"[^\w.+-]+", "-", stem).strip("-.")
        if plain and (not _GENERIC.fullmatch(plain) or part == parts[0]):
            return plain
    return ""


def _value(text: str) -> Any:
    """Returns a typed value of the command line, as far as it is plain."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _quoted(text: str) -> str:
    """Returns a text in quotes of Hydra's grammar."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda end: 2 * end[1] + ("\\'" if end[2] else ""), text)
    return f"'{escaped}'"


def _listed(paths: Sequence[str]) -> str:
    quoted = [_quoted(path) for path in paths]
    return quoted[0] if len(quoted) == 1 else f"[{','.join(quoted)}]"
