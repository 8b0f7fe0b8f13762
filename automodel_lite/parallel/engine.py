"""Tensor and expert parallelism by transformers' own engine and its plan of each family, beside our
FSDP.

Imported only with mesh.tp or mesh.ep over 1: the engine has both since transformers 5.22.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from automodel_lite.attention.spec import FAMILIES, config_value
from automodel_lite.config.sizes import model_axes, without
from automodel_lite.errors import ConfigError, one_line
from automodel_lite.models.layers import decoder_layers
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.expert_dispatch import ExpertDispatch
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_axes


def split_layers(model: LossModel, mesh: Mesh, policy: MixedPrecisionPolicy) -> None:
    """Cuts layers over tp and deals experts over ep, in place; experts are sharded here, all else
    is left to FSDP.

    Raises ConfigError for a family without a plan, or sizes that do not divide.
    """
    shape = mesh.shape
    _check_heads(model.lm, shape)
    axes = DistributedConfig(
        tp_size=shape.tp,
        ep_size=shape.ep,
        fsdp_size=shape.dp_shard * shape.cp,
        dp_replicate_size=shape.dp_replicate,
    )
    with _naming_axes(shape):
        tp_plan, ep_plan, _ = model.lm._resolve_parallel_plans(axes)
    if shape.tp > 1:
        _cut_columns(model, mesh, tp_plan)
    if shape.ep > 1:
        _deal_experts(model.lm, mesh, axes, ep_plan, policy)


def _check_heads(lm: transformers.PreTrainedModel, shape: MeshShape) -> None:
    text = lm.config.get_text_config()
    heads = config_value(text, "num_attention_heads", 0)
    kv_heads = config_value(text, "num_key_value_heads", heads)
    if heads % shape.tp or kv_heads % shape.tp:
        raise ConfigError(
            f"mesh.tp={shape.tp} must divide the {heads} query heads and the {kv_heads} key/value "
            "heads of the model."
        )


@contextmanager
def _naming_axes(shape: MeshShape) -> Iterator[None]:
    """Names the axes in what transformers' engine refuses inside."""
    try:
        yield
    except ValueError as error:
        # transformers' cures are arguments of its own
        reason, is_theirs, _ = one_line(error).partition(". Pass `")
        axes = model_axes(shape)
        cure = f": set {without(axes)}." if is_theirs else ""
        raise ConfigError(f"{' '.join(axes)}: {reason}{cure}") from None


def _cut_columns(model: LossModel, mesh: Mesh, plan: dict[str, str]) -> None:
    """Cuts the weights of the plan over tp, in place, and adds to the plan what it lacks."""
    assert mesh.root is not None
    lm = model.lm
    # The plan may cut a tied weight twice, and both parameters must be there. Tied again
    # afterwards, both names are one sharded parameter.
    for name in lm.all_tied_weights_keys:
        module, _, weight = name.rpartition(".")
        setattr(lm.get_submodule(module), weight, nn.Parameter(lm.get_parameter(name).detach()))
    # Some families have a plan for their head alone.
    modules = dict(lm.named_modules())
    in_layers = {module for layer in decoder_layers(lm) for module in layer.modules()}
    if in_layers.isdisjoint(map(modules.get, plan)):
        raise ConfigError(
            f"{' '.join(model_axes(mesh.shape))}: transformers' plan of {type(lm).__name__} cuts "
            "the head alone, so each rank would compute all layers: use mesh.dp_shard, mesh.cp or "
            "mesh.ep."
        )
    # A norm that works on columns is whole on each rank, which has its gradient for its own
    # columns; some plans do not sum it.
    for name in [name for name, style in plan.items() if style == "colwise"]:
        layer, _, own = name.rpartition(".")
        shared = f"{layer}.{FAMILIES['behind_columns'].get(own)}"
        if shared in modules:
            plan.setdefault(shared, "replicated_with_grad_allreduce")
    with _naming_axes(mesh.shape):
        apply_tensor_parallelism(lm, mesh.root["tp"], plan)
    lm.tie_weights(recompute_mapping=False)
    model.wrap_head()


def _deal_experts(
    lm: transformers.PreTrainedModel,
    mesh: Mesh,
    axes: DistributedConfig,
    plan: dict[str, str],
    policy: MixedPrecisionPolicy,
) -> None:
    """Deals the experts over ep, in place, and shards them."""
    assert mesh.root is not None
    shape = mesh.shape
    # The same ranks again, for experts, of which the ranks that ep leaves over have copies.
    replicated = {"dp_replicate": shape.dp_replicate} if shape.dp_replicate > 1 else {}
    sharded = replicated | {"efsdp": axes.efsdp_size}
    experts = open_axes(mesh.device, sharded | {"ep": shape.ep}, mesh.timeout)
    units: list[tuple[str, Any]] = list(lm.named_modules())
    units = [(name, unit) for name, unit in units if plan.get(name) == "ep_dispatch_experts"]
    dispatches = [ExpertDispatch(unit, experts["ep"], mesh.root["tp"]) for _, unit in units]
    with _naming_axes(shape):
        apply_expert_parallelism(lm, experts["ep"], mesh.root["tp"], plan)
    # Experts are units of their own, so that the layers' FSDP leaves them alone. An expert has
    # seen the tokens of all batches: its gradient is divided by their number, after a sum where
    # copies of it exist, as in transformers' engine.
    for (_, module), dispatch in zip(units, dispatches, strict=True):
        dispatch.install()
        fully_shard(module, mesh=experts[tuple(sharded)], mp_policy=policy)
        module.set_gradient_divide_factor(float(axes.dp_size))
        if axes.efsdp_size > 1:
            module.set_force_sum_reduction_for_comms(True)
