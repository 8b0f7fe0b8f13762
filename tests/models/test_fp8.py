"""FSDP gathers in fp8, emulated on two gloo ranks: the numbers of gathers in bf16, in half the bytes."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import run_ranks
from tests.runs import _quick, _train_quick_on_rank, losses_by_step, rows_of

pytestmark = pytest.mark.slow
WIDE = [
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "packed_sequence.packed_sequence_size=256",
]
FP8 = [*WIDE, "training.fp8=tensorwise", "training.log_every_steps=1"]


@pytest.fixture(autouse=True)
def with_torchao() -> None:
    pytest.importorskip("torchao")


class SentBytes(TorchDispatchMode):
    """Bytes that this rank gives to gathers."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in str(func):
            # the shard, and those of two ranks
            self.total += sum(x.nbytes for x in args if isinstance(x, Tensor)) // 3
        return func(*args, **(kwargs or {}))


def train_fp8(
    rank: int, world_size: int, raw: Any, in_fp8: bool, stop_at: int = 0
) -> tuple[int, str, int]:
    """A run of emulated fp8 -> its exit code, its screen, and bytes given to gathers."""
    from automodel_lite.models import fp8
    from automodel_lite.training import compiling

    fp8.use_fp8 = partial(fp8.use_fp8, emulate=True)
    compiling.compile_model = partial(compiling.compile_model, backend="aot_eager")
    if not in_fp8:
        fp8.Fp8Gathers.__init__ = fp8.Fp8Gathers.refresh = lambda *_: None  # type: ignore[method-assign, assignment]
    sent = SentBytes()
    with sent if raw.training.compile is not True else nullcontext():  # dynamo takes no mode
        code, screen = _train_quick_on_rank(rank, world_size, raw, stop_at, 0)
    return code, screen, sent.total


def run(
    folder: Path, *options: str, in_fp8: bool = True, ranks: int = 2, stop_at: int = 0
) -> tuple[int, str, int]:
    return run_ranks(train_fp8, ranks, _quick(folder, *FP8, *options), in_fp8, stop_at)[0]  # type: ignore[no-any-return]


CASES = {
    "bf16": ["training.precision=bf16"],
    "fp32": [],
    "bf16 masters": [
        "training.precision=bf16",
        "training.master_weights=bf16",
        "optimizer=adamw_bf16",
    ],
    "8 bits, kept gathered": ["optimizer=adamw_8bit", "advanced.reshard_after_forward=false"],
    "muon, averaged": ["optimizer=muon", "training.ema_decay=0.5", "training.val_every_steps=2"],
    "compiled": [
        "training.precision=bf16",
        "training.compile=true",
        "training.activation_checkpointing=full",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_gathers_in_fp8_have_the_same_bits(case: str, tmp_path: Path) -> None:
    """Losses and gradient norms of each step, and validation."""
    sent = []
    for name, in_fp8 in (("fp8", True), ("plain", False)):
        code, screen, num_bytes = run(tmp_path / name, *CASES[case], in_fp8=in_fp8)
        assert code == 0, screen
        sent.append(num_bytes)
    fp8, plain = (
        [
            {key: value for key, value in row.items() if "loss" in key or key == "grad_norm"}
            for row in rows_of(folder)
        ]
        for folder in (tmp_path / "fp8", tmp_path / "plain")
    )
    assert fp8 == plain
    assert sum("val_loss/held_out" in row for row in fp8) >= 1
    # beside them the embedding and the head, and what the checks at the start gather
    assert case == "compiled" or sent[0] < 0.75 * sent[1]


def test_gathers_in_fp8_resume_on_other_ranks(tmp_path: Path) -> None:
    """Stopped in step 4: bit for bit the run in one go; then on replicas of shards, within rounding."""
    assert run(tmp_path / "whole", "optimizer=adamw_8bit")[0] == 0
    assert run(tmp_path / "cut", "optimizer=adamw_8bit", stop_at=4)[0] == 75
    shutil.copytree(tmp_path / "cut", tmp_path / "replicas")
    assert run(tmp_path / "cut", "optimizer=adamw_8bit")[0] == 0
    assert losses_by_step(tmp_path / "cut") == losses_by_step(tmp_path / "whole")
    code, screen, _ = run(
        tmp_path / "replicas", "optimizer=adamw_8bit", "mesh.dp_replicate=2", ranks=4
    )
    assert code == 0, screen
    want, found = losses_by_step(tmp_path / "whole"), losses_by_step(tmp_path / "replicas")
    assert found[6] == pytest.approx(want[6], rel=1e-3)


def test_frozen_weights_are_gathered_in_fp8(tmp_path: Path) -> None:
    """Adapters stay as they are, and are exported."""
    assert run(tmp_path / "base", "training.fp8=none", "checkpoint.export_hf=true")[0] == 0
    base = f"{tmp_path}/base/hf"
    loaded = [
        "tokenizer=pretrained",
        f"tokenizer.path={base}",
        "~model.config",
        f"model.pretrained={base}",
    ]
    options = [*loaded, "peft=lora", "checkpoint.export_hf=true", FP8[2]]
    for name, in_fp8 in (("fp8", True), ("plain", False)):
        raw = _quick(
            tmp_path / name, *options, "training.fp8=tensorwise", "training.log_every_steps=1"
        )
        code, screen, _ = run_ranks(train_fp8, 2, raw, in_fp8)[0]
        assert code == 0, screen
    assert losses_by_step(tmp_path / "fp8") == losses_by_step(tmp_path / "plain")
