"""Tensor and expert parallelism, with the other axes and alone, beside one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import freeze_towers
from automodel_lite.models.loss import CrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.training.checks import check_model, explaining_family_errors
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


def _checks_of(rank: int, world_size: int, families: list[str]) -> list[str]:
    """What is said of each family at the start."""
    mesh = open_mesh(MeshShape(1, 1, 1, 2, 1), torch.device("cpu"))
    found = []
    for family in families:
        model = parallelize(_loss_model(family).train(), mesh, "fsdp", torch.float32)
        try:
            found.append(check_model("auto", model, mesh))
        except ConfigError as error:
            found.append(str(error))
    return found


@pytest.mark.system
def test_a_family_whose_plan_does_not_run_is_refused_in_a_sentence() -> None:
    """One mixes what is cut and what is whole; in the other, autograd refuses a sum in place."""
    for said in run_ranks(_checks_of, 2, ["gemma4", "llama4_text"]):
        for name, sentence in zip(("Gemma4", "Llama4"), said, strict=True):
            assert sentence.startswith(f"mesh.tp=2: {name}"), sentence
            assert "does not run in parts (" in sentence
            assert sentence.endswith("set mesh.tp=1.")


@pytest.mark.parametrize("family", ["nemotron_h", "beam"])
def test_logits_in_fp32_of_a_model_in_bf16_are_as_exact_as_bf16(family: str) -> None:
    """These families cast their own, and were held to the rounding of fp32."""
    mesh = Mesh(MeshShape(1, 1, 1), torch.device("cpu"), None)
    model = parallelize(_loss_model(family), mesh, "none", torch.bfloat16)
    assert check_model("auto", model, mesh)


def _routed_in_bf16(rank: int, world_size: int, family: str) -> list[torch.dtype]:
    """What experts of their own ranks are given: hidden states, and the weights of routing."""
    mesh = open_mesh(MeshShape(1, 2, 1, 1, 2), torch.device("cpu"))
    model = parallelize(_loss_model(family), mesh, "fsdp", torch.bfloat16)
    found: list[torch.dtype] = []
    experts = next(m for name, m in model.loss_model.named_modules() if name.endswith("experts"))
    experts.register_forward_pre_hook(
        lambda _, args: found.extend(x.dtype for x in args if x.is_floating_point())
    )
    model(batch())
    return found


def test_weights_of_routing_are_not_rounded_to_the_compute_dtype() -> None:
    """Experts of ranks of their own are a unit of FSDP, which would cast what they are given."""
    assert run_ranks(_routed_in_bf16, 2, "mixtral") == [[torch.bfloat16, torch.float32]] * 2


def test_what_is_no_fault_of_a_plan_keeps_its_name() -> None:
    lm = tiny_model("llama")
    one, two = (Mesh(MeshShape(1, 1, 1, tp), torch.device("cpu"), None) for tp in (1, 2))
    no_thread = RuntimeError("can't start new thread")
    for mesh, error in [
        (one, RuntimeError("x")),
        (two, torch.OutOfMemoryError("x")),
        (two, no_thread),
    ]:
        with pytest.raises(RuntimeError, match=str(error)), explaining_family_errors(lm, mesh):
            raise error


def _cut(rank: int, world_size: int, family: str) -> str:
    mesh = open_mesh(MeshShape(1, 1, 1, 2, 1), torch.device("cpu"))
    with pytest.raises(ConfigError) as raised:
        parallelize(_loss_model(family), mesh, "fsdp", torch.float32)
    return str(raised.value)


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("lfm2", marks=pytest.mark.system)])
def test_a_plan_that_cuts_no_layer_is_refused(family: str) -> None:
    """Each rank computed all layers, and held them."""
    for sentence in run_ranks(_cut, 2, family):
        assert sentence.startswith("mesh.tp=2: transformers' plan of ")
        assert "cuts the head alone, so each rank would compute all layers" in sentence
