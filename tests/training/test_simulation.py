"""A step of any world counted on one machine: what is held and sent equals the arithmetic where there is one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import transformers

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.training.dry_run import dry_run
from automodel_lite.training.simulation import Simulation, simulate

LLAMA = transformers.LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=2048,
    tie_word_embeddings=False,
)
EMBEDDING = 2048 * 256
LAYER = 256 * (256 + 128 + 128 + 256) + 3 * 256 * 512 + 2 * 256
PARAMETERS = 2 * EMBEDDING + 4 * LAYER + 256


def config(*overrides: str) -> Config:
    return check_config(compose_config("smoke", ["packed_sequence.packed_sequence_size=2048", *overrides]))


def world(*axes: int, overrides: tuple[str, ...] = ()) -> Simulation:
    shape = MeshShape(*axes)
    asked = [f"mesh.dp_replicate={axes[0]}", f"mesh.dp_shard={axes[1]}", f"mesh.cp={axes[2]}"]
    asked.append(f"training.global_batch_size={shape.dp}")
    result = simulate(config(*asked, *overrides), LLAMA, shape, torch.bfloat16)
    assert not dist.is_initialized()
    return result


@pytest.mark.parametrize("ranks", [8, 64])
def test_what_a_rank_of_many_holds_and_sends(ranks: int) -> None:
    found = world(1, ranks, 1)
    assert found.weights == 4 * PARAMETERS // ranks
    assert found.gradients == 4 * PARAMETERS // ranks
    assert found.optimizer == pytest.approx(8 * PARAMETERS / ranks, rel=1e-3)  # and a step count per parameter
    assert found.peak > found.weights + found.gradients + found.optimizer
    # bf16 gathered in the forward and, but for the embedding and the head, in the backward pass; fp32 reduced
    gathered = 2 * (2 * PARAMETERS - 2 * EMBEDDING)
    assert sum(found.sent.values()) == pytest.approx(gathered + 4 * PARAMETERS, rel=0.02)


def test_memory_falls_with_ranks_and_with_recomputation() -> None:
    few, many = world(1, 2, 1), world(1, 16, 1)
    assert many.peak < few.peak
    recomputed = world(1, 2, 1, overrides=("training.activation_checkpointing=full",))
    assert recomputed.peaks["forward"] < few.peaks["forward"]
    assert recomputed.weights == few.weights


def test_context_parallel_ranks_share_the_tokens() -> None:
    alone, shared = world(1, 4, 1), world(1, 1, 4)
    assert shared.weights == alone.weights
    assert shared.peaks["forward"] < alone.peaks["forward"]
    assert shared.sent["cp"] > 0
    assert "cp" not in alone.sent


def test_one_process_holds_the_whole_model() -> None:
    found = simulate(config("training.global_batch_size=1"), LLAMA, MeshShape(1, 1, 1), torch.float32)
    assert found.weights == found.gradients == 4 * PARAMETERS
    assert found.optimizer == pytest.approx(8 * PARAMETERS, rel=1e-3)


def test_the_dry_run_of_one_process_answers_for_a_world(capsys: pytest.CaptureFixture[str]) -> None:
    asked = config("mesh.dp_shard=16", "mesh.cp=2", "training.global_batch_size=16", "training.precision=bf16")
    assert dry_run(asked) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "simulated rank 0 of 32: at most" in shown
    assert "cp" in shown[shown.index("sends") :]


def test_a_softcap_does_not_stop_it() -> None:
    gemma = transformers.Gemma2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=256,
    )
    found = simulate(config("training.global_batch_size=2"), gemma, MeshShape(1, 2, 1), torch.bfloat16)
    assert found.peak > found.weights
