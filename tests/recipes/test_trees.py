"""Trees of documents in whole runs: the same training as their rows, on any layout, resumed, and streamed."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from automodel_lite.extras.proof import data
from recipes import train_ft
from tests.runs import QUICK, config_of, losses, train

pytestmark = pytest.mark.numbers


def answered_prompts(path: Path, num_prompts: int = 6) -> Path:
    return data.answered_prompts(path, num_prompts, num_words=90, num_answers=4)


def steps(folder: Path, *overrides: str, world_size: int = 1) -> list[dict]:
    return [
        row for row in train("smoke", folder, *overrides, world_size=world_size) if "loss" in row
    ]


def settings(path: Path, *more: str) -> list[str]:
    sources = [
        "dataset=files",
        "~dataset.num_chats",
        f"dataset.path={path}",
        "tokenizer=bpe",
        "tokenizer.vocab_size=300",
    ]
    size = [
        "packed_sequence.packed_sequence_size=1024",
        "training.global_batch_size=64",
        "training.max_steps=2",
    ]
    return [
        *QUICK,
        *sources,
        "evaluation=none",
        *size,
        "training.precision=fp32",
        "lr_scheduler=constant",
        *more,
    ]


def test_trees_train_as_their_rows(tmp_path: Path) -> None:
    """Every step sees all data: the losses of two steps are those of the rows, of two ranks and of ranks that share."""
    path = answered_prompts(tmp_path / "a.jsonl")
    rows = steps(tmp_path / "off", *settings(path, "packed_sequence.tree=off"))
    trees = steps(tmp_path / "auto", *settings(path))
    shared = steps(tmp_path / "cp", *settings(path, "mesh.cp=2"), world_size=2)
    sharded = steps(tmp_path / "dp", *settings(path, "mesh.dp_shard=2"), world_size=2)
    assert len(rows) == len(trees) == 2
    for run in (trees, shared, sharded):
        for row, want in zip(run, rows):
            assert row["num_label_tokens"] == want["num_label_tokens"]
            assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
            assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


MIXTURE = [
    "~model.config",
    *(
        f"model.config.{setting}"
        for setting in (
            "model_type=qwen3_moe",
            "hidden_size=64",
            "num_hidden_layers=2",
            "num_attention_heads=4",
            "num_key_value_heads=2",
            "intermediate_size=64",
            "moe_intermediate_size=32",
            "num_experts=4",
            "num_experts_per_tok=2",
        )
    ),
    "model.router_aux_loss=0.1",
]
"""Experts, whose balance counts a shared token as often as rows hold it."""


# since transformers 5.22
HAS_ENGINE = find_spec("transformers.distributed.expert_parallel") is not None
ENGINE = pytest.mark.skipif(
    not HAS_ENGINE, reason="tensor and expert parallelism need transformers 5.22"
)
AXES = [
    pytest.param("tp", marks=[ENGINE, pytest.mark.system]),
    pytest.param("ep", marks=[ENGINE, pytest.mark.system]),
]


@pytest.mark.parametrize("axis", [*AXES, pytest.param("cp", marks=pytest.mark.slow)])
def test_experts_train_on_trees_as_on_rows(tmp_path: Path, axis: str) -> None:
    path = answered_prompts(tmp_path / "a.jsonl")
    rows = steps(tmp_path / "off", *settings(path, *MIXTURE, "packed_sequence.tree=off"))
    trees = steps(tmp_path / axis, *settings(path, *MIXTURE, f"mesh.{axis}=2"), world_size=2)
    assert len(rows) == len(trees) == 2
    for row, want in zip(trees, rows):
        assert row["num_label_tokens"] == want["num_label_tokens"]
        assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


FILES = "automodel_lite.data.reading.files.FilesDataset"
SOURCES = {
    "files": [
        "dataset=files",
        "dataset.path={a}",
        "packed_sequence.repack_each_epoch=true",
        "packed_sequence.max_packs=3",
    ],
    "mixture": [
        "dataset=mixture",
        f"dataset.sources.half={{dataset:{{_target_:{FILES},path:{{a}}}},repeat:0.5}}",
        f"dataset.sources.whole={{dataset:{{_target_:{FILES},path:{{b}}}},repeat:1}}",
    ],
    "stream": [
        "dataset=streaming",
        "dataset.path={a}",
        "dataset.num_shards=2",
        "checkpoint.every_steps=3",  # after step 4 it begins anew: a run without its place would do the same
    ],
}


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("kind", SOURCES)
def test_runs_on_trees_resume_bit_for_bit(tmp_path: Path, kind: str) -> None:
    a, b = (answered_prompts(tmp_path / f"{name}.jsonl", 12) for name in "ab")
    more = ["training.global_batch_size=1", "training.max_steps=5", "checkpoint.every_steps=4"]
    given = [x for x in settings(a, *more) if not x.startswith("dataset")]
    source = [x.replace("{a}", str(a)).replace("{b}", str(b)) for x in SOURCES[kind]]
    whole = losses(train("smoke", tmp_path / "run", *given, *source))
    assert len(whole) == 5
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000005")
    (tmp_path / "run" / "STATUS.json").unlink()
    assert losses(train("smoke", tmp_path / "run", *given, *source)) == whole


@pytest.mark.same_on_every_cpu
@pytest.mark.system
def test_a_dry_run_counts_the_keys_of_trees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = settings(answered_prompts(tmp_path / "a.jsonl"), "dry_run=true", "mesh.dp_shard=2")
    peaks = []
    for mode in ("auto", "off"):
        assert (
            train_ft.main(
                config_of("smoke", tmp_path / mode, *given, f"packed_sequence.tree={mode}")
            )
            == 0
        )
        printed = capsys.readouterr().out
        assert ("with the keys of its trees" in printed) == (mode == "auto")
        peaks.append(float(re.search(r"simulated.*: at most ([0-9.]+) MiB", printed)[1]))  # type: ignore[index]
    assert 1 < peaks[0] / peaks[1] < 1.2


def test_a_stream_of_trees(tmp_path: Path) -> None:
    """Documents of a stream become the trees that they are in a file."""
    path = answered_prompts(tmp_path / "a.jsonl", 12)
    stream = [
        "dataset=streaming",
        f"dataset.path={path}",
        "dataset.num_shards=1",
        "training.max_steps=1",
    ]
    given = [
        x
        for x in settings(path, "training.global_batch_size=2")
        if not x.startswith(("dataset", "training.max_steps"))
    ]
    off = steps(tmp_path / "off", *given, *stream, "packed_sequence.tree=off")
    auto = steps(tmp_path / "auto", *given, *stream)
    assert auto[0]["num_label_tokens"] > 1.5 * off[0]["num_label_tokens"]
