"""Tasks of a run: read before anything is loaded, and asked of its weights as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.data.tokens.stop_tokens import stop_ids
from automodel_lite.errors import ConfigError, did_you_mean
from automodel_lite.evaluation.task_files import Asked, Drawing
from automodel_lite.seed import derive_seed
from automodel_lite.telemetry.directions import rises
from automodel_lite.training.engine import Engine

if TYPE_CHECKING:
    from automodel_lite.parts.evaluation.tasks import OpenTasks


def ask_tasks(
    tasks: OpenTasks,
    engine: Engine,
    config: Config,
    must_stop: Callable[[], bool] = lambda: False,
    enter: Callable[[str], None] = lambda doing: None,
) -> Asked | None:
    """Returns what the present weights answer, and how right it is; None where the run must stop.
    Every rank calls it.

    Answers follow from `seed`, the task and the question, and are drawn from the same noise at
    each step: scores of two steps differ by their weights alone, and a run that was stopped has
    those of one that was not.
    """
    # with transformers' generation
    from automodel_lite.extras.client.drawing import draw_answers
    from automodel_lite.extras.client.sampling import Request

    ends = stop_ids(engine.model.loss_model.lm, tasks.tokenizer, config.tokenize.template_kwargs)

    def draw(drawings: Sequence[Drawing], batch_size: int) -> list[list[list[int]]] | None:
        requests = [
            Request(
                prompt=x.prompt,
                num_samples=x.num_samples,
                max_new_tokens=x.max_new_tokens,
                temperature=x.temperature,
                top_p=x.top_p,
                seed=derive_seed("task", *x.seed),
            )
            for x in drawings
        ]
        drawn = draw_answers(
            engine.model,
            engine.mesh,
            requests,
            batch_size,
            ends,
            tasks.tokenizer,
            config.seed,
            must_stop,
        )
        if drawn is None:
            return None
        return [[ids for ids, _ in answers] for answers in drawn]

    return tasks.ask(draw, enter)


def check_best(config: Config, tasks: OpenTasks | None) -> None:
    """Raises ConfigError for a `checkpoint.best_metric` that nothing computes when it is needed, or
    of which nobody knows when it gets better; and for a callback that waits for a task.
    """
    names = tasks.metrics if tasks else []
    watched = {f"callbacks.{x}.metric": part.get("metric") for x, part in config.callbacks.items()}
    if config.checkpoint.keep_best:
        watched["checkpoint.best_metric"] = config.checkpoint.best_metric
    for key, metric in watched.items():
        if str(metric).startswith("task_") and metric not in names:
            known = f"the tasks have {', '.join(names)}" if names else "no task is asked"
            cure = did_you_mean(str(metric), names)
            cure = cure if names else ": set tasks=files tasks.files=[...]."
            raise ConfigError(f"{key}={metric} is a score of tasks, and {known}{cure}")
    if not config.checkpoint.keep_best:
        return
    metric = config.checkpoint.best_metric
    if not metric.startswith(("val_", "task_")):
        raise ConfigError(
            f"checkpoint.best_metric={metric} must be a number of validations: val_loss, "
            "val_token_accuracy, or task_score with tasks=files."
        )
    if config.checkpoint.best_rises is None and rises(metric) is None:
        raise ConfigError(
            f"checkpoint.best_metric={metric} has no known direction: set "
            "checkpoint.best_rises=true where it should rise, or checkpoint.best_rises=false."
        )
    every = config.checkpoint.every_steps
    asks = tasks.how.every_steps if tasks and metric.startswith("task_") else 0
    if asks and every % asks:
        raise ConfigError(
            f"checkpoint.keep_best={config.checkpoint.keep_best} compares checkpoints by "
            f"{metric}, and checkpoint.every_steps={every} is no multiple of "
            f"tasks.every_steps={asks}: set tasks.every_steps={every}."
        )


def open_tasks(
    config: Config, tokenizer: PreTrainedTokenizerBase, model: PretrainedConfig
) -> OpenTasks | None:
    """Returns the tasks that the run asks, their files read; None without any. Raises ConfigError
    and DataError, also for tasks that no validation comes to.
    """
    opened = None
    if config.tasks:
        variables = dict(config.tokenize.template_kwargs)
        allowed = config.security.allow_targets
        opened = build(config.tasks).open(tokenizer, model, variables, allowed)
        validates = config.training.val_every_steps
        every = opened.how.every_steps
        if every and (not validates or every % validates):
            raise ConfigError(
                f"tasks.every_steps={every}: tasks are asked at validations, and "
                f"training.val_every_steps={validates}: set training.val_every_steps={every}."
            )
    check_best(config, opened)
    return opened
