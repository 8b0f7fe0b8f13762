"""A step of any world counted on one machine: what is held and sent equals the arithmetic where there is one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from _pytest.mark.structures import ParameterSet
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError
from automodel_lite.extras.dry_run import dry_run
from automodel_lite.extras.plan.by_layers import (
    LayerPattern,
    layer_pattern,
    recompute_every,
    simulate_by_layers,
)
from automodel_lite.extras.plan.simulation import CountError, Simulation, simulate
from automodel_lite.extras.plan.tracker import _MADE_IN, Message, Operation, Work
from automodel_lite.extras.short_models import with_layers
from automodel_lite.models.flops import model_size
from automodel_lite.models.layers import decoder_layers, recompute_layers
from automodel_lite.models.loss import LossInputs, LossOutput, PlainLoss
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.reading import SHAPES
from automodel_lite.models.source import describe
from automodel_lite.parallel.mesh import Mesh, MeshShape, choose_strategy, mesh_shape
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.thd import stream_of
from automodel_lite.training import memory
from automodel_lite.training.memory import MemoryEstimate, estimate_memory
from automodel_lite.training.settings import Decided, RunParts, build_parts, with_recomputation
from benchmarks.tiny_models import tiny_config
from tests.ranks import in_a_process
from tests.runs import composed

LAYERS = 2
AXIS_NAMES = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
LLAMA = transformers.LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=2048,
    tie_word_embeddings=False,
)
EMBEDDING = 2048 * 256
LAYER = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 512 + 2 * 256
PARAMETERS = 2 * EMBEDDING + LAYERS * LAYER + 256


def in_ci(names: Iterable[str], *always: str, seldom: tuple[str, ...] = ()) -> list[ParameterSet]:
    """Cases of which `make test` runs these, and CI all but the seldom ones: a simulation takes
    seconds.
    """
    marks = dict.fromkeys(names, pytest.mark.system) | dict.fromkeys(seldom, pytest.mark.slow)
    return [pytest.param(name, marks=() if name in always else marks[name]) for name in names]


def config(*overrides: str) -> Config:
    sizes = ["packed_sequence.packed_sequence_size=2048", "training.activation_checkpointing=none"]
    return check_config(composed("smoke", *sizes, *overrides))


def parts(*overrides: str) -> RunParts:
    return build_parts(config(*overrides))


@cache
def world(*axes: int, overrides: tuple[str, ...] = ()) -> Simulation:
    shape = MeshShape(*axes)
    asked = [f"mesh.{name}={size}" for name, size in zip(AXIS_NAMES, axes)]
    asked.append(f"training.global_batch_size={shape.dp}")
    result = simulate(parts(*asked, *overrides), LLAMA, shape)
    assert not dist.is_initialized()
    return result


@pytest.mark.parametrize("ranks", [8, 64])
def test_what_a_rank_of_many_holds_and_sends(ranks: int) -> None:
    found = world(1, ranks, 1)
    assert found.weights == 4 * PARAMETERS // ranks
    assert found.gradients == 4 * PARAMETERS // ranks
    # and a step count per parameter
    assert found.optimizer == pytest.approx(8 * PARAMETERS / ranks, rel=1e-3)
    assert found.peak > found.weights + found.gradients + found.optimizer
    # bf16 gathered in the forward and, but for the embedding and the head, in the backward pass; fp32 reduced
    gathered = 2 * (2 * PARAMETERS - 2 * EMBEDDING)
    assert sum(found.sent.values()) == pytest.approx(
        (gathered + 4 * PARAMETERS) * (ranks - 1) / ranks, rel=1e-3
    )
    assert sum(found.at_peak.values()) == found.peak
    assert set(found.at_peak) <= {
        "weights",
        "optimizer states",
        "gathered weights and gradients",
        "logits",
        *_MADE_IN.values(),
    }


def test_weights_that_stay_gathered_are_sent_once() -> None:
    """Once per micro-batch less; all layers are held at the end of the forward pass, where two or three were."""
    twice, once = (
        world(1, 8, 1, overrides=(f"advanced.reshard_after_forward={how}",))
        for how in ("true", "false")
    )
    of_layers = PARAMETERS - 2 * EMBEDDING
    assert sum(twice.sent.values()) - sum(once.sent.values()) == pytest.approx(
        2 * of_layers * 7 / 8, rel=0.01
    )
    assert once.peaks["forward"] - twice.peaks["forward"] >= 2 * (LAYERS - 3) * of_layers / LAYERS


@pytest.mark.system
def test_memory_falls_with_ranks_and_with_recomputation() -> None:
    few, many = world(1, 2, 1), world(1, 16, 1)
    assert many.peak < few.peak
    recomputed = world(1, 2, 1, overrides=("training.activation_checkpointing=full",))
    assert recomputed.peaks["forward"] < few.peaks["forward"]
    assert recomputed.weights == few.weights
    offloaded = world(1, 2, 1, overrides=("training.activation_checkpointing=offload",))
    inputs = LAYERS * 2048 * 256 * 2  # of each layer, in bf16
    assert recomputed.peaks["forward"] - offloaded.peaks["forward"] == pytest.approx(
        inputs, rel=0.01
    )


def test_what_is_offloaded_is_on_the_host() -> None:
    """Shards, their gradients and moments; a copy of a layer's shards is on the GPU while it is gathered."""
    there, here = (
        world(1, 1, 1, overrides=(FULL, f"mesh.cpu_offload={how}")) for how in ("true", "false")
    )
    assert there.weights == there.gradients == there.optimizer == 0
    assert there.peaks["load"] < 2**18  # buffers
    assert there.peaks["optimizer"] < 2**18
    states = 4 * 4 * PARAMETERS
    assert 4 * LAYER < there.peaks["backward"] < here.peaks["backward"] - states / 2
    assert there.sent == here.sent


def _count_after_a_failed_compilation() -> None:
    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("no such instruction")

    bf16 = ("training.precision=bf16",)
    before = world(1, 2, 1, overrides=bf16).peaks["forward"]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(torch.neg, backend=broken)(torch.ones(2))
    world.cache_clear()
    assert world(1, 2, 1, overrides=bf16).peaks["forward"] == before


@pytest.mark.system
def test_a_failed_compilation_leaves_no_logits_behind(tmp_path: Path) -> None:
    """Dynamo stays in front of every later call, and a frame that is called through it holds its arguments."""
    code, screen = in_a_process(_count_after_a_failed_compilation, tmp_path)
    assert code == 0, screen


@pytest.mark.system
def test_context_parallel_ranks_share_the_tokens() -> None:
    alone, shared = world(1, 4, 1), world(1, 1, 4)
    assert shared.weights == alone.weights
    assert shared.peaks["forward"] < alone.peaks["forward"]
    assert shared.sent["cp"] > 0
    assert "cp" not in alone.sent


@pytest.mark.system
def test_an_exchange_of_heads_knows_the_share_of_tp() -> None:
    """Two of eight heads are left to a rank of tp 4, which four ranks cannot exchange: the step once ended in a traceback."""
    model = transformers.LlamaConfig(
        **LLAMA.to_dict() | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
    )
    shape, asked = MeshShape(1, 1, 4, 4), ("mesh.cp=4", "mesh.tp=4", "training.global_batch_size=1")
    assert simulate(parts(*asked), model, shape).sent["cp"] > 0
    with pytest.raises(ConfigError, match="must divide the 2 query heads"):
        simulate(parts(*asked, "mesh.cp_exchange=all_to_all"), model, shape)


def test_loading_and_export_hold_the_shards_and_one_tensor() -> None:
    found = world(1, 8, 1)
    step_count = 4 * 40  # of each parameter
    # and buffers
    assert found.peaks["load"] == pytest.approx(4 * (PARAMETERS / 8 + EMBEDDING), abs=2**17)
    # gathered into one tensor, and copied from there: the embedding, the largest
    assert found.peaks["export"] == pytest.approx(
        4 * (3 * PARAMETERS / 8 + 2 * EMBEDDING), rel=0.05, abs=step_count
    )
    assert found.peaks["save"] < found.peaks["export"]


@pytest.mark.parametrize(
    ("axes", "sent_over"),
    [
        pytest.param((1, 4, 1, 2), "tp", marks=pytest.mark.system),
        ((1, 2, 2, 2), "cp"),
        ((2, 2, 1, 2), "tp"),
    ],
)
def test_tensor_parallel_ranks_hold_a_part_of_each_layer(
    axes: tuple[int, ...], sent_over: str
) -> None:
    found = world(*axes)
    # norms are whole
    assert found.weights == pytest.approx(4 * PARAMETERS / (axes[1] * axes[2] * 2), rel=0.01)
    assert found.sent[sent_over] > 0


@pytest.mark.system
def few_experts() -> transformers.PretrainedConfig:
    return transformers.Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=256,
        decoder_sparse_step=1,
    )


def test_two_micro_batches_that_take_turns_hold_twice_the_activations_and_send_the_same() -> None:
    turns = ("mesh.ep_overlap=true", "advanced.reshard_after_forward=false")
    axes = (
        "mesh.dp_shard=2",
        "mesh.ep=2",
        "training.global_batch_size=8",
        "training.micro_batch_size=1",
    )
    gathered = "advanced.reshard_after_forward=false"
    shape = MeshShape(1, 2, 1, 1, 2)
    one, two = (
        simulate(parts(*axes, *more), few_experts(), shape, is_whole=False)
        for more in ([gathered], turns)
    )
    rows = [
        {
            x: times
            for x, times in found.work["micro"].items()
            if isinstance(x, Message) and not x.is_parallel
        }
        for found in (one, two)
    ]
    assert rows[0] == rows[1]
    # of a micro-batch; the rest, weights and gradients, are held once
    grown = two.at_peak["activations"] / one.at_peak["activations"]
    assert 1.7 < grown < 2.1
    assert two.weights == one.weights


@pytest.mark.parametrize(("tp", "ep"), [(1, 4), (2, 1)])
def test_experts_are_dealt_over_ranks(tp: int, ep: int) -> None:
    """Or cut: torch reads the rows of a shard of fused gates and values from a tensor, which has none here."""
    experts = few_experts()
    shape = MeshShape(1, 4 // tp, 1, tp, ep)
    axes = [f"mesh.dp_shard={4 // tp}", f"mesh.tp={tp}", f"mesh.ep={ep}"]
    found = simulate(parts(*axes, f"training.global_batch_size={4 // tp}"), experts, shape)
    whole = sum(p.numel() for p in describe(experts).parameters())
    assert found.weights == pytest.approx(4 * whole / 4, rel=0.02)


@pytest.mark.system
def test_frozen_towers_are_counted_as_they_are_stored() -> None:
    composite = tiny_config("gemma3")
    composite.dtype = torch.bfloat16
    asked = parts("model=pretrained", "model.pretrained=any", "training.global_batch_size=2")
    found = simulate(asked, composite, MeshShape(1, 2, 1))
    size = model_size(composite)
    assert found.weights == pytest.approx(2 * size.parameters - size.towers, rel=0.01)


@pytest.mark.system
def test_one_process_holds_the_whole_model() -> None:
    found = simulate(parts("training.global_batch_size=1"), LLAMA, MeshShape(1, 1, 1))
    assert found.weights == 4 * PARAMETERS
    # those of large weights stay in bf16 for the optimizer
    assert 2 * PARAMETERS < found.gradients < 4 * PARAMETERS
    assert found.optimizer == pytest.approx(8 * PARAMETERS, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_weight"),
    [pytest.param("adamw_bf16", 4, marks=pytest.mark.system), ("adamw_8bit", 2)],
)
def test_small_states(optimizer: str, bytes_per_weight: int) -> None:
    """Their update in place is one kernel on a GPU, so that the optimizer is no peak; a real one works afterwards."""
    bf16 = ("training.master_weights=bf16", "training.precision=bf16")
    found = world(1, 8, 1, overrides=(f"optimizer={optimizer}", *bf16))
    assert found.weights == found.gradients == 2 * PARAMETERS // 8
    assert found.optimizer == pytest.approx(bytes_per_weight * PARAMETERS / 8, rel=0.03)
    assert found.peaks["optimizer"] < 2 * (found.weights + found.gradients + found.optimizer)
    assert memory.optimizer_bytes(parts(f"optimizer={optimizer}").optimizer) == pytest.approx(
        bytes_per_weight, 0.03
    )


def test_the_dry_run_of_one_process_answers_for_a_world(capsys: pytest.CaptureFixture[str]) -> None:
    asked = config(
        "mesh.dp_shard=16", "mesh.cp=2", "training.global_batch_size=16", "training.precision=bf16"
    )
    assert dry_run(asked) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "memory rank 0 of 32, simulated: at most" in shown
    assert "cp" in shown[shown.index("sends over") :]
    assert "fits GPUs of 16 GB and more" in shown


@pytest.mark.parametrize("peft", [pytest.param("lora", marks=pytest.mark.system), "dora"])
def test_adapters_alone_have_gradients_and_states(peft: str) -> None:
    # of the four matrices of attention, on each of which sit two
    rank = 8 * LAYERS * (4 * 256 + 2 * 256 + 2 * 128)
    overrides = (
        f"peft={peft}",
        "peft.r=8",
        "peft.target_modules=[q_proj,k_proj,v_proj,o_proj]",
        "training.precision=bf16",
    )
    found = world(1, 2, 1, overrides=(*overrides, "model=pretrained", "model.pretrained=any"))
    adapters = rank + (LAYERS * (2 * 256 + 2 * 128) if peft == "dora" else 0)
    assert found.gradients == 4 * adapters // 2
    assert found.weights == (2 * PARAMETERS + 4 * adapters) // 2


def test_a_softcap_does_not_stop_it() -> None:
    gemma = transformers.Gemma2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=256,
    )
    found = simulate(parts("training.global_batch_size=2"), gemma, MeshShape(1, 2, 1))
    assert found.peak > found.weights


FULL = "training.activation_checkpointing=full"
WORLDS = {
    "dense": ("Llama-3.1-8B-Instruct", ["mesh.dp_shard=8"]),
    "recomputed": ("Llama-3.1-70B-Instruct", ["mesh.dp_shard=1024", FULL]),
    "one-gpu": ("Llama-3.1-8B-Instruct", ["mesh.dp_shard=1", FULL]),
    "micro-batches": ("Qwen3-8B", ["mesh.dp_shard=2", FULL, "training.global_batch_size=4"]),
    "reduced-every-time": (
        "Qwen3-8B",
        [
            "mesh.dp_shard=2",
            FULL,
            "training.global_batch_size=4",
            "advanced.reduce_every_micro_batch=true",
        ],
    ),
    "cp": ("Qwen3-8B", ["mesh.cp=4", "mesh.cp_exchange=all_to_all", FULL]),
    "tp": ("Llama-3.1-8B-Instruct", ["mesh.dp_shard=8", "mesh.tp=4", FULL]),
    "experts": ("Qwen3-30B-A3B", ["mesh.dp_shard=8", FULL]),
    "fewer-experts-than-ranks": ("Qwen3-30B-A3B", ["mesh.dp_shard=1024", FULL]),
    "ep": ("Qwen3-30B-A3B", ["mesh.dp_shard=8", "mesh.ep=8", FULL]),
}


class Living(TorchDispatchMode):
    """Counts the bytes of real storages that are alive, and names the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak, self.sent = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if (
                isinstance(tensor, torch.Tensor)
                and (key := tensor.untyped_storage()._cdata) not in self.sizes
            ):
                self.sizes[key] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self.sizes.pop, key)
        self.peak = max(self.peak, sum(self.sizes.values()))
        self.sent |= {func.overloadpacket.__name__} if func.namespace == "c10d" else set()
        return result


@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_real_ddp_holds_what_is_estimated(micro_batches: int) -> None:
    """Fake tensors do not pass DDP's reducer, so it is not simulated: the formulas alone tell of it. Gradients are views
    of its buckets, and no buffer is sent in a step.
    """
    overrides = (
        FULL,
        "packed_sequence.packed_sequence_size=512",
        "mesh.strategy=ddp",
        "training.precision=bf16",
    )
    asked = parts(*overrides, f"training.global_batch_size={micro_batches}")
    shape = MeshShape(1, 1, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Living() as living:
            lm = transformers.LlamaForCausalLM(LLAMA).train()
            install(lm, ReferenceAttention())
            recompute_layers(decoder_layers(lm), "full", 1)
            mesh = Mesh(shape, torch.device("cpu"), None)
            model = parallelize(LossModel(lm, asked.loss), mesh, "ddp", torch.bfloat16)
            optimizer = asked.optimizer(model.loss_model)
            batch = stream_of(torch.arange(512).view(2, 256), "cpu")
            for _ in range(3):  # the second one rebuilds the buckets
                living.peak, living.sent = 0, set()
                for number in range(micro_batches):
                    with model.accumulate(is_last=number == micro_batches - 1):
                        model(batch).sum.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    plan = Decided.of(
        asked,
        config=LLAMA,
        size=model_size(LLAMA),
        shape=shape,
        strategy="ddp",
        dtype=torch.bfloat16,
    )
    assert estimate_memory(plan, None).total == pytest.approx(living.peak, rel=0.4)
    with pytest.raises(NotImplementedError, match="ddp is not counted"):
        simulate(asked, LLAMA, shape)
    assert living.sent == {"allreduce_"}


@pytest.mark.parametrize(
    "name", in_ci(WORLDS, "dense", seldom=("one-gpu", "micro-batches", "fewer-experts-than-ranks"))
)
def test_coarse_memory_of_sharded_models(name: str) -> None:
    """Of models as wide as those that are trained, of four layers; mixtures of two, where no layer is behind another."""
    shape, overrides = WORLDS[name]
    model = shipped(shape, num_hidden_layers=2 if "experts" in name else 4)
    found, estimate = counted(model, ["packed_sequence.packed_sequence_size=8192", *overrides])
    assert estimate.total == pytest.approx(found.peak, rel=0.45)


BY_LAYERS = {
    "dense": ("Qwen3-0.6B", (1, 8, 1), ()),
    "every-second": ("Qwen3-0.6B", (1, 8, 1), (FULL, "advanced.recompute_every_layers=2")),
    "micro-batches": ("Qwen3-0.6B", (2, 4, 1), ("training.global_batch_size=32",)),
    "context-parallel": ("Qwen3-0.6B", (1, 2, 4), ()),
    "tensor-parallel": ("Qwen3-0.6B", (1, 4, 1, 2), ()),
    "lora": ("Qwen3-0.6B", (1, 2, 1), ("peft=lora", "model=pretrained", "model.pretrained=any")),
}


@pytest.mark.parametrize(
    "name", in_ci(BY_LAYERS, "dense", seldom=("every-second", "micro-batches"))
)
def test_few_layers_tell_what_all_of_them_hold_and_do(name: str) -> None:
    shape, axes, overrides = BY_LAYERS[name]
    model, mesh = shipped(shape, num_hidden_layers=8), MeshShape(*axes)
    asked = parts(
        *(f"mesh.{axis}={size}" for axis, size in zip(AXIS_NAMES, axes)),
        "training.precision=bf16",
        *overrides,
    )
    if not any("global_batch_size" in text for text in overrides):
        asked = replace(asked, training=replace(asked.training, global_batch_size=None))
    pattern = layer_pattern(model)
    assert (pattern.num_layers, pattern.period) == (8, 1)
    whole = simulate(asked, model, mesh, is_whole=False)
    few = simulate_by_layers(asked, model, mesh, pattern)
    assert few.peak == pytest.approx(whole.peak, rel=0.01)
    states = [(found.weights, found.gradients, found.optimizer) for found in (few, whole)]
    assert states[0] == pytest.approx(states[1], rel=1e-3)
    for step_part in ("micro", "last", "update"):
        sums = [totals(found.work[step_part]) for found in (few, whole)]
        assert sums[0] == pytest.approx(sums[1], rel=1e-3)


def gemma3(layer_types: list[str]) -> transformers.PretrainedConfig:
    return transformers.Gemma3TextConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=2048,
        layer_types=layer_types,
    )


# Every second layer of another kind, a model too short for a pattern, a mixture (whose layers hold much more than their inputs), a
# model whose gradients are more than its activations, and one with micro-batches.
RUNGS: dict[str, tuple[transformers.PretrainedConfig, int, tuple[str, ...]]] = {
    "kinds": (
        gemma3(["sliding_attention", "full_attention"] * 5),
        2,
        (),
    ),
    "a short model": (
        gemma3([*["sliding_attention"] * 4, "full_attention"]),
        2,
        (),
    ),
    "experts": (
        transformers.Qwen3MoeConfig(
            hidden_size=128,
            moe_intermediate_size=256,
            num_hidden_layers=11,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=16,
            num_experts_per_tok=4,
            vocab_size=2048,
            decoder_sparse_step=1,
        ),
        4,
        (),
    ),
    "gradients": (
        transformers.LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 10}),
        1,
        ("packed_sequence.packed_sequence_size=256",),
    ),
    "micro-batches": (
        transformers.LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 10}),
        2,
        ("training.global_batch_size=6",),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.system if name in ("kinds", "a short model") else pytest.mark.slow,
        )
        for name in RUNGS
    ],
)
def test_rungs_in_between_are_those_of_the_whole(name: str) -> None:
    """Read off the line from none to all they were up to 5 % too low here, and 4 % too high."""
    model, ranks, overrides = RUNGS[name]
    shape, pattern = MeshShape(1, ranks, 1), layer_pattern(model)
    asked = parts(
        f"mesh.dp_shard={ranks}",
        "training.global_batch_size=null",
        "training.precision=bf16",
        *overrides,
    )
    kept = simulate_by_layers(asked, model, shape, pattern)
    full = simulate_by_layers(with_recomputation(asked, "full", 1), model, shape, pattern)
    # with a period of two: all, along the period, and across it; a short model is run as it is
    rungs = {1: (1, 2, 3, 8), 2: (1, 2, 3), model.num_hidden_layers: (2,)}
    for every in rungs[pattern.period]:
        found = recompute_every(every, kept, full, pattern) if every > 1 else full
        whole = simulate(with_recomputation(asked, "full", every), model, shape, is_whole=False)
        assert found.peak == pytest.approx(whole.peak, rel=0.01), every
        if pattern.period == 1:
            for part in ("micro", "last", "update"):
                assert totals(found.work[part]) == pytest.approx(totals(whole.work[part]), rel=0.01)


def totals(work: Work) -> list[float]:
    """FLOPs of products and of attention, bytes of kernels, bytes sent."""
    kernels = [(one, number) for one, number in work.items() if isinstance(one, Operation)]
    flops = [
        sum(o.flops * n for o, n in kernels if o.kind == kind) for kind in ("product", "attention")
    ]
    sent = sum(one.bytes * number for one, number in work.items() if isinstance(one, Message))
    return [*flops, sum(o.bytes * n for o, n in kernels), sent]


def test_operations_of_a_dense_step_are_the_known_ones() -> None:
    """6 FLOPs per weight and token, 4 + 10 per visible key and channel; the update reads and writes what there
    is, and the gradients that it scales.
    """
    found = world(1, 8, 1)
    product, attention, _, sent = totals(found.work["last"])
    in_layers = LAYERS * (LAYER - 2 * 256)
    assert product == 6 * 2048 * (in_layers + EMBEDDING)
    assert attention == LAYERS * (4 + 10) * 2048 * 256
    assert sent == pytest.approx(sum(found.sent.values()), rel=1e-3)
    updates = [
        one for one in found.work["update"] if isinstance(one, Operation) and one.kind == "update"
    ]
    assert sum(one.bytes for one in updates) == pytest.approx(8 * 4 * PARAMETERS / 8, rel=1e-3)


def test_layers_repeat_after_the_first() -> None:
    gemma = transformers.Gemma3TextConfig(num_hidden_layers=26)
    assert layer_pattern(gemma) == LayerPattern(26, 0, 6)
    shorter = with_layers(gemma, 8)
    assert (shorter.num_hidden_layers, len(shorter.layer_types), gemma.num_hidden_layers) == (
        8,
        8,
        26,
    )


def shipped(name: str, **changes: int) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.from_pretrained(next(SHAPES.glob(f"*{name}.json")), **changes)


def counted(
    model: transformers.PretrainedConfig, overrides: list[str]
) -> tuple[Simulation, MemoryEstimate]:
    asked = parts("training.global_batch_size=null", "training.precision=bf16", *overrides)
    shape = mesh_shape(
        asked.mesh,
        asked.mesh.dp_replicate * max(asked.mesh.dp_shard, 1) * asked.mesh.cp * asked.mesh.tp,
    )
    strategy = choose_strategy(asked.mesh.strategy, shape)
    plan = Decided.of(
        asked,
        config=model,
        size=model_size(model),
        shape=shape,
        strategy=strategy,
        dtype=torch.bfloat16,
    )
    return simulate(asked, model, shape), estimate_memory(plan, None)


@pytest.mark.system
def test_offloading_holds_inputs_on_the_host() -> None:
    """It takes one bf16 input per layer off the device."""
    whole = world(1, 1, 2, overrides=(FULL,))
    offloaded = world(
        1, 1, 2, overrides=("training.activation_checkpointing=offload", "mesh.cp_exchange=ring")
    )
    assert offloaded.peaks["forward"] <= whole.peaks["forward"] - (LAYERS - 1) * 1024 * 256 * 2


@pytest.mark.parametrize(
    ("experts", "ranks"), [(6, 4), pytest.param(160, 64, marks=pytest.mark.system)]
)
def test_ranks_without_an_expert_are_counted(experts: int, ranks: int) -> None:
    """160 experts in chunks of 3 fill 54 ranks of 64; rank 0 holds 3 of them."""
    sizes = {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "vocab_size": 2048,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = transformers.Qwen3MoeConfig(
        num_experts=experts, num_experts_per_tok=2, **sizes, **heads
    )
    asked = (f"mesh.dp_shard={ranks}", f"training.global_batch_size={ranks}")
    found = simulate(parts(*asked), model, MeshShape(1, ranks, 1))
    of_experts = 4 * LAYERS * 3 * 64 * 32 * -(-experts // ranks)
    dense = model_size(model).parameters - LAYERS * experts * 3 * 64 * 32
    assert found.weights == pytest.approx(of_experts + 4 * dense / ranks, rel=0.02)


@pytest.mark.parametrize(
    "axes", [pytest.param((1, 2, 1), marks=pytest.mark.system), (1, 1, 2)], ids=["fsdp 2", "cp 2"]
)
def test_values_narrower_than_keys_are_counted(axes: tuple[int, int, int]) -> None:
    """Latent attention, whatever goes around its kernel."""
    latent = tiny_config("deepseek_v3")
    asked = (f"mesh.dp_shard={axes[1]}", f"mesh.cp={axes[2]}", "mesh.cp_exchange=ring")
    found = simulate(parts(*asked, "training.global_batch_size=2"), latent, MeshShape(*axes))
    assert found.peak > found.weights > 0


class WaitsForTheDevice(PlainLoss):
    """A loss of one's own that reads a number, which nobody knows under fake tensors."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        total = inputs.log_probs().sum()
        return LossOutput(-total / (1 + float(total.detach() > 0)), {})


def test_a_step_that_cannot_be_counted_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    asked = config("dry_run=true", "mesh.dp_shard=2", "training.global_batch_size=2")
    own_loss = {"_target_": f"{__name__}.WaitsForTheDevice"}
    asked.security.allow_targets = ["tests"]
    with pytest.raises(CountError, match=r"on 2 ranks cannot be counted .*, so nothing is known"):
        dry_run(replace(asked, loss=own_loss))
    assert "fit together" not in capsys.readouterr().out
