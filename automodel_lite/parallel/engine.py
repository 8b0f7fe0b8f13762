"""Tensor and expert parallelism by transformers' own engine and its plan of each family, beside our FSDP.

Imported only with mesh.tp or mesh.ep over 1: the engine has both since transformers 5.21.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from automodel_lite.errors import ConfigError, one_line
from automodel_lite.models.loss import LossModel
from automodel_lite.parallel.mesh import Mesh, MeshShape


def split_layers(model: LossModel, mesh: Mesh, policy: MixedPrecisionPolicy) -> DeviceMesh:
    """Cuts layers over tp and deals experts over ep, in place; returns the mesh over which FSDP shards all but experts.

    Raises ConfigError for a family without a plan, or sizes that do not divide.
    """
    shape, lm = mesh.shape, model.lm
    check_sizes(lm.config.get_text_config(), shape)
    axes = DistributedConfig(
        tp_size=shape.tp,
        ep_size=shape.ep,
        fsdp_size=shape.dp_shard * shape.cp,
        dp_replicate_size=shape.dp_replicate,
    )
    dense, experts = _meshes(mesh, axes)
    try:
        tp_plan, ep_plan, _ = lm._resolve_parallel_plans(axes)
        # The plan may cut a tied weight twice; tied again afterwards, both names are one sharded parameter.
        if shape.tp > 1:
            _untie(lm)
            apply_tensor_parallelism(lm, dense["tp"], tp_plan)
            lm.tie_weights(recompute_mapping=False)
            model.wrap_head()
        if shape.ep > 1:
            apply_expert_parallelism(lm, experts["ep"], dense["tp"], ep_plan)
    except ValueError as error:
        reason = one_line(error)
        raise ConfigError(f"mesh.tp={shape.tp} mesh.ep={shape.ep}: {reason}") from None
    if shape.ep > 1:
        _shard_experts(lm, ep_plan, experts[_replicated("efsdp", shape)], axes, policy)
    return dense[_replicated("fsdp", shape)]


def _untie(lm: Any) -> None:
    """Gives a tied weight a parameter under each of its names: the plan cuts both, which must be there."""
    for name in lm.all_tied_weights_keys:
        module, _, weight = name.rpartition(".")
        setattr(lm.get_submodule(module), weight, nn.Parameter(lm.get_parameter(name).detach()))


def check_sizes(config: Any, shape: MeshShape) -> None:
    """Raises ConfigError for heads that tensor parallelism cannot distribute."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % shape.tp or kv_heads % shape.tp:
        raise ConfigError(
            f"mesh.tp={shape.tp} must divide the {heads} query heads and the {kv_heads} key/value heads of the model."
        )


def _meshes(mesh: Mesh, axes: DistributedConfig) -> tuple[DeviceMesh, DeviceMesh]:
    """Returns the same ranks twice, as the engine lays them out: for dense layers, and for experts, which have copies
    on the ranks that ep leaves over (efsdp). New process groups; every rank calls it.
    """
    layouts: dict[tuple[str, ...], Any] = {
        ("dp_replicate", "fsdp", "tp"): (axes.dp_replicate_size, axes.fsdp_size, axes.tp_size),
        ("dp_replicate", "efsdp", "ep"): (axes.dp_replicate_size, axes.efsdp_size, axes.ep_size),
    }
    dense, experts = (
        init_device_mesh(mesh.device.type, sizes, mesh_dim_names=names) for names, sizes in layouts.items()
    )
    return dense, experts


def _replicated(axis: str, shape: MeshShape) -> str | tuple[str, str]:
    return ("dp_replicate", axis) if shape.dp_replicate > 1 else axis


def _shard_experts(
    lm: Any, ep_plan: dict[str, str], mesh: DeviceMesh, axes: DistributedConfig, policy: MixedPrecisionPolicy
) -> None:
    """Shards experts as the engine's own wrapping does: an expert has seen the tokens of all batches, so that its
    gradient is divided by their number, after a sum where copies of it exist.
    """
    for name, module in lm.named_modules():
        # Experts get units of their own, so that the layers' FSDP leaves them alone.
        if ep_plan.get(name) == "ep_dispatch_experts":
            fully_shard(module, mesh=mesh, mp_policy=policy)
            module.set_gradient_divide_factor(float(axes.dp_size))
            if axes.efsdp_size > 1:
                module.set_force_sum_reduction_for_comms(True)
