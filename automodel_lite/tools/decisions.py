"""What a run that trains on decisions leaves beside its model: how its questions are written, how
good the answers to held-out ones are, and the temperature that calibrates them.

    runs/x/decisions.jsonl      a line per validation: step, temperature, numbers of each set
    runs/x/hf/decisions.json    the line of the exported step, and how questions are written
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from automodel_lite.data.formats.decisions import Decision, decisions_of, place_of, record_of
from automodel_lite.data.reading.documents import Documents
from automodel_lite.evaluation.decisions import Answered, fit_temperature
from automodel_lite.models.loss import Loss
from automodel_lite.parts.losses.decisions import Decisions
from automodel_lite.run.checkpoint_folder import exported_step
from automodel_lite.run.durable import write_atomically
from automodel_lite.run.folder import RunFolder, json_object, saved_config

NAME = "decisions.json"
MOST_NAMES = (
    40  # of questions; where there are more, each is asked too rarely for numbers of its own
)
FEW_QUESTIONS = 30  # on which a temperature is hardly fitted


def note_decisions(
    run: Path,
    step: int,
    loss: Loss,
    judged: Mapping[str, Sequence[np.ndarray]],
    documents: Documents,
) -> None:
    """Adds a validation to the run's decisions.jsonl; does nothing under another loss.

    judged  by set, what forward passes gave of it (`Answered.of`)
    """
    if not isinstance(loss, Decisions):
        return
    sets = {}
    fitted: dict[str, Any] = {}
    for name, parts in judged.items():
        answered = Answered.of(parts).known()
        if not len(answered):
            continue
        temperature = fit_temperature(answered)
        # the first set's, as one model has one temperature
        fitted = fitted or {"temperature": temperature, "set": name, "questions": len(answered)}
        by_name = _by_name(answered, documents.val.get(name))
        sets[name] = numbers_of(answered, temperature) | {"by_question": by_name}
    line = {"step": step, "fitted": fitted, "held_out": sets}
    with RunFolder(run).decisions.open("a") as file:
        file.write(f"{json.dumps(line)}\n")


def numbers_of(answered: Answered, temperature: float) -> dict[str, Any]:
    """Returns how good answers are, as they are and at a temperature."""
    return {
        "questions": len(answered),
        "records": len(np.unique(record_of(answered.numbers))),
        "records_right": answered.records_right(record_of),
        **answered.metrics(),
        "calibrated": answered.metrics(temperature),
    }


def _by_name(answered: Answered, documents: Any) -> dict[str, Any]:
    """Returns the numbers of the questions of each name; nothing where names are too many."""
    if documents is None:
        return {}
    names = np.array([decision.name for decision in asked(answered.numbers, documents)])
    counts = Counter(names.tolist())
    if len(counts) > MOST_NAMES:
        return {}
    return {
        name: {"questions": count, **answered[names == name].metrics()}
        for name, count in sorted(counts.items())
    }


def asked(numbers: np.ndarray, documents: Any) -> Iterator[Decision]:
    """Yields the questions of these numbers, in rising order; each record is read once."""
    last = -1
    decisions: dict[int, Decision] = {}
    for number in numbers.tolist():
        if record_of(number) != last:
            last = record_of(number)
            decisions = {one.place: one for one in decisions_of(documents[last])}
        yield decisions[place_of(number)]


def write_decisions(run: Path, folder: Path, is_mean: bool = False) -> list[str]:
    """Writes decisions.json into the exported folder of a run that trains on decisions; returns
    what to say of it, nothing of another run.

    is_mean  it holds the mean of several checkpoints, which no validation has judged
    """
    config = saved_config(run / "config.yaml")
    loss = str(config["loss"].get("_target_", ""))
    if loss.rpartition(".")[2] != Decisions.__name__:
        return []
    step = exported_step(folder)
    folder_of_run = RunFolder(run)
    found: dict[str, Any] = {} if is_mean else folder_of_run.decisions_of(step)
    found = found or {"step": step, "fitted": {}, "held_out": {}}
    tokenize = config["tokenize"]
    written = {name: tokenize[name] for name in ("choice_prefix", "permute_choices")}
    written |= {"template_kwargs": tokenize["template_kwargs"], "seed": config["seed"]}
    fitted = found["fitted"]
    whole = {"temperature": fitted.get("temperature", 1.0), **found, "written": written}
    write_atomically(folder / NAME, json.dumps(whole, indent=1) + "\n")
    if not fitted and folder_of_run.decisions_of().get("fitted"):
        return [
            f"{NAME}: temperature 1, as no validation has judged these weights: export a step of "
            f"{folder_of_run.decisions.name}, or answer with decide --temperature"
        ]
    if not fitted:
        return [
            f"{NAME}: temperature 1, as nothing is held out: set dataset.val_frac=0.1 to fit it"
        ]
    numbers = found["held_out"][fitted["set"]]
    few = f", which are few (under {FEW_QUESTIONS})" * (fitted["questions"] < FEW_QUESTIONS)
    said = [
        f"{NAME}: temperature {fitted['temperature']:.3g}, fitted on {fitted['questions']:,} "
        f"held-out questions of {fitted['set']}{few}: ECE {numbers['ece']:.3f} becomes "
        f"{numbers['calibrated']['ece']:.3f}; {numbers['accuracy']:.1%} right, all of a record "
        f"{numbers['records_right']:.1%}"
    ]
    for name, one in numbers["by_question"].items():
        said.append(
            f"{name}: {one['questions']:,} questions, accuracy {one['accuracy']:.3f}, Brier "
            f"{one['brier']:.3f}, ECE {one['ece']:.3f}"
        )
    return said


def read_decisions(folder: Path) -> dict[str, Any]:
    """Returns decisions.json of a model's folder; nothing without one."""
    return json_object(folder / NAME)
