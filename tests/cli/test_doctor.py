"""`automodel-lite doctor`: what it measures on a CPU, and what it says of machines that are not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from automodel_lite.compat import TESTED
from automodel_lite.errors import ConfigError
from automodel_lite.extras.cli import doctor
from tests.ranks import run_ranks

GIB = 2**30
SOUND = doctor.Findings(
    rank=0,
    host="a",
    device="NVIDIA H100 80GB HBM3",
    versions={name: newest for name, (_, newest) in TESTED.items()} | {"triton": "3.6.0"},
    tflops=700.0,
    peak_tflops=989.4,
    clocks="1980 MHz, 0x0, 50",
    kernels={"VarlenAttention": "ok", "flash": "attention=flash needs flash-attn"},
    disk_bytes=10**12,
    disk_mb_per_s=1000.0,
    shm_bytes=16 * GIB,
    open_files=65536,
)


def test_a_page_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor(["--output-dir", str(tmp_path)]) == 0
    screen = capsys.readouterr().out
    for line in ("1 x cpu on 1 host", "reference: ok", "TFLOP/s", "MB/s"):
        assert line in screen
    assert list(tmp_path.iterdir()) == []


def two_ranks(rank: int, world_size: int, folder: str) -> float:
    import torch
    import torch.distributed as dist

    found = [replace(SOUND, rank=number) for number in range(world_size)]
    assert dist.is_initialized()
    doctor.measure_links(found, torch.device("cpu"))
    rate = found[1 - rank].host_gb_per_s
    assert rate == found[rank].host_gb_per_s or rate
    return float(rate or 0)


def test_links_are_measured_inside_a_host(tmp_path: Path) -> None:
    assert min(run_ranks(two_ranks, 2, str(tmp_path))) > 0


def test_sound_machines_have_no_problem() -> None:
    found = [replace(SOUND, rank=rank, tflops=700 - rank, host_gb_per_s=300.0) for rank in range(8)]
    assert doctor.judge(found) == ([], [])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tflops": 600.0}, "rank 7 on b: its product runs at 86% of the others' rate"),
        ({"host_gb_per_s": 200.0}, "b: its GPUs exchange at 67% of the other hosts' rate"),
        ({"shm_bytes": 64 * 2**20}, "b: /dev/shm has 64 MiB"),
        ({"device": "NVIDIA A100-SXM4-80GB"}, "the ranks have different devices"),
        ({"versions": SOUND.versions | {"torch": "2.4.1"}}, "b: torch 2.4.1: install"),
        (
            {"kernels": {"VarlenAttention": "fails: OSError: no"}},
            "b: attention kernel VarlenAttention fails",
        ),
        (
            {"kernels": {"flash": "gives other numbers than the reference"}},
            "kernel flash gives other",
        ),
    ],
    ids=[
        "slow GPU",
        "slow links",
        "container",
        "mixed cards",
        "old torch",
        "broken kernel",
        "wrong kernel",
    ],
)
def test_what_has_to_be_mended_is_a_sentence(changes: dict, sentence: str) -> None:
    found = [
        replace(SOUND, rank=rank, host="a" if rank < 4 else "c", host_gb_per_s=300.0)
        for rank in range(7)
    ]
    found.append(replace(found[0], rank=7, host="b", **changes))
    assert sentence in "\n".join(doctor.judge(found)[0])


def test_every_card_that_is_slow_is_named_although_all_are_alike() -> None:
    problems, _ = doctor.judge([replace(SOUND, tflops=300.0)])
    assert "300 TFLOP/s where NVIDIA H100 80GB HBM3 has 989" in problems[0]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output-dir .*file/runs cannot be written"):
        doctor.measure_disk(tmp_path / "file/runs")


def test_newer_versions_are_a_note() -> None:
    newer = replace(SOUND, versions=SOUND.versions | {"torch": "99.1.0+cu130"}, open_files=1024)
    problems, notes = doctor.judge([newer])
    assert problems == []
    assert [text.split(" is ")[0].split(" allows ")[0] for text in notes] == [
        "torch 99.1.0+cu130",
        "a",
    ]
