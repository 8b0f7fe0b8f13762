"""The real set-up, step, checkpoint and export of one rank of any world: fake tensors in a fake
process group.

Nothing is allocated and nothing is sent, but the real code runs: shapes, sharding, collectives,
recomputation, the loss and the optimizer are those of that world, so what is counted is what a GPU
will hold. The allocator's slack and the kernels' workspaces come on top. Weights are not read here:
a whole tensor beside the shards stands for it.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from automodel_lite.attention.interface import install
from automodel_lite.compat import (
    FakeTensorMode,
    disable_current_modes,
)
from automodel_lite.config.sizes import global_batch_size_of
from automodel_lite.errors import ConfigError, is_limit, one_line
from automodel_lite.extras.plan.capacity import GPUS_GB, usable
from automodel_lite.extras.plan.fake_world import (
    CountedAttention,
    UnloadedSource,
    UnplacedAdapters,
    as_on_a_gpu,
    fake_world,
)
from automodel_lite.extras.plan.tracker import (
    GPU,
    MemoryTracker,
    Message,
    Work,
    gpu_tensors,
)
from automodel_lite.models.layers import decoder_layers, recompute_layers
from automodel_lite.models.settings import experts_per_token
from automodel_lite.parallel.mesh import Mesh, MeshShape
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.parallel.turns import in_turns
from automodel_lite.run.checkpoint import flat_state
from automodel_lite.run.weight_files import gathered_files, groups_of, plan_files
from automodel_lite.thd import ThdBatch
from automodel_lite.training import engine as engine_room
from automodel_lite.training.build import assemble
from automodel_lite.training.compiling import worst_case_batch
from automodel_lite.training.decide import decide_layout
from automodel_lite.training.engine import TrainingEngine
from automodel_lite.training.memory import gib
from automodel_lite.training.settings import Decided, RunParts, as_teacher

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
def counting(model_config: PretrainedConfig, shape: MeshShape) -> Iterator[None]:
    """Turns whatever goes wrong inside a count into a sentence: it must not pass for a step that
    fits.
    """
    try:
        yield
    except (ConfigError, NotImplementedError):
        raise
    except Exception as error:
        if is_limit(error):
            raise
        raise CountError(
            f"a step of model_type={model_config.model_type} on {shape.world_size} ranks cannot be "
            f"counted ({type(error).__name__}: {one_line(error, 200)}), so nothing is known of the "
            "memory that it needs: train a few steps, training.max_steps=2, to see whether it fits."
        ) from error


def simulate(
    parts: RunParts,
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
    Raises what the run would raise, NotImplementedError under DDP and for weights in 4 bits,
    CountError for a step that cannot be counted. No process group may exist: one is made, and
    destroyed.
    """
    with counting(model_config, shape):
        plan = decide_layout(
            replace(parts, attention=CountedAttention()), model_config, shape, torch.device("cuda")
        )
        if plan.strategy == "ddp":
            raise NotImplementedError("mesh.strategy=ddp is not counted")
        if plan.is_quantized:
            raise NotImplementedError("weights in 4 bits are not counted")
        # The most that a step can hold; boundaries of documents do not change it, keys along the
        # paths of trees do.
        batch = batch or worst_case_batch(plan, num_ids=1)
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
        with fake_world(shape) as mesh, as_on_a_gpu(held):
            model = _model(plan, mesh, fake, held)
            optimizer = plan.optimizer(model.loss_model)  # looks up where its shards lie
            engine = TrainingEngine(mesh, model, plan, optimizer)
            engine.write_copies()  # as on a GPU, whose name here is another one
            sharded = engine.place(batch)
            with fake, held:
                without = replace(sharded, images=None)
                inputs = without.map_tensors(lambda tensor: fake.from_tensor(tensor).to(GPU))
                around: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
                if sharded.images is not None:
                    inputs, around = _with_values(inputs, sharded, held)
                gradients = _step(engine, inputs, fake, held, around)
                if is_whole:
                    held.enter("save")
                    flat_state(model.loss_model, optimizer)
                    held.enter("export")
                    if plan.peft is None:
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


def _model(plan: Decided, mesh: Mesh, fake: FakeTensorMode, held: MemoryTracker) -> ParallelModel:
    """Returns the model on its mesh, with its teacher."""
    adapted: RunParts = plan
    if plan.peft:
        adapted = replace(plan, peft=UnplacedAdapters(plan.peft))  # type: ignore[arg-type]
    model = _sharded(adapted, plan, mesh, fake, held)
    if plan.teacher:
        frozen = as_teacher(plan, plan.teacher)
        teacher = _sharded(frozen, plan, mesh, fake, held, trains=False)
        install(teacher.loss_model.lm, CountedAttention())
        model.loss_model.set_teacher(teacher.loss_model)
    return replace(
        model,
        reduces_every=plan.advanced.reduce_every_micro_batch is True,
        takes_turns=plan.mesh.ep_overlap,
    )


def _sharded(
    parts: RunParts,
    plan: Decided,
    mesh: Mesh,
    fake: FakeTensorMode,
    held: MemoryTracker,
    trains: bool = True,
) -> ParallelModel:
    """Returns the model on its mesh, its weights fake."""
    config = plan.config if trains else parts.model.resolve_model_config({})
    drawn = replace(parts, model=UnloadedSource(parts.model, config, fake, held))
    no_tokenizer: Any = None  # a drawn model's source needs no vocabulary
    return assemble(drawn, no_tokenizer, mesh, plan.strategy, plan.dtype, trains)[0]


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
    fake: FakeTensorMode,
    held: MemoryTracker,
    around: contextlib.AbstractContextManager[Any],
) -> int:
    """An optimizer step of at most two micro-batches, or of two that take turns and one, with
    states that exist; returns the bytes of its gradients.

    around  what its micro-batches run in
    """
    parts = engine.decided
    model = engine.model
    optimizer = engine.optimizer
    lm = model.loss_model.lm
    training = parts.training
    install(lm, CountedAttention())
    held.knows(model.parameters())
    layers = decoder_layers(lm)
    recompute_layers(
        layers, training.activation_checkpointing, parts.advanced.recompute_every_layers
    )
    model.gather_towers_once()
    # A first update makes the optimizer's states. It is no part of a step, and not counted.
    held.enter("optimizer")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    held.forget("optimizer")

    # the layers are told apart
    def begin(layer: nn.Module, args: Any) -> None:
        held.is_in_layer = True

    def mark(number: int, layer: nn.Module, args: Any, output: Any) -> None:
        held.is_in_layer = False
        held.after_layers[number] = held.now
        for hidden in gpu_tensors(output):
            if hidden.requires_grad:
                hidden.register_hook(lambda _: held.enter("backward", number))

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(partial(mark, number))
    # micro-batches before the last are alike: two stand for any number
    dp = engine.mesh.shape.dp
    asked = global_batch_size_of(training, dp) // (training.micro_batch_size * dp)
    takes_turns = parts.mesh.ep_overlap
    num_micro = 3 if takes_turns else min(2, asked)

    def in_counted_turns(
        first: Callable[[], Any], second: Callable[[], Any], device: torch.device
    ) -> list[Any]:
        """A thread of its own has neither mode."""

        def counted() -> Any:
            with fake, held:
                return second()

        return in_turns(first, counted, torch.device("cpu"))

    def lap(phase: str) -> None:
        if phase == "forward":
            held.enter("backward")
        elif held.part == "micro":
            held.part = "last"
            held.enter("forward")

    held.part = "micro" if num_micro > 1 else "last"
    gc.collect()  # what was made on the way here, in cycles, is no part of a step
    held.enter("forward")
    with around, patch.object(engine_room, "in_turns", in_counted_turns):
        sums = engine.forward_backward([inputs] * num_micro, lap=lap)
    if takes_turns:  # the work of two
        held.work["micro"] = Counter({one: times / 2 for one, times in held.work["micro"].items()})
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


def _local_bytes(values: Iterable[Any]) -> int:
    """Counts those on the GPU."""
    return sum(part.nbytes for part in gpu_tensors(list(values)))
