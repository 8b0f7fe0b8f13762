"""Our own parts in a bare loop: batches made beforehand, no recipe, no loader, no logs: what the recipe may cost.

python -m benchmarks.peers.bare JOB
"""

from __future__ import annotations

import torch

from automodel_lite.attention.interface import choose_attention, install
from automodel_lite.attention.spec import attention_specs
from automodel_lite.config.components import build
from automodel_lite.data.packing.packs import join_packs
from automodel_lite.data.tokens.tokenize import job_of, tokenize_documents
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.optimizers.adamw import adamw
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.optimizers import apply_gradients
from automodel_lite.training.settings import build_parts
from benchmarks.peers.job import LR, Clock, Job
from benchmarks.peers.plain import llama
from benchmarks.peers.recipe import recipe_config


def batches(job: Job) -> list[ThdBatch]:
    """The packs of the recipe, one for each step."""
    config = recipe_config(job)
    documents = build(config.dataset)
    rows = tokenize_documents(documents, job_of(config, documents), config.cache_dir).train
    packs = build_parts(config).packer.packs(rows)
    order = torch.randperm(len(packs), generator=torch.Generator().manual_seed(0)).tolist()
    numbers = [order[step % len(order)] for step in range(job.all_steps)]
    return [to_thd(join_packs(packs.__getitems__([number]))) for number in numbers]


def main(job: Job) -> None:
    torch.set_num_threads(1)
    steps = batches(job)
    lm = llama(job)
    is_bf16 = job.precision == "bf16"
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    kernel, _ = choose_attention(None, attention_specs(lm.config, torch.device("cpu"), dtype))
    install(lm, kernel)
    model = LossModel(lm, FusedLinearCrossEntropy())
    optimizer = adamw(model, lr=LR)
    clock = Clock()
    for batch in steps:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            loss = model(batch).sum
        (loss / batch.num_label_tokens).backward()
        apply_gradients(optimizer, model.parameters(), loss.detach(), 1.0)
        optimizer.zero_grad()
        clock.step_done()
    clock.report(job, [batch.num_tokens for batch in steps])


if __name__ == "__main__":
    main(Job.from_argv())
