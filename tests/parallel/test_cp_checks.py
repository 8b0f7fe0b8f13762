"""What is refused before a context-parallel run trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention, require_blocks
from automodel_lite.attention.spec import LayerShape
from automodel_lite.attention.varlen import VarlenAttention
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.context_parallel import (
    check_context_parallel,
    check_cp_settings,
    check_ranks_read_alike,
)
from automodel_lite.parallel.exchange import NETWORK, NVLINK, Load, checkpointing_hint, choose_exchange
from tests.attention.families import BASE, build, documents, stream
from tests.ranks import run_ranks


def check(config: transformers.PretrainedConfig, cp: int, exchange: str = "all_gather", size: int = 512) -> None:
    check_cp_settings(config, cp, exchange, size)


def test_pack_size_must_divide() -> None:
    with pytest.raises(
        ConfigError,
        match=r"packed_sequence.packed_sequence_size=63 must be a multiple of 4 \(2 \* mesh.cp\): use 64",
    ):
        check(LlamaConfig(**BASE), 2, size=63)
    check(LlamaConfig(**BASE), 2, size=64)
    check(LlamaConfig(**BASE), 1, size=63)


def test_heads_must_divide_for_all_to_all() -> None:
    config = LlamaConfig(**BASE | {"num_attention_heads": 6, "hidden_size": 96})
    with pytest.raises(ConfigError, match="must divide the 6 query heads"):
        check(config, 4, "all_to_all")
    check(config, 4, "all_gather")


WIDE = [LayerShape(num_heads=32, num_kv_heads=8, head_dim=128, value_head_dim=128)] * 32


def test_gathered_keys_and_values_call_for_activation_checkpointing() -> None:
    hint = checkpointing_hint(WIDE, Load(131072, 4, 2), "all_gather")
    assert hint is not None
    assert "16.0 GiB" in hint
    assert checkpointing_hint(WIDE, Load(131072, 4, 2), "all_to_all") is None
    assert checkpointing_hint(WIDE, Load(4096, 4, 2), "all_gather") is None
    assert checkpointing_hint(WIDE, Load(131072, 1, 2), "all_gather") is None


CHOICES = {
    "long documents over the network": (WIDE, Load(2**20, 8, 2, 2**17), NETWORK, "ring"),
    "short documents: less to send than to hide": (WIDE, Load(2**17, 8, 2, 512), NETWORK, "all_to_all"),
    "one kv head of 16": ([LayerShape(16, 1, 128, 128)], Load(2**15, 4, 2, 16), NVLINK, "all_gather"),
    "heads that do not divide": ([LayerShape(6, 3, 64, 64)], Load(2**15, 4, 2, 16), NVLINK, "all_gather"),
    "the same documents on a slow link": (WIDE, Load(2**17, 8, 2, 8192), 10.0, "all_to_all"),
    "the same documents on a fast one": (WIDE, Load(2**17, 8, 2, 8192), 300.0, "ring"),
    "all layers have windows": ([LayerShape(32, 8, 128, 128, window=64)], Load(2**15, 8, 2), NVLINK, "all_to_all"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_exchange_that_keeps_the_gpu_waiting_least(case: str) -> None:
    layers, load, gb_per_s, name = CHOICES[case]
    chosen, reason = choose_exchange(ReferenceAttention(), layers, load, gb_per_s)
    assert chosen == name
    assert reason.startswith(
        f"per layer MiB sent, ms waited for and MiB held by GPUs with {gb_per_s:g} GB/s: all_gather "
    )
    assert f" {name} " in reason


def test_a_kernel_without_a_log_sum_exp_has_no_ring() -> None:
    whole = VarlenAttention()
    only_whole = type("OnlyWhole", (), {"name": "thd_whole", "check": whole.check, "__call__": whole.__call__})()
    layers, load, gb_per_s, _ = CHOICES["long documents over the network"]
    assert choose_exchange(only_whole, layers, load, gb_per_s)[0] != "ring"
    with pytest.raises(
        ConfigError, match=r"attention=whole does not support mesh\.cp_exchange=ring: use attention=varlen"
    ):
        require_blocks(only_whole)
    require_blocks(whole)


def read_alike(rank: int, cp: int, differ: str) -> str:
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    batch = stream(documents([9, 30]), 2 * cp)
    if rank == 1 and differ == "tokens":
        batch = replace(batch, input_ids=batch.input_ids.flip(0))
    if rank == 1 and differ == "labels":
        batch = replace(batch, labels=batch.labels.roll(1))
    try:
        check_ranks_read_alike(batch, mesh)
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
def test_the_start_up_check_finds_tokens_that_are_mixed_elsewhere(exchange: str, mixes: bool) -> None:
    for answer in run_ranks(exactness, 2, exchange, mixes):
        assert ("is not exact over mesh.cp=2 ranks" in answer) == mixes
        assert (answer == "exact") != mixes
