"""Context-parallel ranks together compute what one process computes: logits, loss and every gradient."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.parallel.context_parallel import cp_shard, shard_indices
from automodel_lite.thd import ThdBatch
from tests.attention.families import DOCUMENT_LENGTHS, FAMILIES, build, documents, gradients, stream
from tests.attention.hybrids import InFloat64
from tests.ranks import run_ranks
from tests.tiers import only_in_ci, rarely

LARGEST_ERROR = 1e-9
"""fp64, relative to the largest logit or the loss; of gradients, absolute."""

Wanted = tuple[np.ndarray, float, dict[str, np.ndarray]]
"""Logits, loss and gradients."""


def batch_of(cp: int) -> ThdBatch:
    return stream(documents(DOCUMENT_LENGTHS), 2 * cp, 272)


def model_of(family: str) -> PreTrainedModel:
    model = build(family)
    model.set_experts_implementation("eager")  # the grouped product has no fp64
    install(model, ReferenceAttention())
    return model.double()


@cache
def on_one_rank(family: str, cp: int) -> Wanted:
    """Of the whole stream, as `cp` ranks have it; computed once, for all exchanges."""
    batch = batch_of(cp)
    model = model_of(family)
    with InFloat64():
        logits = model(**batch.model_inputs()).logits[0]
        loss = F.cross_entropy(logits, batch.labels, reduction="sum", ignore_index=IGNORE_INDEX)
        (loss / batch.num_label_tokens).backward()
    return (
        logits.detach().numpy(),
        loss.item(),
        {name: grad.numpy() for name, grad in gradients(model).items()},
    )


def largest_errors(
    rank: int, cp: int, wanted: dict[str, Wanted], exchange: str, recompute: bool
) -> dict[str, dict]:
    """For each family the largest difference of logits, loss and gradients from the whole stream on one rank."""
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    errors = {}
    for family, (logits_TV, want_loss, want_grads) in wanted.items():
        model, batch, want = model_of(family), batch_of(cp), torch.from_numpy(logits_TV)
        if recompute:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={
                    "use_reentrant": False,
                    "context_fn": lambda: (nullcontext(), InFloat64()),
                }
            )
        mine = cp_shard(batch, mesh, exchange)
        with InFloat64():
            logits = model(**mine.model_inputs()).logits[0]
            loss = F.cross_entropy(logits, mine.labels, reduction="sum", ignore_index=IGNORE_INDEX)
            (loss / mine.num_label_tokens).backward()
        grads = gradients(model)
        total = loss.detach()
        for tensor in (total, *grads.values()):
            dist.all_reduce(tensor)
        assert grads.keys() == want_grads.keys()
        indices = shard_indices(batch.cu_seqlens_padded, cp, rank)
        errors[family] = {
            "logits": float((logits - want[indices]).detach().abs().max() / want.abs().max()),
            "loss": float(abs(total - want_loss) / want_loss),
            "gradients": max(
                float((grads[name] - torch.from_numpy(want)).abs().max())
                for name, want in want_grads.items()
            ),
        }
    return errors


def check_equal(cp: int, families: Iterable[str], exchange: str, recompute: bool = False) -> None:
    wanted = {family: on_one_rank(family, cp) for family in families}
    for errors in run_ranks(largest_errors, cp, wanted, exchange, recompute):
        for family, error in errors.items():
            assert max(error.values()) < LARGEST_ERROR, (family, error)


IN_CI = [(4, "ring")]
SLOW = [(2, "ring"), (4, "all_gather"), (4, "all_to_all"), (8, "all_gather"), (8, "ring")]
LAYOUTS = [(2, "all_gather"), (2, "all_to_all")]


@pytest.mark.parametrize(
    ("cp", "exchange"),
    [
        *LAYOUTS,
        *only_in_ci(*IN_CI),
        *rarely(*SLOW),
    ],
)
def test_context_parallel_equals_one_rank(cp: int, exchange: str) -> None:
    check_equal(cp, FAMILIES, exchange)


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_activation_checkpointing_repeats_the_exchange(exchange: str) -> None:
    check_equal(2, ["llama"], exchange, recompute=True)
