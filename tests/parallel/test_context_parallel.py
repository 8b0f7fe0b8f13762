"""Context-parallel ranks together compute what one process computes: logits, loss and every gradient."""

from __future__ import annotations

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.zigzag import shard_indices
from automodel_lite.thd import IGNORE_INDEX
from tests.attention.families import DOCUMENT_LENGTHS, FAMILIES, build, documents, gradients, stream
from tests.ranks import run_ranks

LARGEST_ERROR = 1e-6


def largest_errors(rank: int, cp: int, families: list[str], exchange: str, recompute: bool) -> dict[str, dict]:
    """For each family the largest difference of logits, loss and gradients from the whole stream on one rank."""
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    errors = {}
    for family in families:
        model = build(family)
        install(model, ReferenceAttention())
        batch = stream(documents(DOCUMENT_LENGTHS), 2 * cp, 272)
        want = model(**batch.model_inputs()).logits[0]
        want_loss = F.cross_entropy(want, batch.labels, reduction="sum", ignore_index=IGNORE_INDEX)
        (want_loss / batch.num_label_tokens).backward()
        want_grads = gradients(model)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mine = cp_shard(batch, mesh, exchange)
        logits = model(**mine.model_inputs()).logits[0]
        loss = F.cross_entropy(logits, mine.labels, reduction="sum", ignore_index=IGNORE_INDEX)
        (loss / mine.num_label_tokens).backward()
        grads = gradients(model)
        total = loss.detach()
        for tensor in (total, *grads.values()):
            dist.all_reduce(tensor)
        indices = shard_indices(batch.cu_seqlens_padded, cp, rank)
        errors[family] = {
            "logits": float((logits - want[indices]).detach().abs().max() / want.detach().abs().max()),
            "loss": float(abs(total - want_loss.detach()) / want_loss.detach()),
            "gradients": max(float((grads[name] - want_grads[name]).abs().max()) for name in want_grads),
        }
    return errors


SLOW = [(4, "all_gather"), (4, "all_to_all"), (8, "all_gather"), (8, "ring")]
LAYOUTS = [(2, "all_gather"), (2, "all_to_all"), (2, "ring"), (4, "ring")]


@pytest.mark.parametrize(
    ("cp", "exchange"), [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in SLOW)]
)
def test_context_parallel_equals_one_rank(cp: int, exchange: str) -> None:
    for errors in run_ranks(largest_errors, cp, list(FAMILIES), exchange, False):
        for family, error in errors.items():
            assert max(error.values()) < LARGEST_ERROR, (family, error)


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_activation_checkpointing_repeats_the_exchange(exchange: str) -> None:
    for errors in run_ranks(largest_errors, 2, ["llama"], exchange, True):
        assert max(errors["llama"].values()) < LARGEST_ERROR
