"""Tensor and expert parallelism, with the other axes and alone, beside one process."""

from __future__ import annotations

import pytest

from tests.parallel.test_sharding import assert_equal

AXES = [
    ((1, 1, 1, 2), "llama"),
    ((1, 1, 1, 2), "qwen3_moe"),
    ((1, 2, 1, 1, 2), "qwen3_moe"),
    ((1, 2, 1, 1, 2), "gpt_oss_sinks_window"),
    ((1, 1, 1, 2), "gemma2_softcap_window"),
    ((1, 1, 1, 2), "gpt_oss_sinks_window"),
    ((1, 1, 1, 2), "qwen3"),
    ((1, 1, 1, 2), "deepseek_v3_latent"),
    ((1, 1, 2, 2), "llama"),
    ((1, 1, 2, 1, 2), "qwen3_moe"),
    ((2, 1, 1, 2), "llama"),
    ((2, 2, 1, 1, 2), "qwen3_moe"),
]
"""dp_replicate, dp_shard, cp, tp, ep: tensor and expert parallelism are transformers', context parallelism is ours."""


@pytest.mark.parametrize(("shape", "family"), AXES[:3], ids=str)
def test_tensor_and_expert_parallel(shape: tuple[int, ...], family: str) -> None:
    assert_equal(shape, "fsdp", "all_gather", [family])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "family"), AXES[3:], ids=str)
def test_tensor_and_expert_parallel_with_the_other_axes(
    shape: tuple[int, ...], family: str
) -> None:
    assert_equal(shape, "fsdp", "all_gather", [family])
