"""`dry_run=true`: everything that can be said of a run without training it, and then an end.

The data is read and tokenised (the cache is kept for the run), packs are planned, the kernel is chosen and checked,
parameters are counted on the meta device, and a step of rank 0 is run under fake tensors. No weights are loaded,
nothing is written to the run's folder. One process answers for any mesh: set mesh.dp_shard to the processes meant.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.data.loader import batch_shape
from automodel_lite.data.prepare import prepare_data
from automodel_lite.models.adapter import Peft, is_quantized
from automodel_lite.models.flops import cost_model, model_size
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parallel.mesh import MeshShape, mesh_shape, rank, world_size
from automodel_lite.parallel.sharding import choose_precision, choose_strategy
from automodel_lite.progress import activity
from automodel_lite.telemetry.console import Console
from automodel_lite.training.build import choose_attention
from automodel_lite.training.memory import USABLE_FRAC, gpu_bytes, out_of_memory_text, plan_memory
from automodel_lite.training.start_lines import count, data_lines, packing_text, steps_text, warmup_steps
from automodel_lite.training.trial import try_settings


def dry_run(config: Config) -> int:
    """Prints the findings on rank 0 and returns 0; raises ConfigError or DataError as the run would."""
    console = Console(is_silent=rank() != 0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = planned_shape(config)
    source: CausalLM = build(config.model)
    try_settings(config, source)
    data = prepare_data(config, batch_shape(config.training, shape.dp))
    plan = data.plan(config.training)
    model_config = source.config(data.tokenizer)
    strategy = choose_strategy(config.mesh.strategy, shape, device.type == "cuda", is_quantized(config.peft))
    dtype = choose_precision(config.training.precision, device)
    _, attention = choose_attention(config, model_config, device, dtype)
    adapter = _adapter_weights(config, source, model_config, device, strategy)
    size = model_size(model_config)
    memory, reduction = plan_memory(config, shape, strategy, model_config, size, adapter, dtype, gpu_bytes(device))
    axes = f"dp_replicate {shape.dp_replicate} x dp_shard {shape.dp_shard} x cp {shape.cp}"
    name = str(dtype).removeprefix("torch.")
    trained = "all trained" if adapter is None else f"frozen, {count(adapter)} of the adapter trained"
    report = data.report(cost_model(model_config))
    console.say("device", f"{device.type}, {shape.world_size} process(es) ({axes}, {strategy}), {name} compute")
    console.say("model", f"{model_config.model_type}: {count(size.parameters)} parameters, {trained}")
    console.say("attention", attention)
    for topic, text in data_lines(data):
        console.say(topic, text)
    console.say("packing", packing_text(report))
    console.say("steps", steps_text(plan, report, warmup_steps(config)))
    console.say("memory", f"{memory}\n{reduction}".strip())
    console.say("simulated", _simulated(config, model_config, shape, strategy, dtype))
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
        console.say("", f"this GPU has {available / 2**30:.1f} GiB")
        if memory.total > USABLE_FRAC * available:
            console.say("", out_of_memory_text(config, None))
    console.print("dry run: the settings, the data and the model fit together; nothing was trained or written")
    return 0


def _simulated(
    config: Config, model_config: PretrainedConfig, shape: MeshShape, strategy: str, dtype: torch.dtype
) -> str:
    """What rank 0 of the asked world would hold and send, counted by running its step under fake tensors."""
    if rank() != 0:
        return ""
    if strategy == "ddp" or is_quantized(config.peft):
        return "not for this strategy: the line above is arithmetic"
    from automodel_lite.training.simulation import simulate  # a run that trains has no use for it

    try:
        with activity(f"simulating a step of {shape.world_size} ranks"):
            return f"rank 0 of {shape.world_size}: {simulate(config, model_config, shape, dtype)}"
    except (RuntimeError, NotImplementedError) as error:
        return f"not for this model ({type(error).__name__}): the line above is arithmetic"


def planned_shape(config: Config) -> MeshShape:
    """The mesh of the processes that run; in a single one, the requested mesh."""
    mesh = config.mesh
    asked = mesh.dp_replicate * max(mesh.dp_shard, 1) * mesh.cp
    return mesh_shape(mesh, world_size() if world_size() > 1 else asked)


def _adapter_weights(
    config: Config, source: CausalLM, model_config: PretrainedConfig, device: torch.device, strategy: str
) -> int | None:
    """Counted on the meta device; None when the model itself is trained."""
    if not config.peft:
        return None
    peft: Peft = build(config.peft)
    peft.check(device, strategy, source.pretrained)
    lm = describe(model_config)
    with torch.device("meta"):
        peft.adapt(lm, str(source.pretrained))
    return sum(p.numel() for p in lm.parameters() if p.requires_grad)
