"""Packed training under Hugging Face's Trainer, or TRL's SFTTrainer: packs and `hf_collater` are
all it takes.

    pip install accelerate                   (trl too, for --trl)
    python examples/hf_trainer.py            (--trl: the same through SFTTrainer)

The labels of a pack are next-token aligned. Given to Trainer as `labels` alone they would be
shifted a second time, in silence; `hf_collater` gives them as `shift_labels` too, which
transformers takes as they are.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from plain_loop import make_model, make_rows
from transformers import Trainer, TrainingArguments

from automodel_lite import Packer, hf_collater, install_attention


def main(use_trl: bool = False, num_steps: int = 10) -> list[float]:
    """The losses that the trainer logs, one per step."""
    tokenizer, rows = make_rows()
    packer = Packer(packed_sequence_size=256)
    packs = packer.packs(rows)
    model = make_model(len(tokenizer))
    print("attention:", install_attention(model))
    settings: dict[str, Any] = {
        "max_steps": num_steps,
        "per_device_train_batch_size": 2,  # packs
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
        # the boundaries of the documents are arguments that Trainer does not know
        "remove_unused_columns": False,
        "disable_tqdm": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        if use_trl:
            from trl import SFTConfig, SFTTrainer

            # the packs are tokenized already
            skip = {"dataset_kwargs": {"skip_prepare_dataset": True}}
            arguments = SFTConfig(folder, **settings, **skip)
            dataset = Dataset.from_list(
                [{key: value.tolist() for key, value in pack.items()} for pack in packs]
            )  # TRL asks for this class
            trainer: Trainer = SFTTrainer(
                model,
                arguments,
                data_collator=hf_collater,
                train_dataset=dataset,
                processing_class=tokenizer,
            )
        else:
            arguments = TrainingArguments(folder, **settings)
            trainer = Trainer(model, arguments, data_collator=hf_collater, train_dataset=packs)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    return losses


if __name__ == "__main__":
    main(use_trl="--trl" in sys.argv)
