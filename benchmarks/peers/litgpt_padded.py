"""litgpt's own model, collate function and loss, in the loop of its `finetune full`; runs in its environment."""

from __future__ import annotations

import lightning as L
import numpy as np
import torch
from litgpt.config import Config
from litgpt.data.base import get_sft_collate_fn
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from torch.utils.data import DataLoader

from benchmarks.peers.job import LR, PACK_TOKENS, Clock, Job, use_one_thread


def model_of(job: Job) -> GPT:
    settings = job.model_settings()
    return GPT(
        Config(
            name="llama",
            block_size=PACK_TOKENS,
            padded_vocab_size=settings["vocab_size"],
            n_layer=settings["num_hidden_layers"],
            n_head=settings["num_attention_heads"],
            n_query_groups=settings["num_key_value_heads"],
            n_embd=settings["hidden_size"],
            intermediate_size=settings["intermediate_size"],
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        )
    )


def main(job: Job) -> None:
    use_one_thread()
    fabric = L.Fabric(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if job.precision == "bf16" else "32-true",
    )
    torch.manual_seed(0)
    model = model_of(job)
    model.lm_head.weight = model.transformer.wte.weight  # tied, as the others'
    rows = [
        {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        for ids, labels in job.rows()
    ]
    for row in rows:
        row["token_counts"] = {
            "raw": len(row["input_ids"]),
            "raw_plus_prompt_template": len(row["input_ids"]),
        }
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    collate = get_sft_collate_fn(max_seq_length=PACK_TOKENS, pad_id=0)
    loader = DataLoader(
        [rows[i] for i in order], batch_size=job.documents_a_step(), collate_fn=collate
    )
    model = fabric.setup(model)
    model.max_seq_length = max(len(row["input_ids"]) for row in rows)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=LR, fused=True))
    loader = fabric.setup_dataloaders(loader)
    clock, tokens, batches = Clock(), [], iter(loader)
    for _ in range(job.all_steps):
        batch = next(batches)
        logits = model(batch["input_ids"])
        loss = chunked_cross_entropy(logits[..., :-1, :], batch["labels"][..., 1:])
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done()
        tokens.append(int(batch["token_counts"]["raw"].sum()))
    clock.report(job, tokens)


if __name__ == "__main__":
    main(Job.from_argv())
