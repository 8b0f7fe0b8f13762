"""Values per label that are computed once: on any mesh, resumed after a kill, and by the model that they name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from recipes import score
from tests.ranks import run_ranks
from tests.recipes.test_objectives import SMALL, curve, dpo, pairs
from tests.runs import config_of, wait_until

__all__ = ["pairs"]  # the fixture
ROOT = Path(__file__).resolve().parents[2]
LENGTH = "packed_sequence.packed_sequence_size=1024"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, pairs: Path) -> Path:
    """A student and a teacher of one tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("student", 0), ("teacher", 5)):
        dpo(folder / "run", pairs, f"seed={seed}", "training.max_steps=2")
        shutil.copytree(folder / "run/hf", folder / name)
        shutil.rmtree(folder / "run")
    return folder


def settings(models: Path, cache: Path, *overrides: str) -> list[str]:
    return [
        "dataset=toy_chat",
        "dataset.num_chats=60",
        f"model.pretrained={models / 'student'}",
        f"cache_dir={cache}",
        *(setting for setting in SMALL if setting not in ("model=llama_smoke", "tokenizer=bpe")),
        LENGTH,
        "loss=distill_topk",
        f"loss.teacher={models / 'teacher'}",
        "loss.top_k=7",
        "packed_sequence.slot_multiple=4",
        *overrides,
    ]


def scored(models: Path, cache: Path, *overrides: str, world_size: int = 1) -> dict[str, np.ndarray]:
    """The training set's columns."""
    arguments = settings(models, cache, *overrides)
    if world_size == 1:
        assert score.main(config_of("finetune", cache / "run", *arguments)) == 0
    else:
        assert run_ranks(_score, world_size, cache / "run", arguments) == [0] * world_size
    return columns(cache)


def _score(rank: int, world_size: int, folder: Path, arguments: list[str]) -> int:
    return score.main(config_of("finetune", folder, *arguments))


def columns(cache: Path) -> dict[str, np.ndarray]:
    (folder,) = (cache / "values").glob("top_7-train-*")
    assert not folder.name.endswith(".part")
    return {name: np.load(folder / f"{name}.npy") for name in ("teacher_ids", "teacher_log_probs")}


LAYOUTS = {"dp 2": "mesh.strategy=ddp", "fsdp 2": "mesh.strategy=fsdp", "cp 2": "mesh.cp=2", "tp 2": "mesh.tp=2"}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_score_together_what_one_scores(layout: str, models: Path, tmp_path: Path) -> None:
    one, two = scored(models, tmp_path / "one"), scored(models, tmp_path / "two", layout, world_size=2)
    assert one["teacher_ids"].any()
    same = one["teacher_ids"] == two["teacher_ids"]
    assert same.mean() > 0.999  # near-ties of the teacher
    logs = [values["teacher_log_probs"].astype(np.float32) for values in (one, two)]
    np.testing.assert_allclose(*logs, atol=2e-2)


KILLED = """
import sys
from pathlib import Path
from automodel_lite.training import label_values
from recipes import score
from tests.runs import config_of
label_values.SAVE_EVERY_S = 0.0
score.main(config_of("finetune", Path(sys.argv[1]), *sys.argv[2:]))
"""


def test_a_killed_scoring_goes_on_where_it_was(models: Path, tmp_path: Path) -> None:
    """What was noted as done is kept: values that are changed by hand in the meantime stay changed."""
    many = ("dataset.num_chats=400", "packed_sequence.packed_sequence_size=256", "packed_sequence.overlong=drop")
    whole = scored(models, tmp_path / "whole", *many)
    cache = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(cache / "run"), *settings(models, cache, *many)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL)
    found: list[Path] = []

    def is_under_way() -> bool:
        found[:] = (cache / "values").glob("top_7-train-*.part/progress.json")
        assert process.poll() is None
        return bool(found) and len(found[0].read_text()) > 0

    wait_until(is_under_way, 120)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = json.loads(found[0].read_text())["packs"]
    assert done > 0
    ids = np.lib.format.open_memmap(found[0].with_name("teacher_ids.npy"), mode="r+")
    places = np.flatnonzero(ids.any(axis=1))
    assert 0 < len(places) < len(np.flatnonzero(whole["teacher_ids"].any(axis=1)))
    ids[places] = 12345
    ids.flush()
    resumed = scored(models, cache, *many)
    # values of packs behind the noted place, which the kill came before, are computed again
    kept = (resumed["teacher_ids"] == 12345).all(axis=1)
    assert 0 < kept.sum() <= len(places)
    np.testing.assert_array_equal(resumed["teacher_ids"][~kept], whole["teacher_ids"][~kept])
    np.testing.assert_array_equal(resumed["teacher_log_probs"], whole["teacher_log_probs"])


def test_references_computed_ahead_are_taken(pairs: Path, tmp_path: Path) -> None:
    """By recipes/score.py with the arguments of training, which then has nothing to compute."""
    where = [f"dataset.path={pairs}", "dataset.val_frac=0.2", f"cache_dir={tmp_path / 'cache'}", *SMALL]
    assert score.main(config_of("dpo", tmp_path / "run", *where)) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/values").rglob("*.npy")}
    assert len(before) == 2  # training and validation
    rows = dpo(tmp_path / "run", pairs, "training.max_steps=1")
    assert curve(rows)[0] == pytest.approx(0.69314718, abs=1e-6)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/values").rglob("*.npy")} == before


def test_a_continued_adapter_has_a_reference_of_its_own(models: Path, pairs: Path, tmp_path: Path) -> None:
    """One base, two adapters to start from: the reference is the model as it starts, not the base alone."""
    base = ("model=pretrained", f"model.pretrained={models / 'student'}", "tokenizer=pretrained", "peft=lora")
    fresh = dpo(tmp_path / "fresh", pairs, *base, "optimizer.lr=1e-2")
    assert curve(fresh)[-1] < 0.69
    again = dpo(tmp_path / "again", pairs, *base, f"peft.adapter={tmp_path / 'fresh'}", "training.max_steps=1")
    assert [curve(fresh)[0], curve(again)[0]] == pytest.approx([0.69314718] * 2, abs=1e-6)
