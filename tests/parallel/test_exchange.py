"""The exchanges of one attention layer: gradients of one process, broken variants that are noticed, no waits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.spec import LayerShape
from automodel_lite.errors import ConfigError
from automodel_lite.parallel import exchange as exchanges
from automodel_lite.parallel.context_parallel import attention_plan, shard_indices
from automodel_lite.parallel.exchange import choose_exchange
from automodel_lite.thd import AttentionInputs, AttentionOptions
from tests.attention.families import documents, stream
from tests.ranks import run_ranks


class AllGatherWithoutReduceScatter(torch.autograd.Function):
    """The classical bug: each rank keeps its own gradient of its own rows. The loss stays right."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
        exchanges.all_gather_rows(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


def layer_errors(
    rank: int, cp: int, exchange: str, broken: bool, num_kv_heads: int, changes: dict[str, Any]
) -> dict[str, float]:
    """Largest differences of this rank's part from one process: output, and gradients of q, k, v and sinks."""
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    if broken:
        exchanges.AllGatherRows = AllGatherWithoutReduceScatter  # type: ignore[misc,assignment]
    torch.manual_seed(0)
    batch = stream(documents([9, 30, 1, 17]), 2 * cp)
    total = len(batch.input_ids)
    drawn = partial(torch.randn, dtype=torch.float64)
    q, k, v = (drawn(total, heads, 8) for heads in (8, num_kv_heads, num_kv_heads))
    sinks, weight = drawn(8), drawn(total, 8, 8)
    kernel = ReferenceAttention()

    def attend(rows: torch.Tensor, plan: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        leaves = [x[rows].clone().requires_grad_() for x in (q, k, v)] + [
            sinks.clone().requires_grad_()
        ]
        how = plan.segments, AttentionOptions(**{"scale": 0.25} | changes, sinks=leaves[3])
        if plan.exchange is None:
            out = kernel(*leaves[:3], *how)
        else:
            out = plan.exchange.attend(kernel, AttentionInputs(*leaves[:3], *how))
        (out * weight[rows]).sum().backward()
        return out.detach(), {name: x.grad for name, x in zip(("q", "k", "v", "sinks"), leaves)}

    want, want_grads = attend(torch.arange(total), batch.attention)
    mine = shard_indices(batch.cu_seqlens_padded, cp, rank)
    out, grads = attend(mine, attention_plan(batch, mesh.get_group(), cp, rank, exchange))
    dist.all_reduce(grads["sinks"])
    errors = {
        name: float((grads[name] - want_grads[name][mine]).abs().max()) for name in ("q", "k", "v")
    }
    errors["sinks"] = float((grads["sinks"] - want_grads["sinks"]).abs().max())
    return errors | {"out": float((out - want[mine]).abs().max())}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "ring"])
def test_a_layer_equals_one_process(exchange: str, num_kv_heads: int) -> None:
    for errors in run_ranks(layer_errors, 2, exchange, False, num_kv_heads, {}):
        assert max(errors.values()) < 1e-12, errors


def test_a_dropped_reduce_scatter_is_noticed() -> None:
    """The output is right to the last digit, the gradients of keys and values are not."""
    for errors in run_ranks(layer_errors, 2, "all_gather", True, 2, {}):
        assert errors["out"] < 1e-12
        assert min(errors["k"], errors["v"]) > 1e-2


class CountSent(TorchDispatchMode):
    """Bytes that leave this rank by collectives over `cp` ranks."""

    def __init__(self, cp: int) -> None:
        super().__init__()
        self.cp, self.sent = cp, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_allgather_base_" in name:
            self.sent += args[1].nbytes * (self.cp - 1)
        elif "_reduce_scatter_base_" in name:
            self.sent += args[1].nbytes * (self.cp - 1) // self.cp
        elif "alltoall_base_" in name:
            # ring: all of it to one rank; else equal parts, one of them the rank's own
            _, sent, _, to_ranks, *_ = args
            self.sent += sent.nbytes if to_ranks else sent.nbytes * (self.cp - 1) // self.cp
        else:
            assert not name.startswith("c10d"), name
        return func(*args, **(kwargs or {}))


def bytes_of_a_layer(rank: int, cp: int, exchange: str) -> tuple[int, int]:
    """Sent by the forward and by the backward of 8 heads over 2 of keys and values, 8 wide."""
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    batch = stream(documents([9, 30, 1, 17]), 2 * cp)
    plan = attention_plan(batch, mesh.get_group(), cp, rank, exchange)
    rows = len(batch.input_ids) // cp
    q, k, v = (torch.randn(rows, heads, 8, requires_grad=True) for heads in (8, 2, 2))
    assert plan.exchange is not None
    with CountSent(cp) as forward:
        out = plan.exchange.attend(
            ReferenceAttention(), AttentionInputs(q, k, v, plan.segments, AttentionOptions(0.25))
        )
    with CountSent(cp) as backward:
        out.sum().backward()
    return forward.sent, backward.sent


def sent_bytes(exchange: str, num_tokens: int, cp: int) -> tuple[int, int]:
    """Returns the bytes that leave a rank in the forward and in the backward pass: fp32, 8 heads, 2 of keys, of dim 8.

    num_tokens  of the whole stream
    """
    own = 4 * num_tokens // cp
    if exchange == "all_to_all":
        # where ranks outnumber the key heads, each head is sent to several of them
        kv_heads = max(2, cp)
        traded = own * (8 + kv_heads) * (8 + 8) * (cp - 1) // cp
        return traded, traded
    gathered = own * 2 * (8 + 8) * (cp - 1)
    # the ring's gradients travel with the keys and values that they are of
    return gathered, gathered * (2 if exchange == "ring" else 1)


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "ring"])
@pytest.mark.parametrize("cp", [2, 4])
def test_the_bytes_that_are_sent_are_those_of_the_formula(cp: int, exchange: str) -> None:
    num_tokens = len(stream(documents([9, 30, 1, 17]), 2 * cp).input_ids)
    want = sent_bytes(exchange, num_tokens, cp)
    assert run_ranks(bytes_of_a_layer, cp, exchange) == [want] * cp


class CountWaits(TorchDispatchMode):
    """Counts the operations that make the host wait for the device."""

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "is_nonzero",
        "equal.default",
        "_unique",
    )

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(waiting in name for waiting in self.WAITING):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


def waits_of_a_layer(rank: int, cp: int, exchange: str) -> list[str]:
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    batch = stream(documents([9, 30, 1, 17]), 2 * cp)
    plan = attention_plan(batch, mesh.get_group(), cp, rank, exchange)
    rows = len(batch.input_ids) // cp
    q, k, v = (torch.randn(rows, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    assert plan.exchange is not None
    with CountWaits() as counted:
        out = plan.exchange.attend(
            NoAttention(), AttentionInputs(q, k, v, plan.segments, AttentionOptions(0.25))
        )
        out.sum().backward()
    return counted.waits


class NoAttention:
    """Touches all tensors and looks into none."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *how: Any) -> Any:
        return q * (k.sum() + v.sum())

    def block(self, inputs: AttentionInputs, causal: bool) -> Any:
        return self(*inputs), inputs.q.sum(2)

    def block_backward(self, inputs: AttentionInputs, *of_block: Any) -> Any:
        return inputs[:3]


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "ring"])
def test_the_exchange_never_waits_for_the_device(exchange: str) -> None:
    assert run_ranks(waits_of_a_layer, 2, exchange) == [[], []]


def test_the_counter_of_waits_can_count() -> None:
    with CountWaits() as counted:
        torch.ones(3).sum().item()
        torch.ones(3).nonzero()
    assert len(counted.waits) == 2


@pytest.mark.parametrize(("cp", "heads", "kv_heads"), [(3, 4, 4), (4, 4, 3)], ids=str)
def test_heads_that_cannot_be_dealt_out(cp: int, heads: int, kv_heads: int) -> None:
    with pytest.raises(ConfigError, match=f"must divide the {heads} query heads"):
        choose_exchange(
            "all_to_all", ReferenceAttention(), [LayerShape(heads, kv_heads, 8, 8)], 64, cp, 4
        )
