"""`automodel-lite verify ... --card RUN`: what an export was trained on, and what was compared.

    RUN/hf/certificate.json    model, data and code by their hashes, the run's command, versions;
                               packed against alone, layouts, the export against its checkpoint

The model card shows it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.prepare import build_documents
from automodel_lite.errors import ConfigError
from automodel_lite.extras.hub import write_card
from automodel_lite.extras.load_run import load_run_config, load_trained
from automodel_lite.extras.report import read_run
from automodel_lite.extras.verify import Check, Sample
from automodel_lite.models.source import load_whole
from automodel_lite.run.checkpoint_folder import exported_step, name_of, step_of
from automodel_lite.run.durable import sha256
from automodel_lite.run.folder import RunFolder, existing_run
from automodel_lite.telemetry.ledger import NAME as LEDGER
from automodel_lite.telemetry.ledger import last_line
from automodel_lite.version import __version__

NAME = "certificate.json"
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of an export's loss, relative


def check_export(run: Path) -> None:
    """Raises ConfigError where a run has no exported folder, or is none."""
    existing_run(run, "--card ")
    if not (run / "hf" / "config.json").is_file():
        raise ConfigError(
            f"--card {run}: it has no hf/: automodel-lite export {shlex.quote(str(run))}."
        )


def write_certificate(run: Path, checks: Sequence[Check], sample: Sample) -> dict[str, Any]:
    """Writes certificate.json beside the export and the model card again; returns the row of the
    export.
    """
    check_export(run)
    folder = run / "hf"
    record = read_run(run)
    config = load_run_config(RunFolder(run))
    documents = build_documents(config)
    files = [stamp.path for stamp in getattr(documents, "train_files", [])]
    base = Path(str(config.model.get("pretrained") or ""))
    exported = export_against_training(run, sample)
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "trained": {
            "command": str(record.facts.get("command", "")),
            "steps": record.rows[-1].get("step"),
            "base_sha256": hashes(sorted(base.glob("*.safetensors"))) if base.is_dir() else {},
            "data_sha256": hashes(Path(path) for path in files),
            "export_sha256": hashes(sorted(folder.glob("*.safetensors"))),
        },
        "ledger": dict(zip(("steps", "head"), last_line(run / LEDGER))),
        "versions": {
            "automodel_lite": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "compared": [*map(as_json, checks), exported],
    }
    (folder / NAME).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    write_card(run, folder)
    return exported


def hashes(paths: Iterable[Path]) -> dict[str, str]:
    """Returns the SHA-256 of each file by its name."""
    return {path.name: sha256(path) for path in paths}


def as_json(check: Check) -> dict[str, Any]:
    """Returns a comparison's row: relative differences to three digits, and the verdict."""
    found = check.difference._asdict()
    differences = {name: float(f"{float(value):.2e}") for name, value in found.items()}
    return {
        "what": check.name,
        **differences,
        "limit": check.limit,
        "passed": bool(check.passed),
        "is_fault": check.is_fault,
    }


def export_against_training(run: Path, sample: Sample) -> dict[str, Any]:
    """Compares the loss of the export, in plain transformers, with that of the checkpoint that it
    was made of, each document alone.
    """
    step = exported_step(run / "hf")
    name = name_of(step) if step else None
    trained = load_trained(run, name, is_alone=True)  # the other ranks wait at the end
    export = load_whole(str(run / "hf"), torch.float32)
    losses = [mean_loss(model, sample) for model in (trained.model.lm, export)]
    difference = abs(losses[1] - losses[0]) / losses[0]
    limit = LIMITS.get(trained.dtype, LIMITS[torch.bfloat16])
    return {
        "what": f"the export in transformers = checkpoint of step {step_of(trained.checkpoint)}",
        "loss": float(f"{difference:.2e}"),
        "limit": limit,
        "passed": difference <= limit,
        "is_fault": False,
    }


@torch.no_grad()
def mean_loss(model: nn.Module, sample: Sample) -> float:
    """Returns the mean over the labels of the sample's documents, each one alone."""
    model.eval()
    if isinstance(model, transformers.PreTrainedModel):
        model.set_attn_implementation("eager")
    total = torch.zeros(())
    count = torch.zeros(())
    for inputs, labels, weights in sample.each_document():
        logits: Tensor = model(**inputs, use_cache=False).logits[0].float()
        each = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
        total += (each * weights).sum()
        count += weights[labels != IGNORE_INDEX].sum()
    return float(total / count)
