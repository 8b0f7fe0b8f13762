"""Our own parts in a bare loop: batches made beforehand, no recipe, no loader, no logs. What the framework may cost."""

from __future__ import annotations

import torch

from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.feeding.source import Cursor
from automodel_lite.data.prepare import prepare_data
from automodel_lite.models.flops import cost_model
from automodel_lite.parallel.mesh import Mesh, MeshShape
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.parts.optimizers.adamw import adamw
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.build import build_model
from automodel_lite.training.decide import decide
from automodel_lite.training.optimizers import apply_gradients
from automodel_lite.training.plan import build_parts
from benchmarks.peers.job import LR, Clock, Job, use_one_thread
from benchmarks.peers.recipe import recipe_config


def parts(job: Job) -> tuple[ParallelModel, torch.optim.Optimizer, list[ThdBatch]]:
    """Model, optimizer, and the batches of all steps."""
    config = recipe_config(job)
    mesh = Mesh(MeshShape(1, 1, 1), torch.device("cpu"), None)
    made_of = build_parts(config)
    data = prepare_data(config, BatchShape(1, 1, 1), made_of.packer)
    decided = decide(made_of, data.tokenizer, mesh.shape, mesh.device)
    torch.manual_seed(0)
    model = build_model(decided, data.tokenizer, mesh).model
    optimizer = adamw(model.loss_model, LR, betas=[0.9, 0.95])
    steps = data.steps(Cursor(), mesh, cost_model(made_of.model.config(data.tokenizer)))
    return model, optimizer, [to_thd(next(steps).micro_batches[0]) for _ in range(job.all_steps)]


def train(model: ParallelModel, optimizer: torch.optim.Optimizer, batch: ThdBatch) -> None:
    """One step."""
    loss = model(batch).sum
    (loss / batch.num_label_tokens).backward()
    apply_gradients(optimizer, model.parameters(), loss.detach(), 1.0)
    optimizer.zero_grad()


def main(job: Job) -> None:
    use_one_thread()
    model, optimizer, batches = parts(job)
    clock = Clock()
    for batch in batches:
        train(model, optimizer, batch)
        clock.step_done()
    clock.report(job, [batch.num_tokens for batch in batches])


if __name__ == "__main__":
    main(Job.from_argv())
