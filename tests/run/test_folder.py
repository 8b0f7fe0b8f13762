"""The small files of a run: true, and readable, whatever happens to the disk."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.run.folder import RunFolder, command_line
from automodel_lite.run.lock import RunLock
from automodel_lite.training.resolve import as_the_run_began, with_layout
from tests.run.test_durable import Faults
from tests.runs import losses_by_step, quick_config, train_quick
from tests.tools.test_report import run_folder


def test_logs_behind_a_link_are_refused(tmp_path: Path) -> None:
    """A run's folder may come from a stranger: its logs once were appended to files of the user's own."""
    (tmp_path / "own").mkdir()
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.logs.symlink_to(tmp_path / "own")
    with pytest.raises(ConfigError, match=r"run/logs is a link: remove it"):
        train_quick(run.path)
    assert list((tmp_path / "own").iterdir()) == []


@pytest.mark.parametrize("what", ["removed", "renamed"])
def test_a_run_folder_that_vanishes_is_a_failure(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes import train_ft

    real, run = train_ft.TrainFinetuneRecipe.step, tmp_path / "run"

    def step(recipe: Any, *args: Any) -> Any:
        if recipe.num_steps == 2:
            run.rename(tmp_path / "elsewhere") if what == "renamed" else shutil.rmtree(run)
        return real(recipe, *args)

    with monkeypatch.context() as patch:
        patch.setattr(train_ft.TrainFinetuneRecipe, "step", step)
        with pytest.raises(
            RunStoppedError, match=r"output_dir=.*run is gone: it was removed or renamed"
        ):
            train_quick(run)
    assert not (run / "checkpoints").exists()


def _no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_status_is_true_where_no_other_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status("running", 123456, "", "step_00123456")
    Faults(monkeypatch, tmp_path, at, _no_space).is_on = True
    folder.end("failed", "no room")
    assert folder.read_status() == {
        "state": "failed",
        "step": 123456,
        "reason": "no room",
        "checkpoint": "step_00123456",
    }


@pytest.mark.parametrize("at", [1, 5, 8, 11])
def test_a_disk_that_is_full_at_the_start_is_a_sentence(tmp_path: Path, at: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, tmp_path / "run", at, _no_space).is_on = True
        with pytest.raises((ConfigError, RunStoppedError), match=r"No space left|no space"):
            train_quick(tmp_path / "run", "training.max_steps=1")


@pytest.mark.parametrize("content", ["5", "[]", '{"state"', ""])
def test_small_files_that_are_damaged(tmp_path: Path, content: str) -> None:
    """A damaged STATUS.json or metrics line is written again; a damaged config.yaml is a sentence, whose cure brings back
    what followed from the layout too.
    """
    short = ("training.max_steps=2", "training.global_batch_size=null")
    assert train_quick(tmp_path, *short, stop_at=1)[0] == 75
    kept = (tmp_path / "config.yaml").read_bytes()
    (tmp_path / "STATUS.json").write_text(content)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(content + "\n")
    (tmp_path / "config.yaml").write_text(content or "a: [")
    with pytest.raises(ConfigError, match=r"config.yaml cannot be read .*restore it"):
        train_quick(tmp_path, *short)
    (newest,) = RunFolder(tmp_path).checkpoints.glob("*1/config.yaml")
    assert newest.read_bytes() == kept
    shutil.copy(newest, tmp_path)
    assert train_quick(tmp_path, *short)[0] == 0
    assert sorted(losses_by_step(tmp_path)) == [1, 2]


def _begin_a_run(folder: RunFolder, config: Config) -> None:
    """What a run does in its folder before its first step."""
    config = as_the_run_began(config, folder)
    lock = RunLock(folder.lock)
    lock.check()
    folder.check(config)
    lock.acquire()
    folder.open(with_layout(config, global_batch_size=4, slot_multiple=1))
    folder.write_status("running", 0)
    lock.release()


@pytest.mark.system
def test_a_kill_at_any_moment_of_the_start_hinders_no_other(tmp_path: Path) -> None:
    at, is_killed = 0, True
    while is_killed:
        at += 1
        folder = RunFolder(tmp_path / f"at{at}")
        config = quick_config(folder.path)
        pid = os.fork()
        if pid == 0:
            try:
                Faults(pytest.MonkeyPatch(), folder.path, at, lambda: os._exit(9)).is_on = True
                _begin_a_run(folder, config)
            finally:  # never back into the test run that this is a copy of
                os._exit(0)
        is_killed = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        _begin_a_run(folder, config)
        assert folder.config.is_file()
        assert not folder.lock.exists()
    assert at > 10


def test_only_an_export_of_the_newest_checkpoint_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = run_folder(tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "adapter"):
        (run / name).mkdir()
        (run / name / "automodel_lite.json").write_text('{"step": 3, "files": []}')
    checkpoint = run / "checkpoints" / "step_00000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE.json").write_text("{}")
    folder = RunFolder(run)
    assert folder.next_commands("finished")[1] == "vllm serve runs/a/hf"
    (run / "hf" / "automodel_lite.json").write_text('{"step": 2, "files": []}')
    assert folder.next_commands("finished")[1].endswith(
        "export runs/a   # the adapter merged, for vLLM"
    )
    checkpoint.rename(checkpoint.with_name("step_00000004"))
    export, generate = folder.next_commands("finished")
    assert "export runs/a   # writes the newest checkpoint" in export
    assert generate.endswith('generate runs/a "..."')
    folder.write_facts([], kind="text")
    assert folder.next_commands("finished")[1].endswith('generate runs/a "..." --raw')
    program = tmp_path / "my work" / "automodel-lite"
    program.parent.mkdir()
    program.touch()
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    generate = folder.next_commands("finished")[1]
    assert shlex.split(generate) == [str(program), "generate", "runs/a", "...", "--raw"]


TYPED = {
    "python": (["python", "recipes/train_ft.py", "a=b c"], "python recipes/train_ft.py 'a=b c'"),
    "installed": (
        ["/venv/bin/python", "/venv/bin/automodel-lite", "train"],
        "/venv/bin/automodel-lite train",
    ),
    "module": (
        ["/venv/bin/python3", "-m", "automodel_lite", "train"],
        "/venv/bin/python3 -m automodel_lite train",
    ),
}


@pytest.mark.parametrize(("words", "command"), TYPED.values(), ids=TYPED)
def test_the_command_of_a_run_can_be_typed_again(
    monkeypatch: pytest.MonkeyPatch, words: list[str], command: str
):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(sys, "orig_argv", words)
    assert command_line() == command


def test_the_command_of_a_rank_is_its_launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    code = "from automodel_lite.run.folder import command_line; print(command_line())"
    launcher = tmp_path / "launcher.py"
    launcher.write_text(f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {code!r}])")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    command = ["python", str(launcher), "--nproc", "2"]
    out = subprocess.run(
        command, executable=sys.executable, capture_output=True, text=True, check=True
    ).stdout
    assert out == f"python {launcher} --nproc 2\n"


def test_a_validation_that_is_made_again_is_logged_once(tmp_path: Path) -> None:
    """A run that stopped between a validation made up for and its next step had its rows twice."""
    run = RunFolder(tmp_path)
    rows = [
        {"step": 2, "val_loss/val": 1.5},
        {"step": 4, "loss": 1.0},
        {"step": 4, "val_loss/val": 0.5},
        {"step": 4, "text/Who?": "I"},
        {"step": 5, "loss": 0.5},
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.rewind_metrics(4)
    assert run.rows() == rows[:4]
    run.rewind_metrics(4, validates_again=True)
    assert run.rows() == rows[:2]


def test_decisions_of_steps_that_come_again_are_dropped(tmp_path: Path) -> None:
    """Also what a kill has left of the last line, which the next one would be written behind."""
    run = RunFolder(tmp_path)
    for step in (2, 4, 6):
        run.note_decisions(step, {"fitted": {"temperature": step / 2}})
    with run.decisions.open("a") as file:
        file.write('{"step": 8, "fit')
    run.rewind_metrics(4)
    assert run.decisions_of() == {"step": 4, "fitted": {"temperature": 2.0}}
    run.rewind_metrics(4, validates_again=True)
    run.note_decisions(4, {"fitted": {"temperature": 9.0}})
    run.note_decisions(6, {})
    lines = [json.loads(line) for line in run.decisions.read_text().splitlines()]
    assert [(x["step"], x["fitted"]["temperature"]) for x in lines] == [(2, 1.0), (4, 9.0)]
