"""NeMo AutoModel's own recipe on one CPU process, its CUDA calls stubbed; runs in its environment.

Padded batches: its packing asserts that flash-attn is there, its THD path needs Transformer Engine, hence a GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

os.environ.update(
    RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29519"
)
for name in ("reset_peak_memory_stats", "empty_cache", "set_device", "synchronize"):
    setattr(torch.cuda, name, lambda *args, **kwargs: None)
torch.cuda.max_memory_allocated = lambda *args, **kwargs: 0
torch.cuda.current_device = lambda: "cpu"

import nemo_automodel._transformers.auto_model as auto_model
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from torch.utils.data import Dataset
from transformers import AutoTokenizer, LlamaConfig

from benchmarks.peers.job import LR, Clock, Job, use_one_thread


class TorchOnCpu:
    """torch, but every device is the CPU: for a module that asks for `torch.device("cuda", 0)`."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *args: torch.device("cpu")) if name == "device" else getattr(torch, name)


auto_model.torch = TorchOnCpu()


class Rows(Dataset):
    """Token rows as NeMo's datasets give them: labels are next-token aligned."""

    def __init__(self, **_: Any) -> None:
        self.rows = []
        for ids, labels in Job.from_argv().rows():
            shifted = [*labels[1:].tolist(), -100]
            self.rows.append(
                {"input_ids": ids.tolist(), "labels": shifted, "attention_mask": [1] * len(ids)}
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(self.rows)


def settings(job: Job) -> dict[str, Any]:
    folder = tempfile.mkdtemp(dir=job.scratch)
    LlamaConfig(**job.model_settings(), architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    AutoTokenizer.from_pretrained(Path(job.folder) / "tokenizer").save_pretrained(folder)
    return {
        "step_scheduler": {
            "global_batch_size": job.documents_a_step(),
            "local_batch_size": job.documents_a_step(),
            "max_steps": job.all_steps,
            "num_epochs": 1,
            "ckpt_every_steps": 100000,
        },
        "dist_env": {"backend": "gloo", "timeout_minutes": 1},
        "rng": {
            "_target_": "nemo_automodel.components.training.rng.StatefulRNG",
            "seed": 0,
            "ranked": True,
        },
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "config": {
                "_target_": "transformers.AutoConfig.from_pretrained",
                "pretrained_model_name_or_path": folder,
            },
            "attn_implementation": "sdpa",
            "torch_dtype": "float32",
            "force_hf": True,
        },
        "checkpoint": {"enabled": False, "checkpoint_dir": job.scratch},
        "distributed": {"strategy": "ddp"},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {"_target_": "benchmarks.peers.nemo_recipe.Rows"},
        "dataloader": {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
            "shuffle": True,
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": LR, "fused": True},
    }


class Timed(TrainFinetuneRecipeForNextTokenPrediction):
    """Looks at the clock after each optimizer step; counts tokens that are no padding."""

    def _run_train_optim_step(self, batches: list[dict[str, Any]], *args: Any) -> Any:
        self.tokens_of_step.append(sum(real_tokens(batch) for batch in batches))
        result = super()._run_train_optim_step(batches, *args)
        self.clock.step_done()
        return result


def real_tokens(batch: dict[str, Any]) -> int:
    if "attention_mask" in batch and batch["attention_mask"].ndim == 2:
        return int((batch["attention_mask"] != 0).sum())
    return int((batch["input_ids"] != 0).sum())


def main(job: Job) -> None:
    use_one_thread()
    recipe = Timed(ConfigNode(settings(job)))
    recipe.clock, recipe.tokens_of_step = Clock(), []
    recipe.setup()
    recipe.run_train_validation_loop()
    recipe.clock.report(job, recipe.tokens_of_step)


if __name__ == "__main__":
    main(Job.from_argv())
