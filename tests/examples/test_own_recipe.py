"""A package beside ours: its recipe, keys, format, losses and kernel, from an empty folder, on one and two ranks."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.data.templates import MARKED, byte_tokenizer
from tests.forked import warm_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE, PARTS = ROOT / "examples/own_recipe", ROOT / "examples/own_parts"
ROW = {
    "dialog": [{"who": "user", "said": "Capital of Peru?"}, {"who": "assistant", "said": "Lima."}]
}
_ = -100
WEIGHTED = {"input_ids": [5, 6, 7, 8], "labels": [_, 7, 8, _], "loss_weights": [1.0, 3.0, 0.5, 1.0]}
SMALL = [
    "training.num_threads=1",
    "training.max_steps=3",
    "training.global_batch_size=2",
    "training.log_every_steps=1",
    "packed_sequence.packed_sequence_size=256",
    "lr_scheduler.warmup_steps=0",
    "checkpoint.export_hf=false",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip fills it, two models and two files beside it, and an empty folder to start from."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copytree(EXAMPLE / "my_kd", folder / "site/my_kd")
    shutil.copy(PARTS / "my_parts.py", folder / "site")
    shutil.copytree(PARTS / "conf/attention", folder / "site/my_kd/conf/attention")
    tokenizer = byte_tokenizer(MARKED)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    for name in ("student", "teacher"):
        LlamaForCausalLM(
            LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)
        ).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "dialogs.jsonl").write_text(f"{json.dumps(ROW)}\n" * 40)
    (folder / "weighted.jsonl").write_text(f"{json.dumps(WEIGHTED)}\n" * 200)
    (folder / "empty").mkdir()
    return folder


def run(site: Path, name: str, ranks: int, *overrides: str) -> list[dict]:
    """The rows of metrics.jsonl of `automodel-lite run`, by a Python that sees nothing of this checkout but the package."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site / 'site'}:{ROOT}",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
    }
    flags = ["--nproc", str(ranks)] if ranks > 1 else []
    command = [
        warm_python(),
        "-m",
        "automodel_lite",
        "run",
        "my_kd.recipe:main",
        *flags,
        "--config-name",
        "kd",
    ]
    model = [
        f"model.pretrained={site / 'student'}",
        f"extra.teacher={site / 'teacher'}",
        f"cache_dir={site / 'cache'}",
    ]
    done = subprocess.run(
        [*command, f"name={name}", *model, *SMALL, *overrides],
        cwd=site / "empty",
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return [
        json.loads(line)
        for line in (site / "empty/runs" / name / "metrics.jsonl").read_text().splitlines()
    ]


def curve(rows: list[dict], name: str = "loss") -> list[float]:
    return [row[name] for row in rows if name in row]


@pytest.mark.system
def test_it_distils_from_an_empty_folder_on_one_and_two_ranks(site: Path) -> None:
    """With a format and an attention kernel from outside."""
    more = (f"dataset.path={site / 'dialogs.jsonl'}", "attention=masked")
    more += ("security.allow_targets=[my_parts]", "packed_sequence.slot_multiple=4")
    one = run(site, "one", 1, *more)
    two = run(site, "two", 2, *more)
    cp = run(site, "cp", 2, *more, "mesh.cp=2")
    assert curve(one)[0] > 0
    assert curve(one, "loss/ce")[0] > 1
    for other in (two, cp):
        assert curve(other) == pytest.approx(curve(one), abs=1e-5)


@pytest.mark.system
def test_a_student_taught_by_itself_starts_at_0(site: Path) -> None:
    rows = run(
        site,
        "itself",
        1,
        f"dataset.path={site / 'dialogs.jsonl'}",
        f"extra.teacher={site / 'student'}",
    )
    assert curve(rows)[0] == pytest.approx(0, abs=1e-5)


def train(site: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site / 'site'}:{ROOT}",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        warm_python(),
        "-m",
        "automodel_lite",
        "train",
        "--config-dir",
        str(site / "site/my_kd/conf"),
    ]
    command += ["--config-name", "finetune", *SMALL, *overrides]
    model = [
        f"model.pretrained={site / 'student'}",
        f"cache_dir={site / 'cache'}",
        "security.allow_targets=[my_kd]",
    ]
    return subprocess.run(
        [*command, *model],
        cwd=site / "empty",
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.system
def test_weights_of_labels_reach_a_loss_from_outside(site: Path) -> None:
    done = train(
        site, "name=z", f"dataset.path={site / 'weighted.jsonl'}", "loss=z", "loss.coefficient=0.0"
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    plain = train(site, "name=plain", f"dataset.path={site / 'weighted.jsonl'}")
    assert plain.returncode == 0, plain.stderr[-3000:]
    z, ce = (
        [
            json.loads(line)
            for line in (site / f"empty/runs/{name}/metrics.jsonl").read_text().splitlines()
        ]
        for name in ("z", "plain")
    )
    assert curve(z) == pytest.approx(curve(ce), abs=1e-5)
    assert curve(z, "loss/z")[0] > 0


@pytest.mark.system
def test_a_mistake_in_a_format_names_the_line(site: Path) -> None:
    file = site / "wrong.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n" * 3 + '{"dialog": [{"who": "user"}]}\n')
    done = train(
        site, "name=wrong", f"dataset.path={file}", "dataset.format._target_=my_kd.parts.dialog"
    )
    assert done.returncode == 2
    assert "wrong.jsonl:4" in done.stderr + done.stdout


def test_the_doors_are_as_narrow_as_they_are_said_to_be() -> None:
    recipe = (EXAMPLE / "my_kd/recipe.py").read_text()
    assert len(recipe.splitlines()) <= 80
    z_loss = re.search(
        r"    def __call__.*?return [^\n]*\n",
        (EXAMPLE / "my_kd/parts.py").read_text(),
        flags=re.DOTALL,
    )
    assert z_loss
    assert len(z_loss[0].splitlines()) <= 10
    assert inspect.cleandoc(recipe)
