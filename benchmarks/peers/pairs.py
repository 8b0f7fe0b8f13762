"""Preference pairs and distillation as trained by our recipe, and by TRL's padded trainers in their environment.

python -m benchmarks.peers.pairs JOB recipe | trl | trl_precomputed | distill_recipe | distill_gkd

A step of our recipe is a pack, one of TRL's BATCH pairs or chats: what is compared is the time per pair, or per chat.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.job import LR, Job, use_one_thread

BATCH = 2
PACK_TOKENS = 8192
BETA = 0.1


def ours(job: Job, is_pairs: bool) -> None:
    """Our recipe as shipped; imports what the other environment does not have."""
    from automodel_lite.cli import compose_config
    from automodel_lite.config.check import check_config
    from benchmarks.peers.recipe import TimedRecipe, shared_overrides
    from recipes import train_ft

    class Counting(TimedRecipe):
        items: list[int] = []  # noqa: RUF012 - of this process

        def step(self, ready: Any) -> Any:
            result = super().step(ready)
            documents = sum(
                int((batch.cu_seqlens.diff() > 0).sum()) for batch in ready.micro_batches
            )
            self.items.append(int(result.counts.num_items or 0) if is_pairs else documents)
            return result

    method = (
        []
        if is_pairs
        else [f"teacher.pretrained={job.folder}/teacher", "loss.kind=jsd", "loss.beta=0.5"]
    )
    train_ft.TrainFinetuneRecipe = Counting  # type: ignore[misc]
    model = [f"model.pretrained={job.folder}/model", "training.precision=fp32"]
    overrides = [*shared_overrides(job, PACK_TOKENS), *model, *method]
    preset = "dpo" if is_pairs else "distill"
    assert train_ft.main(check_config(compose_config(preset, overrides))) == 0
    Counting.clock.report(job, Counting.items)


def theirs(job: Job, variant: str) -> None:
    """TRL's DPOTrainer or GKDTrainer, as its pages show them; padded, for its packing of pairs is off."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.peers.trainers import StepClock

    use_one_thread()
    clock = StepClock()
    model, teacher = (
        AutoModelForCausalLM.from_pretrained(f"{job.folder}/{name}", dtype=torch.float32)
        for name in ("model", "teacher")
    )
    tokenizer = AutoTokenizer.from_pretrained(f"{job.folder}/model")
    data = load_dataset(
        "json", data_files=job.data, split="train", cache_dir=f"{job.scratch}/cache"
    )
    common: dict[str, Any] = {
        "output_dir": str(Path(job.scratch) / "run"),
        "per_device_train_batch_size": BATCH,
        "max_steps": job.all_steps,
        "learning_rate": LR,
        "max_length": PACK_TOKENS // 2,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "disable_tqdm": True,
    }
    given = {
        "model": model,
        "train_dataset": data,
        "processing_class": tokenizer,
        "callbacks": [clock],
    }
    if variant == "distill_gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        arguments = GKDConfig(**common, lmbda=0.0, beta=0.5, temperature=1.0)
        trainer = GKDTrainer(teacher_model=teacher, args=arguments, **given)
    else:
        from trl import DPOConfig, DPOTrainer

        is_ahead = variant == "trl_precomputed"
        trainer = DPOTrainer(
            args=DPOConfig(**common, beta=BETA, precompute_ref_log_probs=is_ahead), **given
        )
    clock.clock.__init__()  # type: ignore[misc] - references that are computed ahead are not timed, here as in ours
    trainer.train()
    clock.clock.report(job, [BATCH] * len(clock.clock.seconds), torch=torch.__version__)


if __name__ == "__main__":
    job, variant = Job.from_argv(), sys.argv[2]
    if variant.endswith("recipe"):
        ours(job, is_pairs=variant == "recipe")
    else:
        theirs(job, variant)
