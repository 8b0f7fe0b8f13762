"""Peaks of torch's own allocator in whole runs on the fake card against those that are counted before a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from automodel_lite.config.check import check_config
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.extras.plan.heaviest import most_branched
from automodel_lite.extras.plan.recompute import choose_recomputation
from automodel_lite.extras.plan.simulation import simulate
from automodel_lite.parallel.mesh import mesh_shape
from automodel_lite.training.decide import decide
from automodel_lite.training.memory import gpu_bytes
from automodel_lite.training.resolve import resolve_auto
from automodel_lite.training.settings import build_parts
from tests.gpu_paths.fake.jobs import (
    EAGER,
    _raw,
    only_on_fake_gpu,
    rows_of,
    train,
    train_on,
)
from tests.gpu_paths.fake.run import ROOT, environment

pytestmark = only_on_fake_gpu
# 134 million parameters, of which the embedding and the head are a quarter
LLAMA = (
    "~model.config",
    "model.config.model_type=llama",
    "model.config.hidden_size=1024",
    "model.config.intermediate_size=2816",
    "model.config.num_hidden_layers=8",
    "model.config.num_attention_heads=16",
    "model.config.num_key_value_heads=4",
    "model.config.vocab_size=16384",
    "model.config.max_position_embeddings=4096",
    "tokenizer=bpe",
    "tokenizer.vocab_size=300",
)
RUN = (
    "dataset=files",
    "~dataset.num_chats",
    "packed_sequence.packed_sequence_size=4096",
    "training.max_steps=3",
    "training.val_every_steps=0",
    "training.num_threads=1",
    "training.log_every_steps=1",
    "lr_scheduler.warmup_steps=0",
    "checkpoint.every_steps=1000",
    "checkpoint.export_hf=false",
)


def texts(path: Path) -> tuple[str, ...]:
    """Documents of which every token has a label, cut at the end of a pack."""
    rows = [{"text": " ".join(f"word {(n * k) % 97}" for k in range(200))} for n in range(400)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (f"dataset.path={path}", "dataset.format=text", "packed_sequence=wrapped")


def counted(folder: Path, options: tuple[str, ...], num_ranks: int = 1) -> int:
    """The most that a step of this configuration holds, by its simulation."""
    config = resolve_auto(check_config(_raw("smoke", folder, options)))
    parts = build_parts(config)
    data = prepare_data(config, check_sizes(config, num_ranks), parts.packer)
    shape = mesh_shape(config.mesh, num_ranks)
    device = torch.device("cuda")
    decided = decide(
        parts, data.tokenizer, shape, device, gpu_bytes(device), recompute=choose_recomputation
    )
    print(decided.recomputation_text, decided.reduction_text)
    found = simulate(decided, decided.config, shape, most_branched(data, parts))
    print(found)
    return max(found.peaks[phase] for phase in ("forward", "backward", "optimizer"))


def check(run: Path, options: tuple[str, ...], num_ranks: int = 1) -> None:
    held = max(row.get("memory_gib", 0) for row in rows_of(run)) * 2**30
    wanted = counted(run, options, num_ranks)
    print(f"{run.parent.name}: allocator {held / 2**30:.3f} GiB, counted {wanted / 2**30:.3f}")

    assert held == pytest.approx(wanted, rel=0.05)


KINDS = {
    "plain": (EAGER, "training.global_batch_size=1"),
    "micro-batches": (EAGER, "training.global_batch_size=3"),
    "recompute": (EAGER, "training.activation_checkpointing=full", "training.global_batch_size=1"),
    "8-bit states": (EAGER, "optimizer=adamw_8bit", "training.global_batch_size=1"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_allocator_holds_what_was_counted(kind: str, tmp_path: Path) -> None:
    options = (*LLAMA, *RUN, *texts(tmp_path / "texts.jsonl"), *KINDS[kind])
    train(tmp_path / "run", *options)
    check(tmp_path / "run", options)


def test_the_allocator_holds_what_was_counted_of_two_ranks(tmp_path: Path) -> None:
    whole = (EAGER, "training.global_batch_size=2")
    options = (*LLAMA, *RUN, *texts(tmp_path / "texts.jsonl"), *whole)
    train_on(2, tmp_path / "run", *options)
    check(tmp_path / "run", options, num_ranks=2)


def test_the_allocator_holds_what_was_counted_of_an_adapter(tmp_path: Path) -> None:
    data = texts(tmp_path / "texts.jsonl")
    once = ("training.max_steps=1", "checkpoint.export_hf=true", EAGER)
    train(tmp_path / "base", *LLAMA, *RUN, *data, *once)
    hf = tmp_path / "base/hf"
    model = (
        "~model.config",
        f"model.pretrained={hf}",
        "tokenizer=pretrained",
        f"tokenizer.path={hf}",
    )
    options = (*model, *RUN, *data, EAGER, "peft=lora", "training.global_batch_size=1")
    train(tmp_path / "run", *options)
    check(tmp_path / "run", options)


def test_the_allocator_holds_what_was_counted_of_trees(tmp_path: Path) -> None:
    rows = []
    for number in range(60):
        prompt = " ".join(f"word {(number * place) % 97}" for place in range(60))
        responses = [
            " ".join(f"{(number + answer) * place % 89} thing" for place in range(120))
            for answer in range(4)
        ]
        rows.append({"prompt": prompt, "responses": responses})
    path = tmp_path / "trees.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (*LLAMA, *RUN, f"dataset.path={path}", EAGER, "training.global_batch_size=1")
    train(tmp_path / "run", *options)
    check(tmp_path / "run", options)


def test_page_locked_copies_are_no_larger_than_the_weights() -> None:
    if Version(torch.__version__) < Version("2.13"):
        pytest.skip("torch rounds each up to a power of two")
    torch.empty(1, pin_memory=True)  # before the first one there are no numbers
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    copy = torch.empty(40 << 20, dtype=torch.uint8, pin_memory=True)
    held = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert held == copy.numel()


OUT_OF_MEMORY = """
import sys
from automodel_lite.config.check import check_config
from tests.gpu_paths.fake.jobs import _raw
from pathlib import Path
from recipes import train_ft
train_ft.main(check_config(_raw("smoke", Path(sys.argv[1]), tuple(sys.argv[2:]))))
"""


def test_a_step_that_is_larger_than_the_card_says_what_to_change(tmp_path: Path) -> None:
    """The weights, their gradients and states of 2.1 GB fit, the activations of a pack do not."""
    kept = (EAGER, "training.activation_checkpointing=none")
    options = (*LLAMA, *RUN, *texts(tmp_path / "texts.jsonl"), *kept)
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY, str(tmp_path / "run"), *options],
        env=environment(FAKE_GPU_GB="3.2"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    status = json.loads((tmp_path / "run/STATUS.json").read_text())
    assert status["state"] == "failed"
    said = done.stderr + json.dumps(status)
    assert "out of memory" in said
    assert "training.activation_checkpointing=full" in said
