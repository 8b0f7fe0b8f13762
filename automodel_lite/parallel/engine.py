"""Tensor and expert parallelism by transformers' own engine and its plan of each family, beside our
FSDP.

Imported only with mesh.tp or mesh.ep over 1: the engine has both since transformers 5.21.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from automodel_lite.attention.spec import FAMILIES, config_value
from automodel_lite.errors import ConfigError, one_line
from automodel_lite.models.layers import decoder_layers
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.mesh import Mesh, open_axes


def split_layers(model: LossModel, mesh: Mesh, policy: MixedPrecisionPolicy) -> None:
    """Cuts layers over tp and deals experts over ep, in place; experts are sharded here, all else
    is left to FSDP.

    Raises ConfigError for a family without a plan, or sizes that do not divide.
    """
    assert mesh.root is not None
    shape = mesh.shape
    lm = model.lm
    text = lm.config.get_text_config()
    heads = config_value(text, "num_attention_heads", 0)
    kv_heads = config_value(text, "num_key_value_heads", heads)
    if heads % shape.tp or kv_heads % shape.tp:
        raise ConfigError(
            f"mesh.tp={shape.tp} must divide the {heads} query heads and the {kv_heads} key/value "
            "heads of the model."
        )
    axes = DistributedConfig(
        tp_size=shape.tp,
        ep_size=shape.ep,
        fsdp_size=shape.dp_shard * shape.cp,
        dp_replicate_size=shape.dp_replicate,
    )
    try:
        tp_plan, ep_plan, _ = lm._resolve_parallel_plans(axes)
        # The plan may cut a tied weight twice; tied again afterwards, both names are one sharded
        # parameter.
        if shape.tp > 1:
            # the plan cuts both parameters, which must be there
            for name in lm.all_tied_weights_keys:
                module, _, weight = name.rpartition(".")
                setattr(
                    lm.get_submodule(module), weight, nn.Parameter(lm.get_parameter(name).detach())
                )
            modules = dict(lm.named_modules())
            in_layers = {module for layer in decoder_layers(lm) for module in layer.modules()}
            if in_layers.isdisjoint(map(modules.get, tp_plan)):
                raise ValueError(
                    f"transformers' plan of {type(lm).__name__} cuts the head alone, so each rank "
                    "would compute all layers: use mesh.dp_shard, mesh.cp or mesh.ep."
                )
            for name in [name for name, style in tp_plan.items() if style == "colwise"]:
                layer, _, own = name.rpartition(".")
                shared = f"{layer}.{FAMILIES['behind_columns'].get(own)}"
                # each rank has its gradient for its own columns; some plans do not sum it
                if shared in modules:
                    tp_plan.setdefault(shared, "replicated_with_grad_allreduce")
            apply_tensor_parallelism(lm, mesh.root["tp"], tp_plan)
            lm.tie_weights(recompute_mapping=False)
            model.wrap_head()
        if shape.ep > 1:
            # the same ranks again, for experts, of which the ranks that ep leaves over have copies
            replicated = {"dp_replicate": shape.dp_replicate} if shape.dp_replicate > 1 else {}
            sharded = replicated | {"efsdp": axes.efsdp_size}
            experts = open_axes(mesh.device, sharded | {"ep": shape.ep}, mesh.timeout)
            apply_expert_parallelism(lm, experts["ep"], mesh.root["tp"], ep_plan)
    except ValueError as error:
        # transformers' cures are arguments of its own
        reason, is_theirs, _ = one_line(error).partition(". Pass `")
        cure = ": set mesh.tp=1 mesh.ep=1." if is_theirs else ""
        raise ConfigError(f"mesh.tp={shape.tp} mesh.ep={shape.ep}: {reason}{cure}") from None
    if shape.ep > 1:
        # Experts are units of their own, so that the layers' FSDP leaves them alone. An expert has
        # seen the tokens of all batches: its gradient is divided by their number, after a sum where
        # copies of it exist, as in transformers' engine.
        units: list[tuple[str, Any]] = list(lm.named_modules())
        for name, module in units:
            if ep_plan.get(name) == "ep_dispatch_experts":
                fully_shard(module, mesh=experts[tuple(sharded)], mp_policy=policy)
                module.set_gradient_divide_factor(float(axes.dp_size))
                if axes.efsdp_size > 1:
                    module.set_force_sum_reduction_for_comms(True)
