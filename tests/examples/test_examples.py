"""The scripts of examples/ do what they say."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from automodel_lite import hf_collater, install_attention
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.thd import AttentionOptions, Segments
from docs.site_links import repository
from docs.write_notebook import run_cells
from recipes.train_ft import main
from tests.attention.hybrids import InFloat64

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))
    return importlib.import_module


def test_a_plain_loop_learns(example) -> None:
    losses = example("plain_loop").main(num_steps=12)
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.system
def test_a_policy_learns(example, tmp_path: Path) -> None:
    overrides = (f"output_dir={tmp_path}", "training.num_threads=1")
    rewards = example("rl").main(*overrides, num_steps=20)
    assert sum(rewards[15:]) / 5 > 1.5 * sum(rewards[:3]) / 3
    again = example("rl").main(*overrides, num_steps=21)  # goes on from the last save
    assert again[:20] == rewards


def test_the_policy_page_shows_code_of_the_example() -> None:
    example = ROOT / "examples/rl.py"
    code = _without_layout(example.read_text())
    assert len(example.read_text().splitlines()) <= 80
    page = (ROOT / "docs/cookbook/policies.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        assert _without_layout(block) in code


def first_step_by_hand(plain: ModuleType, seen: list[dict]) -> float:
    """Mean loss over the label tokens of the first optimizer step, from logits and labels alone."""
    tokenizer, _ = plain.make_rows()
    model = plain.make_model(len(tokenizer))
    install_attention(model)
    loss_sum = num_labels = 0
    for batch in seen[:2]:  # gradient accumulation of 2
        inputs = {
            key: value for key, value in batch.items() if key not in ("labels", "shift_labels")
        }
        logits = model(**inputs).logits[0]
        loss_sum += torch.nn.functional.cross_entropy(
            logits.float(), batch["labels"][0], reduction="sum"
        ).item()
        num_labels += int((batch["labels"] != -100).sum())
    return loss_sum / num_labels


@pytest.mark.parametrize(
    "use_trl", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["trainer", "trl"]
)
def test_hf_trainer_gives_our_loss(example, use_trl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    script, plain = example("hf_trainer"), example("plain_loop")
    seen: list[dict] = []

    def remember(packs: list) -> dict:
        seen.append(hf_collater(packs))
        return dict(seen[-1])

    monkeypatch.setattr(script, "hf_collater", remember)
    losses = script.main(use_trl, num_steps=2)
    assert losses[0] == pytest.approx(first_step_by_hand(plain, seen), rel=1e-4)
    assert losses[1] < losses[0]


@pytest.mark.system
def test_parts_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / "examples/own_parts"
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    places = [f"output_dir={tmp_path}/run", f"cache_dir={tmp_path}/cache"]
    raw = compose_config("mine", ["security.allow_targets=[my_parts]", *places], config_dir="conf")
    assert main(check_config(raw)) == 0
    said = capsys.readouterr().out
    assert "spelling: 5 words, 20 times" in said
    assert "loss LabelSmoothing" in said
    assert "finished at step 6 of 6" in said
    assert (tmp_path / "run/metrics.csv").read_text().startswith("1,")


def test_the_kernel_of_ones_own_agrees_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples/own_parts"))
    mine = importlib.import_module("my_parts").MaskedAttention()
    torch.manual_seed(0)
    cu_q, cu_k = (
        torch.tensor([0, 3, 8, 10], dtype=torch.int32),
        torch.tensor([0, 5, 10, 12], dtype=torch.int32),
    )
    shapes = (10, 4, 8), (12, 2, 8), (12, 2, 8)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    for window in (None, 2):
        how = Segments(cu_q, cu_k, 5, 5), AttentionOptions(0.3, window)
        got = []
        for kernel in (mine, ReferenceAttention()):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            with InFloat64():
                out = kernel(*inputs, *how)
            out.square().sum().backward()
            got.append([out.detach(), *(x.grad for x in inputs)])
        for ours, reference in zip(*got):
            torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def _without_layout(code: str) -> str:
    """The formatter breaks the lines of a page and of a file at other places."""
    return re.sub(r",(?=[)\]}])", "", "".join(code.split()))


def test_the_page_shows_code_of_the_examples() -> None:
    files = [
        ROOT / "examples/own_parts/my_parts.py",
        *(ROOT / "examples/own_recipe/my_kd").glob("*.py"),
    ]
    code = [_without_layout(file.read_text()) for file in files]
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), flags=re.DOTALL
    )
    assert len(blocks) == 11
    # a packer, a source of packs and an exchange are run as they stand, by test_doors
    for block in blocks[:2] + blocks[5:]:
        for stretch in block.split("    ...\n"):
            assert any(_without_layout(stretch) in text for text in code), stretch


def test_the_notebook_begins_on_a_machine_without_the_package() -> None:
    """The first cell installs what the badge opens; the others are Python and need nothing else."""
    notebook = json.loads((ROOT / "examples/first_steps.ipynb").read_text())
    head, install = notebook["cells"][:2]
    address = repository().removeprefix("https://github.com/")
    place = f"github/{address}/blob/main/examples/first_steps.ipynb"
    assert f"https://colab.research.google.com/{place})" in "".join(head["source"])
    assert install["metadata"]["tags"] == ["install"]
    assert f'"automodel-lite @ git+{repository()}"' in install["source"][-1]
    cells = run_cells(notebook)
    assert len(cells) == 5
    for cell in cells:
        ast.parse("".join(cell["source"]))


@pytest.mark.slow
def test_the_notebook_shows_what_its_cells_print(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "docs/write_notebook.py", "--to", str(tmp_path / "new.ipynb")], cwd=ROOT
    )
    assert done.returncode == 0
    cells, new = (
        run_cells(json.loads(path.read_text()))
        for path in (ROOT / "examples/first_steps.ipynb", tmp_path / "new.ipynb")
    )
    stale = "stale: python docs/write_notebook.py"
    assert [cell["outputs"] for cell in cells[:2]] == [cell["outputs"] for cell in new[:2]], stale
    steps = [
        re.findall(r"^ +\d+ +\d\.\d{4}", "".join(c[2]["outputs"][0]["text"]), re.MULTILINE)
        for c in (cells, new)
    ]
    assert len(steps[0]) == len(steps[1]) > 3, stale
    assert [cell[3]["outputs"][0]["text"] for cell in (cells, new)] == [
        ["The capital of France is Paris.<|end|>\n"]
    ] * 2
