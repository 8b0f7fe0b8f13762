"""transformers' Trainer on padded token rows; runs in TRL's environment, which has accelerate.

python -m benchmarks.peers.hf JOB
"""

from __future__ import annotations

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

from benchmarks.peers.job import LR, Clock, Job
from benchmarks.peers.plain import CountingCollator, documents_per_step, llama, read_rows


def main(job: Job) -> None:
    torch.set_num_threads(1)
    clock = Clock()

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step_done()

    rows = read_rows(job)
    labels = [
        [token if is_label else -100 for token, is_label in zip(ids, mask)]
        for ids, mask in zip(rows["input_ids"], rows["completion_mask"])
    ]
    tokenizer = AutoTokenizer.from_pretrained(Path(job.folder) / "tokenizer")
    collator = CountingCollator(DataCollatorForSeq2Seq(tokenizer))
    arguments = TrainingArguments(
        output_dir=str(Path(job.scratch) / "run"),
        per_device_train_batch_size=documents_per_step(rows),
        max_steps=job.all_steps,
        learning_rate=LR,
        max_grad_norm=1.0,
        bf16=job.precision == "bf16",
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        disable_tqdm=True,
    )
    Trainer(
        model=llama(job),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows["input_ids"], "labels": labels}),
        data_collator=collator,
        callbacks=[Watch()],
    ).train()
    clock.report(job, collator.tokens_of_step)


if __name__ == "__main__":
    main(Job.from_argv())
