"""The formulas of docs/planning.md on numbers that a reader can check by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from automodel_lite.config.check import check_config
from automodel_lite.training.plan import Parts, build_parts
from benchmarks.formulas import Hardware, estimate
from tests.runs import composed

HARDWARE = Hardware(1e12, 0.5, in_node_bytes_per_s=1e9, between_nodes_bytes_per_s=1e8)
MODEL = LlamaConfig(
    vocab_size=100,
    hidden_size=10,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    tie_word_embeddings=True,
)
# a layer: q 8x10, k and v 4x10 each, o 10x8, three of 10x20: 840; two norms of 10; with 1000 embedded and a norm: 2730
PARAMETERS = 2730


def parts_of(*overrides: str) -> Parts:
    sizes = ["packed_sequence.packed_sequence_size=64", "training.micro_batch_size=1"]
    return build_parts(check_config(composed("smoke", *sizes, *overrides)))


def test_one_gpu_moves_nothing() -> None:
    alone = estimate(parts_of(), MODEL, HARDWARE, gpus=1, document_tokens=8)
    assert (alone.gather_bytes, alone.reduce_bytes, alone.exchange_bytes, alone.exposed_s) == (
        0,
        0,
        0,
        0,
    )
    weights = 6 * (2 * 840 + 1000) * 64
    attention = 12 * 2 * 2 * 4 * 64 * 9 / 2
    assert alone.compute_s == pytest.approx((weights + attention) / 0.5e12)


def test_traffic_does_not_grow_with_data_parallel_ranks() -> None:
    four, eight = (estimate(parts_of(), MODEL, HARDWARE, gpus, 8) for gpus in (4, 8))
    # the layers twice, what is outside them once
    assert four.gather_bytes == 2 * (2 * 1720 + 1010) * 3 / 4
    assert eight.gather_bytes == 2 * (2 * 1720 + 1010) * 7 / 8
    assert eight.reduce_bytes == 4 * PARAMETERS * 7 / 8
    assert eight.tokens == 2 * four.tokens


def test_micro_batches_gather_again_and_reduce_once() -> None:
    once, thrice = (estimate(parts_of(), MODEL, HARDWARE, 4, 8, micro_steps=m) for m in (1, 3))
    assert thrice.gather_bytes == 3 * once.gather_bytes
    assert thrice.reduce_bytes == once.reduce_bytes


def test_context_parallel_exchanges_keys_and_values() -> None:
    two = estimate(parts_of("mesh.cp=2"), MODEL, HARDWARE, 2, 8)
    assert two.exchange_bytes == 2 * (2 * 64 * (2 * 1 * 4) * 2) / 2
    assert (two.dp, two.cp, two.tokens) == (1, 2, 64)


def test_each_exchange_has_its_own_traffic() -> None:
    dealt, ring = (
        estimate(parts_of("mesh.cp=2", f"mesh.cp_exchange={name}"), MODEL, HARDWARE, 2, 8)
        for name in ("all_to_all", "ring")
    )
    q, kv, out = 2 * 4, 2 * 2 * 4, 2 * 4  # one key head is not enough for two ranks
    assert dealt.exchange_bytes == 2 * (2 * 32 * (q + kv + out) * 2) / 2
    # the gradients travel with what they are of
    assert ring.exchange_bytes == 2 * (32 * (2 * 1 * 4) * 2) * 3


def test_replicas_spare_the_network() -> None:
    sharded = estimate(parts_of(), MODEL, HARDWARE, 16, 8)
    hybrid = estimate(parts_of("mesh.dp_replicate=2"), MODEL, HARDWARE, 16, 8)
    assert hybrid.exposed_s < sharded.exposed_s
    assert replace(hybrid, gpus=0).memory_bytes > sharded.memory_bytes
