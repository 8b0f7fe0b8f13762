"""What is refused before a context-parallel run trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.spec import LayerShape, layer_shapes
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.context_parallel import (
    check_context_parallel,
    check_same_batch,
)
from automodel_lite.parallel.exchange import choose_exchange
from automodel_lite.parts.kernels.varlen import VarlenAttention
from tests.attention.families import BASE, build, documents, stream
from tests.ranks import run_ranks


def test_heads_must_divide_for_all_to_all() -> None:
    config = LlamaConfig(**BASE | {"num_attention_heads": 6, "hidden_size": 96})
    with pytest.raises(ConfigError, match="must divide the 6 query heads"):
        choose_exchange("all_to_all", ReferenceAttention(), layer_shapes(config), 64, 4, 2)
    assert choose_exchange("all_gather", ReferenceAttention(), layer_shapes(config), 64, 4, 2) == (
        "all_gather",
        "",
    )


WIDE = [LayerShape(num_heads=32, num_kv_heads=8, head_dim=128, value_head_dim=128)] * 32


CHOICES = {
    "it sends less": (WIDE, 2**17, 8, "all_to_all", "it sends 0.62 x the bytes of an all-gather"),
    "short packs, few ranks": (
        WIDE,
        2**13,
        4,
        "all_gather",
        "it holds 0.031 GiB of keys and values in each layer",
    ),
    "one kv head of 16": (
        [LayerShape(16, 1, 128, 128)],
        2**15,
        4,
        "all_gather",
        "it holds 0.016 GiB",
    ),
    "heads that do not divide": (
        [LayerShape(6, 3, 64, 64)],
        2**15,
        4,
        "all_gather",
        "it holds 0.023 GiB",
    ),
    "much to hold, heads that do not divide": (
        [LayerShape(20, 10, 128, 128)],
        2**20,
        8,
        "ring",
        "an all-gather would",
    ),
    "no attention": ([LayerShape(0, 0, 0, 0)], 2**15, 4, "all_gather", "it holds 0 GiB"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_exchange_that_is_taken(case: str) -> None:
    layers, num_tokens, cp, name, why = CHOICES[case]
    chosen, reason = choose_exchange("auto", ReferenceAttention(), layers, num_tokens, cp, 2)
    assert chosen == name
    assert reason.startswith(why)


def test_a_kernel_without_a_log_sum_exp_has_no_ring() -> None:
    whole = VarlenAttention()
    only_whole = type(
        "OnlyWhole", (), {"name": "thd_whole", "check": whole.check, "__call__": whole.__call__}
    )()
    layers, num_tokens, cp, *_ = CHOICES["much to hold, heads that do not divide"]
    assert choose_exchange("auto", only_whole, layers, num_tokens, cp, 2)[0] == "all_gather"
    with pytest.raises(
        ConfigError,
        match=r"attention=whole does not support mesh\.cp_exchange=ring: use attention=varlen",
    ):
        choose_exchange("ring", only_whole, layers, num_tokens, cp, 2)
    assert choose_exchange("ring", whole, layers, num_tokens, cp, 2) == ("ring", "")


def read_alike(rank: int, cp: int, differ: str) -> str:
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    batch = stream(documents([9, 30]), 2 * cp)
    if rank == 1 and differ == "tokens":
        batch = replace(batch, input_ids=batch.input_ids.flip(0))
    if rank == 1 and differ == "labels":
        batch = replace(batch, labels=batch.labels.roll(1))
    try:
        check_same_batch(batch, mesh)
    except ConfigError as error:
        return str(error)
    return "alike"


@pytest.mark.parametrize("differ", ["nothing", "tokens", "labels"])
def test_ranks_must_read_the_same_packs(differ: str) -> None:
    for answer in run_ranks(read_alike, 2, differ):
        assert (answer == "alike") == (differ == "nothing")
        assert answer == "alike" or "read different packs" in answer


class MixesNeighbors(torch.nn.Module):
    """A model whose tokens also see their neighbor in the local stream: wrong at the edge of every chunk."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, **inputs: object) -> object:
        out = self.model(**inputs)
        out.logits = out.logits + out.logits.roll(1, 1)
        return out


def exactness(rank: int, cp: int, exchange: str, mixes: bool) -> str:
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    model = build("llama")
    install(model, ReferenceAttention())
    try:
        check_context_parallel(MixesNeighbors(model) if mixes else model, mesh, exchange)
    except ConfigError as error:
        return str(error)
    return "exact"


@pytest.mark.parametrize("mixes", [False, True], ids=["attention only", "mixes neighbors"])
@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "ring"])
def test_the_start_up_check_finds_tokens_mixed_elsewhere(exchange: str, mixes: bool) -> None:
    for answer in run_ranks(exactness, 2, exchange, mixes):
        assert ("is not exact over mesh.cp=2 ranks" in answer) == mixes
        assert (answer == "exact") != mixes
