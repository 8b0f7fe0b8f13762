"""Puts a kernel under a Hugging Face model, through transformers' AttentionInterface, and what
other mixers need.

A registered attention name without a registered mask function makes transformers build no mask at
all. Documents reach the layers as keyword arguments of the model's forward, and attention from
there (attention/documents.py).

`attention=auto` picks the kernel for this device and this model, or one for each kind of layer, and
reports why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from automodel_lite.attention.documents import (
    IN_GRAPH,
    NOW,
    DecoderByRows,
    WithinDocuments,
    mixers_of,
    replace_forwards,
)
from automodel_lite.attention.kernel import (
    AttentionKernel,
    GraphKernel,
    ReasonedKernel,
    ReferenceAttention,
    over_ahead,
    over_tree,
)
from automodel_lite.attention.mixers.packed import PackedMixer
from automodel_lite.attention.positions import (
    length_dependent_rotations,
    refuse_rotations,
    scale_queries,
)
from automodel_lite.attention.rotations import RotationByDocument
from automodel_lite.attention.spec import (
    UNPACKED,
    AttentionSpec,
    config_value,
    layer_shapes,
    layer_window,
)
from automodel_lite.config.components import build, option
from automodel_lite.errors import ConfigError
from automodel_lite.thd import (
    AttentionInputs,
    AttentionOptions,
    Segments,
    TreeKeys,
)

# of attention=auto on CUDA, the fastest first; the reference is behind them
AUTO_KERNELS = ("varlen", "flex")
AUTO_OPTIONS = {"varlen": {"implementation": "fastest"}}


def choose_attention(
    kernel: AttentionKernel | None, specs: Sequence[AttentionSpec]
) -> tuple[AttentionKernel, str]:
    """The kernel, checked against what the model needs, or, for None, the first that supports it;
    and one sentence with the reason, to be printed.

    Off CUDA the reference; on CUDA varlen, with FlashAttention-3 or -4 where one is installed that
    this GPU runs, else flex (softcap, sinks, wide heads), else the reference. Layers of several
    kinds get the first kernel that supports each. Raises ConfigError for what `kernel` does not
    support.
    """
    if kernel is not None:
        for spec in specs:
            kernel.check(spec)
        return kernel, f"{kernel.name.removeprefix('thd_')}: as configured"
    if not specs:
        return ReferenceAttention(), "none: the model has no attention layers"
    if specs[0].device.type != "cuda":
        return (
            ReferenceAttention(),
            f"reference: the only packed kernel that trains on {specs[0].device.type}",
        )
    kernels = [
        build(option("attention", name), **AUTO_OPTIONS.get(name, {})) for name in AUTO_KERNELS
    ]
    kernels.append(ReferenceAttention())
    found = [first_able(kernels, spec) for spec in specs]
    if len({kernel for kernel, _ in found}) == 1:
        return found[0]
    reasons = [
        f"{spec.num_layers} layers with head dim {spec.head_dim} on {reason}"
        for spec, (_, reason) in zip(specs, found)
    ]
    by_dims = {
        (spec.head_dim, spec.value_head_dim): kernel for spec, (kernel, _) in zip(specs, found)
    }
    return KernelByKind(by_dims), "by kind of layer: " + " / ".join(reasons)


def first_able(
    kernels: Sequence[AttentionKernel], spec: AttentionSpec
) -> tuple[AttentionKernel, str]:
    """The first of `kernels` that supports `spec`, and why those before it do not; the last one
    supports everything.
    """
    refused = []
    for kernel in kernels[:-1]:
        try:
            kernel.check(spec)
        except ConfigError as error:
            refused.append(str(error))
        else:
            why = " ".join(refused)
            if not refused and isinstance(kernel, ReasonedKernel):
                why = kernel.reason
            return kernel, f"{kernel.name.removeprefix('thd_')}: {why}"
    return kernels[-1], f"reference: slow, but {' '.join(refused)}"


class KernelByKind:
    """One kernel for each kind of layer, distinguished by the dims of its heads: of queries, and of
    values.
    """

    name = "thd_by_kind"

    def __init__(self, by_dims: dict[tuple[int, int], AttentionKernel]) -> None:
        self.by_dims = by_dims

    def check(self, spec: AttentionSpec) -> None:
        """Does not raise: each kind has a kernel that supports it."""

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """See `AttentionKernel`."""
        inputs = AttentionInputs(q_THD, k_THD, v_THD, segments, options)
        return self._of(inputs)(*inputs)

    def block(self, inputs: AttentionInputs, causal: bool) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        return self._of(inputs).block(inputs, causal)

    def block_backward(
        self, inputs: AttentionInputs, *of_block: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel`."""
        return self._of(inputs).block_backward(inputs, *of_block)

    def attend_tree(self, inputs: AttentionInputs, tree: TreeKeys) -> Tensor:
        """See `TreeKernel`."""
        return over_tree(self._of(inputs), tree, is_cut=False)(*inputs)

    def attend_ahead(self, inputs: AttentionInputs, reach: Tensor) -> Tensor:
        """See `AheadKernel`."""
        return over_ahead(self._of(inputs), reach, None)(*inputs)

    def _of(self, inputs: AttentionInputs) -> Any:
        return self.by_dims[inputs.q.shape[2], inputs.v.shape[2]]


def install(model: transformers.PreTrainedModel, kernel: AttentionKernel) -> None:
    """Makes all attention layers of `model` run on `kernel`, and its other mixers document by
    document. A family that does not use AttentionInterface (transformers itself only warns) runs
    document by document as a whole, see `runs_by_rows`.
    """
    # The models inside it too hold the documents they are called with; rotations choose by each
    # token's document.
    replace_forwards(
        (x for x in model.modules() if isinstance(x, transformers.PreTrainedModel)), WithinDocuments
    )
    if rotations := [*length_dependent_rotations(model)]:
        replace_forwards(rotations, RotationByDocument)
    text = model.config.get_text_config()
    # what is known of a layer is read again: lengths may have been others
    for module in model.modules():
        vars(module).pop("packed_as", None)
    if any(shape.num_heads for shape in layer_shapes(text)):
        transformers.AttentionInterface.register(
            kernel.name, compilable(kernel, packed_attention(kernel))
        )
        # Of a composite, the language model alone: some towers look their attention up in a table
        # of their own.
        of_text = {
            key: kernel.name
            for key in model.config.sub_configs
            if config_value(model.config, key) is text
        }
        model.set_attn_implementation({"": kernel.name, **of_text} if of_text else kernel.name)
        if text._attn_implementation != kernel.name:
            refuse_rotations(model)
            replace_forwards([model.base_model.forward], DecoderByRows)
            return
    if mixers := [*mixers_of(model)]:
        replace_forwards(mixers, PackedMixer)


class PackedLayer(NamedTuple):
    """What its config says of a layer, read at its first forward: configs are slow to ask, layers
    many.
    """

    window: int | None
    chunk: int | None
    # it sees whole documents, with queries as they are: its attention may be part of a graph
    is_plain: bool


def compilable(
    kernel: AttentionKernel, attend: Callable[..., tuple[Tensor, None]]
) -> Callable[..., Any]:
    """What a compiled layer calls: `attend`, outside of its graph, or inside the operation of a
    `GraphKernel` for plain documents. A layer is called uncompiled first, as by the isolation
    probe, which makes all checks.
    """
    outside = torch.compiler.disable(attend)
    if not isinstance(kernel, GraphKernel):
        return outside

    def forward(
        module: Any, *qkv: Tensor, scaling: float | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        sizes = IN_GRAPH.sizes
        layer = getattr(module, "packed_as", None)
        if sizes is None or layer is None or not layer.is_plain:
            return outside(module, *qkv, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
        # as the operation's shapes promise for its results
        q, k, v = (x.contiguous() for x in _heads_last(*qkv[:3]))
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        capped = kwargs.get("softcap")
        options = AttentionOptions(scale, layer.window, capped, kwargs.get("s_aux"))
        cu = sizes[0]
        longest = sizes[1].shape[0]
        return kernel(q, k, v, Segments(cu, cu, longest, longest), options)[None], None

    return forward


def _heads_last(*qkv: Tensor) -> list[Tensor]:
    """[1, H, T, D] -> [T, H, D], in autocast's dtype: rotations leave queries and keys in fp32, and
    values in bf16. Kernels need one dtype (FlashAttention not fp32), and context parallelism sends
    half the bytes.
    """
    device = qkv[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return [x.to(dtype or x.dtype).squeeze(0).transpose(0, 1) for x in qkv]


def packed_attention(kernel: AttentionKernel) -> Callable[..., tuple[Tensor, None]]:
    """The kernel with the signature that transformers' attention layers call."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        # the model passes every keyword argument of its forward to every layer
        **of_other_layers: Any,
    ) -> tuple[Tensor, None]:
        """query [1, Hq, T, D], key, value [1, Hkv, T, D] -> ([1, T, Hq, Dv], None)."""
        documents = NOW.get()
        if documents is None:
            raise ConfigError(
                f"{type(module).__name__} got no documents: call the model with "
                "ThdBatch.model_inputs()."
            )
        _refuse_what_packing_cannot(module, query, attention_mask, dropout, is_causal)
        # What a layer is does not change: found at its first call.
        if "packed_as" not in vars(module):
            window, chunk = _window(module, sliding_window)
            is_plain = chunk is None and "floor_scale" not in vars(module)
            vars(module)["packed_as"] = PackedLayer(window, chunk, is_plain)
        window, chunk, is_plain = vars(module)["packed_as"]
        q, k, v = _heads_last(query, key, value)
        if not is_plain:
            q = scale_queries(module, q, documents.position_ids)
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        plan = documents.attention
        inputs = AttentionInputs(
            q, k, v, plan.cut(chunk), AttentionOptions(scale, window, softcap, s_aux)
        )
        # One of three kernels around the user's: where tokens see ahead (images, prefixes), where
        # documents branch, or the kernel itself; an exchange between ranks is around all of it.
        reach = plan.reach(window) if plan.ahead else None
        if reach is not None:
            attend = over_ahead(kernel, reach, plan.tree)
        elif plan.tree is not None:
            attend = over_tree(kernel, plan.tree, is_cut=chunk is not None)
        else:
            attend = kernel
        out = attend(*inputs) if plan.exchange is None else plan.exchange.attend(attend, inputs)
        return out[None], None

    return forward


def _refuse_what_packing_cannot(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise ConfigError(
            f"{name} brings a mask of shape {tuple(attention_mask.shape)} to packed attention, "
            "which takes its documents from ThdBatch.model_inputs(): this family builds masks of "
            f"its own: {UNPACKED}."
        )
    if query.shape[0] != 1:
        raise ConfigError(
            f"{name} got {query.shape[0]} rows: packed attention needs one stream of tokens."
        )
    if dropout:
        raise ConfigError(
            f"{name} uses attention dropout {dropout}: set model.config.attention_dropout=0."
        )
    # PaliGemma's, a mask away from bidirectional
    if is_causal is False or vars(module).get("is_causal") is False:
        raise ConfigError(f"{name} is not causal: packed attention is. {UNPACKED.capitalize()}.")


def _window(module: nn.Module, sliding_window: int | None) -> tuple[int | None, int | None]:
    """The window of this layer: what its attention call passes, or what its mask would have had
    (PhiMoE); its chunk.
    """
    expected, chunk = layer_window(module.config, module.layer_idx)  # type: ignore[arg-type]
    builds_masks = "create_sliding_window_causal_mask" in vars(sys.modules[type(module).__module__])
    if expected == sliding_window or (sliding_window is None and builds_masks):
        return expected, chunk
    raise ConfigError(
        f"{type(module).__name__}: the config gives layer {module.layer_idx} a sliding window of "
        f"{expected}, its attention call passes {sliding_window}, so the window would silently be "
        "lost: set model.config.sliding_window=null if no document is longer than it, or take "
        "another model."
    )
