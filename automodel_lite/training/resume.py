"""How a run starts or continues, topic by topic: its settings, its position, its folder and its
log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

from automodel_lite.data.feeding.planned import document_kind
from automodel_lite.data.feeding.source import Cursor, PackSource, TrainingPlan
from automodel_lite.data.packing.report import PackingReport
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.mesh import mesh_shape, world_size
from automodel_lite.parallel.peers import versions
from automodel_lite.run.checkpoint_folder import Rating
from automodel_lite.telemetry.callbacks import MetricsLog, open_metrics
from automodel_lite.telemetry.metrics import STARTUP
from automodel_lite.training import world
from automodel_lite.training.agreement import changed_files, files_read
from automodel_lite.training.decide import ChooseRecomputation, check_positions, decide
from automodel_lite.training.engine import TrainingEngine
from automodel_lite.training.guards import Guards, TrainState
from automodel_lite.training.resolve import with_layout
from automodel_lite.training.settings import Decided, RunParts

_NUM_ROWS = 256  # of a validation set that are hashed


def compare_data(guards: Guards, data: PackSource, plan: TrainingPlan, parts: RunParts) -> None:
    """Compares between the ranks what they have read; keeps for the checkpoints digests of what no
    setting tells: the files that shape the numbers, and rows of each validation set. From here on
    the guards know the last step.
    """
    guards.max_steps = plan.max_steps
    guards.peers.compare("data", data.fingerprint() | {"training.max_steps": plan.max_steps})
    STARTUP.lap("data")
    validation = {}
    for name, packs in data.val_packs.items():
        digest = hashlib.sha256(packs.plan.fingerprint().encode())
        for row in np.linspace(0, len(packs.rows) - 1, min(len(packs.rows), _NUM_ROWS), dtype=int):
            digest.update(packs.rows[int(row)]["input_ids"].tobytes())
        validation[f"validation set {name}"] = digest.hexdigest()[:16]
    compare_files(guards, parts, more=validation)


def compare_files(
    guards: Guards,
    parts: RunParts,
    keeps_start: bool = False,
    more: Mapping[str, str] | None = None,
) -> None:
    """Compares between the ranks the files that shape the numbers, and `more` digests; keeps them
    for the checkpoints. `keeps_start` as in `files_read`.
    """
    found = files_read(guards.config, parts, keeps_start) | dict(more or {})
    guards.peers.compare("files", found)
    guards.state.sources = found


def agree_on_settings(
    guards: Guards,
    parts: RunParts,
    tokenizer: PreTrainedTokenizerBase,
    recompute: ChooseRecomputation,
    data: PackSource | None = None,
) -> Decided:
    """Decides what depends on the model and the device, and compares it between the ranks; raises
    ConfigError for documents longer than a model's positions.

    data  None: rows come later, from memory
    """
    if data is not None:
        check_positions(data, parts.model, parts.teacher)
        # its heaviest packs count in the memory of a step, of as many packs as follow from it
        training = replace(
            parts.training,
            global_batch_size=data.shape.global_batch_size,
            micro_batch_size=data.shape.micro_batch_size,
            global_batch_documents=None,
        )
        parts = replace(parts, data=data, training=training)
    shape = mesh_shape(guards.config.mesh, world_size())
    device = world.default_device()
    decided = decide(parts, tokenizer, shape, device, recompute=recompute)
    guards.peers.compare("recomputation", {"why": decided.recomputation_text})
    return decided


def open_run(
    guards: Guards,
    data: PackSource,
    engine: TrainingEngine,
    scheduler: LambdaLR,
    report: PackingReport | None,
    lines: Sequence[tuple[str, str]],
) -> tuple[TrainState, MetricsLog]:
    """Takes the run's folder; goes on from the newest checkpoint that loads, or begins. Every rank
    calls it.

    lines  the start block
    """
    guards.open()
    saved = guards.checkpointer.load_newest(engine.model.loss_model, engine.optimizer)
    has_frozen = not all(p.requires_grad for p in engine.model.module.parameters())
    guards.state = state_of(saved, data, scheduler, guards, has_frozen)
    _open_folder(guards, data, report, lines, engine)
    _open_ledger(guards, saved, data, engine)
    return guards.state, _open_log(guards, saved, data.counts)


def state_of(
    saved: dict[str, Any] | None,
    data: PackSource,
    scheduler: LambdaLR,
    guards: Guards,
    has_frozen: bool,
) -> TrainState:
    """Where the checkpoint stood, or the beginning; the schedule is moved there.

    Raises ConfigError when the checkpoint's data or model were others, or when it is beyond the
    step at which the run is to end.
    """
    now = guards.state.sources
    if saved is None:
        return TrainState(sources=now)
    accepts = guards.config.checkpoint.accept_changes
    of_data = data.fingerprint()
    differing = [
        f"{key}: was {value}, now {of_data.get(key)}"
        for key, value in saved["data"].items()
        if value != of_data.get(key)
    ]
    if differing and not accepts:
        raise ConfigError(
            f"the data changed since the checkpoint was written ({', '.join(differing)}): restore "
            "the old files or settings, start a new run with name=..., or continue on the new data "
            "with checkpoint.accept_changes=true."
        )
    accept_changes(guards, saved["sources"], has_frozen, differing)
    cursor = Cursor(**saved["cursor"])
    # of an older version, a checkpoint has none
    rating = Rating(**saved["rating"]) if saved.get("rating") else None
    state = TrainState(
        saved["step"], cursor, saved["owes_validation"], saved["val_loss"], rating, now
    )
    if state.num_steps > guards.max_steps:
        raise ConfigError(
            f"the run is at step {state.num_steps}, and these settings end it at step "
            f"{guards.max_steps}: raise training.max_steps or training.num_epochs, whichever ends "
            "it, or start a new run with name=..."
        )
    # A schedule has no other state than its place: the rate of the next step follows from it.
    scheduler.last_epoch = state.num_steps - 1
    scheduler._step_count = state.num_steps + 1
    scheduler.step()
    return state


def accept_changes(
    guards: Guards, before: Mapping[str, str], has_frozen: bool, differing: Sequence[str] = ()
) -> None:
    """Raises ConfigError for files other than those of the checkpoint, unless
    `checkpoint.accept_changes` is set; reports what is accepted, settings among it.

    before      the digests that the checkpoint holds
    has_frozen  as in `changed_files`
    differing   what is others' to refuse, and was accepted
    """
    changed = changed_files(before, guards.state.sources, has_frozen)
    if changed and not guards.config.checkpoint.accept_changes:
        raise ConfigError(
            f"{', '.join(changed)}: not what the checkpoint was trained with: restore the old "
            "files, start a new run with name=..., or continue with checkpoint.accept_changes=true."
        )
    if accepted := [*guards.folder.changes(guards.config), *differing, *changed]:
        guards.say(f"accepted   {'; '.join(accepted)}")


def _open_folder(
    guards: Guards,
    data: PackSource,
    report: PackingReport | None,
    lines: Sequence[tuple[str, str]],
    engine: TrainingEngine,
) -> None:
    """Writes what a run's folder tells from its start, and drops the rows of steps that come again;
    every rank calls it. `lines` is the start block.
    """
    folder = guards.folder
    step = guards.state.num_steps
    if guards.ranks.is_first:
        batch = data.shape.global_batch_size
        folder.open(with_layout(guards.config, batch, data.packer.slot_multiple))
        with folder.explain_os_errors():
            folder.write_status("running", step, checkpoint=guards.checkpointer.newest_name)
            folder.write_facts(
                lines,
                kind=document_kind(data.documents),
                head=engine.decided.model.head_facts(),
                loss_unit=engine.model.loss_model.loss.unit,
            )
            if report:
                folder.packing.write_text(json.dumps(asdict(report), indent=2) + "\n")
                folder.lengths.write_text(json.dumps(data.lengths()))
            folder.rewind_metrics(step, guards.state.pending_validation)
    guards.ranks.barrier()
    assert guards.lock.token
    # from now on the stacks of a rank without progress are written to its log
    guards.watchdog.start(guards.lock.token)


def _open_ledger(
    guards: Guards, saved: dict[str, Any] | None, data: PackSource, engine: TrainingEngine
) -> None:
    """Begins ledger.jsonl, or goes on behind the checkpoint's step; what the numbers of the steps
    from here on depend on beside the settings stands at their beginning.
    """
    facts = {
        "data": data.fingerprint(),
        "files": guards.state.sources,
        "dtype": str(engine.decided.dtype).removeprefix("torch."),
        "device": engine.mesh.device.type,
        "ranks": world_size(),
        "versions": versions(),
    }
    with guards.folder.explain_os_errors():
        checkpoint = guards.checkpointer.newest if saved else None
        head = saved.get("ledger", "") if saved else ""
        guards.ledger.open(guards.state.num_steps, head, checkpoint, facts)


def _open_log(
    guards: Guards, saved: dict[str, Any] | None, counts: Mapping[str, int]
) -> MetricsLog:
    """metrics.jsonl and the callbacks, with what these kept. The first row has the seconds of the
    start by phase, which are printed too, and in a fresh run `counts` of the data.
    """
    extra = saved["extra"] if saved else {}
    step = guards.state.num_steps
    metrics = open_metrics(guards.config, guards.folder, guards.ranks, step, extra, guards.say)
    STARTUP.lap("checkpoint")
    phases = STARTUP.seconds()
    parts = ", ".join(
        f"{phase} {spent_s:.1f}" for phase, spent_s in phases.items() if spent_s >= 0.05
    )
    guards.say(f"{'start':<10} {sum(phases.values()):.1f} s: {parts}")
    row = {
        "step": step,
        **{f"start_s/{phase}": round(spent_s, 3) for phase, spent_s in phases.items()},
    }
    metrics.log_step(row if step else {**row, **counts})
    return metrics
