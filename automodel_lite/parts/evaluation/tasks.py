"""Asks the questions of task files while a model trains, of its weights as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean as mean
from typing import Annotated, Protocol

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_lite.attention.spec import config_value
from automodel_lite.config.rules import Count, Range, Size
from automodel_lite.errors import ConfigError, counted, is_limit, one_line
from automodel_lite.evaluation.generator import prompt_ids
from automodel_lite.evaluation.task_files import (
    Asked,
    Drawing,
    TaskFile,
    TaskRow,
    pass_at,
    read_task,
)

MOST_SAMPLES = 1024


class Draw(Protocol):
    """Returns ids, [question][answer]; None where the run must stop. Every rank calls it."""

    def __call__(
        self, drawings: Sequence[Drawing], batch_size: int
    ) -> list[list[list[int]]] | None: ...


@dataclass(frozen=True)
class Tasks:
    """The config node `tasks`: task files (evaluation/task_files.py) that the present weights
    answer at validations.
    """

    files: list[str]  # [sums.jsonl, capitals.yaml]
    # steps between, a multiple of training.val_every_steps; 0 = at each validation
    every_steps: Count = 0
    num_samples: Annotated[int, Range(1, MOST_SAMPLES)] = 1  # answers to each question
    # [1, 4]: is one of so many answers right? without bias, of num_samples; null = [1]
    pass_at: list[Annotated[int, Range(1, MOST_SAMPLES)]] | None = None
    # of the draws; null = 0, the likeliest tokens, for one answer, else 1
    temperature: Annotated[float, Range(0, 100)] | None = None
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0  # of the draws
    max_new_tokens: Size = 64  # of an answer, where its file does not say
    num_questions: Count = 0  # of each file, the first ones; 0 = all
    batch_size: Size = 64  # answers drawn at a time by a data-parallel rank
    num_shown: Count = 3  # questions of each task whose first answer the report shows

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError(
                "tasks.files=[]: there is nothing to ask: name task files, tasks.files=[a.jsonl]."
            )
        if min(self.ks, default=0) < 1 or max(self.ks) > self.num_samples:
            raise ConfigError(
                f"tasks.pass_at={self.pass_at} must be numbers from 1 to the answers that are "
                f"drawn: set tasks.num_samples={max([1, *self.ks])}, not {self.num_samples}."
            )
        if self.temperature == 0 and self.num_samples > 1:
            raise ConfigError(
                f"tasks.temperature=0 draws the same answer tasks.num_samples={self.num_samples} "
                "times: set a temperature above 0, or tasks.num_samples=1."
            )

    @property
    def ks(self) -> list[int]:
        """Returns the k of each pass@k."""
        return [1] if self.pass_at is None else self.pass_at

    def open(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PretrainedConfig,
        template_kwargs: dict[str, object],
        allowed: Sequence[str],
    ) -> OpenTasks:
        """Reads the files, and tokenizes the questions; raises ConfigError and DataError, also for
        a question that leaves no room for its answer.

        config   of the model
        allowed  packages that scorers may come from
        """
        opened = []
        found: dict[str, str] = {}
        for path in self.files:
            task = read_task(path, allowed)
            if task.name in found:
                raise ConfigError(
                    f"tasks.files: {found[task.name]} and {path} would both be the task "
                    f"{task.name}: rename one."
                )
            found[task.name] = path
            rows = task.rows[: self.num_questions or None]
            tokens = task.max_new_tokens or self.max_new_tokens
            positions = config_value(config.get_text_config(), "max_position_embeddings", None)
            drawings = []
            for number, row in enumerate(rows):
                asked = row.asked
                ids = prompt_ids(
                    tokenizer, asked.messages, asked.is_chat, template_kwargs=template_kwargs
                )
                if not ids or (positions and len(ids) + tokens > positions):
                    raise ConfigError(
                        f"{row.where}: the question has {len(ids):,} tokens, and its answer up to "
                        f"{tokens:,} more, and the model {positions:,} positions: shorten it, or "
                        "set max_new_tokens."
                    )
                draw = (self.num_samples, tokens, self._temperature, self.top_p)
                drawings.append(Drawing(list(ids), *draw, seed=(task.name, number)))
            opened.append((task, rows, drawings))
        return OpenTasks(self, tokenizer, opened)

    @property
    def _temperature(self) -> float:
        if self.temperature is not None:
            return self.temperature
        return 1.0 if self.num_samples > 1 else 0.0


@dataclass(frozen=True)
class OpenTasks:
    """Tasks whose files are read."""

    how: Tasks
    tokenizer: PreTrainedTokenizerBase
    tasks: list[tuple[TaskFile, list[TaskRow], list[Drawing]]]

    @property
    def metrics(self) -> list[str]:
        """Returns the keys of metrics.jsonl, and `task_score`, the mean over the tasks."""
        kinds = ["task_score", *(f"task_pass_at_{k}" for k in self.how.ks)]
        return [
            "task_score",
            *(f"{kind}/{task.name}" for task, _, _ in self.tasks for kind in kinds),
        ]

    def text(self) -> str:
        """Returns what the start block says."""
        parts = []
        for task, rows, _ in self.tasks:
            scorer = "a function" if task.function is not None else task.scorer
            ignored = f", columns not used: {', '.join(task.unused)}" if task.unused else ""
            questions = counted(len(rows), "question")
            parts.append(f"{task.name} ({questions}, scored by {scorer}{ignored})")
        return f"{'; '.join(parts)}; {counted(self.how.num_samples, 'answer')} to each"

    def is_due(self, step: int, is_last: bool) -> bool:
        """Returns whether the validation of this step asks them."""
        every = self.how.every_steps
        return is_last or not every or step % every == 0

    def ask(self, draw: Draw, enter: Callable[[str], None]) -> Asked | None:
        """Asks all tasks; every rank calls it. None where the run must stop.

        enter  is told what the run is doing
        """
        asked = Asked()
        for task, rows, drawings in self.tasks:
            enter(f"asking the task {task.name}")
            answers = draw(drawings, self.how.batch_size)
            if answers is None:
                return None
            texts = [self._texts(of_row) for of_row in answers]
            self._add(asked, task, rows, texts)
        return asked

    def _texts(self, answers: list[list[int]]) -> list[str]:
        decode = self.tokenizer.decode
        return [str(decode(ids, skip_special_tokens=True)).strip() for ids in answers]

    def _add(
        self, asked: Asked, task: TaskFile, rows: list[TaskRow], texts: list[list[str]]
    ) -> None:
        """Adds the numbers of a task."""
        scores: list[list[float]] = []
        failed: list[str] = []
        for row, of_row in zip(rows, texts):
            scores.append([])
            for text in of_row:
                try:
                    score = task.score(row, text)
                except Exception as error:  # of the user's: the run goes on
                    if is_limit(error):
                        raise
                    failed.append(f"{row.where}: {type(error).__name__}: {one_line(error, 80)}")
                    score = 0.0
                scores[-1].append(score)
        numbers = {"task_score": mean(map(mean, scores))}
        num = self.how.num_samples
        for k in self.how.ks:
            right = [sum(score >= 1 for score in of_row) for of_row in scores]
            numbers[f"task_pass_at_{k}"] = mean(pass_at(k, num, count) for count in right)
        shown = "".join(f"  {kind.removeprefix('task_')} {x:.4g}" for kind, x in numbers.items())
        asked.lines.append(f"{task.name}:{shown}  ({counted(len(rows), 'question')})")
        if failed:
            asked.lines.append(
                f"WARNING: {counted(len(failed), 'answer', 'is')} counted as wrong, as the scorer "
                f"failed; first {failed[0]}"
            )
        asked.numbers.update({f"{kind}/{task.name}": x for kind, x in numbers.items()})
        for row, of_row in list(zip(rows, texts))[: self.how.num_shown]:
            asked.texts.append((str(row.asked.messages[-1]["content"]), of_row[0]))
