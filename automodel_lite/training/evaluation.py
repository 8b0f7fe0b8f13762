"""Validation: the loss over held-out packs, and what is asked of the model.

The loss is (sum, count): every document is counted once, on any layout of ranks. Fixed prompts and
held-out questions are answered by parts/evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from automodel_lite.attention.isolation import evaluating
from automodel_lite.config.components import build
from automodel_lite.config.schema import CheckpointConfig, Config, SamplesConfig
from automodel_lite.config.sizes import ceil_div
from automodel_lite.data.feeding.feed import DeviceFeed, validation_steps
from automodel_lite.data.feeding.planned import document_kind
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.errors import ConfigError
from automodel_lite.evaluation.questions import OwnQuestions, has_questions
from automodel_lite.progress import Progress
from automodel_lite.run.checkpoint_folder import Rating
from automodel_lite.telemetry.callbacks import value_of
from automodel_lite.telemetry.directions import direction_problem, rises
from automodel_lite.training.engine import Engine, add_output, with_mean


def validate(
    engine: Engine,
    source: PackSource,
    samples: SamplesConfig,
    must_stop: Callable[[], bool],
    judged: dict[str, list[np.ndarray]] | None = None,
) -> tuple[dict[str, float], list[tuple[str, str]]] | None:
    """Returns `val_loss/<set>` and the other numbers of `validation_losses`, of all validation
    sets, and the answers to the prompts; None when it was stopped. Every rank calls it.

    judged  gets the values that the loss judges, by set
    """
    losses: dict[str, float] = {}
    for name, packs in source.val_packs.items():
        rows: list[np.ndarray] = []
        found = validation_losses(engine, packs, source, must_stop, rows)
        if found is None:
            return None
        losses |= {f"val_{kind}/{name}": loss for kind, loss in found.items()}
        if judged is not None and rows:
            judged[name] = rows
    if not samples.prompts:
        return losses, []
    from automodel_lite.evaluation.samples import sample_answers  # with transformers' generation

    answers = sample_answers(samples, engine.model, engine.mesh, source)
    return losses, answers


@torch.no_grad()
def validation_losses(
    engine: Engine,
    packs: PackedDataset,
    source: PackSource,
    must_stop: Callable[[], bool],
    judged: list[np.ndarray] | None = None,
) -> dict[str, float] | None:
    """Returns `loss` and its parts, means over what the loss counts in all packs; the
    `token_accuracy` 0..1 and, where it is not the loss, the plain `cross_entropy`, means over all
    label tokens, by their weights; the `perplexity` of that; and what the loss finds in the values
    that it judges, which are added to `judged`. By these, runs of different losses compare. Of a
    loss that is not of text, in place of tokens, its own measures alone. Every rank calls it.

    `must_stop` is called after every batch, on all ranks; None when it is true.
    """
    model = engine.model
    mesh = engine.mesh
    loss_model = model.loss_model
    sums = {"loss": torch.zeros((), device=mesh.device)}
    counts = torch.zeros(2, dtype=torch.float64)  # of what the loss counts, and of label tokens
    packs_per_forward = source.shape.dp_size * source.shape.micro_batch_size
    num_batches = ceil_div(len(packs), packs_per_forward)

    def open_feed() -> DeviceFeed:
        shape = source.shape
        return engine.feed(validation_steps(packs, shape, mesh.dp_rank, source.dataloader))

    # What a loss needs of a whole step it gets here of the whole set, which is read twice.
    mean = None
    if loss_model.loss.step_mean:
        step_sums = engine.no_step_sums()
        feed = open_feed()
        for ready in feed:
            step_sums = step_sums + engine.step_sums(ready.inputs[0], loss_model.loss)
            feed.stage()
            if must_stop():
                return None
        mean = engine.step_mean(step_sums, loss_model.loss)
    feed = open_feed()
    rows: list[np.ndarray] = []
    with evaluating(model.module), Progress("validating", num_batches, "batches") as progress:
        for ready in feed:
            batch = ready.inputs[0]
            output = model(batch if mean is None else with_mean(batch, loss_model.loss, mean))
            # Sums and counts stay apart to the end: means of batches would weigh short ones too
            # much.
            add_output(sums, output)
            if loss_model.judged_rows is not None:
                rows.append(loss_model.judged_rows.cpu().numpy())
            whole = ready.micro_batches[0]
            counts += torch.tensor([loss_model.loss.num_items(whole), whole.num_label_tokens])
            feed.stage()
            progress.add(1)
            if must_stop():
                return None
    # Losses are summed over each rank's own tokens. Counts are of whole streams, which the ranks of
    # cp share, so each stream is counted cp times.
    num_items, num_labels = (mesh.sum(counts) / mesh.shape.cp).tolist()
    means = {}
    for name, value in sums.items():
        is_per_label = name in ("token_accuracy", "cross_entropy")
        count = num_labels if is_per_label else num_items
        means[name] = mesh.sum(value).item() / (count or 1)
    if loss_model.loss.of_text:
        # The loss is the cross-entropy where that is not a part of its own; e^700 is near the
        # largest float.
        cross_entropy = means.get("cross_entropy", means["loss"])
        means["perplexity"] = math.exp(min(cross_entropy, 700.0))
    of_all = [part for of_rank in mesh.gather(rows) for part in of_rank]
    if judged is not None:
        judged += of_all
    return means | loss_model.loss.judge(of_all)


def rating_of(config: CheckpointConfig, numbers: Mapping[str, float]) -> Rating | None:
    """Returns what the best checkpoint is chosen by; None where this validation has not asked for
    it. Raises ConfigError for a number that no validation has.
    """
    metric = config.best_metric
    value = value_of(dict(numbers), metric)
    if value is None:
        if numbers and config.keep_best and not metric.startswith("task_"):
            raise ConfigError(
                f"checkpoint.best_metric={metric} is none of the numbers of a validation: "
                f"{', '.join(sorted(numbers))}."
            )
        return None
    known = rises(metric)
    return Rating(metric, value, bool(known if config.best_rises is None else config.best_rises))


def check_held_out(config: Config, data: PackSource) -> None:
    """Raises ConfigError where something asks for held-out data that there are not: it would never
    act, without a word.
    """
    for name, part in config.callbacks.items():
        metric = str(part.get("metric", ""))
        if "rises" in part:
            key = f"callbacks.{name}"
            if problem := direction_problem(metric, part.get("rises"), key):
                raise ConfigError(problem)
        if not metric.startswith("val_"):
            continue
        if not data.val_packs:
            raise ConfigError(
                f"callbacks.{name} waits for {metric}, and nothing is held out: set "
                "dataset.val_frac=0.05 or dataset.val_path, and training.val_every_steps."
            )
        if not config.training.val_every_steps:
            raise ConfigError(
                f"callbacks.{name} waits for {metric}, which training.val_every_steps=0 computes "
                "only at the end: set training.val_every_steps."
            )
    by_tasks = config.checkpoint.best_metric.startswith("task_")
    if config.checkpoint.keep_best and not by_tasks and not data.val_packs:
        raise ConfigError(
            f"checkpoint.keep_best={config.checkpoint.keep_best} compares validation losses, and "
            "nothing is held out: set dataset.val_frac=0.05 or dataset.val_path, or keep_best=0."
        )
    part = build(config.evaluation) if config.evaluation else None
    if isinstance(part, OwnQuestions):
        part.check_tasks()
    elif config.evaluation and document_kind(data.documents) == "decisions":
        raise ConfigError(
            "evaluation compares answers that are written, and those to decisions are choices, "
            "which every validation judges (val_accuracy, val_ece)",
            key="evaluation",
            cure="set evaluation=none",
        )
    elif config.evaluation and not has_questions(data.documents):
        raise ConfigError(
            "evaluation asks held-out questions, and there are none: set dataset.val_frac=0.05 or "
            "dataset.val_path, to chats that end with an answer (plain text and token ids ask "
            "nothing), or evaluation=none."
        )
