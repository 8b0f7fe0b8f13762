"""Jobs on two and four fake GPUs, each a process: what they send must agree, in one order."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu_paths.fake.jobs import COMPILED, EAGER, only_on_fake_gpu, train_on

pytestmark = only_on_fake_gpu
QUIET = ("training.val_every_steps=0", "training.log_every_steps=100")
HEADS = ("model.config.num_attention_heads=4", "model.config.num_key_value_heads=2")
EXPERTS = (
    "~model.config",
    "model.config.model_type=qwen3_moe",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "model.config.moe_intermediate_size=64",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    "model.config.num_experts=4",
    "model.config.num_experts_per_tok=2",
    "model.config.max_position_embeddings=2048",
)


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all", "ring"])
def test_context_parallel_steps_never_wait(exchange: str, tmp_path: Path) -> None:
    options = (EAGER, "mesh.cp=2", f"mesh.cp_exchange={exchange}", *HEADS, *QUIET)
    train_on(2, tmp_path / "run", *options, strict_from=4)
    assert (tmp_path / "run/hf/model.safetensors").is_file()


# without ddp: it compares the ranks' models by numbers that it reads from the device
WORLDS = {
    "fsdp": (2, ()),
    "hsdp": (4, ("mesh.dp_replicate=2",)),
    "hsdp, cp": (4, ("mesh.dp_replicate=2", "mesh.cp=2")),
    "tp": (2, ("mesh.tp=2", *HEADS)),
    "tp, fsdp": (4, ("mesh.tp=2", *HEADS)),
    "ep": (2, ("mesh.ep=2", *EXPERTS)),
    "ep = tp": (2, ("mesh.ep=2", "mesh.tp=2", *EXPERTS)),
}


# since transformers 5.22
HAS_ENGINE = find_spec("transformers.distributed.expert_parallel") is not None
needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="needs transformers 5.22")
CASES = [
    pytest.param(name, marks=[needs_engine] if name[:2] in ("tp", "ep") else []) for name in WORLDS
]


@pytest.mark.parametrize("name", CASES)
def test_each_world_trains_saves_and_exports(name: str, tmp_path: Path) -> None:
    world_size, options = WORLDS[name]
    train_on(world_size, tmp_path / "run", EAGER, "checkpoint.mode=async", *options)
    assert (tmp_path / "run/hf/model.safetensors").is_file()


@pytest.mark.parametrize("options", [(), ("mesh.cp=2",)], ids=["fsdp", "cp"])
def test_compiled_layers_of_two_ranks(options: tuple[str, ...], tmp_path: Path) -> None:
    train_on(2, tmp_path / "run", COMPILED, *options, *QUIET)


@needs_engine
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_expert_parallel_steps_wait_for_their_row_counts_alone(
    recomputed: str, tmp_path: Path
) -> None:
    """What reads a tensor, or copies it to memory that is not pinned, is an error."""
    options = ("mesh.ep=2", f"training.activation_checkpointing={recomputed}", *EXPERTS)
    train_on(2, tmp_path / "run", EAGER, *options, *QUIET, strict_from=4)


@needs_engine
def test_two_micro_batches_take_turns(tmp_path: Path) -> None:
    options = ("mesh.ep=2", "mesh.ep_overlap=true", "training.global_batch_size=8", *EXPERTS)
    batch = ("training.micro_batch_size=1", "training.activation_checkpointing=full")
    train_on(2, tmp_path / "run", EAGER, *options, *batch, *QUIET, strict_from=4)


def test_fp8_weights_are_gathered_in_fp8(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    wide = ("model.config.hidden_size=256", "model.config.intermediate_size=512")
    train_on(2, tmp_path / "run", COMPILED, "training.fp8=tensorwise", *wide, *QUIET)
