"""Values per label that are computed once: on any mesh, resumed after a kill, and by the model that they name."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_lite.data.cache import seal
from automodel_lite.errors import ConfigError
from automodel_lite.parts.losses import label_values
from automodel_lite.training.engine import Engine
from recipes import score
from tests.forked import warm_python
from tests.ranks import fork_server, run_ranks
from tests.recipes.test_objectives import SMALL, curve, dpo, pairs
from tests.runs import config_of, train, wait_until

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


def scored(
    models: Path, cache: Path, *overrides: str, world_size: int = 1
) -> dict[str, np.ndarray]:
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
    (folder,) = (cache / "values").glob("top_7-train-????????????")
    return {name: np.load(folder / f"{name}.npy") for name in ("teacher_ids", "teacher_log_probs")}


@pytest.fixture(scope="module")
def one(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return scored(models, tmp_path_factory.mktemp("one"))


LAYOUTS = {
    "dp 2": "mesh.strategy=ddp",
    "fsdp 2": "mesh.strategy=fsdp",
    "cp 2": "mesh.cp=2",
    "tp 2": "mesh.tp=2",
}


@pytest.mark.system
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_score_together_what_one_scores(
    layout: str, models: Path, one: dict[str, np.ndarray], tmp_path: Path
) -> None:
    two = scored(models, tmp_path, layout, world_size=2)
    assert one["teacher_ids"].any()
    same = one["teacher_ids"] == two["teacher_ids"]
    assert same.mean() > 0.999  # near-ties of the teacher
    logs = [values["teacher_log_probs"].astype(np.float32) for values in (one, two)]
    np.testing.assert_allclose(*logs, atol=2e-2)


def test_values_are_those_of_the_same_cuts(models: Path, tmp_path: Path) -> None:
    """A teacher that has read the other half of a document says other things of its labels."""
    wrapped = ("packed_sequence=wrapped", LENGTH.replace("1024", "256"))
    assert scored(models, tmp_path, *wrapped)["teacher_ids"].any()
    for elsewhere in ("packed_sequence.seed=5", "packed_sequence.slot_multiple=8"):
        arguments = settings(models, tmp_path, *wrapped, elsewhere)
        with pytest.raises(ConfigError, match="for these rows, packs and teacher"):
            train("finetune", tmp_path / "run", *arguments)
    anew = settings(models, tmp_path, *wrapped, "packed_sequence.repack_each_epoch=true")
    with pytest.raises(ConfigError, match="cuts documents elsewhere in each epoch"):
        score.main(config_of("finetune", tmp_path / "run", *anew))


MANY = (
    "dataset.num_chats=400",
    "packed_sequence.packed_sequence_size=256",
    "packed_sequence.overlong=drop",
)


def _score_five(folder: Path, arguments: list[str], is_disk_full: bool) -> None:
    """The place of four packs is noted, that of the fifth is not: nothing more can be written, or the process hangs."""
    values = Engine.values

    def interrupted(*given: Any) -> Any:
        for number, found in enumerate(values(*given)):
            if number == 4 and is_disk_full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            if number == 4 and not is_disk_full:
                label_values.SAVE_EVERY_S = 1000.0
            if number == 5:
                (folder / "hangs").touch()
                time.sleep(600)
            yield found

    label_values.SAVE_EVERY_S = -1.0
    Engine.values = interrupted  # type: ignore[method-assign]
    score.main(config_of("finetune", folder, *arguments))


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return scored(models, tmp_path_factory.mktemp("whole"), *MANY)


@pytest.mark.parametrize(
    "is_disk_full",
    [
        pytest.param(False, id="killed", marks=pytest.mark.system),
        pytest.param(True, id="disk-full", marks=pytest.mark.system),
    ],
)
def test_an_interrupted_scoring_goes_on_where_it_was(
    is_disk_full: bool, models: Path, whole: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """What was noted as done is kept: values that are changed by hand in the meantime stay changed."""
    (tmp_path / "run").mkdir()
    arguments = tmp_path / "run", settings(models, tmp_path, *MANY), is_disk_full
    process = fork_server().Process(target=_score_five, args=arguments, daemon=True)
    process.start()
    wait_until(lambda: (tmp_path / "run/hangs").exists() or not process.is_alive(), 200)
    assert process.is_alive() != is_disk_full
    process.kill()
    process.join()
    (part,) = (tmp_path / "values").glob("top_7-train-*.part")
    assert json.loads((part / "progress.json").read_text())["packs"] == 4
    shutil.copytree(tmp_path, tmp_path / "copy")
    ids = np.lib.format.open_memmap(part / "teacher_ids.npy", mode="r+")
    places = np.flatnonzero(ids.any(axis=1))
    assert 0 < len(places) < len(np.flatnonzero(whole["teacher_ids"].any(axis=1)))
    ids[places] = 12345
    ids.flush()
    resumed = scored(models, tmp_path, *MANY)
    # values of the pack behind the noted place are computed again
    kept = (resumed["teacher_ids"] == 12345).all(axis=1)
    assert 0 < kept.sum() < len(places)
    np.testing.assert_array_equal(resumed["teacher_ids"][~kept], whole["teacher_ids"][~kept])
    np.testing.assert_array_equal(resumed["teacher_log_probs"], whole["teacher_log_probs"])
    # of other packs nothing is kept, so nothing is left out
    other = scored(models, tmp_path / "copy", *MANY, "seed=3", "packed_sequence.slot_multiple=8")
    np.testing.assert_allclose(
        other["teacher_log_probs"], whole["teacher_log_probs"], atol=2e-2, equal_nan=True
    )
    assert not (other["teacher_ids"] == 12345).any()


FULL_DISK = """\
import resource
from automodel_lite.cli import run_recipe
from automodel_lite.parts.losses.label_values import Part

opened = Part._open

def _open(part):
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    opened(part)

Part._open = _open
run_recipe("recipes.score:main")
"""


@pytest.mark.system
def test_a_full_disk_under_one_rank_is_one_sentence(models: Path, tmp_path: Path) -> None:
    """The other rank waits in a collective: it ended in a traceback of the transport, the last thing on the screen."""
    (tmp_path / "full.py").write_text(FULL_DISK)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [warm_python(), *torchrun, str(tmp_path / "full.py"), "--config-name", "finetune"]
    done = subprocess.run(
        [*command, f"output_dir={tmp_path}/run", *settings(models, tmp_path, *MANY)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "values cannot be written (File too large): make room there" in done.stderr
    assert "[rank 1] Traceback" not in done.stderr
    assert "by peer" not in done.stderr


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        half = len(content) // 2
        path.write_bytes(content[:half] + (bytes(len(content) - half) if how == "zeroed" else b""))


def test_damaged_values_are_refused_and_computed_again(
    models: Path, one: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored(models, tmp_path)
    (folder,) = (tmp_path / "values").glob("top_7-train-????????????")
    step = ("training.max_steps=1", "training.allow_few_steps=true")
    for how, name in (
        ("zeroed", "teacher_ids"),
        ("cut", "teacher_log_probs"),
        ("missing", "teacher_rest"),
    ):
        damage(folder / f"{name}.npy", how)
        with pytest.raises(ConfigError, match=rf"is damaged \({name}.npy .*run recipes/score.py"):
            train("finetune", tmp_path / "run", *settings(models, tmp_path, *step))
        again = scored(models, tmp_path)
        for column, values in again.items():
            np.testing.assert_array_equal(values, one[column])
        assert "was damaged: it is computed again" in capsys.readouterr().out
    # and a value that nobody computed, whatever its checksum
    values = np.lib.format.open_memmap(folder / "teacher_log_probs.npy", mode="r+")
    label = np.flatnonzero(values[:, 0])[5]
    values[label] = np.nan
    values.flush()
    (folder / "key.json").unlink()
    seal(folder, "x", {})
    with pytest.raises(ConfigError, match="has no value for 1 label: remove it"):
        train("finetune", tmp_path / "run", *settings(models, tmp_path, *step))


def test_two_jobs_with_one_cache_compute_once(
    models: Path, one: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """As of a sweep: one computes, the other waits for it."""
    jobs = []
    for number in range(2):
        arguments = tmp_path / f"run{number}", settings(models, tmp_path)
        jobs.append(fork_server().Process(target=_score_alone, args=arguments, daemon=True))
        jobs[-1].start()
    for job in jobs:
        job.join(200)
        assert job.exitcode == 0
    for column, values in columns(tmp_path).items():
        np.testing.assert_array_equal(values, one[column])


def _score_alone(folder: Path, arguments: list[str]) -> None:
    label_values.SAVE_EVERY_S = -1.0
    assert score.main(config_of("finetune", folder, *arguments)) == 0


@pytest.mark.system
def test_references_computed_ahead_are_taken(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By recipes/score.py with the arguments of training, which then has nothing to compute."""
    where = [
        f"dataset.path={pairs}",
        "dataset.val_frac=0.2",
        f"cache_dir={tmp_path / 'cache'}",
        *SMALL,
    ]
    assert score.main(config_of("dpo", tmp_path / "run", *where)) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache/values").rglob("*.npy")}
    assert len(before) == 2  # training and validation
    rows = dpo(tmp_path / "run", pairs, "training.max_steps=1")
    assert curve(rows)[0] == pytest.approx(0.69314718, abs=1e-6)
    assert {
        path: path.stat().st_mtime_ns for path in (tmp_path / "cache/values").rglob("*.npy")
    } == before
    assert "NOTE: the reference of all" not in capsys.readouterr().out
    # another start has another reference: one step takes few of its pairs
    dpo(tmp_path / "other", pairs, "training.max_steps=1", "seed=5")
    assert "training.max_steps=1 trains on" in capsys.readouterr().out


@pytest.mark.system
def test_a_continued_adapter_has_a_reference_of_its_own(
    models: Path, pairs: Path, tmp_path: Path
) -> None:
    """One base, two adapters to start from: the reference is the model as it starts, not the base alone."""
    base = (
        "model=pretrained",
        f"model.pretrained={models / 'student'}",
        "tokenizer=pretrained",
        "peft=lora",
    )
    fresh = dpo(tmp_path / "fresh", pairs, *base, "optimizer.lr=1e-2")
    assert curve(fresh)[-1] < 0.69
    again = dpo(
        tmp_path / "again",
        pairs,
        *base,
        f"peft.adapter={tmp_path / 'fresh'}",
        "training.max_steps=1",
    )
    assert [curve(fresh)[0], curve(again)[0]] == pytest.approx([0.69314718] * 2, abs=1e-6)
