"""TRL's SFTTrainer, packed or padded, on token rows; runs in its environment.

python -m benchmarks.peers.trl JOB packed | padded
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.job import LR, PACK_TOKENS, Clock, Job
from benchmarks.peers.plain import CountingCollator, documents_per_step, llama, read_rows


def fine_tune(
    model: Any, data: dict[str, Any], tokenizer: Any, step_done: Callable[[], None], **settings: Any
) -> list[int]:
    """Trains on columns of token rows, and returns the tokens of each step; `settings` are SFTConfig's."""

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            step_done()

    arguments = SFTConfig(
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        optim="adamw_torch_fused",
        disable_tqdm=True,
        **settings,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.data_collator = CountingCollator(trainer.data_collator)
    trainer.train()
    return trainer.data_collator.tokens_of_step


def main(job: Job, variant: str) -> None:
    torch.set_num_threads(1)
    is_packed = variant == "packed"
    clock, folder = Clock(), Path(job.folder)
    data = read_rows(job)
    tokens_of_step = fine_tune(
        llama(job),
        data,
        AutoTokenizer.from_pretrained(folder / "tokenizer"),
        clock.step_done,
        output_dir=str(Path(job.scratch) / "run"),
        per_device_train_batch_size=1 if is_packed else documents_per_step(data),
        max_steps=job.all_steps,
        learning_rate=LR,
        bf16=job.precision == "bf16",
        use_cpu=True,
        packing=is_packed,
        max_length=PACK_TOKENS,
        completion_only_loss=True,
    )
    clock.report(job, tokens_of_step)


if __name__ == "__main__":
    main(Job.from_argv(), sys.argv[2])
