"""The wheel: built, unpacked, and run from another folder with presets of one's own."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def run(site: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "automodel_lite", *arguments]
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=120)


def test_the_wheel_carries_recipes_configs_types_and_licence(unpacked: Path):
    names = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    wanted = {"conf/llama_packed.yaml", "conf/peft/lora.yaml", "recipes/train_ft.py", "py.typed"}
    assert {f"automodel_lite/{name}" for name in wanted} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {"automodel_lite"}


def test_it_runs_from_another_folder_with_presets_of_ones_own(unpacked: Path, tmp_path: Path):
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets/mine.yaml").write_text(PRESET)
    done = run(unpacked, tmp_path, "train", "--config-dir", "presets", "--config-name", "mine", "cache_dir=cache")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/mine/hf/model.safetensors").is_file()
    asked = run(unpacked, tmp_path, "generate", "runs/mine", "Hello", "--max-new-tokens", "2")
    assert asked.returncode == 0, asked.stderr


def test_the_command_without_arguments_lists_the_recipes(unpacked: Path, tmp_path: Path):
    said = run(unpacked, tmp_path, "--help").stdout
    assert "automodel-lite train" in said
    assert "automodel-lite generate" in said
    assert "llama_packed" in run(unpacked, tmp_path, "train", "--help").stdout
