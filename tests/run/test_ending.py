"""The message that the last word of a launcher quotes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from automodel_lite.run.ending import ending_of
from tests.cli.test_exit_codes import ROOT
from tests.forked import warm_python

SIZES = [
    (
        "packed_sequence.packed_sequence_size=63 mesh.cp=2",
        "packed_sequence.packed_sequence_size=63 must be a multiple of 4 (2 * mesh.cp): use 64.",
    ),
    (
        "training.global_batch_size=7",
        "training.global_batch_size=7 must be a multiple of 2 (training.micro_batch_size=1 x 2 data-parallel ranks): use 8, or micro-batches and ranks that divide 7, as a run that continues has to.",
    ),
    ("mesh.cp=3 packed_sequence.packed_sequence_size=126", "mesh.dp_replicate=1 x mesh.cp=3 = 3 must divide the number of processes, 2: start 3 (--nproc), or lower these."),
    ("training.max_stepz=3", "training.max_stepz=3: unknown key; did you mean training.max_steps?"),
    ("model=pretrained model.pretrained=./missing", "model.pretrained=./missing: there is no such folder."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *(pytest.param(*case, marks=pytest.mark.system) for case in (SIZES[0], SIZES[-1])),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SIZES[1:-1]),
    ],
)
def test_under_torchrun_the_summary_quotes_the_sentence(
    overrides: str, message: str, tmp_path: Path
) -> None:
    command = [
        warm_python(),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    recipe = [
        str(ROOT / "recipes" / "train_ft.py"),
        "--config-name",
        "smoke",
        f"output_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        [*command, *recipe, *overrides.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode != 0
    assert f"\n{message}\n" in done.stderr, done.stderr  # above torchrun's summary, which quotes it
    assert done.stderr.count(message) >= 2
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "run").exists()


def test_memory_that_torch_is_not_given_is_a_sentence() -> None:
    """Outside of training: an export or an answer ended in a traceback."""
    with pytest.raises(RuntimeError) as no_memory:
        torch.empty(2**50, dtype=torch.uint8)
    text, code, _ = ending_of(no_memory.value)
    assert text.startswith("the host has no memory left (1048576.00 GiB asked for): give")
    assert code == 1
    mapped = RuntimeError("unable to mmap 9 bytes from file <x>: Cannot allocate memory (12)")
    assert ending_of(mapped).text.startswith("the host has no memory left (unable to mmap 9 bytes")


@pytest.mark.parametrize(
    "words",
    [
        "received 0 items of ancdata",
        "Too many open files. Communication with the workers is no",
        "Pin memory thread exited unexpectedly",
    ],
)
def test_a_batch_that_cannot_be_opened_is_a_sentence(words: str) -> None:
    assert ending_of(RuntimeError(words)).text == (
        "no further file can be opened: the limit for open files is too low: raise `ulimit -n`, to "
        "4096 or more."
    )


def test_a_rank_that_is_gone_is_a_sentence() -> None:
    """Outside of training: an export over several ranks ended in a traceback of gloo."""
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5")
    text, code, _ = ending_of(lost)
    assert text.startswith("another rank ended without a message (killed, out of memory, or its")
    assert code == 1
