"""The real set-up, step, checkpoint and export of one rank of any world: fake tensors in a fake
process group.

Nothing is allocated and nothing is sent, but the real code runs: shapes, sharding, collectives,
recomputation, the loss and the optimizer are those of that world, so what is counted is what a GPU
will hold. The allocator's slack and the kernels' workspaces come on top. Weights are not read here:
a whole tensor beside the shards stands for it.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_lite.attention.interface import install
from automodel_lite.attention.positions import length_dependent_rotations
from automodel_lite.attention.spec import AttentionSpec, layer_shapes
from automodel_lite.compat import (
    FakeStore,
    FakeTensorMode,
    clear_sharding_prop_cache,
    disable_current_modes,
    fsdp_param_group,
    fully_shard_module,
)
from automodel_lite.config.sizes import global_batch_size_of
from automodel_lite.errors import ConfigError, one_line
from automodel_lite.extras.plan.capacity import GPUS_GB, usable
from automodel_lite.extras.plan.tracker import (
    GPU,
    MemoryTracker,
    Message,
    Operation,
    Work,
    gpu_tensors,
)
from automodel_lite.extras.short_models import with_layers
from automodel_lite.models.layers import decoder_layers, recompute_layers
from automodel_lite.models.settings import experts_per_token
from automodel_lite.models.sharded import Spread
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_mesh
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.parts.kernels.varlen import VarlenAttention
from automodel_lite.parts.optimizers import adamw
from automodel_lite.run.checkpoint import flat_state
from automodel_lite.run.weight_files import gathered_files, groups_of, plan_files
from automodel_lite.thd import AttentionInputs, AttentionOptions, Segments, ThdBatch
from automodel_lite.training.build import assemble, worst_case_batch
from automodel_lite.training.decide import decide_layout
from automodel_lite.training.engine import TrainingEngine
from automodel_lite.training.memory import gib
from automodel_lite.training.plan import Decided, Parts, as_teacher

if TYPE_CHECKING:
    from automodel_lite.parts.adapters.lora import Lora, LoraAdapter

PLACES = tuple(
    f"backward of the {layer}" for layer in ("first layer", "second", "last but one", "last")
)

_MOST_VALUES = 2**26  # of pixels that are there


@dataclass(frozen=True)
class Simulation:
    """What one rank holds and sends when the optimizer's states exist. Bytes."""

    weights: int  # this rank's part
    gradients: int
    optimizer: int
    # phase (load, forward, backward, optimizer, save, export) -> most that is held at one time
    peaks: dict[str, int]
    at_peak: dict[str, int]  # kind of tensor -> held when most is held, the largest first
    # of a micro-batch, of the last one, of the update
    work: dict[str, Work] = field(default_factory=dict)
    after_layers: tuple[int, ...] = ()  # held when the forward pass of each layer is done

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def sent(self) -> dict[str, int]:
        """Mesh axes -> bytes that leave this rank in an optimizer step of at most two
        micro-batches.
        """
        found: Counter[str] = Counter()
        for one, times in (item for work in self.work.values() for item in work.items()):
            if isinstance(one, Message):
                found[one.axes] += round(times * one.bytes)
        return dict(found)

    def __str__(self) -> str:
        peaks = ", ".join(f"{phase} {gib(value)}" for phase, value in self.peaks.items())
        held = ", ".join(f"{kind} {gib(value)}" for kind, value in self.at_peak.items())
        axes = ", ".join(f"{axis} {gib(value)}" for axis, value in self.sent.items())
        sent = f"over {axes}" if axes else "nothing"
        smallest = next((size for size in GPUS_GB if self.peak <= usable(size * 10**9)), None)
        fits = f"GPUs of {smallest} GB and more" if smallest else "no GPU of today"
        return (
            f"at most {gib(self.peak)} ({peaks}): weights {gib(self.weights)}, gradients "
            f"{gib(self.gradients)}, optimizer {gib(self.optimizer)}\nmost is held by "
            f"{held}\nsends {sent}\nfits {fits}"
        )


class CountError(ConfigError):
    """A step that cannot be counted: nothing is known of what it holds."""


@contextlib.contextmanager
def _counting(model_config: PretrainedConfig, shape: MeshShape) -> Iterator[None]:
    """Turns whatever goes wrong inside a count into a sentence: it must not pass for a step that
    fits.
    """
    try:
        yield
    except (ConfigError, NotImplementedError):
        raise
    except Exception as error:
        raise CountError(
            f"a step of model_type={model_config.model_type} on {shape.world_size} ranks cannot be "
            f"counted ({type(error).__name__}: {one_line(error, 200)}), so nothing is known of the "
            "memory that it needs: train a few steps, training.max_steps=2, to see whether it fits."
        ) from error


def simulate(
    parts: Parts,
    model_config: PretrainedConfig,
    shape: MeshShape,
    batch: ThdBatch | None = None,
    is_whole: bool = True,
) -> Simulation:
    """Runs set-up, an optimizer step, a checkpoint and the export of rank 0 of a world of `shape`,
    on GPUs.

    batch     one that is not sharded, with ids of 0, whose trees need the keys of their paths; None
              = plain documents
    is_whole  False: without checkpoint and export, and with a peak for the backward pass of each
              layer, as `backward 3`
    Raises what the run would raise, NotImplementedError without FSDP, CountError for a step that
    cannot be counted. No process group may exist: one is made, and destroyed.
    """
    with _counting(model_config, shape):
        plan = decide_layout(
            replace(parts, attention=_CountedAttention()), model_config, shape, torch.device("cuda")
        )
        if plan.strategy != "fsdp":
            raise NotImplementedError(f"only FSDP is counted, not mesh.strategy={plan.strategy}")
        parts = plan
        # The most that a step can hold; boundaries of documents do not change it, keys along the
        # paths of trees do.
        batch = batch or worst_case_batch(parts, num_ids=1)
        if batch.attention.ahead:  # what tokens of images see behind them is no memory
            batch = replace(batch, attention=replace(batch.attention, ahead={}))
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        text = model_config.get_text_config()
        # how many times a token goes from one rank to another's experts in a layer, if all experts
        # are asked equally often
        routed = (
            len(batch.labels) * (experts_per_token(text) or 1) // (shape.cp * shape.tp * shape.ep)
        )
        held = MemoryTracker(
            shape, routed if shape.ep > 1 else 0, text.vocab_size, tells_layers=not is_whole
        )
        with _fake_world(shape) as mesh, _as_on_a_gpu(held):
            adapted = parts
            if parts.peft:
                adapted = replace(parts, peft=_Adapters(parts.peft))  # type: ignore[arg-type]
            model = _sharded(adapted, plan, mesh, fake, held)
            model = replace(model, reduces_every=parts.advanced.reduce_every_micro_batch is True)
            if parts.teacher:
                teacher = _sharded(
                    as_teacher(parts, parts.teacher), plan, mesh, fake, held, trains=False
                )
                install(teacher.loss_model.lm, _CountedAttention())
                model.loss_model.set_teacher(teacher.loss_model)
            optimizer = parts.optimizer(model.loss_model)  # looks up where its shards lie
            engine = TrainingEngine(mesh, model, plan, optimizer)
            sharded = engine.place(batch)
            with fake, held:
                without = replace(sharded, images=None)
                inputs = without.map_tensors(lambda tensor: fake.from_tensor(tensor).to(GPU))
                around: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
                if sharded.images is not None:
                    inputs, around = _with_values(inputs, sharded, held)
                gradients = _step(engine, inputs, held, around)
                if is_whole:
                    held.enter("save")
                    flat_state(model.loss_model, optimizer)
                    held.enter("export")
                    if parts.peft is None:
                        _export(model.loss_model.lm, shape.world_size)
                states = (value for state in optimizer.state.values() for value in state.values())
                return Simulation(
                    weights=_local_bytes(model.parameters()),
                    gradients=gradients,
                    optimizer=_local_bytes(states),
                    peaks=dict(held.peaks),
                    at_peak=held.at_peak(),
                    work=held.work,
                    after_layers=tuple(held.after_layers.values()),
                )


def simulate_by_layers(
    parts: Parts,
    model_config: PretrainedConfig,
    shape: MeshShape,
    pattern: LayerPattern,
    batch: ThdBatch | None = None,
) -> Simulation:
    """`simulate` of a step alone, in about a second: models of few layers are run, and what one
    more pattern of them adds is added as often as the whole model has it; `after_layers` are those
    of the few. A model that is hardly longer is run as it is, and has a peak for each layer.

    All that is held and done grows linearly with the layers, and so does the peak of each place of
    the backward pass: most may be held at its begin, where all activations are left, or at its end,
    where all gradients are there. The peaks of four layers are therefore told apart: what lies
    between them is on the line from one to the next.
    """
    period = math.lcm(pattern.period, parts.advanced.recompute_every_layers)
    # the first, the last, and one of each kind whose neighbors are gathered ahead and reduced
    # behind it
    few = pattern.first + period * math.ceil((2 + period) / period)

    def of_layers(number: int) -> Simulation:
        with _counting(model_config, shape):
            few_layers = with_layers(model_config, number)
        found = simulate(parts, few_layers, shape, batch, is_whole=False)
        layers = [found.peaks.pop(f"backward {layer}", 0) for layer in range(number)]
        inner = layers[1:-1] or layers
        found.peaks.update(
            zip(PLACES, (layers[0], max(inner[:period]), max(inner[-period:]), layers[-1]))
        )
        return found

    if pattern.num_layers <= few + period:
        return simulate(parts, model_config, shape, batch, is_whole=False)
    one = of_layers(few)
    times = (pattern.num_layers - few) / period
    whole = interpolate(one, of_layers(few + period), times)
    return replace(whole, after_layers=one.after_layers)


def recompute_every(
    every: int, kept: Simulation, recomputed: Simulation, pattern: LayerPattern
) -> Simulation:
    """Returns the step that recomputes each `every`-th layer, from `simulate_by_layers` of no layer
    and of all of them.

    Memory is exact: what other layers hold adds up, and in the backward pass a layer needs beside
    that what it needs in the model whose layers are all of its kind. Work is a share of both, as if
    layers were alike.
    """
    total = pattern.num_layers
    spared = list(np.diff(np.subtract(kept.after_layers, recomputed.after_layers), prepend=0))
    while len(spared) < total:
        spared += spared[-pattern.period :]
    is_recomputed = np.arange(total) % every == 0
    by_recomputed, by_kept = (
        np.cumsum(np.where(of, spared[:total], 0)) for of in (is_recomputed, ~is_recomputed)
    )
    # a layer's backward pass begins with what the layers before it hold, and it itself
    held = np.where(
        is_recomputed,
        _peaks_of_layers(recomputed, total) + by_kept,
        _peaks_of_layers(kept, total) - by_recomputed,
    )
    found = interpolate(kept, recomputed, is_recomputed.mean())
    # the end of the forward pass has the last layer behind it
    step, more = (recomputed, by_kept[-1]) if is_recomputed[-1] else (kept, -by_recomputed[-1])
    ends = {phase: round(step.peaks[phase] + more) for phase in ("forward", "backward")}
    others = {
        phase: peak for phase, peak in found.peaks.items() if not phase.startswith("backward ")
    }
    ends["backward"] = max(ends["backward"], round(held.max()))
    return replace(found, peaks=others | ends)


def _peaks_of_layers(step: Simulation, total: int) -> np.ndarray:
    """Returns the peak of each layer's backward pass."""
    if PLACES[0] not in step.peaks:
        return np.array([step.peaks.get(f"backward {layer}", 0) for layer in range(total)])
    return np.interp(
        range(total), (0, 1, total - 2, total - 1), [step.peaks[place] for place in PLACES]
    )


@dataclass(frozen=True)
class LayerPattern:
    """How the layers of a model repeat: after the `first` ones, every `period` of them is alike."""

    num_layers: int
    first: int
    period: int


def layer_pattern(model_config: PretrainedConfig) -> LayerPattern:
    """Compares the weights and the attention of all layers; a model without a pattern is its own
    period.
    """
    weights = [
        tuple((name, weight.shape) for name, weight in layer.named_parameters())
        for layer in decoder_layers(describe(model_config))
    ]
    kinds = list(zip(weights, layer_shapes(model_config)))
    total = len(kinds)
    for first, period in sorted(((f, p) for f in range(4) for p in range(1, total // 3)), key=sum):
        if all(kinds[i] == kinds[i + period] for i in range(first, total - period)):
            return LayerPattern(total, first, period)
    return LayerPattern(total, 0, total)


def interpolate(one: Simulation, two: Simulation, times: float) -> Simulation:
    """Returns `one` and `times` the difference that `two` makes, each phase by itself."""

    def along(first: Any, second: Any) -> Any:
        if isinstance(first, dict):
            return {
                key: along(first.get(key, 0), second.get(key, 0)) for key in {**first, **second}
            }
        return first + times * (second - first)

    sizes = ("weights", "gradients", "optimizer")
    values = {
        name: along(getattr(one, name), getattr(two, name))
        for name in (*sizes, "peaks", "at_peak", "work")
    }
    values |= {name: round(values[name]) for name in sizes}
    values["peaks"] = {phase: round(value) for phase, value in values["peaks"].items()}
    return Simulation(**values)


def _sharded(
    parts: Parts,
    plan: Decided,
    mesh: Mesh,
    fake: FakeTensorMode,
    held: MemoryTracker,
    trains: bool = True,
) -> ParallelModel:
    """Returns the model on its mesh, its weights fake."""
    config = plan.config if trains else parts.model.resolve_model_config({})
    drawn = replace(parts, model=_UnloadedSource(parts.model, config, fake, held))
    no_tokenizer: Any = None  # a drawn model's source needs no vocabulary
    return assemble(drawn, no_tokenizer, mesh, "fsdp", plan.dtype, trains)[0]


def _with_values(
    inputs: ThdBatch, batch: ThdBatch, held: MemoryTracker
) -> tuple[ThdBatch, contextlib.AbstractContextManager[Any]]:
    """Returns the inputs with the values that a composite's code reads, of ids and of the grids of
    images, and what their step runs in.
    """
    from automodel_lite.parts.images.costs import ValuesKept  # with Pillow

    assert batch.images is not None

    def with_values(tensor: Tensor) -> Tensor:
        """Few pixels keep their values, which some families look at."""
        if tensor.is_floating_point() and tensor.numel() > _MOST_VALUES:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)
        held.watch(tensor, torch.ops.aten.clone.default)
        return tensor

    images = batch.images.map_tensors(with_values)
    values = ValuesKept(GPU, lambda tensor: type(tensor) not in (Tensor, nn.Parameter), held.watch)
    return replace(inputs, input_ids=batch.input_ids, images=images), values


def _step(
    engine: TrainingEngine,
    inputs: ThdBatch,
    held: MemoryTracker,
    around: contextlib.AbstractContextManager[Any],
) -> int:
    """An optimizer step of at most two micro-batches, with states that exist; returns the bytes of
    its gradients.

    around  what its micro-batches run in
    """
    parts = engine.decided
    model = engine.model
    optimizer = engine.optimizer
    lm = model.loss_model.lm
    training = parts.training
    install(lm, _CountedAttention())
    layers = decoder_layers(lm)
    recompute_layers(
        layers, training.activation_checkpointing, parts.advanced.recompute_every_layers
    )
    # A first update makes the optimizer's states. It is no part of a step, and not counted.
    held.enter("optimizer")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    held.forget("optimizer")

    # the layers are told apart
    def mark(number: int, layer: nn.Module, args: Any, output: Any) -> None:
        held.after_layers[number] = held.now
        for hidden in gpu_tensors(output):
            if hidden.requires_grad:
                hidden.register_hook(lambda _: held.enter("backward", number))

    for number, layer in enumerate(layers):
        layer.register_forward_hook(partial(mark, number))
    # micro-batches before the last are alike: two stand for any number
    dp = engine.mesh.shape.dp
    asked = global_batch_size_of(training, dp) // (training.micro_batch_size * dp)
    num_micro = min(2, asked)

    def lap(phase: str) -> None:
        if phase == "forward":
            held.enter("backward")
        elif held.part == "micro":
            held.part = "last"
            held.enter("forward")

    held.part = "micro" if num_micro > 1 else "last"
    held.enter("forward")
    with around:
        sums = engine.forward_backward([inputs] * num_micro, lap=lap)
    gradients = _local_bytes(p.grad for p in model.parameters() if p.grad is not None)
    held.enter("optimizer")
    held.part = "update"
    engine.step(sums["loss"], training.max_grad_norm)
    return gradients


def _export(lm: transformers.PreTrainedModel, num_ranks: int) -> None:
    dtypes = {name: value.dtype for name, value in lm.state_dict().items()}
    with disable_current_modes():  # names and shapes, on no device
        groups = groups_of(lm, dtypes)
    files = plan_files(groups, num_ranks)
    for _ in gathered_files(lm, files, dtypes, rank=0, ranks=num_ranks):
        pass


class _Adapters:
    """Adapters without memory, in sight when the weights are given some."""

    def __init__(self, peft: Lora) -> None:
        self._peft = peft
        self.check = peft.check

    def adapt(self, model: transformers.PreTrainedModel, base: str) -> LoraAdapter:
        adapter = self._peft.adapt(model, base)
        for parameter in model.parameters():
            if not parameter.is_meta:
                empty = nn.Parameter(
                    torch.empty_like(parameter, device="meta"), parameter.requires_grad
                )
                torch.utils.swap_tensors(parameter, empty)
        object.__setattr__(adapter, "hidden", contextlib.nullcontext)
        return adapter


class _UnloadedSource(CausalLM):
    """Weights that are never read: described, sharded, fake tensors."""

    def __init__(
        self,
        source: CausalLM,
        model_config: PretrainedConfig,
        fake: FakeTensorMode,
        held: MemoryTracker,
    ) -> None:
        vars(self).update(vars(source))
        self.dtype = torch.float32
        self.notes = []
        self._modes = fake, held
        self._model_config = model_config

    def build_sharded(
        self,
        tokenizer: PreTrainedTokenizerBase,
        spread: Spread,
        device: torch.device,
        turn: Any = None,
    ) -> transformers.PreTrainedModel:
        model = describe(self._model_config)
        # rotations that a document's length chooses read it; each choice has as many frequencies
        rotation: Any
        for rotation in length_dependent_rotations(model):
            rope = rotation.config.rope_parameters
            kinds = rotation.rope_type
            is_nested = isinstance(kinds, dict)  # by kind of layer
            rotation.rope_type = dict.fromkeys(kinds, "default") if is_nested else "default"
            for parameters in rope.values() if is_nested else [rope]:
                parameters["rope_type"] = "default"
        self.add_heads(model)
        self.freeze_weights(model)
        spread(model)
        vars(model.base_model)["most_calls"] = int  # all ranks of a fake world have the same batch
        fake, held = self._modes
        with fake, held:
            model.to_empty(device=device)
            # the one that is read
            torch.empty(max(p.numel() for p in model.parameters()), device=device)
        return model.train()


class _CountedAttention(VarlenAttention):
    """FlashAttention's memory, whatever the layer needs: heads whose values are narrower than their
    keys (latent attention) are counted as filled up to one width.
    """

    def check(self, spec: AttentionSpec) -> None:
        """Nothing is refused."""

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        options = replace(options, softcap=None, sinks=None)
        q, k, v = _of_one_width(q_THD, k_THD, v_THD)
        return super().__call__(q, k, v, segments, options)[..., : v_THD.shape[-1]]

    def block(self, inputs: AttentionInputs, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = _of_one_width(*inputs[:3])
        out, lse = super().block(inputs._replace(q=q, k=k, v=v), causal)
        return out[..., : inputs.v.shape[-1]], lse

    def block_backward(
        self,
        inputs: AttentionInputs,
        causal: bool,
        grad_THD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, grad, out = _of_one_width(*inputs[:3], grad_THD, out_THD)
        filled = inputs._replace(q=q, k=k, v=v)
        of_q, of_k, of_v = super().block_backward(filled, causal, grad, out, lse_TH)
        width = inputs.q.shape[-1]
        return of_q[..., :width], of_k[..., :width], of_v[..., : inputs.v.shape[-1]]


def _of_one_width(*heads_THD: Tensor) -> list[Tensor]:
    width = max(x.shape[-1] for x in heads_THD)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in heads_THD]


@contextlib.contextmanager
def _fake_world(shape: MeshShape) -> Iterator[Mesh]:
    """Rank 0 of a process group in which nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.world_size)
    try:
        yield open_mesh(shape, GPU)
    finally:
        dist.destroy_process_group()
        clear_sharding_prop_cache()  # plans name the groups of this world


@contextlib.contextmanager
def _as_on_a_gpu(held: MemoryTracker) -> Iterator[None]:
    """FSDP's device is the GPU, what it frees by resizing is seen, and an update in place is one
    kernel, which allocates nothing.
    """
    original = torch.UntypedStorage.resize_

    def beside(communicate: Callable[..., Any]) -> Callable[..., Any]:
        """Marks what FSDP sends: its groups may be those of other axes, whose messages are waited
        for.
        """

        def marked(*args: Any, **kwargs: Any) -> Any:
            held.is_parallel = True
            try:
                return communicate(*args, **kwargs)
            finally:
                held.is_parallel = False

        return marked

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        held.resized(storage._cdata, size)
        return result

    def update(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], **_: Any) -> None:
        moved = gradient.nbytes + 2 * sum(x.nbytes for x in (parameter, *state.values()))
        held.work[held.part][Operation("update", 0.0, moved)] += 1

    make = torch.tensor

    def made_there(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """A constant: torch makes it on the host, of which "cpu:0" is another name to it."""
        made = make(*args, **kwargs)
        return made.to(device) if device is not None else made

    gather = fsdp_param_group.foreach_all_gather
    reduce = fsdp_param_group.foreach_reduce
    # cuDNN's version and the card would be asked for; the run's own choice is there again behind it
    without_cudnn = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with (
        sdpa_kernel(without_cudnn),
        patch.object(torch.UntypedStorage, "resize_", resize),
        patch.object(torch, "tensor", made_there),
        patch.object(fully_shard_module, "_get_device_from_mesh", lambda mesh: GPU),
        patch.object(fsdp_param_group, "foreach_all_gather", beside(gather)),
        patch.object(fsdp_param_group, "foreach_reduce", beside(reduce)),
        patch.object(adamw, "update", update),
    ):
        yield


def _local_bytes(values: Iterable[Any]) -> int:
    """Counts those on the GPU."""
    return sum(part.nbytes for part in gpu_tensors(list(values)))
