"""Each part can be deleted, and each command: what imports none of them trains a run all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "automodel_lite"
NEEDED = {
    "parts/images": "the recipe checks its batches",
    "parts/losses/label_values.py": "the recipe computes the values of a reference with it",
    "parts/losses/distillation.py": "label_values stores what its loss names",
}
"""What the recipe imports: the core does without it, a run does not."""

CHILD = """
import importlib, os, pathlib, sys, traceback
import datasets, hydra, jinja2, peft, torch, torchdata, transformers, transformers.core_model_loading
torch.set_num_threads(1)

def core(folder):
    for path in sorted((folder / "automodel_lite").rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        rooms = ("automodel_lite.parts", "automodel_lite.extras", "automodel_lite.tools", "automodel_lite.nemo_api", "automodel_lite.tinker")
        if not name.startswith(rooms) and not name.endswith("__main__"):
            try:
                importlib.import_module(name.removesuffix(".__init__"))
            except ModuleNotFoundError as error:  # a package that is optional, as torchao
                if (error.name or "").startswith(("automodel_lite", "recipes")):
                    raise

def train(folder):
    from automodel_lite.cli.hydra_app import run_command_line
    places = [f"output_dir={folder}/run", f"cache_dir={folder.parent}/cache"]
    overrides = ["optimizer=sgd", "security.allow_targets=[mine]", "training.max_steps=1", "checkpoint.export_hf=false", "checkpoint.every_steps=0"]
    overrides += ["~dataset.num_chats", "dataset=pairs"]
    preset = ["--config-dir", str(folder.parent / "conf"), "--config-name", "smoke"]
    assert run_command_line("recipes.train_ft:main", [*preset, *places, *overrides]) == 0

for line in sys.stdin:
    folder, what = line.split()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            folder = pathlib.Path(folder)
            os.chdir(folder)
            sys.path[:0] = [str(folder), str(folder.parent)]
            core(folder)
            if what == "trains":
                train(folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print("RESULT", folder, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


MINE = """
import torch
from automodel_lite.data.reading.documents import DocumentList


def sgd(model, lr: float):
    return torch.optim.SGD(model.parameters(), lr=lr)


class Pairs:
    kind = "prompt_completion"
    questions = []

    def __init__(self, num: int):
        pair = lambda i: {"prompt": f"What is {i} plus {i + 1}?", "completion": f"It is {2 * i + 1}."}
        self.train = DocumentList([pair(i) for i in range(num)], "pairs")
        self.val = {"held_out": DocumentList([pair(num + 1)], "held_out")}
        self.description = f"{num} pairs"
        self.identity = f"pairs({num})"
"""


def pieces() -> list[str]:
    """Files of parts/, files and packages below its rooms, and the commands."""
    parts = PACKAGE / "parts"
    rooms = [path for path in parts.iterdir() if path.is_dir()]
    found = [path for path in parts.glob("*.py") if path.stem != "__init__"]
    for room in [*rooms, PACKAGE / "extras" / "cli"]:
        if room.name == "images":
            found.append(room)
            continue
        found += [
            path
            for path in room.iterdir()
            if path.stem not in ("__init__", "__pycache__")
            and (path.is_dir() or path.suffix == ".py")
        ]
    return sorted(str(path.relative_to(PACKAGE)) for path in found)


def copy_without(gone: list[str], to: Path) -> Path:
    """A checkout in `to` whose package lacks those pieces, and the lines of commands.yaml that name them."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("automodel_lite", "recipes", "conf"):
        shutil.copytree(ROOT / name, to / name, ignore=ignored)
    for piece in gone:
        path = to / "automodel_lite" / piece
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    commands = to / "automodel_lite/cli/commands.yaml"
    modules = [f"automodel_lite.{piece.removesuffix('.py').replace('/', '.')}" for piece in gone]
    lines = commands.read_text().splitlines(keepends=True)
    commands.write_text("".join(x for x in lines if not any(name in x for name in modules)))
    return to


@pytest.mark.system
def test_every_part_and_command_can_be_deleted(tmp_path: Path) -> None:
    (tmp_path / "conf" / "optimizer").mkdir(parents=True)
    (tmp_path / "conf" / "optimizer" / "sgd.yaml").write_text("_target_: mine.sgd\nlr: 0.01\n")
    (tmp_path / "conf" / "dataset").mkdir()
    (tmp_path / "conf" / "dataset" / "pairs.yaml").write_text("_target_: mine.Pairs\nnum: 80\n")
    (tmp_path / "mine.py").write_text(MINE)
    every = pieces()
    # what imports without all of them does without any one
    cases = [every, [piece for piece in every if piece not in NEEDED]]
    lines = []
    for number, gone in enumerate(cases):
        folder = copy_without(gone, tmp_path / f"without_{number}")
        lines.append(f"{folder} {'imports' if gone is every else 'trains'}")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input="\n".join(lines),
        cwd=tmp_path,
        env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    results = [line.split() for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(results) == len(cases), done.stderr[-3000:]
    failed = [gone for gone, (_, _, code) in zip(cases, results, strict=True) if code != "0"]
    assert not failed, done.stderr[-5000:]
    assert NEEDED.keys() <= {*every}
