"""The wheel: built, unpacked, and run from another folder with presets of one's own; slow: installed into an empty
environment, and used there as by someone who has never seen the repository.
"""

import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from docs.site_links import repository
from tests.test_release import LINK

ROOT = Path(__file__).resolve().parent.parent
PRESET = """\
defaults:
  - smoke
  - _self_
name: mine
training:
  max_steps: 1
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # through the source distribution, as a release is built
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(site: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "automodel_lite", *arguments]
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_wheel_carries_recipes_configs_types_and_licence(unpacked: Path):
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    wanted = {"py.typed"}
    for folder in ("conf", "recipes", "launch"):
        files = (ROOT / folder).rglob("*.*")
        wanted |= {str(file.relative_to(ROOT)) for file in files if file.suffix != ".pyc"}
    pages = {str(file.relative_to(ROOT)) for file in (ROOT / "docs").rglob("*.md")}
    wanted |= pages
    assert {f"automodel_lite/{name}" for name in wanted} <= names
    # of docs/ the pages alone: no scripts, no pictures
    assert {f"automodel_lite/{name}" for name in pages} == {
        name for name in names if name.startswith("automodel_lite/docs/")
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {
        name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")
    } == {"automodel_lite"}


def test_the_index_of_packages_gets_absolute_links(unpacked: Path):
    (read,) = unpacked.glob("*.dist-info/METADATA")
    metadata = Parser().parsestr(read.read_text(encoding="utf-8"))
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert LINK.findall(text) == []
    assert f"({repository()}/blob/main/docs/architecture.md)" in text
    assert metadata["Author"] == "automodel_lite developers"


@pytest.mark.system
def test_it_runs_from_another_folder_with_presets_of_ones_own(unpacked: Path, tmp_path: Path):
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets/mine.yaml").write_text(PRESET)
    done = run(
        unpacked,
        tmp_path,
        "train",
        "--config-dir",
        "presets",
        "--config-name",
        "mine",
        "cache_dir=cache",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/mine/hf/model.safetensors").is_file()
    asked = run(unpacked, tmp_path, "generate", "runs/mine", "Hello", "--max-new-tokens", "2")
    assert asked.returncode == 0, asked.stderr


def test_the_command_without_arguments_lists_the_recipes(unpacked: Path, tmp_path: Path):
    said = run(unpacked, tmp_path, "--help").stdout
    assert "automodel-lite train" in said
    assert "automodel-lite generate" in said
    assert "llama_packed" in run(unpacked, tmp_path, "train", "--help").stdout
    assert run(unpacked, tmp_path, "docs", "packing").stdout.startswith("# Packing\n")


MINE = """\
# A small model of mine: on my chats
defaults:
  - llama_packed
  - override model: mine_tiny
  - override dataset: files
  - _self_
name: mine
dataset:
  path: chats.jsonl
  val_frac: 0.1
training:
  max_steps: 4
"""
MINE_TINY = """\
defaults:
  - llama_smoke
  - _self_
config:
  num_hidden_layers: 1
"""


@pytest.fixture(scope="module")
def bin_of_the_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment that holds the wheel and what it asks for, at the tested versions."""
    folder = tmp_path_factory.mktemp("environment")
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}

    def call(*command: str | Path) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    said = call(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    assert "warning" not in said.lower()
    (wheel,) = folder.glob("*.whl")
    assert list(folder.glob("*.tar.gz"))
    call(sys.executable, "-m", "venv", folder / "venv")
    # first and alone: see constraints.txt
    call(folder / "venv/bin/python", "-m", "pip", "install", "torch")
    call(folder / "venv/bin/python", "-m", "pip", "install", str(wheel))
    return folder / "venv/bin"


@pytest.mark.slow
def test_an_empty_environment_and_an_empty_folder(bin_of_the_wheel: Path, tmp_path: Path):
    """Train from presets and options of one's own, on one process and two; then ask the model and draw the run."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"PATH": f"{bin_of_the_wheel}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def call(command: str, code: int = 0) -> str:
        done = subprocess.run(
            command.split(),
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    (tmp_path / "my_conf/model").mkdir(parents=True)
    (tmp_path / "my_conf/mine.yaml").write_text(MINE)
    (tmp_path / "my_conf/model/mine_tiny.yaml").write_text(MINE_TINY)
    chats = [
        [("user", f"what is {n} plus one?"), ("assistant", f"it is {n + 1}.")] for n in range(200)
    ]
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))

    said = call("automodel-lite train --config-dir my_conf --help")
    assert "  mine              A small model of mine\n" in said
    assert "  automodel-lite train --config-name llama_packed\n" in said
    assert "recipes/" not in said

    said = call("automodel-lite train --config-dir my_conf --config-name mine")
    assert "180 documents → 180 rows" in said
    assert "finished at step 4 of 4" in said
    call("automodel-lite generate runs/mine hello --max-new-tokens 3")
    call("automodel-lite report runs/mine")
    assert {"hf", "metrics.jsonl", "report.html", "run.json"} <= {
        path.name for path in (tmp_path / "runs/mine").iterdir()
    }
    assert "is finished (step 4): nothing to do" in call(
        "automodel-lite train --config-dir my_conf --config-name mine"
    )

    two = "torchrun --standalone --nproc-per-node 2 -m automodel_lite train --config-dir my_conf --config-name mine name=two"
    assert "2 processes" in call(two)
    call("automodel-lite report runs/mine runs/two --to both")

    mistake = call(
        "automodel-lite train --config-dir my_conf --config-name mine training.max_stepz=3", code=2
    )
    assert mistake.strip() == "training.max_stepz=3: unknown key; did you mean training.max_steps?"
