"""Our recipe as shipped: raw JSON lines in, a run folder with metrics out; the clock only looks on.

python -m benchmarks.peers.recipe JOB [an override]
python -m benchmarks.peers.recipe JOB prepare    tokenizes the lines, for contestants that are given token rows
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import ClassVar

from automodel_lite.cli import compose_config
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.config.check import check_config
from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.feed import DeviceStep
from automodel_lite.data.tokens.tokenize import job_of, tokenize_documents
from automodel_lite.telemetry.metrics import StepResult
from benchmarks.peers.job import LR, PACK_TOKENS, Clock, Job
from recipes import train_ft


def recipe_config(job: Job, *more: str) -> Config:
    """The preset `finetune` on the job's data; what is timed is what a user gets."""
    if job.pretrained:
        model = [f"model.pretrained={job.pretrained}"]
    else:
        settings = job.model_settings()
        size = settings.pop("vocab_size")
        model = ["tokenizer=bpe", f"tokenizer.vocab_size={size}", "model=llama_smoke"]
        model += [f"model.config.{key}={value}" for key, value in settings.items()]
    overrides = [
        "name=peers",
        f"output_dir={job.scratch}/run",
        f"cache_dir={job.folder}/cache",
        f"dataset.path={job.data}",
        f"packed_sequence.packed_sequence_size={PACK_TOKENS}",
        "training.num_epochs=null",
        f"training.max_steps={job.all_steps}",
        "training.global_batch_size=1",
        "training.num_threads=1",
        f"training.precision={job.precision}",
        f"optimizer.lr={LR}",
        "lr_scheduler.warmup_steps=1",
        "checkpoint.export_hf=false",
    ]
    return check_config(compose_config("finetune", [*overrides, *model, *more]))


class TimedRecipe(train_ft.TrainFinetuneRecipe):
    """Looks at the clock where a step ends, which is before its numbers are logged."""

    clock = Clock()
    tokens_of_step: ClassVar[list[int]] = []

    def step(self, ready: DeviceStep) -> StepResult:
        result = super().step(ready)
        self.clock.step_done()
        self.tokens_of_step.append(result.counts.num_tokens)
        return result


def prepare(job: Job) -> None:
    """Writes tokenizer/ and rows.json: ids, and which of them are trained on."""
    config = recipe_config(job)
    documents = build(config.dataset)
    tokenizing = job_of(config, documents)
    rows = tokenize_documents(documents, tokenizing, config.cache_dir).train
    tokenizing.tokenizer.save_pretrained(f"{job.folder}/tokenizer")
    found: dict[str, list] = {"input_ids": [], "completion_mask": []}
    for index in range(len(rows)):
        row = rows[index]
        found["input_ids"].append(row["input_ids"].tolist())
        # labels[i] is the token behind i
        is_label = row["labels"][:-1] != IGNORE_INDEX
        found["completion_mask"].append([0, *is_label.astype(int).tolist()])
    Path(job.folder, "rows.json").write_text(json.dumps(found))
    print(f"{len(rows)} documents, {rows.num_tokens} tokens")


if __name__ == "__main__":
    job = Job.from_argv()
    if sys.argv[2:] == ["prepare"]:
        prepare(job)
    else:
        train_ft.TrainFinetuneRecipe = TimedRecipe
        assert train_ft.main(recipe_config(job, *sys.argv[2:])) == 0
        TimedRecipe.clock.report(job, TimedRecipe.tokens_of_step)
