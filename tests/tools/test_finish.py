"""The end of a run: what fails then can be made up for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCardData
from transformers import LlamaForCausalLM

from automodel_lite.errors import RunStoppedError
from automodel_lite.run import durable
from recipes import export_hf
from tests.run.jobs import status_of
from tests.run.test_export import FEW, _no_space
from tests.runs import train, train_quick


def test_an_export_that_fails_can_be_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", lambda *args, **more: _no_space())
        with pytest.raises(
            RunStoppedError,
            match=r"the export failed \(.*No space left.*\): .*step_00000003; automodel-lite export .* exports it",
        ):
            train("smoke", run, *FEW)
    assert not [path for path in run.iterdir() if path.name.startswith(".tmp")]
    assert json.loads((run / "STATUS.json").read_text())["state"] == "failed"
    assert export_hf.main([str(run)]) == 0
    shutil.rmtree(run / "hf")
    train("smoke", run, *FEW)  # the same command exports it too
    assert (run / "hf/model.safetensors").is_file()


def test_questions_that_do_not_fit_the_model_are_named_and_the_run_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One held-out question over the model's positions once ended a trained, exported run as failed."""
    rows = [{"prompt": "Hi there?", "completion": "Hello!"}] * 60
    long = {"prompt": "word " * 900, "completion": "No."}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "val.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [rows[0], long, *rows[:40]])
    )
    where = (
        f"dataset.path={tmp_path / 'train.jsonl'}",
        f"dataset.val_path={tmp_path / 'val.jsonl'}",
    )
    options = ("dataset=files", "~dataset.num_chats", "evaluation=exact_match", *where)
    more = ("packed_sequence.overlong=drop", "model.config.max_position_embeddings=256")
    size = ("packed_sequence.packed_sequence_size=256", "evaluation.num_questions=3")
    few = [text for text in FEW if not text.startswith("dataset.")]
    rows = train("smoke", tmp_path / "run", *few, *options, *more, *size)
    assert status_of(tmp_path / "run")["state"] == "finished"
    (scores,) = [row for row in rows if "answers" in row]
    assert (scores["answers"], scores["answers_refused"]) == (2, 1)
    screen = " ".join(capsys.readouterr().out.split())
    assert "not asked: question 2, word word" in screen
    assert "256 positions for prompt and answer together" in screen


@pytest.mark.parametrize("stage", ["evaluated", "card"])
def test_nothing_behind_the_export_undoes_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: str,
) -> None:
    """Libraries that fail only then."""

    def fail(*args: object, **more: object) -> None:
        raise MemoryError("no room at all")

    owner, name = {
        "evaluated": (LlamaForCausalLM, "generate"),
        "card": (ModelCardData, "to_dict"),
    }[stage]
    monkeypatch.setattr(owner, name, fail)
    train("smoke", tmp_path / "run", *FEW, "evaluation=exact_match")
    assert status_of(tmp_path / "run")["state"] == "finished"
    assert "WARNING: MemoryError: no room at all" in capsys.readouterr().out


def test_a_disk_that_is_full_at_the_end_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = durable.free_bytes
    with monkeypatch.context() as patch:
        patch.setattr(
            durable,
            "free_bytes",
            lambda folder: 0 if list(folder.glob("step_00000004")) else real(folder),
        )
        with pytest.raises(
            RunStoppedError,
            match=r"the last step, 6, could not be saved: .* step_00000004. Make room",
        ):
            train_quick(tmp_path)
    status = status_of(tmp_path)
    assert (status["state"], status["checkpoint"]) == ("failed", "step_00000004")
    code, screen = train_quick(tmp_path)
    assert code == 0
    assert "continues from step_00000004" in screen


def test_a_last_step_that_is_only_exported_is_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later starts said "nothing to do", and never wrote the checkpoint."""
    real, options = durable.free_bytes, ["checkpoint.export_hf=true"]
    with monkeypatch.context() as patch:
        patch.setattr(
            durable,
            "free_bytes",
            lambda folder: 0 if list(folder.glob("step_00000004")) else real(folder),
        )
        code, screen = train_quick(tmp_path, *options)
    assert code == 0
    assert "the last step is exported, but not saved as a checkpoint" in screen
    assert status_of(tmp_path)["is_saved"] is False
    assert train_quick(tmp_path, *options)[0] == 0
    assert status_of(tmp_path)["checkpoint"] == "step_00000006"
    assert "nothing to do" in train_quick(tmp_path, *options)[1]
