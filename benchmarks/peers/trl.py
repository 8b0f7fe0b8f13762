"""TRL's SFTTrainer, packed or padded, on token rows; runs in its environment.

python -m benchmarks.peers.trl JOB packed | padded
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.job import LR, PACK_TOKENS, Clock, Job


class CountingCollator:
    """Counts the real tokens of every batch, in the order they are made, which is the order of the steps."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.tokens_of_step: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        self.tokens_of_step.append(sum(len(row["input_ids"]) for row in rows))
        return self.collator(rows)


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


def llama(job: Job) -> Any:
    """The Hugging Face model, which knows nothing of our kernels: fp32, SDPA."""
    kind = AutoModelForCausalLM
    if job.pretrained:
        return kind.from_pretrained(job.pretrained, dtype=torch.float32, use_cache=False).train()
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **job.model_settings(), use_cache=False)
    return kind.from_config(config, attn_implementation="sdpa").train()


def main(job: Job, variant: str) -> None:
    torch.set_num_threads(1)
    is_packed = variant == "packed"
    clock, folder = Clock(), Path(job.folder)
    data = json.loads((folder / "rows.json").read_text())
    mean = statistics.mean(map(len, data["input_ids"]))
    tokens_of_step = fine_tune(
        llama(job),
        data,
        AutoTokenizer.from_pretrained(folder / "tokenizer"),
        clock.step_done,
        output_dir=str(Path(job.scratch) / "run"),
        per_device_train_batch_size=1 if is_packed else round(PACK_TOKENS / mean),
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
