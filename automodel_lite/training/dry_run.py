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
from automodel_lite.training.build import check_axes, choose_attention, with_exchange
from automodel_lite.training.memory import gpu_bytes, out_of_memory_text, plan_memory
from automodel_lite.training.start_lines import axes_text, count, data_lines, packing_text, steps_text, warmup_steps
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
    check_axes(config, strategy)
    dtype = choose_precision(config.training.precision, device)
    kernel, attention = choose_attention(config, model_config, device, dtype)
    report = data.report(cost_model(model_config))
    config, exchange = with_exchange(
        config, model_config, kernel, device, dtype, report.mean_tokens if report else None
    )
    adapter = _adapter_weights(config, source, model_config, device, strategy)
    size = model_size(model_config)
    memory, reduction = plan_memory(config, shape, strategy, model_config, size, adapter, dtype, gpu_bytes(device))
    name = str(dtype).removeprefix("torch.")
    trained = "all trained" if adapter is None else f"frozen, {count(adapter)} of the adapter trained"
    console.say(
        "device", f"{device.type}, {shape.world_size} process(es) ({axes_text(shape)}, {strategy}), {name} compute"
    )
    console.say("model", f"{model_config.model_type}: {count(size.parameters)} parameters, {trained}")
    console.say("attention", f"{attention}\n{exchange}" if exchange else attention)
    for topic, text in data_lines(data):
        console.say(topic, text)
    console.say("packing", packing_text(report))
    console.say("steps", steps_text(plan, report, warmup_steps(config)))
    by_arithmetic = f"{memory}\n{reduction}".strip()
    console.say("memory", _memory(config, model_config, shape, by_arithmetic, bool(reduction)))
    console.print("dry run: the settings, the data and the model fit together; nothing was trained or written")
    return 0


def _memory(
    config: Config, model_config: PretrainedConfig, shape: MeshShape, by_arithmetic: str, reduces_every: bool
) -> str:
    """What rank 0 of the asked world would hold and send on GPUs, counted by running it under fake tensors, which GPU
    it fits, and what to change when it fits none.
    """
    if rank() != 0:
        return ""
    strategy = choose_strategy(config.mesh.strategy, shape, is_gpu=True, is_quantized=is_quantized(config.peft))
    if strategy != "fsdp" or config.mesh.cpu_offload:
        return by_arithmetic
    from automodel_lite.training.simulation import GPUS_GB, SLACK, simulate  # a run that trains has no use for it

    try:
        with activity(f"simulating a step of {shape.world_size} ranks"):
            found = simulate(config, model_config, shape, reduces_every)
    except (RuntimeError, NotImplementedError) as error:
        return f"{by_arithmetic}\nnot simulated: this model needs values ({type(error).__name__})"
    available = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else GPUS_GB[-1] * 10**9
    cure = "" if found.peak + SLACK <= available else f"\n{out_of_memory_text(config, None)}"
    return f"rank 0 of {shape.world_size}, simulated: {found}{cure}"


def planned_shape(config: Config) -> MeshShape:
    """The mesh of the processes that run; in a single one, the requested mesh."""
    mesh = config.mesh
    asked = mesh.dp_replicate * max(mesh.dp_shard, 1) * mesh.cp * mesh.tp
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
