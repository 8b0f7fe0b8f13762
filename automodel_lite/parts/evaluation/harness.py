"""Public benchmarks at the end of a run: lm-evaluation-harness scores the exported model.

A benchmark reads its data from the hub; a task of one's own is a YAML file in `include_path`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from automodel_lite.config.rules import Count, PathStr, Size
from automodel_lite.config.schema import BoolOrAuto
from automodel_lite.data.reading.documents import Question
from automodel_lite.errors import ConfigError, did_you_mean
from automodel_lite.evaluation.generator import Generator


@dataclass(frozen=True)
class LmEval:
    """The config node `evaluation`: scores the exported model with lm-evaluation-harness."""

    tasks: list[str]  # [gsm8k, hellaswag]: tasks, groups or tags of lm-eval
    num_fewshot: Count | None = None  # solved examples before each question; null = the task's own
    limit: Count = 0  # questions of each task, the first ones; 0 = all
    batch_size: Size = 8  # questions at a time
    include_path: PathStr | None = None  # a folder with tasks of your own
    # ask through the chat template; auto = where the tokenizer has one
    apply_chat_template: BoolOrAuto = "auto"

    def check_tasks(self) -> None:
        """Raises ConfigError for a task that lm-eval does not know."""
        if not self.tasks:
            raise ConfigError("evaluation.tasks=[]: name tasks of lm-eval, evaluation.tasks=[a].")
        if self.include_path and not Path(self.include_path).is_dir():
            raise ConfigError(f"evaluation.include_path={self.include_path} is no folder.")
        manager = self._manager()
        for name in self.tasks:
            if not manager.match_tasks([name]):
                meant = did_you_mean(name, manager.all_tasks)
                raise ConfigError(f"evaluation.tasks: lm-eval has no task {name}{meant}")

    def ask(self, generator: Generator, _: Iterable[Question]) -> tuple[str, dict[str, Any]]:
        """Returns lines to print, and `lm_eval/<task>/<metric>` for metrics.jsonl."""
        uses_template = self.apply_chat_template
        if uses_template == "auto":
            uses_template = generator.tokenizer.chat_template is not None
        scorer = HFLM(
            pretrained=generator.model,
            tokenizer=generator.tokenizer,
            batch_size=self.batch_size,
            device=str(generator.model.device),
        )
        found = lm_eval.simple_evaluate(
            scorer,
            tasks=self.tasks,
            num_fewshot=self.num_fewshot,
            limit=self.limit or None,
            task_manager=self._manager(),
            apply_chat_template=uses_template,
            log_samples=False,
        )
        scores = scores_of(found["results"])
        lines = [f"lm-eval {lm_eval.__version__}"]
        lines += [f"  {name.removeprefix('lm_eval/')} {x:.4f}" for name, x in scores.items()]
        return "\n".join(lines), scores

    def _manager(self) -> TaskManager:
        """Returns what knows the tasks: to read lm-eval's own, thousands of files, takes seconds,
        and is left out where the folder has all.
        """
        if self.include_path:
            own = _manager_of(self.include_path, False)
            if all(own.match_tasks([name]) for name in self.tasks):
                return own
        return _manager_of(self.include_path, True)


@cache
def _manager_of(include_path: str | None, has_defaults: bool) -> TaskManager:
    return TaskManager(include_path=include_path, include_defaults=has_defaults)


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns the numbers of each task, of its filters by their names.

    >>> scores_of({"sums": {"alias": "sums", "acc,none": 0.5, "em,strict": 1.0}})
    {'lm_eval/sums/acc': 0.5, 'lm_eval/sums/em@strict': 1.0}
    """
    found = {}
    for task, numbers in results.items():
        for key, value in numbers.items():
            if isinstance(value, int | float) and "," in key:
                metric, _, of_filter = key.partition(",")
                name = metric if of_filter == "none" else f"{metric}@{of_filter}"
                found[f"lm_eval/{task}/{name}"] = float(value)
    return found
