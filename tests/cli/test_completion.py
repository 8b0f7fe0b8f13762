from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_lite.extras.cli.completion import complete

ROOT = Path(__file__).resolve().parents[2]
PRESET = ["--config-name", "smoke"]

CASES = [
    (["--config-name"], "llama_", ["llama_packed", "llama_unpacked"]),
    ([], "--config-", ["--config-dir", "--config-name", "--config-path"]),
    (["--cfg"], "", ["all", "hydra", "job"]),
    (PRESET, "optim", ["optimizer.", "optimizer="]),
    (PRESET, "optimizer=", ["optimizer=adamw", "optimizer=adamw_8bit", "optimizer=adamw_bf16", "optimizer=muon"]),
    (PRESET, "optimizer.w", ["optimizer.weight_decay="]),
    ([*PRESET, "lr_scheduler=wsd"], "lr_scheduler.decay", ["lr_scheduler.decay_frac="]),
    (PRESET, "training.max_steps=", ["training.max_steps=6"]),
    ([], "mesh.dp_", ["mesh.dp_replicate=", "mesh.dp_shard="]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "word", "found"), CASES, ids=[f"{' '.join(words)} {word}" for words, word, _ in CASES]
)
def test_what_follows(words: list[str], word: str, found: list[str]) -> None:
    assert list(complete(words, word)) == found


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft/mine.yaml").write_text("r: 4\n")
    assert list(complete(["--config-dir", str(tmp_path), *PRESET], "peft=m")) == ["peft=mine"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("automodel-lite tr", ["train"]),
        ("automodel-lite train --config-name smok", ["smoke"]),
        ("python recipes/train_ft.py --config-name smoke peft=l", ["peft=lora"]),
    ],
)
def test_the_shells_question(line: str, found: list[str]) -> None:
    """In some 0.2 CPU seconds, where torch alone takes over a second; compared with Hydra's import, as machines differ."""
    question = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    (told, ours), (_, hydras) = (
        started("-m", "automodel_lite", "-sc", "query=bash", **question),
        started("-c", "import hydra"),
    )
    assert told.split() == found
    assert (
        ours <= 4 * hydras
        or started("-m", "automodel_lite", "-sc", "query=bash", **question)[1] <= 4 * hydras
    )


def started(*command: str, **variables: str) -> tuple[str, float]:
    """What a new interpreter prints, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    told = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return told.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


PRESS = """
import os, pty, select, sys, time
pid, terminal = pty.fork()
if not pid:
    os.execvp("zsh", ["zsh", "-f", "-i"])
def read(until, seconds=30):
    out, end = b"", time.time() + seconds
    while until not in out and time.time() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            out += os.read(terminal, 65536)
    return out
read(b"% ")
os.write(terminal, b'eval "$(automodel-lite -sc install=zsh)"; echo rea""dy\\n')
read(b"ready")
os.write(terminal, sys.argv[1].encode() + b"\\t")
print(read(sys.argv[2].encode()).decode())
"""
ASK = {
    "bash": 'eval "$(automodel-lite -sc install=bash)"; COMP_LINE="$0"; COMP_POINT=${#0}; COMP_WORDS=($0); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); hydra_bash_completion; echo "${COMPREPLY[@]}"',
    "fish": "automodel-lite -sc install=fish | source; complete -C $argv[1]",
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(("line", "found"), [("automodel-lite tr", "train"), ("automodel-lite train --config-name smoke optimizer.w", "optimizer.weight_decay=")])  # fmt: skip
def test_a_shell_completes_it(shell: str, line: str, found: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    program = tmp_path / "automodel-lite"  # as an installed package has it
    program.write_text(f"#!{sys.executable}\nfrom automodel_lite.__main__ import main\nmain()\n")
    program.chmod(0o755)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TERM": "dumb",
    }
    command = (
        [sys.executable, "-c", PRESS, line, found]
        if shell == "zsh"
        else [shell, "-c", ASK[shell], line]
    )
    told = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert found in told.stdout.split()[-1], told
