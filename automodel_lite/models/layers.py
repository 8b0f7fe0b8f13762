"""Finds the decoder layers of a model, and applies recomputation and compilation to them.

A layer's `forward` is replaced on the instance, so parameter names stay as they are in checkpoints
and exports, and FSDP's hooks stay outside. The order is checkpoint(compile(layer)): in the reverse
order dynamo meets the graph break of attention inside a checkpoint, gives up on the frame and
silently runs it eagerly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from automodel_lite import compat
from automodel_lite.attention.documents import IN_GRAPH, NOW, WithContext, layer_lists
from automodel_lite.config.model_files import SCORES
from automodel_lite.errors import ConfigError
from automodel_lite.graphs import backend_of, strict_graphs

Found = TypeVar("Found")

_ATTENTIONS = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
)
# a product's result is given on as its `_unsafe_view`, whose changes torch counts
_KEPT_NAMES = (
    *("mm", "addmm", "bmm", "_unsafe_view"),
    *(f"_scaled_dot_product_{name}" for name in _ATTENTIONS),
)
KEPT_OPS = frozenset(getattr(torch.ops.aten, name).default for name in _KEPT_NAMES)
"""Selective checkpointing keeps the results of these; norms, rotations and activations are cheap to
repeat.
"""
# of torch's varlen_attn and the flash-attn package
_KEPT_NAMESPACES = frozenset({"torch_attn", "flash_attn"})


def recompute_layers(layers: list[nn.Module], how: str, every_layers: int) -> None:
    """Replaces the forward of every n-th layer.

    how   none | full (only the layer's input is kept) |
          selective (results of matrix products and attention are kept) |
          offload (full, with the input in host memory until the backward pass)
    """
    if how == "none":
        return
    # The first layers, too: their inputs are kept for the longest time.
    for layer in layers[::every_layers]:
        layer.forward = Recomputed(layer.forward, how)  # type: ignore[method-assign]


class Recomputed:
    """A layer's forward whose results the backward pass computes again, but for what `how` keeps
    (`recompute_layers`).
    """

    def __init__(self, forward: Callable[..., Any], how: str) -> None:
        functools.update_wrapper(self, forward)  # and takes its attributes over
        self.forward = forward
        self.how = how
        self.contexts: dict[str, Any] = {}
        if how == "selective":
            self.contexts["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, _policy
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # Entered outside the checkpointed region, the hooks see what the region is given, the
        # layer's input; what is computed inside is not kept.
        moved = saved_tensors_hooks(to_host, from_host) if self.how == "offload" else nullcontext()
        with moved:
            return WithContext(checkpoint)(
                self._repeated, FirstRun(), *args, use_reentrant=False, **self.contexts, **kwargs
            )

    def _repeated(self, first: FirstRun, *args: Any, **kwargs: Any) -> Any:
        first.begin()
        _FIRST_RUN.set(first)  # in the context of this layer's runs (WithContext)
        try:
            return self.forward(*args, **kwargs)
        except RuntimeError as error:
            if "has been mutated" not in str(error):
                raise
            raise ConfigError(
                f"training.activation_checkpointing={self.how} keeps results of products, and this "
                "model's layers change them in place: set full or none."
            ) from None


class FirstRun:
    """What a layer's first run found out and its recomputation takes from it, in order."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._num_taken = 0

    def begin(self) -> None:
        self._num_taken = 0

    def take(self, find: Callable[[], Any]) -> Any:
        if self._num_taken == len(self._found):
            self._found.append(find())
        self._num_taken += 1
        return self._found[self._num_taken - 1]


_FIRST_RUN: ContextVar[FirstRun | None] = ContextVar("first_run", default=None)


def once(find: Callable[[], Found]) -> Found:
    """Returns what `find` returns: in a layer that is recomputed, what it returned in the first
    run. For what costs a wait, or has to be the same; it is kept until the backward pass, so it has
    no gradient.
    """
    first = _FIRST_RUN.get()
    return find() if first is None else first.take(find)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = op in KEPT_OPS or op.namespace in _KEPT_NAMESPACES
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


KEPT_FRAC = 0.5
"""Of what a graph would keep for its backward pass, with selective recomputation; its products are
the last to go.
"""


def compile_layers(
    layers: list[nn.Module],
    backend: str = "inductor",
    kept_frac: float = 1.0,
    after: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Compiles each layer's forward, with its attention if that is a `GraphKernel`, else without it
    and the boundaries of the documents. Packs of other documents need no new graph: one too many is
    an error, never a return to eager.

    kept_frac  of what each graph would keep for its backward pass; the partitioner chooses what is
               computed again. For the whole process, as graphs are made when shapes come
    after      called after each use of a graph, outside of it
    Returns what takes it back, and what was done to the layers since.
    """
    strict_graphs()
    compat.functorch_config.activation_memory_budget = kept_frac
    plain: list[tuple[Any, Any]] = [(layer, layer.forward) for layer in layers]
    for layer, forward in plain:
        layer.forward = _with_sizes(torch.compile(forward, backend=backend_of(backend)), after)

    def undo() -> None:
        for layer, forward in plain:
            layer.forward = forward

    return undo


def _with_sizes(compiled: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        documents = NOW.get()
        IN_GRAPH.sizes = documents.attention.sizes if documents else None
        try:
            return compiled(*args, **kwargs)
        finally:
            IN_GRAPH.sizes = None
            after()

    return forward


def has_fp8(model: nn.Module) -> bool:
    """Returns whether linear layers are torchao's (models/fp8.py), whose products round to fp8."""
    return any(type(module).__name__ == "Float8Linear" for module in model.modules())


def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Copies a tensor as torch's `save_on_cpu` does, which waits for the device at every copy; here
    the copy waits its turn on the device.
    """
    kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return tensor.device, kept.copy_(tensor, non_blocking=True)


def from_host(kept: tuple[torch.device, Tensor]) -> Tensor:
    """Copies a tensor back to the device, when the layer is recomputed."""
    device, tensor = kept
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)


def text_decoder(lm: nn.Module) -> nn.Module:
    """Returns the module that turns token ids into hidden states: of a composite (vision-language)
    model its language model alone, without the towers of the other senses.
    """
    assert isinstance(lm, transformers.PreTrainedModel)
    # Families disagree on what a decoder is: with or without head, the model itself, or one of its
    # towers.
    found = lm.get_decoder()
    if not layer_lists(found):  # ModernBERT's `decoder` is its output head
        found = lm.base_model
    if found is lm:  # Llama4ForCausalLM takes itself for its base
        return found.model
    has_head = (
        isinstance(found, transformers.PreTrainedModel)
        and found.get_output_embeddings() is not None
    )
    # a causal LM with its head, inside a composite
    return text_decoder(found) if has_head else found


def with_head(lm: nn.Module) -> transformers.PreTrainedModel:
    """Returns the model that makes logits of hidden states: of a composite that does not (Nemotron
    Omni), the causal LM inside it. One with a score head is it itself.
    """
    if has_score_head(lm):
        assert isinstance(lm, transformers.PreTrainedModel)
        return lm
    models = (module for module in lm.modules() if isinstance(module, transformers.PreTrainedModel))
    return next(model for model in models if model.get_output_embeddings() is not None)


def has_score_head(lm: nn.Module) -> bool:
    """Returns whether a model gives a document scores in place of tokens their likelihoods."""
    return type(lm).__name__.endswith(SCORES)


def output_head(lm: nn.Module) -> Any:
    """Returns the layer that makes logits of hidden states."""
    if has_score_head(lm):
        return lm.score
    return with_head(lm).get_output_embeddings()


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor that may be sharded: then every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def decoder_layers(lm: nn.Module) -> list[nn.Module]:
    """Returns the language model's layers, in forward order: of its outermost lists the one as long
    as the config says, else the first, and those of the same kind beside it. Raises ValueError
    without one.
    """
    decoder = text_decoder(lm)
    # Outermost lists: those inside a layer (experts, heads) are not layers.
    lists = layer_lists(decoder)
    if not lists:
        raise ValueError(f"{type(lm).__name__} has no list of layers.")
    config: Any = decoder.config
    expected = getattr(config.get_text_config(), "num_hidden_layers", None)
    chosen = next((layers for layers in lists if len(layers) == expected), lists[0])
    alike = [layers for layers in lists if type(layers[0]) is type(chosen[0])]
    found = [layer for layers in alike for layer in layers]
    return found + _heads_beside(lm)


def _heads_beside(lm: nn.Module) -> list[nn.Module]:
    """Returns what predicts further tokens outside the decoder (models/mtp.py): one more layer."""
    return [module for name, module in lm.named_children() if name == "mtp"]


def has_experts(lm: nn.Module) -> bool:
    """Returns whether the model computes experts by one of transformers' implementations."""
    return any("Experts" in type(module).__name__ for module in lm.modules())


def towers(lm: nn.Module) -> list[nn.Module]:
    """Returns what text does not meet in a composite: encoders of images and sound, projections.
    What other models have beside their layers is of text: ModernBERT's head before its output
    embedding.
    """
    assert isinstance(lm, transformers.PreTrainedModel)
    if lm.config.get_text_config() is lm.config:
        return []
    # Walks down only where text and other senses meet: a child without any part of the text is a
    # tower as a whole.
    of_text = {
        text_decoder(lm),
        output_head(lm),
        lm.get_input_embeddings(),
        *_heads_beside(lm),
    }
    found = []
    stack: list[nn.Module] = [lm]
    while stack:
        for child in stack.pop().children():
            if child in of_text:
                continue
            # a list has no forward that FSDP could gather for
            if of_text.isdisjoint(child.modules()) and not isinstance(child, nn.ModuleList):
                found += [child] if next(child.parameters(), None) is not None else []
            else:
                stack.append(child)
    return found


def freeze_towers(lm: nn.Module, dtype: torch.dtype) -> None:
    """Freezes what text does not meet, in place; the weights of towers are held in `dtype`, that
    of their checkpoint. Frequencies of rotations stay what they are: those of Llama 4 are complex.
    """
    decoder = text_decoder(lm)
    meets_text = [module for module in lm.modules() if decoder in module.modules()]
    for tower in towers(lm):
        tower.requires_grad_(False)
        kept = tower.state_dict()
        for name, tensor in [*tower.named_parameters(), *tower.named_buffers()]:
            if tensor.is_floating_point() and name in kept:
                tensor.data = tensor.data.to(dtype)
        # what a composite holds by itself mixes its towers' outputs: text does not meet that either
        for module in meets_text:
            if module is not decoder:
                for parameter in module.parameters(recurse=False):
                    parameter.requires_grad_(False)


def cast_weights(
    model: transformers.PreTrainedModel, dtype: torch.dtype, are_trained: bool
) -> None:
    """Casts the weights that are trained, or that are frozen and need no fp32 master, in place.
    Quantized ones stay as they are, and buffers, such as the frequencies of rotations, in fp32.

    On the meta device a module that is trained as a copy keeps fp32: the copy's masters are made of
    it when it is loaded.
    """
    for name, parameter in model.named_parameters():
        is_source = parameter.is_meta and ".original_module." in name
        if (
            parameter.requires_grad == are_trained
            and parameter.is_floating_point()
            and not is_source
        ):
            parameter.data = parameter.data.to(dtype)
