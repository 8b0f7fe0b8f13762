"""The one signature of all attention kernels, what a model asks of them, and the reference kernel.

The reference is SDPA per document, on any device and in any dtype: the CPU default, and the twin that every other
kernel is tested against. No [T, T] mask exists at any time: at T = 4096 with 20 documents that is several times less
work (benchmarks/attention.py).

What a model asks is in its Hugging Face config. Configs have no common schema: a family that lacks a key lacks the
feature, so keys are looked up with a default here, and nowhere else.

Legend: T tokens, H heads (Hq of the queries, Hkv of keys and values), D head dim; L tokens of one segment (Lq queries,
Lk keys).
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import PretrainedConfig

from automodel_lite.errors import ConfigError


@dataclass(frozen=True)
class AttentionSpec:
    """What the attention layers of a model ask of a kernel.

    model_type     transformers' name of the family
    device, dtype  where and in what the queries arrive
    num_heads, num_kv_heads; head_dim, value_head_dim  (the two differ with latent attention); 0 without attention
    window         keys that a query of the narrowest sliding layer sees, its own included; None without such layers
    softcap        bound of the attention logits; None without
    sinks          True when each head has a learned extra logit
    own_exchange   True when the kernel itself must exchange between context-parallel ranks (mesh.cp_exchange=te)
    num_layers     layers of this kind
    others         what layers with other heads ask (Gemma 4: head dim 512 in one of six)
    """

    model_type: str
    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    own_exchange: bool = False
    num_layers: int = 0
    others: tuple[AttentionSpec, ...] = ()

    @property
    def kinds(self) -> tuple[AttentionSpec, ...]:
        """One for each kind of attention layer."""
        return (replace(self, others=()), *self.others)


class AttentionKernel(Protocol):
    """Packed attention: segment i of the queries attends to segment i of the keys.

    Causal, aligned bottom right: the last query of a segment sees its whole key segment. That one rule serves plain
    packing and context parallelism, where a rank's chunk of queries has the prefix of its document as keys.
    """

    name: str
    """As transformers knows it; must not contain sdpa, flash or flex_attention, which get checks of their own there."""

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError when this kernel cannot do what the model asks for."""

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv] -> [Tq, Hq, Dv].

        cu_q, cu_k  int32 [N + 1]
        window      visible keys, the query's own included; None sees all
        sinks       [Hq]
        A kernel that exchanges between context-parallel ranks by itself takes their group as `cp_group`.
        """


@runtime_checkable
class BlockKernel(Protocol):
    """A kernel that attends to one part of the keys at a time, as ring exchange needs it.

    Segment i of the queries sees all of segment i of the keys, or, `causal`, what lies at or before each query; the two
    have the same length then. The softmax of all parts together is that of their log-sum-exps.
    """

    def block(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        causal: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """The output over these keys alone [Tq, Hq, Dv], and the log-sum-exp of their logits, fp32 [Tq, Hq]."""

    def block_backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        causal: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v through these keys; `out_THD`, `lse_TH` and its gradient are those over all keys."""


def refuse(kernel: AttentionKernel, asked: str, cure: str) -> ConfigError:
    """The error for a model that asks `kernel` for something that it cannot do."""
    return ConfigError(f"attention={kernel.name.removeprefix('thd_')} cannot do {asked}: {cure}.")


def require_cuda(kernel: AttentionKernel, spec: AttentionSpec) -> None:
    """Raises ConfigError off CUDA."""
    if spec.device.type != "cuda":
        raise refuse(kernel, f"device={spec.device}", "it runs on CUDA only, take attention=reference")


def require_half(kernel: AttentionKernel, spec: AttentionSpec) -> None:
    """Raises ConfigError outside fp16 and bf16."""
    if spec.dtype not in (torch.float16, torch.bfloat16):
        cure = "set training.precision=bf16, or take attention=flex or attention=reference"
        raise refuse(kernel, f"dtype={spec.dtype}", cure)


def refuse_own_exchange(kernel: AttentionKernel, spec: AttentionSpec) -> None:
    """Raises ConfigError for mesh.cp_exchange=te on any other kernel."""
    if spec.own_exchange:
        raise refuse(kernel, "mesh.cp_exchange=te", "take attention=te, or mesh.cp_exchange=all_gather")


def require_blocks(kernel: AttentionKernel) -> None:
    """Raises ConfigError for mesh.cp_exchange=ring on a kernel without a log-sum-exp."""
    if not isinstance(kernel, BlockKernel):
        cure = "take attention=varlen, flex or reference, or mesh.cp_exchange=all_gather"
        raise refuse(kernel, "mesh.cp_exchange=ring", cure)


QUERY_BLOCK = 1024
"""Queries that share one explicit mask: bounds it to QUERY_BLOCK x keys for long documents."""

SHORT_TOKENS = 256
"""Keys up to which a CPU computes bf16 in fp32: oneDNN compiles a kernel for every new length, and packs its operands.
Forward and backward of 8 x 32 heads: 2.3 times faster at 150 tokens, 4 times for lengths not seen before; of 8 x 64
heads 0.76 times as fast at 512. The step of a small Llama on GSM8K: 1.34 times faster.
"""


class ReferenceAttention:
    """Scaled dot product attention, one call a document; all options, no limits but speed."""

    name = "thd_reference"

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError for mesh.cp_exchange=te; has no other limit."""
        refuse_own_exchange(self, spec)

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionKernel`."""
        q_lens = cu_q.diff().tolist()
        k_lens = q_lens if cu_k is cu_q else cu_k.diff().tolist()
        if len(set(zip(q_lens, k_lens))) == 1:  # rows of one length: one call for all of them
            q, k, v = (x.unflatten(0, (len(q_lens), -1)).transpose(1, 2) for x in (q_THD, k_THD, v_THD))
            out = _segment(q, k, v, scale, window, softcap, sinks).transpose(1, 2).flatten(0, 1)
            return out.contiguous()  # as the documents below: another layout is another graph of compiled layers
        # split, not slices: its backward is one concatenation, a slice's is a zero-filled [T, H, D]
        outs = []
        for parts in zip(q_THD.split(q_lens), k_THD.split(k_lens), v_THD.split(k_lens)):
            q, k, v = (x.transpose(0, 1)[None] for x in parts)
            if q.shape[2]:
                outs.append(_segment(q, k, v, scale, window, softcap, sinks)[0].transpose(0, 1))
        return torch.cat(outs)

    def block(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        causal: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`."""
        out = q_THD.new_empty(*q_THD.shape[:2], v_THD.shape[2])
        lse = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        for rows, keys, mask in _blocks(cu_q, cu_k, causal, q_THD.device):
            with torch.autocast(q_THD.device.type, enabled=False):
                q, k, v = _grouped(q_THD[rows], k_THD[keys], v_THD[keys])
                logits, _ = _logits(q, k, mask, scale, softcap)
                of_rows = logits.logsumexp(-1, keepdim=True)
                out[rows] = ((logits - of_rows).exp() @ v).flatten(0, 1).transpose(0, 1).to(out.dtype)
                lse[rows] = of_rows.flatten(0, 1).squeeze(-1).t()
        return out, lse

    def block_backward(
        self,
        grad_THD: Tensor,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        causal: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel`."""
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q_THD, k_THD, v_THD)]
        delta_TH = (grad_THD.float() * out_THD.float()).sum(-1)
        for rows, keys, mask in _blocks(cu_q, cu_k, causal, q_THD.device):
            with torch.autocast(q_THD.device.type, enabled=False):
                q, k, v = _grouped(q_THD[rows], k_THD[keys], v_THD[keys])
                logits, slope = _logits(q, k, mask, scale, softcap)
                grad, lse, delta = (
                    _by_group(x, k.shape[0]) for x in (grad_THD[rows], lse_TH[rows, :, None], delta_TH[rows, :, None])
                )
                weights = (logits - lse).exp()
                grad_logits = weights * (grad @ v.transpose(-1, -2) - delta) * slope * scale
                grads[0][rows] += (grad_logits @ k).flatten(0, 1).transpose(0, 1)
                grads[1][keys] += (grad_logits.transpose(-1, -2) @ q).sum(1).transpose(0, 1)
                grads[2][keys] += (weights.transpose(-1, -2) @ grad).sum(1).transpose(0, 1)
        return grads[0], grads[1], grads[2]


def _blocks(
    cu_q: Tensor, cu_k: Tensor, causal: bool, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Rows of at most QUERY_BLOCK queries, the rows of their keys, and which of those each may see (None = all)."""
    q_starts, k_starts = cu_q.tolist(), cu_k.tolist()
    for q_start, q_stop, k_start, k_stop in zip(q_starts, q_starts[1:], k_starts, k_starts[1:]):
        for start in range(q_start, q_stop, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, q_stop)
            if not causal:
                yield slice(start, stop), slice(k_start, k_stop), None
                continue
            rows, keys = slice(start - q_start, stop - q_start), slice(0, stop - q_start)
            mask = _visible(rows, keys, 0, None, device)
            yield slice(start, stop), slice(k_start, k_start + keys.stop), mask


def _by_group(x_THD: Tensor, num_kv_heads: int) -> Tensor:
    """[T, Hq, D] -> fp32 [Hkv, Hq / Hkv, T, D]."""
    return x_THD.float().transpose(0, 1).unflatten(0, (num_kv_heads, -1))


def _grouped(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp32: q [Hkv, Hq / Hkv, Lq, D], k, v [Hkv, 1, Lk, D]."""
    num_kv_heads = k_THD.shape[1]
    return _by_group(q_THD, num_kv_heads), _by_group(k_THD, num_kv_heads), _by_group(v_THD, num_kv_heads)


def _logits(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | float]:
    """Logits, -inf where `mask` hides a key, and the slope of the softcap."""
    logits = (q @ k.transpose(-1, -2)) * scale
    slope: Tensor | float = 1.0
    if softcap is not None:
        bounded = torch.tanh(logits / softcap)
        logits, slope = softcap * bounded, 1 - bounded**2
    return logits if mask is None else logits.masked_fill(~mask, float("-inf")), slope


def _segment(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One segment, or several of one length: q [B, Hq, Lq, D], k, v [B, Hkv, Lk, D] -> [B, Hq, Lq, Dv]."""
    lq, lk = q.shape[2], k.shape[2]
    sees_all = window is None or window >= lk
    grouped = q.shape[1] != k.shape[1]
    if softcap is None and sinks is None and sees_all and (lq == lk or lq == 1):
        if lk <= SHORT_TOKENS and q.device.type == "cpu" and q.dtype == torch.bfloat16:
            with torch.autocast("cpu", enabled=False):
                q, k, v = q.float(), k.float(), v.float()
                out = F.scaled_dot_product_attention(q, k, v, is_causal=lq == lk, scale=scale, enable_gqa=grouped)
            return out.to(torch.bfloat16)
        return F.scaled_dot_product_attention(q, k, v, is_causal=lq == lk, scale=scale, enable_gqa=grouped)
    if grouped and (softcap is not None or sinks is not None):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outs = []
    for rows, keys in _query_blocks(lq, lk, window):
        mask = _visible(rows, keys, lk - lq, window, q.device)
        qb, kb, vb = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(qb, kb, vb, attn_mask=mask, scale=scale, enable_gqa=grouped)
        else:
            with torch.autocast(q.device.type, enabled=False):  # which would take the fp32 products to bf16
                out = _softmax_attention(qb, kb, vb, mask, scale, softcap, sinks)
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2)


def _query_blocks(lq: int, lk: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, each with the range of keys that any of its queries sees."""
    shift = lk - lq
    for start in range(0, lq, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, lq)
        first = 0 if window is None else max(0, start + shift - window + 1)
        yield slice(start, stop), slice(first, stop + shift)


def _visible(rows: slice, keys: slice, shift: int, window: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys] of a block, True = may attend; query i sits on key i + shift."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None] + shift
    j = torch.arange(keys.start, keys.stop, device=device)[None]
    return j <= i if window is None else (j <= i) & (i - j < window)


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention written out in fp32, for the two options that SDPA lacks (Gemma-2's softcap, GPT-OSS's sinks)."""
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return (weights @ v.float()).to(v.dtype)


_ATTENTION_WORDS = ("attention", "hybrid")  # in the names of layer types whose layers attend; linear attention does not
PACKABLE_LAYERS = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention", "attention"),
        *("linear_attention", "mamba", "mamba2", "recurrent", "conv"),  # attention/documents.py
        *("hybrid", "hybrid_sliding"),  # both in one layer, or after it
        *("moe", "mlp", "dense", "sparse"),  # mix no tokens
    }
)
"""Kinds of layers that keep documents apart here. What a name does not tell, the probe does."""

ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
UNPACKED = "take another model, docs/models.md lists the families that can be packed"


def config_value(config: PretrainedConfig, key: str, default: Any = None) -> Any:
    """The config's value of `key`, or `default` for a family that has no such key (or leaves it None)."""
    value = getattr(config, key, default)
    return default if value is None else value


def layer_window(config: PretrainedConfig, layer_idx: int | None) -> int | None:
    """The sliding window, in keys, that the config gives to one layer; None for a layer that sees all.

    Raises ConfigError for a layer type that cannot be packed.
    """
    kinds = config_value(config, "layer_types")
    if kinds is not None and layer_idx is not None:
        kind = kinds[layer_idx]
        if kind not in PACKABLE_LAYERS:
            raise ConfigError(
                f"model_type={config.model_type}: layer {layer_idx} ({kind}) is not known to keep documents apart: "
                f"{UNPACKED}."
            )
        return config.sliding_window if kind in ("sliding_attention", "hybrid_sliding") else None
    if not config_value(config, "use_sliding_window", True):
        return None
    return config_value(config, "sliding_window")


def layer_chunk(config: PretrainedConfig, layer_idx: int | None) -> int | None:
    """Tokens of a chunk in a layer of chunked attention (Llama 4), which sees its own chunk only; None elsewhere."""
    kinds = config_value(config, "layer_types")
    if kinds is None or layer_idx is None or kinds[layer_idx] != "chunked_attention":
        return None
    chunk: int | None = config_value(config, "attention_chunk_size")
    return chunk


@dataclass(frozen=True)
class LayerShape:
    """Attention of one decoder layer; `num_heads` is 0 in a layer without (state space, convolution, linear)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    window: int | None = None  # keys that a query sees; None = all
    state: int = 0  # values that a layer without attention reads and writes for every token; 0 = none, or not known


def layer_shapes(model_config: PretrainedConfig) -> list[LayerShape]:
    """Of each layer; families name their sizes in several ways and may give each layer its own."""
    text = model_config.get_text_config()
    return [_layer_shape(text, layer) for layer in range(config_value(text, "num_hidden_layers", 0))]


def _layer_shape(text: PretrainedConfig, layer: int) -> LayerShape:
    config = text.per_layer_config[layer]
    kinds = config_value(config, "layer_types")
    kind = "full_attention" if kinds is None else kinds[layer % len(kinds)]
    is_sliding = "sliding" in kind or "chunked" in kind

    def value(key: str, default: Any) -> Any:
        found = config_value(config, key, default)
        if is_sliding:
            found = config_value(config, f"swa_{key}", found)
        return found[layer] if isinstance(found, list | tuple) else found

    num_heads = value("num_attention_heads", 0)
    if not num_heads or kind == "linear_attention" or not any(word in kind for word in _ATTENTION_WORDS):
        return LayerShape(0, 0, 0, 0, state=_state_size(config))
    head_dim = value("head_dim", config.hidden_size // num_heads)
    value_head_dim = value("v_head_dim", head_dim)
    if config_value(config, "kv_lora_rank") is not None:  # latent attention: keys are wider than values
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    window = None
    if is_sliding or (kinds is None and config_value(config, "use_sliding_window", True)):
        window = value("sliding_window", value("attention_chunk_size", None))
    num_kv_heads = 1 if value("multi_query", False) else value("num_key_value_heads", num_heads)
    return LayerShape(num_heads, num_kv_heads, head_dim, value_head_dim, window)


_STATES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),  # gated delta rules (Qwen3-Next)
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),  # Bamba, GraniteMoeHybrid, Falcon-H1
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),  # Nemotron-H
    ("mamba_expand", "hidden_size", "mamba_d_state"),  # Jamba, Zamba 2
    ("num_heads", "head_dim", "state_size"),  # Mamba 2
    ("intermediate_size", "state_size"),  # Mamba
)


def _state_size(config: PretrainedConfig) -> int:
    for names in _STATES:
        sizes = [config_value(config, name) for name in names]
        if all(isinstance(size, int) for size in sizes):
            return math.prod(sizes)
    return 0


def has_attention(config: PretrainedConfig) -> bool:
    """False for a family without attention layers (Mamba), of a text config."""
    return any(shape.num_heads for shape in layer_shapes(config))


def attention_spec(
    model_config: PretrainedConfig, device: torch.device | str, dtype: torch.dtype, own_exchange: bool = False
) -> AttentionSpec:
    """What a model of this config will ask of its attention kernel: in most layers, and within it in the others.

    own_exchange  True for mesh.cp_exchange=te with mesh.cp > 1
    Raises ConfigError for layers that cannot be packed, and for attention dropout, which no packed kernel has.
    """
    config = model_config.get_text_config()
    for key in ATTENTION_DROPOUTS:
        if dropout := config_value(config, key, 0.0):
            raise ConfigError(
                f"model_type={config.model_type} has {key}={dropout}, which packed kernels do not do: set "
                f"model.config.{key}=0."
            )
    narrowest: dict[LayerShape, int | None] = {}
    counts: Counter[LayerShape] = Counter()
    for layer, shape in enumerate(layer_shapes(config)):
        window = layer_window(config, layer)
        if shape.num_heads:
            kind = replace(shape, window=None)
            counts[kind] += 1
            narrowest[kind] = min((w for w in (narrowest.get(kind), window) if w is not None), default=None)
    kinds = [
        AttentionSpec(
            model_type=config.model_type,
            device=torch.device(device),
            dtype=dtype,
            num_heads=kind.num_heads,
            num_kv_heads=kind.num_kv_heads,
            head_dim=kind.head_dim,
            value_head_dim=kind.value_head_dim,
            window=narrowest[kind],
            softcap=config_value(config, "attn_logit_softcapping"),
            sinks=passes_sinks(config),
            own_exchange=own_exchange,
            num_layers=num_layers,
        )
        for kind, num_layers in counts.most_common()
    ]
    if not kinds:
        return AttentionSpec(config.model_type, torch.device(device), dtype, 0, 0, 0, 0)
    return replace(kinds[0], others=tuple(kinds[1:]))


def passes_sinks(config: PretrainedConfig) -> bool:
    """Does any attention of this family pass sinks to its kernel? Of a text config; looked up in transformers' code."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        return False
    module = sys.modules[model_class.__module__]
    forwards = [
        vars(cls)["forward"] for cls in vars(module).values() if inspect.isclass(cls) and "forward" in vars(cls)
    ]
    constants = [x for forward in forwards for x in inspect.unwrap(forward).__code__.co_consts]
    return any("s_aux" in names for names in constants if isinstance(names, tuple))  # of arguments passed by name
