import json
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.tools.report import draw_at_end
from automodel_lite.tools.report.page import facts_of, page_of, write_report
from automodel_lite.tools.report.panels import PANELS, draw_grad_norm
from automodel_lite.tools.report.record import RunRecord, differences, read_run
from tests.recipes.runs import train


def run_folder(path: Path, lr: float = 0.01, **more: object) -> Path:
    """Four logged steps and a validation, as a run leaves them, the last line cut by a kill."""
    path.mkdir(parents=True)
    config = f"name: {path.name}\noutput_dir: {path}\noptimizer:\n  lr: {lr}\ntraining:\n  max_steps: 4\n"
    (path / "config.yaml").write_text(config)
    steps = [
        {
            "step": step,
            "loss": 2.0 / step,
            "lr": lr,
            "grad_norm": "nan" if step == 2 else 1.0,
            "tokens_per_s": 100.0 * step,
            "label_tokens_per_s": 50.0,
            "slots_per_s": 120.0,
            "tflops_per_s": 0.1,
            "fill_frac": 0.9,
            "time_s/forward": 2.0,
            "time_s/backward": 3.0,
            **more,
        }
        for step in (1, 2, 3, 4)
    ]
    rows = [*steps, {"step": 4, "val_loss/held_out": 0.7}, {"step": 4, "time_s/checkpoint": 5.0}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "lo')
    packing = {"fill_frac": 0.95, "padded_fill_frac": 0.5, "packed_sequence_size": 16}
    (path / "packing.json").write_text(json.dumps(packing))
    (path / "lengths.json").write_text(json.dumps({"edges": [0, 8, 16, 24], "documents": [5, 2, 1], "pack": [7, 6, 3]}))
    (path / "STATUS.json").write_text('{"state": "finished", "step": 4}')
    return path


def test_what_is_read_from_a_run(tmp_path: Path):
    record = read_run(run_folder(tmp_path / "a"))
    assert record.curve("loss") == ([1, 2, 3, 4], [2.0, 1.0, pytest.approx(2 / 3), 0.5])
    assert record.curve("grad_norm")[0] == [1, 3, 4]
    assert record.time_s() == {"forward": 8.0, "backward": 12.0, "checkpoint": 5.0}
    assert facts_of(record) == [
        ("step", "4"),
        ("loss", "0.5000"),
        ("validation (held out)", "0.7000"),
        ("tokens/s", "300"),
        ("fill", "95.0%"),
    ]


def test_page_is_self_contained_and_its_drawings_are_well_formed(tmp_path: Path):
    page = page_of([read_run(run_folder(tmp_path / "a<b"))])
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', page) == []
    assert "a&lt;b" in page
    assert "prefers-color-scheme: dark" in page
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == len(PANELS)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
        assert "#010203" not in drawing


def test_several_runs_side_by_side(tmp_path: Path):
    runs = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", lr=0.02, mfu_frac=0.4)]
    records = [read_run(path) for path in runs]
    assert differences(records) == [("optimizer.lr", ["0.01", "0.02"])]
    page, picture = write_report(runs, tmp_path / "both")
    assert "Settings that differ" in page.read_text()
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_spike_does_not_flatten_the_gradient_norm():
    figure, axes = plt.subplots()
    rows = [{"step": step, "grad_norm": value} for step, value in enumerate([1.0, 1.0, 40.0, 1.0])]
    assert draw_grad_norm(axes, [RunRecord("a", {}, rows, {}, {}, {})])
    assert axes.get_yscale() == "log"
    plt.close(figure)


def test_folders_that_cannot_be_drawn_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="is no run's folder"):
        read_run(tmp_path)
    empty = run_folder(tmp_path / "a")
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has logged no step yet"):
        read_run(empty)


def test_a_drawing_that_fails_does_not_fail_the_run(tmp_path: Path):
    said: list[tuple[str, str]] = []
    draw_at_end(tmp_path, lambda topic, text: said.append((topic, text)))
    assert said[0][0] == "report"
    assert said[0][1].startswith("WARNING: not drawn: ConfigError")


def test_a_run_of_two_ranks_ends_with_its_report(tmp_path: Path):
    train("smoke", tmp_path / "run", "report=true", "training.max_steps=1", world_size=2)
    assert "Mask of one pack" in (tmp_path / "run/report.html").read_text()
    assert (tmp_path / "run/report.png").is_file()
