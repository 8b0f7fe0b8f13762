"""TRL from raw JSON lines to the end of its first step, as its users write it; runs in its environment."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.job import PACK_TOKENS, Job, llama, say_first_step


class FirstStep(TrainerCallback):
    def on_step_end(self, *args: object, **kwargs: object) -> None:
        say_first_step()


def main(job: Job) -> None:
    torch.set_num_threads(1)
    data = load_dataset(
        "json", data_files=job.data, split="train", cache_dir=f"{job.scratch}/cache"
    )
    data = data.map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        },
        remove_columns=["question", "answer"],
    )
    arguments = SFTConfig(
        output_dir=f"{job.scratch}/run",
        per_device_train_batch_size=1,
        max_steps=1,
        packing=True,
        max_length=PACK_TOKENS,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
    )
    tokenizer = AutoTokenizer.from_pretrained(Path(job.folder) / "tokenizer")
    model, callbacks = llama(job), [FirstStep()]
    SFTTrainer(
        model, args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=callbacks
    ).train()


if __name__ == "__main__":
    main(Job.from_argv())
