"""`automodel-lite verify RUN --replay STEP`: a recorded step is computed again; what was changed
since is found.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from automodel_lite.errors import ConfigError
from automodel_lite.extras.replay import Recorded, shares
from automodel_lite.run.durable import digests, write_file
from automodel_lite.run.folder import RunFolder
from automodel_lite.telemetry.ledger import chained, manifest_digest, read_ledger
from automodel_lite.training.launch import watch_ranks
from recipes import replay
from tests.ranks import run_ranks
from tests.runs import train_on, train_quick

DATA = [
    {
        "messages": [
            {"role": "user", "content": f"say {n}"},
            {"role": "assistant", "content": f"{n} " * n},
        ]
    }
    for n in range(3, 43)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps over a file of chats, with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    train(folder)
    return folder


def settings(folder: Path) -> list[str]:
    data = folder.parent / "chats.jsonl"
    if not data.exists():
        data.write_text("".join(json.dumps(row) + "\n" for row in DATA))
    return [
        "dataset=files",
        "~dataset.num_chats",
        "tokenizer=bpe",
        "tokenizer.vocab_size=300",
        "training.precision=fp32",
        f"dataset.path={data}",
        "dataset.val_path=null",
        f"cache_dir={folder.parent / 'cache'}",
        "packed_sequence.packed_sequence_size=64",
        "packed_sequence.slot_multiple=4",
        "packed_sequence.overlong=truncate",
        "checkpoint.keep_last=10",
    ]


def train(folder: Path, *overrides: str, stop_at: int = 0, world_size: int = 1) -> int:
    if world_size > 1:
        return train_on(world_size, folder, *settings(folder), *overrides, stop_at=stop_at)[0]
    return train_quick(folder, *settings(folder), *overrides, stop_at=stop_at)[0]


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def verify(
    run: Path, capsys: pytest.CaptureFixture[str], step: int | None = None
) -> tuple[int, str]:
    code = replay.main(run, (), step)
    return code, capsys.readouterr().out


def chain_again(run: Path, change: Callable[[dict], dict]) -> None:
    """Changes lines and recomputes every hash: a forgery that only computing again finds."""
    path = run / "ledger.jsonl"
    head = ""
    texts = []
    for line in read_ledger(path):
        row = change(line.row)
        if "checkpoint" in row:  # its manifest changes with the chain of its step, a line before
            row["sha256"] = manifest_digest(run / f"checkpoints/step_{row['checkpoint']:08d}")
        text, head = chained(row, head)
        texts.append(text)
        step = line.step
        state = run / "checkpoints" / f"step_{step or 0:08d}" / "state.json"
        if state.is_file():  # and what the checkpoint knows of it
            content = json.loads(state.read_text())
            state.write_text(json.dumps({**content, "ledger": head}))
            manifest(state.parent)
    path.write_text("".join(texts))


def manifest(checkpoint: Path) -> None:
    """Writes a checkpoint's manifest anew, so that every digest in it is right."""
    path = checkpoint / "COMPLETE.json"
    found = json.loads(path.read_text())
    for name, entry in found["files"].items():
        file = checkpoint / name
        entry |= {"bytes": file.stat().st_size, **digests(file)}
    path.unlink()
    write_file(path, json.dumps(found))


@pytest.mark.parametrize(
    ("step", "start"),
    [
        (1, "the beginning"),
        (2, "the beginning"),  # and compared with its checkpoint
        (3, "step_00000002"),
        (4, "step_00000002"),
    ],
)
def test_one_process_computes_the_same_bits(
    trained: Path, capsys: pytest.CaptureFixture[str], step: int, start: str
) -> None:
    code, said = verify(trained, capsys, step)
    assert code == 0
    assert f"step {step} from {start}: same bits" in said
    assert ("tensors compared" in said) == (step in (2, 4))
    assert not [*trained.glob(".replay*")]


def replay_on_rank(rank: int, world_size: int, run: Path, overrides: list[str]) -> int:
    torch.set_num_threads(1)
    return replay.main(run, overrides, 4)


@pytest.mark.parametrize("overrides", [[], ["mesh.cp=2"]], ids=str)
def test_two_ranks_stay_within_rounding(
    trained: Path, tmp_path: Path, overrides: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    run = copied(trained, tmp_path / "run")
    assert run_ranks(replay_on_rank, 2, run, overrides) == [0, 0]


def test_what_two_ranks_trained_one_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(run, "mesh.cp=2", world_size=2) == 0
    code, said = verify(run, capsys, 4)
    assert code == 0, said
    assert "same bits" in said or "within rounding of float32: loss" in said


def test_a_continued_run_has_the_steps_of_an_uninterrupted_one(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copy(trained.parent / "chats.jsonl", tmp_path)
    assert train(run, stop_at=3) == 75
    assert train(run) == 0
    steps = [
        [line.row for line in read_ledger(folder / "ledger.jsonl") if line.step]
        for folder in (trained, run)
    ]
    assert steps[0] == steps[1]
    code, said = verify(run, capsys, 5)
    assert code == 0, said
    assert "same bits" in said


def test_a_changed_line_is_found(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(trained, tmp_path / "run")
    path = run / "ledger.jsonl"
    path.write_text(path.read_text().replace('"labels": ', '"labels": 1', 1))
    code, said = verify(run, capsys)
    assert code == 1
    assert "ledger.jsonl:2: the line does not follow" in said


def test_a_forged_loss_is_found_by_computing_it(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(trained, tmp_path / "run")
    chain_again(
        run, lambda row: {**row, "loss": row["loss"] - 0.01} if row.get("step") == 3 else row
    )
    code, said = verify(run, capsys, 3)
    assert code == 1
    assert "FAIL: step 3: different: loss" in said


def test_a_forged_weight_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All digests are made right again: computing the step is what finds it."""
    run = copied(trained, tmp_path / "run")
    checkpoint = run / "checkpoints" / "step_00000004"
    file = next(checkpoint.glob("tensors/*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.1.mlp.up_proj" in name and "model." in name)
    tensors[name][0] += 0.1
    save_file(tensors, file)
    manifest(checkpoint)
    chain_again(run, dict)
    code, said = verify(run, capsys, 4)
    assert code == 1
    assert "first tensor model.lm.model.layers.1.mlp.up_proj.weight" in said
    code, said = verify(run, capsys, 3)
    assert code == 0, said


def test_a_swapped_checkpoint_is_found(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(trained, tmp_path / "run")
    folder = run / "checkpoints"
    shutil.rmtree(folder / "step_00000004")
    shutil.copytree(folder / "step_00000002", folder / "step_00000004")
    code, said = verify(run, capsys)
    assert code == 1
    assert "step_00000004 is another checkpoint" in said


def test_changed_bytes_of_a_checkpoint_are_found(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(trained, tmp_path / "run")
    file = next((run / "checkpoints" / "step_00000004").glob("tensors/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, said = verify(run, capsys)
    assert code == 1
    assert "step_00000004: tensors/rank_00000.safetensors has other content" in said


def opened_on_rank(rank: int, world_size: int, run: Path, hosts: list[str]) -> list[str]:
    """Hashes a run's files on a host of this name; returns the tensor files that were opened."""
    socket.gethostname = lambda: hosts[rank]
    opened = []

    def hook(event: str, args: tuple) -> None:
        if event == "open" and "/tensors/rank_" in str(args[0]):
            opened.append("/".join(Path(args[0]).parts[-3:]))

    sys.addaudithook(hook)
    with watch_ranks() as peers:
        peers.compare("settings", {})
        assert Recorded.of(RunFolder(run)).hash_files(peers).problems == []
    return opened


@pytest.mark.parametrize(
    ("hosts", "num_reads"), [(["a", "a"], 1), (["a", "b"], 2), (["a", "b", "a"], 2)], ids=str
)
def test_one_rank_of_each_host_reads_a_file(
    trained: Path, hosts: list[str], num_reads: int
) -> None:
    """Hosts may have copies of their own; SLURM may number the ranks of two hosts in turn."""
    opened = run_ranks(opened_on_rank, len(hosts), trained, hosts)
    files = [f"step_0000000{step}/tensors/rank_00000.safetensors" for step in (2, 4, 6)]
    assert sorted(name for names in opened for name in names) == sorted(files * num_reads)
    assert all(opened)  # every rank has a share


def hash_on_rank(rank: int, world_size: int, run: Path, hosts: list[str]) -> str:
    """Hashes the files of each host's own copy of a run; returns the error."""
    socket.gethostname = lambda: hosts[rank]
    records = Recorded.of(RunFolder(run / hosts[rank]))
    with watch_ranks() as peers:
        peers.compare("settings", {})
        with pytest.raises(ConfigError) as caught:
            records.hash_files(peers)
    return str(caught.value)


def test_changed_bytes_on_one_host_are_named_on_all(trained: Path, tmp_path: Path) -> None:
    for host in "ab":
        copied(trained, tmp_path / host)
    file = tmp_path / "b/checkpoints/step_00000004/tensors/rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for said in run_ranks(hash_on_rank, 2, tmp_path, ["a", "b"]):
        assert "problems: none on rank 0 (a), step_00000004: tensors/rank_00000" in said


def test_large_files_are_dealt_first() -> None:
    sizes = {Path("a"): 1, Path("b"): 5, Path("c"): 5, Path("d"): 9}
    assert shares(sizes, 2) == [[Path("d"), Path("a")], [Path("b"), Path("c")]]


@pytest.mark.parametrize("name", ["state.json", "COMPLETE.json"])
def test_a_missing_file_of_a_checkpoint_is_found(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = copied(trained, tmp_path / "run")
    (run / "checkpoints/step_00000004" / name).unlink()
    code, out = verify(run, capsys)
    assert code == 1
    assert f"step_00000004 is skipped: {name} is missing" in out


def test_changed_data_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train(run, "training.max_steps=2") == 0
    data = tmp_path / "chats.jsonl"
    data.write_text(data.read_text().replace("say 7", "say 8", 1))
    code, said = verify(run, capsys)
    assert code == 1
    assert "FAIL: data content: the ledger has" in said


def test_the_card_has_the_head(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, "training.max_steps=2", "checkpoint.export_hf=true") == 0
    head = read_ledger(run / "ledger.jsonl")[-1].chain
    assert f"| ledger | 2 steps, head `{head}` |" in (run / "hf" / "README.md").read_text()
