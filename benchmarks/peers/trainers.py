"""TRL's SFTTrainer (packed or padded) and transformers' Trainer (padded) on token rows; runs in their environment.

python -m benchmarks.peers.trainers JOB trl_packed | trl_padded | hf_padded
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.peers.job import LR, PACK_TOKENS, Clock, Job, llama, use_one_thread


class StepClock(TrainerCallback):
    def __init__(self) -> None:
        self.clock = Clock()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.step_done()


class CountingCollator:
    """Counts the real tokens of every batch, in the order they are made, which is the order of the steps."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.tokens_of_step: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        self.tokens_of_step.append(sum(len(row["input_ids"]) for row in rows))
        return self.collator(rows)


def arguments(job: Job, documents_a_step: int) -> dict[str, Any]:
    return {
        "output_dir": str(Path(job.scratch) / "run"),
        "per_device_train_batch_size": documents_a_step,
        "max_steps": job.all_steps,
        "learning_rate": LR,
        "max_grad_norm": 1.0,
        "bf16": job.precision == "bf16",
        "use_cpu": True,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 0,
        "disable_tqdm": True,
    }


def trl_trainer(job: Job, is_packed: bool, clock: StepClock) -> tuple[Trainer, CountingCollator]:
    from trl import SFTConfig, SFTTrainer

    rows = job.rows()
    data = Dataset.from_dict(
        {
            "input_ids": [ids for ids, _ in rows],
            "completion_mask": [(labels != -100).astype(int) for _, labels in rows],
        }
    )
    trainer = SFTTrainer(
        model=llama(job),
        args=SFTConfig(
            **arguments(job, 1 if is_packed else job.documents_a_step()),
            packing=is_packed,
            max_length=PACK_TOKENS,
            completion_only_loss=True,
        ),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(Path(job.folder) / "tokenizer"),
        callbacks=[clock],
    )
    collator = trainer.data_collator = CountingCollator(trainer.data_collator)
    return trainer, collator


def hf_trainer(job: Job, clock: StepClock) -> tuple[Trainer, CountingCollator]:
    data = Dataset.from_list(
        [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in job.rows()]
    )
    collator = CountingCollator(
        DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(Path(job.folder) / "tokenizer"))
    )
    trainer = Trainer(
        model=llama(job),
        args=TrainingArguments(**arguments(job, job.documents_a_step())),
        train_dataset=data,
        data_collator=collator,
        callbacks=[clock],
    )
    return trainer, collator


def main(job: Job, variant: str) -> None:
    use_one_thread()
    clock = StepClock()
    if variant == "hf_padded":
        trainer, collator = hf_trainer(job, clock)
    else:
        trainer, collator = trl_trainer(job, variant == "trl_packed", clock)
    trainer.train()
    clock.clock.report(job, collator.tokens_of_step, torch=torch.__version__)


if __name__ == "__main__":
    main(Job.from_argv(), sys.argv[2])
