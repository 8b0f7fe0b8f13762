"""TRL's SFTTrainer, packed or padded, on token rows; runs in its environment.

python -m benchmarks.peers.trl JOB packed | padded
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.job import LR, PACK_TOKENS, Clock, Job, llama


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


def main(job: Job, variant: str) -> None:
    is_packed = variant == "packed"
    rows, clock = job.rows(), StepClock()
    data = {
        "input_ids": [ids for ids, _ in rows],
        "completion_mask": [(labels != -100).astype(int) for _, labels in rows],
    }
    settings = SFTConfig(
        output_dir=str(Path(job.scratch) / "run"),
        per_device_train_batch_size=1 if is_packed else job.documents_a_step(),
        max_steps=job.all_steps,
        learning_rate=LR,
        max_grad_norm=1.0,
        bf16=job.precision == "bf16",
        use_cpu=True,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        dataloader_num_workers=0,
        disable_tqdm=True,
        packing=is_packed,
        max_length=PACK_TOKENS,
        completion_only_loss=True,
    )
    trainer = SFTTrainer(
        model=llama(job),
        args=settings,
        train_dataset=Dataset.from_dict(data),
        processing_class=AutoTokenizer.from_pretrained(Path(job.folder) / "tokenizer"),
        callbacks=[clock],
    )
    trainer.data_collator = CountingCollator(trainer.data_collator)
    trainer.train()
    clock.clock.report(job, trainer.data_collator.tokens_of_step)


if __name__ == "__main__":
    main(Job.from_argv(), sys.argv[2])
