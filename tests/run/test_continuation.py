"""A run that is stopped goes on as if nothing had happened."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.extras.load_run import load_run_config
from automodel_lite.extras.report import read_run
from automodel_lite.run.folder import RunFolder
from automodel_lite.training.resolve import as_the_run_began, with_layout
from tests.runs import (
    DROPOUT,
    losses_by_step,
    quick_config,
    rows_of,
    train_on,
    train_quick,
)

OVER_AN_EPOCH = [*DROPOUT, "dataset.num_chats=50", "training.max_steps=7"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, dropout on, 7 steps of 4 packs: over the edge of an epoch, in step 5."""
    folder = tmp_path_factory.mktemp("whole")
    assert train_on(2, folder, *OVER_AN_EPOCH)[0] == 0
    epochs = {row["step"]: row["epoch"] for row in rows_of(folder) if "loss" in row}
    assert list(epochs) == [1, 2, 3, 4, 5, 6, 7]
    assert epochs[3] == 0
    assert epochs[6] == 1
    return folder


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="sync"),
        pytest.param(["checkpoint.mode=async"], id="async", marks=pytest.mark.system),
        pytest.param(["dataloader.num_workers=2"], id="two-workers", marks=pytest.mark.system),
    ],
)
def test_the_same_layout_continues_bit_for_bit(
    tmp_path: Path, uninterrupted: Path, options: list[str]
) -> None:
    run = tmp_path / "run"
    overrides = [*OVER_AN_EPOCH, *options]
    code, screen = train_on(2, run, *overrides, stop_at=3, on_rank=1)
    assert code == 75
    assert (
        "stopped after step 3 of 7 (SIGTERM); run the same command again to continue from step_00000003"
        in screen
    )
    status = json.loads((run / "STATUS.json").read_text())
    assert status == {
        "state": "preempted",
        "step": 3,
        "reason": "SIGTERM",
        "checkpoint": "step_00000003",
    }
    code, screen = train_on(2, run, *overrides, stop_at=6)  # past the edge of the epoch
    assert code == 75
    assert "continues from step_00000003, steps 4 to 7" in screen
    code, screen = train_on(2, run, *overrides)
    assert code == 0
    assert json.loads((run / "STATUS.json").read_text())["state"] == "finished"
    assert losses_by_step(run) == losses_by_step(uninterrupted)


@pytest.mark.system
def test_another_layout_continues_with_the_same_batches(tmp_path: Path) -> None:
    """1 rank -> 2 ranks -> 4 = dp 2 x cp 2 -> 1 rank with other micro-batches and workers; no dropout, whose masks
    belong to ranks.
    """
    slots = "packed_sequence.slot_multiple=4"  # wide enough for cp=2 later
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train_quick(whole, slots, "training.max_steps=12")[0] == 0
    overrides = [slots, "training.max_steps=12"]
    assert (
        train_quick(
            run,
            *overrides,
            "training.global_batch_size=null",
            "training.micro_batch_size=4",
            stop_at=3,
        )[0]
        == 75
    )
    free = "training.global_batch_size=null"  # stays what the run began with
    assert train_on(2, run, *overrides, free, stop_at=6)[0] == 75
    assert train_on(4, run, *overrides, free, "mesh.cp=2", stop_at=9)[0] == 75
    assert (
        train_quick(
            run, *overrides, free, "training.micro_batch_size=2", "dataloader.num_workers=2"
        )[0]
        == 0
    )
    want, got = losses_by_step(whole), losses_by_step(run)
    assert want.keys() == got.keys()
    for step, (loss, grad_norm) in want.items():
        assert got[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(grad_norm, rel=1e-4)), (
            step
        )


def test_a_signal_to_every_process_spares_the_workers(tmp_path: Path) -> None:
    """SLURM signals the data workers too."""
    options = ["training.max_steps=3"]
    assert train_on(1, tmp_path, "dataloader.num_workers=2", *options, stop_at=-2)[0] == 75
    assert train_quick(tmp_path, *options)[0] == 0


def test_a_validation_that_a_signal_ends_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss was logged, and not the checkpoint's, so that keep_best deleted the best one."""
    import os
    import signal

    from recipes import train_ft

    options = ["training.val_every_steps=1", "training.max_steps=3", "checkpoint.every_steps=2"]
    options += ["checkpoint.keep_last=1", "checkpoint.keep_best=1", "optimizer.lr=0.5"]
    options += ["lr_scheduler.warmup_steps=3"]
    assert train_quick(tmp_path / "whole", *options)[0] == 0
    real = train_ft.TrainFinetuneRecipe.validate

    def validate(recipe: train_ft.TrainFinetuneRecipe) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        real(recipe)

    with monkeypatch.context() as patch:
        patch.setattr(train_ft.TrainFinetuneRecipe, "validate", validate)
        code, screen = train_quick(tmp_path / "run", *options)
    assert code == 75
    assert "stopped after step 1 of 3 (SIGUSR1)" in screen
    assert "validation (held_out)" not in screen
    assert train_quick(tmp_path / "run", *options)[0] == 0
    read = [
        (tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "run")
    ]
    validations = [[line for line in lines if "val_loss" in line] for lines in read]
    assert validations[0] == validations[1]
    losses = [json.loads(line)["val_loss/held_out"] for line in validations[0]]
    assert min(losses) == losses[0]
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["step_00000001", "step_00000003"]


def test_the_step_at_which_a_run_stops_is_logged(tmp_path: Path) -> None:
    """Rows cover the steps since the one before: without it, the next row's rates stood for these steps, too."""
    options = ["training.max_steps=5", "training.log_every_steps=4"]
    assert train_quick(tmp_path / "whole", *options, "training.log_every_steps=1")[0] == 0
    assert train_quick(tmp_path / "run", *options, stop_at=3)[0] == 75
    assert train_quick(tmp_path / "run", *options)[0] == 0
    assert list(losses_by_step(tmp_path / "run")) == [1, 3, 4, 5]
    rows = rows_of(tmp_path / "whole")
    num_tokens = sum(row.get("num_tokens", 0) for row in rows)
    assert read_run(tmp_path / "run").axes()["tokens"][1][-1] == pytest.approx(num_tokens)


def test_time_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 3600))
    code, screen = train_quick(tmp_path, "advanced.stop_margin_s=3600", "training.max_steps=2")
    assert code == 75
    assert "(the time is nearly up)" in screen
    assert train_quick(tmp_path, "advanced.stop_margin_s=60", "training.max_steps=2")[0] == 0


def test_packs_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    assert train_quick(tmp_path, "training.max_steps=1")[0] == 0
    with pytest.raises(ConfigError) as refusal:
        train_quick(tmp_path, "training.max_steps=2", "mesh.cp=2", "checkpoint.accept_changes=true")
    assert str(refusal.value) == (
        f"mesh.cp=2 needs documents padded to multiples of 4, and {tmp_path} was started with "
        "packed_sequence.slot_multiple=1: use another mesh.cp, or start a new run with name=... "
        "(packed_sequence.slot_multiple=4 from the start fits mesh.cp=1 and 2)."
    )


def test_slots_that_were_set_are_as_the_run_began(tmp_path: Path) -> None:
    """To set others, as a new run is told to, would be refused."""
    folder, slots = RunFolder(tmp_path), "packed_sequence.slot_multiple=2"
    folder.open(with_layout(quick_config(tmp_path, slots), global_batch_size=4, slot_multiple=2))
    with pytest.raises(ConfigError, match=r"slot_multiple=2: use another mesh.cp"):
        as_the_run_began(quick_config(tmp_path, slots, "mesh.cp=2"), folder)


def test_a_run_of_an_older_version_goes_on(tmp_path: Path) -> None:
    """It did not know every setting of today."""
    folder, config = RunFolder(tmp_path), quick_config(tmp_path)
    folder.open(with_layout(config, global_batch_size=4, slot_multiple=1))
    config = as_the_run_began(config, folder)
    text = folder.config.read_text().replace("  ema_decay: 0.0\n", "")
    assert text != folder.config.read_text()
    folder.config.write_text(text)
    folder.check(config)
    assert load_run_config(folder).optimizer == config.optimizer
    # it took settings that do nothing beside others
    idle = text.replace("warmup_frac: 0.03", "warmup_frac: 0.5").replace(
        "  keep_every: 0", "  keep_every: 2"
    )
    assert idle.count("0.5") > text.count("0.5")
    folder.config.write_text(re.sub(r"\n  every_steps: .*", "\n  every_steps: 0", idle))
    read = load_run_config(folder)
    assert (read.checkpoint.keep_every, read.optimizer) == (0, config.optimizer)

    folder.config.write_text(f"{text}strategy:\n  _target_: automodel_lite.distributed.FSDP\n")
    with pytest.raises(
        ConfigError,
        match=r"strategy._target_: was .*FSDP, now null\nStart a new run with name=..., or continue",
    ):
        folder.check(config)
    with pytest.raises(
        ConfigError,
        match=r"config.yaml does not match this version: use the version that the run was",
    ):
        load_run_config(folder)


def test_changed_data_is_refused(tmp_path: Path) -> None:
    chat = {
        "messages": [
            {"role": "user", "content": "what is {}?"},
            {"role": "assistant", "content": "it is {}."},
        ]
    }
    data = tmp_path / "chats.jsonl"
    lines = [json.dumps(chat).replace("{}", f"thing {number}") for number in range(40)]
    data.write_text("\n".join(lines))
    options = [
        "dataset=files",
        f"dataset.path={data}",
        "training.max_steps=2",
        "~dataset.num_chats",
    ]
    assert train_quick(tmp_path / "run", *options, stop_at=1)[0] == 75
    data.write_text("\n".join([*lines, lines[0]]))
    with pytest.raises(ConfigError, match="the data changed since the checkpoint was written"):
        train_quick(tmp_path / "run", *options)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    accepting = [*options, "checkpoint.accept_changes=true", "training.max_grad_norm=2"]
    code, screen = train_quick(tmp_path / "other", *accepting)
    (accepted,) = (line for line in screen.splitlines() if line.startswith("accepted"))
    assert code == 0
    assert "training.max_grad_norm: was 1.0, now 2.0; documents: was 40, now 41; " in accepted
    data.write_text("\n".join(lines))
    code, screen = train_quick(tmp_path / "run", *options)
    assert code == 0
    assert "accepted" not in screen


def test_another_optimizer_does_not_continue(tmp_path: Path) -> None:
    """Its checkpoints are whole, and no backup has others."""
    assert train_quick(tmp_path, "training.max_steps=2", stop_at=1)[0] == 75
    more = ["checkpoint.accept_changes=true", "training.ema_decay=0.9"]
    with pytest.raises(ConfigError) as raised:
        train_quick(tmp_path, "training.max_steps=2", *more)
    text = str(raised.value)
    assert "step_00000001 cannot be continued with what has changed (training.ema_decay:" in text
    assert "begin a new run with its weights: automodel-lite export" in text


def test_a_torn_metrics_line_is_written_again(tmp_path: Path) -> None:
    assert train_quick(tmp_path, "training.max_steps=4", stop_at=2)[0] == 75
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "loss": 1.0, "grad_norm": 1.0}\n{"step": 4, "lo')
    assert train_quick(tmp_path, "training.max_steps=4")[0] == 0
    assert sorted(losses_by_step(tmp_path)) == [1, 2, 3, 4]


@pytest.mark.slow
def test_tensor_parallel_ranks_continue_and_are_continued(tmp_path: Path) -> None:
    """2 ranks FSDP -> tp 2 -> dp 2 x tp 2 -> 1 rank: the same packs and the losses of one process."""
    free = ["training.max_steps=8", "training.global_batch_size=null"]
    assert train_quick(tmp_path / "whole", "training.max_steps=8")[0] == 0
    run = tmp_path / "run"
    assert train_on(2, run, "training.max_steps=8", stop_at=2)[0] == 75
    assert train_on(2, run, *free, "mesh.tp=2", stop_at=4)[0] == 75
    assert train_on(4, run, *free, "mesh.tp=2", stop_at=6)[0] == 75
    assert train_quick(run, *free)[0] == 0
    want, got = losses_by_step(tmp_path / "whole"), losses_by_step(run)
    assert want.keys() == got.keys()
    for step, (loss, grad_norm) in want.items():
        assert got[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(grad_norm, rel=1e-4)), (
            step
        )


@pytest.mark.system
def test_a_mixture_continues_with_the_same_documents(tmp_path: Path) -> None:
    """Each epoch draws its own: stopped in the second epoch, the run goes on with those that it would have drawn."""
    chats = "{_target_: automodel_lite.parts.datasets.toy_chat.ToyChat, num_chats: %d, seed: %d}"
    first, second = chats % (30, 1), chats % (30, 2)
    parts = f"{{one: {{dataset: {first}, weight: 0.8}}, two: {{dataset: {second}, weight: 0.2}}}}"
    overrides = [
        "dataset=mixture",
        "~dataset.num_chats",
        f"dataset.sources={parts}",
        "training.max_steps=7",
    ]
    assert train_quick(tmp_path / "whole", *overrides)[0] == 0
    epochs = {row["step"]: row["epoch"] for row in rows_of(tmp_path / "whole") if "loss" in row}
    assert (epochs[3], epochs[5]) == (0, 1)
    run = tmp_path / "run"
    assert train_quick(run, *overrides, stop_at=5)[0] == 75
    assert train_quick(run, *overrides)[0] == 0
    assert losses_by_step(run) == losses_by_step(tmp_path / "whole")


def test_a_run_continues_on_fewer_data_than_its_epoch_has_read(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    row = json.dumps({"text": "Ship and cargo. " * 8}) + "\n"
    files = ["dataset=files", "~dataset.num_chats", f"dataset.path={data}"]
    data.write_text(row * 60)
    assert train_quick(tmp_path / "run", *files, "training.max_steps=2")[0] == 0
    data.write_text(row * 6)
    more = ["training.max_steps=4", "checkpoint.accept_changes=true"]
    assert train_quick(tmp_path / "run", *files, *more)[0] == 0
    steps = [(row["step"], row["epoch"]) for row in rows_of(tmp_path / "run") if "loss" in row]
    assert steps[-2:] == [(3, 1), (4, 2)]
