"""What a run that trains on decisions leaves beside its model: how its questions are written, how
good the answers to held-out ones are, and the temperature that calibrates them.

    runs/x/decisions.jsonl      a line per validation: step, temperature, numbers of each set
    runs/x/hf/decisions.json    the line of the exported step, and how questions are written
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from automodel_lite.run.checkpoint_folder import exported_step
from automodel_lite.run.durable import write_atomically
from automodel_lite.run.folder import RunFolder, json_object, saved_config

NAME = "decisions.json"
FEW_QUESTIONS = 30  # on which a temperature is hardly fitted


def write_decisions(run: Path, folder: Path, is_mean: bool = False) -> list[str]:
    """Writes decisions.json into the exported folder of a run that trains on decisions; returns
    what to say of it, nothing of another run.

    is_mean  it holds the mean of several checkpoints, which no validation has judged
    """
    folder_of_run = RunFolder(run)
    if json_object(folder_of_run.facts).get("kind") != "decisions":
        return []
    step = exported_step(folder)
    found: dict[str, Any] = {} if is_mean else folder_of_run.decisions_of(step)
    found = found or {"step": step, "fitted": {}, "held_out": {}}
    config = saved_config(folder_of_run.config)
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
