"""Experts of a mixture with each token's results summed by a gather: `model.experts=sorted_mm`, in
transformers' interface for functions of experts.

    sort the slots by expert -> gather -> product -> gate * routing weight -> product -> sum

A slot is a token's choice of one expert. transformers' `grouped_mm` weights the results, C wide,
and its backward pass adds into a token from all of its slots: by atomics in a compiled graph, in
any order and in bf16. Here routing weights meet the F channels between both products, and both
passes gather: forward and backward, a token's sum is over the rows that its slots were sorted to.
Nothing depends on an order of execution, so the bits repeat. Kept for the backward pass are the
tokens, what the first product made, and indices; the gathered tokens are gathered again.

Legend: T tokens, K slots of a token, S = T * K slots sorted by expert, E experts, C model dim, F
width of an expert, I and O the channels before and behind a product.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from automodel_lite.errors import ConfigError

SORTED_MM = "sorted_mm"
_ALIGNED = 8  # values of bf16 in the 16 bytes that rows of torch's grouped product are aligned to


def sorted_mm(
    module: nn.Module, hidden_TC: Tensor, experts_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Returns the weighted sum of each token's experts, [T, C].

    module  with the stacked weights and the flags of transformers' `use_experts_implementation`
    """
    own: Any = module
    num_slots = experts_TK.shape[-1]
    experts_TK = experts_TK.reshape(-1, num_slots)
    first = own.gate_up_proj if own.has_gate else own.up_proj
    second = own.down_proj
    dtype = first.dtype
    if torch.is_autocast_enabled(hidden_TC.device.type):  # of which grouped products do not know
        dtype = torch.get_autocast_dtype(hidden_TC.device.type)
    first = first.to(dtype)
    second = second.to(dtype)
    num_experts = first.shape[0]

    # 1. Sort slots by expert, and where each slot went. A stable sort repeats.
    expert_S, slot_S = experts_TK.reshape(-1).sort(stable=True)
    places = torch.arange(len(slot_S), device=slot_S.device)
    row_TK = torch.empty_like(slot_S).scatter(0, slot_S, places).view_as(experts_TK)
    token_S = slot_S // num_slots
    all_experts = torch.arange(num_experts, device=slot_S.device)
    ends_E = torch.searchsorted(expert_S, all_experts, right=True).to(torch.int32)

    # Slots of experts that other ranks have are numbered `num_experts`: they are sorted behind all
    # others, where products leave their rows as they find them.
    is_elsewhere_S = None
    if vars(own).get("_is_expert_parallel", True):  # older transformers does not tell
        is_elsewhere_S = expert_S >= num_experts
        expert_S = expert_S.clamp(max=num_experts - 1)
    routes = (token_S, row_TK, ends_E, is_elsewhere_S)

    # 2. The first product, of gathered tokens.
    bias = None
    if own.has_bias:
        bias_EO = own.gate_up_proj_bias if own.has_gate else own.up_proj_bias
        bias = bias_EO.to(dtype)
    inner_SO = _GatheredProduct.apply(
        hidden_TC.to(dtype), first, bias, expert_S, *routes, own.is_transposed
    )

    # 3. The gate times the routing weight, in one kernel where layers are compiled. The second
    # product is linear, so weights may come before it, and F is less than C; a norm in between is
    # not.
    weight_S = _Permuted.apply(weights_TK.reshape(-1), slot_S, row_TK, is_elsewhere_S)
    has_norm = vars(own).get("has_post_expert_norm", False)

    def gated(inner_SO: Tensor, weight_S: Tensor) -> Tensor:
        out_SF = own._apply_gate(inner_SO) if own.has_gate else own.act_fn(inner_SO)
        return (out_SF if has_norm else out_SF * weight_S[:, None]).to(dtype)

    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # what a graph's partitioner does by itself: keep what goes in, not what is in between
        inner_SF = checkpoint(
            gated, inner_SO, weight_S, use_reentrant=False, preserve_rng_state=False
        )
    else:
        inner_SF = gated(inner_SO, weight_S)

    # 4. The second product, and the sum over a token's slots.
    out_SC = _Product.apply(inner_SF, second, ends_E, own.is_transposed)
    if has_norm:
        out_SC = _cleared(out_SC, None if is_elsewhere_S is None else is_elsewhere_S[:, None])
        if own.has_bias:
            out_SC = out_SC + _Rows.apply(own.down_proj_bias.to(dtype), expert_S, ends_E)
        out_SC = own.post_expert_norm(out_SC) * weight_S[:, None]
    out_TC = _Summed.apply(out_SC, *routes)
    if own.has_bias and not has_norm:
        # A token's weight of each expert, none for those of other ranks. Dense, as it is E wide:
        # neither it nor its gradients are added up by index.
        chosen_TKE = experts_TK[..., None] == all_experts
        weights_TE = (chosen_TKE * weights_TK.reshape(-1, num_slots, 1)).sum(1)
        out_TC = out_TC + weights_TE.to(dtype) @ own.down_proj_bias.to(dtype)
    return out_TC.to(hidden_TC.dtype)


ALL_EXPERTS_FUNCTIONS.register(SORTED_MM, sorted_mm)


def use_experts(config: PretrainedConfig, experts: str) -> None:
    """Has a model of this config, built after it, compute its experts so."""
    config._experts_implementation = experts


def choose_experts(asked: str, lm: nn.Module, device: torch.device, key: str) -> str:
    """Returns the function of experts; `auto` is sorted_mm on a GPU, and transformers' choice on a
    CPU and for a model without experts in its interface.

    Raises ConfigError for one that cannot train this model here.
    """
    # the flags that `use_experts_implementation` gives to the experts of most families
    has_interface = any("has_gate" in vars(module) for module in lm.modules())
    is_gpu = device.type == "cuda"
    if asked == "auto":
        return SORTED_MM if has_interface and is_gpu else asked
    setting = f"{key}.experts={asked}"
    if not has_interface:
        raise ConfigError(
            f"{setting}: {type(lm).__name__} has no experts that are computed so: set "
            f"{key}.experts=auto."
        )
    if asked not in ("eager", *ALL_EXPERTS_FUNCTIONS.keys()):
        raise ConfigError(
            f"{setting}: transformers {transformers.__version__} has no such function: set "
            f"{key}.experts={SORTED_MM}."
        )
    if asked == "sonicmoe":
        if not is_gpu:
            raise ConfigError(f"{setting} needs a GPU: set {key}.experts={SORTED_MM}.")
        if not find_spec("kernels"):
            raise ConfigError(
                f"{setting} needs the package kernels: pip install kernels, or set "
                f"{key}.experts={SORTED_MM}."
            )
    return asked


# ---------------------------------------------- differentiable steps
class _GatheredProduct(torch.autograd.Function):
    """The first product. Keeps the tokens, not the S rows that are gathered of them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TC: Tensor,
        weight: Tensor,
        bias_EO: Tensor | None,
        expert_S: Tensor,
        token_S: Tensor,
        row_TK: Tensor,
        ends_E: Tensor,
        is_elsewhere_S: Tensor | None,
        is_transposed: bool,
    ) -> Tensor:
        # Of another type than what gathers here: a graph would take both gathers for one, and keep
        # the S rows from the forward to the backward pass.
        again_S = token_S.to(torch.int32)
        ctx.save_for_backward(hidden_TC, weight, again_S, row_TK, ends_E, is_elsewhere_S)
        ctx.is_transposed = is_transposed
        out_SO = _product(hidden_TC[token_S], _of_io(weight, is_transposed), ends_E)
        return out_SO if bias_EO is None else out_SO + bias_EO[expert_S]

    @staticmethod
    def backward(ctx: Any, grad_SO: Tensor) -> Any:
        hidden_TC, weight, again_S, row_TK, ends_E, is_elsewhere_S = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_SO = grad_SO.contiguous()
        grads: list[Tensor | None] = [None] * 9
        if needs_hidden:
            weight_OI = _of_io(weight, ctx.is_transposed).transpose(1, 2)
            grad_SC = _product(grad_SO, weight_OI, ends_E)
            grads[0] = _sum_slots(grad_SC, row_TK, is_elsewhere_S)
        if needs_weight:
            grads[1] = _weight_gradient(hidden_TC[again_S], grad_SO, ends_E, ctx.is_transposed)
        if needs_bias:
            grads[2] = _sums_of_experts(grad_SO, ends_E)
        return tuple(grads)


class _Product(torch.autograd.Function):
    """The second product."""

    @staticmethod
    def forward(
        ctx: Any, x_SI: Tensor, weight: Tensor, ends_E: Tensor, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x_SI, weight, ends_E)
        ctx.is_transposed = is_transposed
        return _product(x_SI, _of_io(weight, is_transposed), ends_E)

    @staticmethod
    def backward(ctx: Any, grad_SO: Tensor) -> Any:
        x_SI, weight, ends_E = ctx.saved_tensors
        grad_SO = grad_SO.contiguous()
        grad_x = None
        grad_weight = None
        if ctx.needs_input_grad[0]:
            weight_OI = _of_io(weight, ctx.is_transposed).transpose(1, 2)
            grad_x = _product(grad_SO, weight_OI, ends_E)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(x_SI, grad_SO, ends_E, ctx.is_transposed)
        return grad_x, grad_weight, None, None


class _Summed(torch.autograd.Function):
    """A token's sum over its slots, and its gradient in each of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x_SC: Tensor,
        token_S: Tensor,
        row_TK: Tensor,
        ends_E: Tensor,
        is_elsewhere_S: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(token_S)
        return _sum_slots(x_SC, row_TK, is_elsewhere_S)

    @staticmethod
    def backward(ctx: Any, grad_TC: Tensor) -> Any:
        (token_S,) = ctx.saved_tensors
        return grad_TC[token_S], None, None, None, None


class _Permuted(torch.autograd.Function):
    """Routing weights in the order of the sorted slots. For slots of other ranks' experts they have
    no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, slot_S: Tensor, row_TK: Tensor, is_elsewhere_S: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(row_TK, is_elsewhere_S)
        return weights[slot_S]

    @staticmethod
    def backward(ctx: Any, grad_S: Tensor) -> Any:
        row_TK, is_elsewhere_S = ctx.saved_tensors
        return _cleared(grad_S, is_elsewhere_S)[row_TK.reshape(-1)], None, None, None


class _Rows(torch.autograd.Function):
    """Each slot's row of its expert's vectors."""

    @staticmethod
    def forward(ctx: Any, vectors_EO: Tensor, expert_S: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        return vectors_EO[expert_S]

    @staticmethod
    def backward(ctx: Any, grad_SO: Tensor) -> Any:
        (ends_E,) = ctx.saved_tensors
        return _sums_of_experts(grad_SO.contiguous(), ends_E), None, None


# ---------------------------------------------- without gradients
def _of_io(weight: Tensor, is_transposed: bool) -> Tensor:
    """Returns stacked weights as [E, I, O]; most families have them as [E, O, I]."""
    return weight if is_transposed else weight.transpose(1, 2)


def _sum_slots(x_SC: Tensor, row_TK: Tensor, is_elsewhere_S: Tensor | None) -> Tensor:
    """Sums each token's rows, in fp32 at least."""
    if is_elsewhere_S is not None:
        x_SC = _cleared(x_SC, is_elsewhere_S[:, None])
    if torch.compiler.is_compiling():  # one kernel; that of a bag of embeddings stays another
        return x_SC[row_TK].sum(1)
    return F.embedding_bag(row_TK, x_SC, mode="sum")


def _cleared(x: Tensor, is_cleared: Tensor | None) -> Tensor:
    """Takes also what is not finite out of it: rows that no product has written."""
    return x if is_cleared is None else x.masked_fill(is_cleared, 0)


def _sums_of_experts(x_SO: Tensor, ends_E: Tensor) -> Tensor:
    """Sums the rows of each expert, [E, O]: a product with ones, in fp32 and in one order."""
    ones = x_SO.new_ones(len(x_SO), _ALIGNED)
    return _weight_gradient(ones, x_SO, ends_E, True)[:, 0]


def _is_grouped(*tensors: Tensor) -> bool:
    """Returns whether torch's grouped product takes these, compiled, too."""
    return all(x.dtype == torch.bfloat16 and x.shape[-1] % _ALIGNED == 0 for x in tensors)


def _product(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Multiplies each expert's rows by its matrix, [S, O]."""
    if _is_grouped(x_SI, weight_EIO):
        return F.grouped_mm(x_SI, weight_EIO, offs=ends_E)
    return _one_by_one(x_SI, weight_EIO, ends_E)


def _weight_gradient(x_SI: Tensor, grad_SO: Tensor, ends_E: Tensor, is_transposed: bool) -> Tensor:
    """Multiplies each expert's rows of two, [E, I, O] if `is_transposed` and else [E, O, I]."""
    one_SA, other_SB = (x_SI, grad_SO) if is_transposed else (grad_SO, x_SI)
    if _is_grouped(one_SA, other_SB):
        return F.grouped_mm(one_SA.t(), other_SB, offs=ends_E)
    return _gradient_one_by_one(one_SA, other_SB, ends_E)


@torch.library.custom_op("automodel_lite::experts_one_by_one", mutates_args=())
def _one_by_one(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """What torch's grouped product is for other dtypes: it has no compiled form for them."""
    out_SO = x_SI.new_zeros(len(x_SI), weight_EIO.shape[2])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            torch.mm(x_SI[start:end], weight_EIO[expert], out=out_SO[start:end])
        start = end
    return out_SO


@_one_by_one.register_fake
def _(x_SI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    return x_SI.new_empty(len(x_SI), weight_EIO.shape[2])


@torch.library.custom_op("automodel_lite::expert_gradients_one_by_one", mutates_args=())
def _gradient_one_by_one(one_SA: Tensor, other_SB: Tensor, ends_E: Tensor) -> Tensor:
    out_EAB = one_SA.new_zeros(len(ends_E), one_SA.shape[1], other_SB.shape[1])
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > start:
            torch.mm(one_SA[start:end].t(), other_SB[start:end], out=out_EAB[expert])
        start = end
    return out_EAB


@_gradient_one_by_one.register_fake
def _(one_SA: Tensor, other_SB: Tensor, ends_E: Tensor) -> Tensor:
    return one_SA.new_empty(len(ends_E), one_SA.shape[1], other_SB.shape[1])
