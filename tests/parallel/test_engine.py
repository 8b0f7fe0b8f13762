"""Tensor and expert parallelism, with the other axes and alone, beside one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.models.layers import freeze_towers
from automodel_lite.models.loss import CrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.mesh import MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from benchmarks.survey_models import batch
from benchmarks.tiny_models import tiny_model
from tests.parallel.test_sharding import assert_equal
from tests.ranks import run_ranks

AXES = [
    ((1, 1, 1, 2), "llama"),
    ((1, 1, 1, 2), "qwen3_moe"),
    ((1, 2, 1, 1, 2), "qwen3_moe"),
    ((1, 2, 1, 1, 2), "gpt_oss_sinks_window"),
    ((1, 1, 1, 2), "gemma2_softcap_window"),
    ((1, 1, 1, 2), "gpt_oss_sinks_window"),
    ((1, 1, 1, 2), "qwen3"),
    ((1, 1, 1, 2), "deepseek_v3_latent"),
    ((1, 1, 2, 2), "llama"),
    ((1, 1, 2, 1, 2), "qwen3_moe"),
    ((2, 1, 1, 2), "llama"),
    ((2, 2, 1, 1, 2), "qwen3_moe"),
]
"""dp_replicate, dp_shard, cp, tp, ep: tensor and expert parallelism are transformers', context parallelism is ours."""


@pytest.mark.parametrize(("shape", "family"), AXES[:3], ids=str)
def test_tensor_and_expert_parallel(shape: tuple[int, ...], family: str) -> None:
    assert_equal(shape, "fsdp", "all_gather", [family])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "family"), AXES[3:], ids=str)
def test_tensor_and_expert_parallel_with_the_other_axes(
    shape: tuple[int, ...], family: str
) -> None:
    assert_equal(shape, "fsdp", "all_gather", [family])


def _loss_model(family: str) -> LossModel:
    lm = tiny_model(family)
    freeze_towers(lm, torch.float32)
    install(lm, ReferenceAttention())
    return LossModel(lm, CrossEntropy())


def _gradients_of_what_is_shared(rank: int, world_size: int, families: list[str]) -> dict:
    """The largest difference of a gradient from one process, relative to that gradient."""
    mesh = open_mesh(MeshShape(1, 1, 1, 2, 1), torch.device("cpu"))
    errors = {}
    for family in families:
        alone = _loss_model(family)
        alone(batch()).sum.backward()
        want = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        model = parallelize(_loss_model(family), mesh, "fsdp", torch.float32)
        with model.accumulate(is_last=True):
            (model(batch()).sum * model.mean_ranks).backward()
        for name, parameter in model.loss_model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight", "alpha_p", "alpha_n")):
                got = parameter.grad
                got = got.full_tensor() if isinstance(got, DTensor) else got
                off = (got - want[name]).abs().max() / want[name].abs().max()
                errors[f"{family} {name}"] = float(off)
    return errors


def test_what_all_ranks_have_behind_their_columns_has_whole_gradients() -> None:
    """Norms of each head, and activations with weights: plans of two families do not name them."""
    for errors in run_ranks(_gradients_of_what_is_shared, 2, ["qwen3_vl_moe", "apertus"]):
        assert len(errors) == 12
        assert max(errors.values()) < 1e-4, errors
