"""`automodel-lite proof`: its table, its page, and the comparisons that its rows make. The rows
themselves train for minutes.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from automodel_lite.errors import ConfigError
from automodel_lite.extras.cli.proof import Shown, look, page, proof, read_shown
from automodel_lite.extras.proof import data, packers, plain
from automodel_lite.extras.proof.rows import ROWS, Row, of_curves
from automodel_lite.extras.proof.work import MissingError, Seen, Work, farthest


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {"text-cp2", "text-cp4", "text-cp8", "text-ddp", "text-tp2"} <= {r.name for r in ROWS}


def test_curves_are_as_far_apart_as_their_worst_step() -> None:
    curve = {1: (2.0, 1.0), 2: (1.0, 1.0)}
    assert farthest(curve, {1: (2.0, 1.0), 2: (1.5, 1.0)}) == (0.5, 2)
    text = "5e-06 at most, in step 2 of 2; loss 2.0000 → 1.0000"
    assert of_curves(curve, {1: (2.0, 1.0), 2: (1.000005, 1.0)}) == Seen(text, True)
    assert of_curves(curve, {1: (2.0, 1.0), 2: (1.0002, 1.0)}).passed is False
    assert of_curves(curve, {1: (2.0, 1.0), 2: (float("nan"), 1.0)}).passed is False
    with pytest.raises(ConfigError, match="2 and 1 steps"):
        farthest(curve, {1: (2.0, 1.0)})


def test_next_fit_begins_a_bin_where_a_document_does_not_fit() -> None:
    assert packers.next_fit(np.array([6, 5, 4, 3, 3]), 10) == 3  # 6 | 5 4 | 3 3


def test_a_pack_is_split_into_its_documents() -> None:
    pack = {
        "input_ids": np.array([1, 2, 3, 0, 4, 5, 0, 0]),
        "labels": np.array([2, 3, -100, -100, 5, -100, -100, -100]),
        "seq_lens": np.array([3, 2]),
        "seq_lens_padded": np.array([4, 4]),
    }
    found = plain.split(pack)
    assert [ids.tolist() for ids, _ in found] == [[1, 2, 3], [4, 5]]
    assert [labels.tolist() for _, labels in found] == [[2, 3, -100], [5, -100]]
    assert found[0][0].dtype == torch.long


def test_labels_belong_to_their_own_token_in_trl() -> None:
    document = torch.tensor([5, 6, 7]), torch.tensor([-100, 7, -100])
    assert plain.unshifted(document) == {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}


def row(name: str, seen: Seen | Exception) -> Row:
    def look_at(work: Work) -> Seen:
        work.commands.append(f"automodel-lite {name}")
        if isinstance(seen, Exception):
            raise seen
        return seen

    return Row(name, "what", "expected", "rule", look_at)


def test_the_page_grows_row_by_row(tmp_path: Path) -> None:
    rows = [
        row("good", Seen("1e-07 | over 2 steps", True)),
        row("bad", Seen("far", False)),
        row("absent", MissingError("no TRL")),
        row("broken", ValueError("a\nb")),
        row("later", Seen("", True)),
    ]
    shown = {each.name: look(each, Work(tmp_path)) for each in rows[:4]}
    assert shown["absent"].passed is None
    assert (shown["broken"].seen, shown["broken"].passed) == ("a b", False)
    text = page(rows, shown)
    assert "1 of 4 rows as expected" in text
    assert "| good | what | expected | 1e-07 \\| over 2 steps | rule | as expected |" in text
    assert "| bad | what | expected | far | rule | **DIFFERENT** |" in text
    assert "| absent | what | expected | no TRL | rule | missing |" in text
    assert "| later | what | expected | not computed yet | rule |  |" in text
    assert "### bad\n\n```\nautomodel-lite bad\n```" in text


def test_a_row_counts_the_cpu_time_of_its_processes(tmp_path: Path) -> None:
    """And not the time that it waited for others on the machine."""

    def compute(work: Work) -> Seen:
        work.python(["-c", "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(0.5)"])
        return Seen("", True)

    found = look(Row("name", "", "", "", compute), Work(tmp_path))
    assert 0.3 <= found.cpu_seconds < 0.6
    assert found.seconds >= 0.8


def test_rows_of_an_earlier_proof_are_kept(tmp_path: Path) -> None:
    kept = {"text-cp2": {"seen": "x", "passed": True, "commands": [], "seconds": 1.0}}
    path = tmp_path / "proof.json"
    path.write_text(json.dumps(kept | {"gone": kept["text-cp2"]}))
    assert read_shown(path) == {"text-cp2": Shown("x", True, [], 1.0)}


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [(["--only", "text-cp3"], "did you mean"), (["--steps", "0"], "at least 2")],
)
def test_mistakes(arguments: list[str], cure: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=cure):
        proof([*arguments, "--to", str(tmp_path)])


def test_rows_run_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    script = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    assert Work(tmp_path).python(["-c", script]) == "''\n"


def test_made_up_rows_are_the_same_each_time(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for make in (data.pairs, data.answered_prompts, data.sampled):
        first = make(path).read_text()
        assert make(path).read_text() == first
    sampled = [json.loads(line) for line in path.read_text().splitlines()]
    assert {len({len(v) for v in each.values()}) for each in sampled} == {1}


@pytest.mark.slow
def test_the_first_row_passes(tmp_path: Path) -> None:
    assert proof(["--to", str(tmp_path), "--only", "ledger"]) == 0
    assert "replayed to the same bits" in (tmp_path / "proof.md").read_text()
