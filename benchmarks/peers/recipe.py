"""Our recipe as shipped: raw JSON lines in, a run folder with metrics out; the clock only looks on.

python -m benchmarks.peers.recipe JOB [an override]
"""

from __future__ import annotations

import sys
from typing import ClassVar

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.feed import DeviceStep
from automodel_lite.telemetry.metrics import StepResult
from benchmarks.peers.job import LR, PACK_TOKENS, Clock, Job
from recipes import train_ft


def recipe_config(job: Job, *more: str) -> Config:
    """The preset `finetune` on the job's data; what is timed is what a user gets."""
    if job.pretrained:
        model = [f"model.pretrained={job.pretrained}"]
    else:
        settings = {
            key: value for key, value in job.model_settings().items() if key != "vocab_size"
        }
        model = ["tokenizer=bpe", "tokenizer.vocab_size=8192", "model=llama_smoke"]
        model += [f"model.config.{key}={value}" for key, value in settings.items()]
    overrides = [*shared_overrides(job), *model, f"training.precision={job.precision}", *more]
    return check_config(compose_config("finetune", overrides))


def shared_overrides(job: Job, pack_tokens: int = PACK_TOKENS) -> list[str]:
    """What every preset is given: the job's data and number of steps, one pack per step."""
    return [
        "name=peers",
        f"output_dir={job.scratch}/run",
        f"cache_dir={job.folder}/cache",
        f"dataset.path={job.data}",
        f"packed_sequence.packed_sequence_size={pack_tokens}",
        "training.num_epochs=null",
        f"training.max_steps={job.all_steps}",
        "training.global_batch_size=1",
        "training.num_threads=1",
        f"optimizer.lr={LR}",
        "lr_scheduler.warmup_steps=1",
        "checkpoint.export_hf=false",
    ]


class TimedRecipe(train_ft.TrainFinetuneRecipe):
    """Looks at the clock where a step ends, which is before its numbers are logged."""

    clock = Clock()
    tokens_of_step: ClassVar[list[int]] = []

    def step(self, ready: DeviceStep) -> StepResult:
        result = super().step(ready)
        self.clock.step_done()
        self.tokens_of_step.append(result.counts.num_tokens)
        return result


if __name__ == "__main__":
    job = Job.from_argv()
    train_ft.TrainFinetuneRecipe = TimedRecipe
    assert train_ft.main(recipe_config(job, *sys.argv[2:])) == 0
    TimedRecipe.clock.report(job, TimedRecipe.tokens_of_step)
