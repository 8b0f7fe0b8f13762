"""What a simulated step runs in: rank 0 of a fake process group, FSDP as on a GPU, weights that are
never read, and attention that holds what FlashAttention holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_lite.attention.positions import length_dependent_rotations
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.compat import (
    FakeStore,
    FakeTensorMode,
    StridedShard,
    clear_sharding_prop_cache,
    disable_current_modes,
    fsdp_param_group,
    fully_shard_module,
)
from automodel_lite.extras.plan.tracker import (
    GPU,
    MemoryTracker,
    Operation,
)
from automodel_lite.models.sharded import Spread
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parallel import row_counts
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_mesh
from automodel_lite.parts.kernels.varlen import VarlenAttention
from automodel_lite.parts.optimizers import adamw
from automodel_lite.thd import AttentionInputs, AttentionOptions, Segments

if TYPE_CHECKING:
    from automodel_lite.parts.adapters.adapter import LoraAdapter
    from automodel_lite.parts.adapters.lora import Lora


class UnplacedAdapters:
    """Adapters without memory, in sight when the weights are given some."""

    def __init__(self, peft: Lora) -> None:
        self._peft = peft
        self.check = peft.check
        self.is_quantized = peft.is_quantized

    def adapt(
        self,
        model: transformers.PreTrainedModel,
        base: str,
        tokenizer: transformers.PreTrainedTokenizerBase | None = None,
    ) -> LoraAdapter:
        adapter = self._peft.adapt(model, base, tokenizer)
        for parameter in model.parameters():
            if not parameter.is_meta:
                empty = nn.Parameter(
                    torch.empty_like(parameter, device="meta"), parameter.requires_grad
                )
                torch.utils.swap_tensors(parameter, empty)
        object.__setattr__(adapter, "hidden", contextlib.nullcontext)
        return adapter


class UnloadedSource(CausalLM):
    """Weights that are never read: described, sharded, fake tensors."""

    def __init__(
        self,
        source: CausalLM,
        model_config: PretrainedConfig,
        fake: FakeTensorMode,
        held: MemoryTracker,
    ) -> None:
        vars(self).update(vars(source))
        self.dtype = self.stored_dtype(model_config)
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
            _give_memory(model, device)
            # the one that is read
            torch.empty(max(p.numel() for p in model.parameters()), device=device)
        return model.train()


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """As `Module.to_empty`, which cannot swap plain parameters that fake tensors remember."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model.to_empty(device=device)
        return
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    empty = torch.empty_like(tensor, device=device)
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
                held[name] = made[tensor]  # type: ignore[assignment]


class CountedAttention(VarlenAttention):
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
def fake_world(shape: MeshShape) -> Iterator[Mesh]:
    """Rank 0 of a process group in which nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.world_size)
    try:
        yield open_mesh(shape, GPU)
    finally:
        dist.destroy_process_group()
        clear_sharding_prop_cache()  # plans name the groups of this world


@contextlib.contextmanager
def as_on_a_gpu(held: MemoryTracker) -> Iterator[None]:
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

    def update(
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        copy: Tensor | None = None,
        **_: Any,
    ) -> None:
        moved = gradient.nbytes + 2 * sum(x.nbytes for x in (parameter, *state.values()))
        moved += 0 if copy is None else copy.nbytes
        held.work[held.part][Operation("update", 0.0, moved)] += 1

    make = torch.tensor

    def made_there(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """A constant: torch makes it on the host, of which "cpu:0" is another name to it."""
        made = make(*args, **kwargs)
        return made.to(device) if device is not None else made

    places = StridedShard.local_shard_size_and_offset

    def places_on_host(*args: Any, **kwargs: Any) -> Any:
        """Rows of a shard, which torch reads from a tensor: a fake one has no values."""
        with disable_current_modes():
            return places(*args, **kwargs)

    gather = fsdp_param_group.foreach_all_gather
    reduce = fsdp_param_group.foreach_reduce
    # cuDNN's version and the card would be asked for; the run's own choice is there again behind it
    without_cudnn = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with (
        sdpa_kernel(without_cudnn),
        patch.object(torch.UntypedStorage, "resize_", resize),
        patch.object(torch, "tensor", made_there),
        patch.object(StridedShard, "local_shard_size_and_offset", places_on_host),
        patch.object(fully_shard_module, "_get_device_from_mesh", lambda mesh: GPU),
        # there is no stream beside that of the operations
        patch.object(row_counts, "exchange_counts", row_counts.exchange_at_once),
        patch.object(fsdp_param_group, "foreach_all_gather", beside(gather)),
        patch.object(fsdp_param_group, "foreach_reduce", beside(reduce)),
        patch.object(adamw, "update", update),
    ):
        yield
