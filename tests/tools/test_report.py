import json
import re
import shlex
from pathlib import Path

import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.extras.report import (
    _thin,
    differences,
    facts_of,
    packing_of,
    page_of,
    read_run,
    samples_of,
    warnings_of,
    write_report,
)
from automodel_lite.extras.report.live import LiveReport
from automodel_lite.run.folder import RunFolder
from recipes import report as report_recipe
from tests.runs import train


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
            "step_s": 2.0,
            "time_s/forward": 2.0,
            "time_s/backward": 3.0,
            **more,
        }
        for step in (1, 2, 3, 4)
    ]
    rows = [
        *steps,
        {
            "step": 4,
            "val_loss/held_out": 0.7,
            "val_perplexity/held_out": 2.0138,
            "val_token_accuracy/held_out": 0.75,
        },
        {"step": 4, "time_s/checkpoint": 5.0},
    ]
    (path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5, "lo'
    )
    packing = {"fill_frac": 0.95, "padded_fill_frac": 0.5, "packed_sequence_size": 16}
    (path / "packing.json").write_text(json.dumps(packing))
    (path / "lengths.json").write_text(
        json.dumps({"edges": [0, 8, 16, 24], "documents": [5, 2, 1], "pack": [7, 6, 3]})
    )
    (path / "STATUS.json").write_text('{"state": "finished", "step": 4}')
    return path


def test_a_report_tells_what_trees_save(tmp_path: Path) -> None:
    counts = {"data/train/num_saved_tokens": 250, "data/train/num_tokens": 1000}
    assert ("saved by trees", "250 tokens of 1,000, 25%") in packing_of(
        read_run(run_folder(tmp_path / "a", **counts))
    )
    assert "saved by trees" not in dict(packing_of(read_run(run_folder(tmp_path / "b"))))


def test_what_is_read_from_a_run(tmp_path: Path):
    record = read_run(run_folder(tmp_path / "a"))
    assert record.curve("loss") == ([1, 2, 3, 4], [2.0, 1.0, pytest.approx(2 / 3), 0.5])
    assert record.curve("grad_norm")[0] == [1, 3, 4]
    assert record.time_s() == {"forward": 8.0, "backward": 12.0, "checkpoint": 5.0}
    assert facts_of(record) == [
        ("step", "4"),
        ("loss", "0.5000"),
        ("validation (held out)", "0.7000"),
        ("perplexity (held out)", "2.01"),
        ("tokens right (held out)", "75.0%"),
        ("tokens", "2,000"),
        ("time", "0:25"),
        ("tokens/s", "300"),
        ("fill", "95.0%"),
    ]


def test_page_is_self_contained_and_escapes_what_it_shows(tmp_path: Path):
    page = page_of([read_run(run_folder(tmp_path / "a<b", **{"text/<script>q": "</script><b>"}))])
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', page) == []
    assert "a&lt;b" in page
    assert page.count("</script>") == 2  # its own data and its own code
    assert "prefers-color-scheme: dark" in page
    (data,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL
    )
    (run,) = json.loads(data)["runs"]
    assert run["curves"]["loss"] == [[1, 2, 3, 4], [2.0, 1.0, pytest.approx(2 / 3), 0.5]]
    assert run["curves"]["grad_norm"][0] == [1, 3, 4]  # the step that was not a number is left out
    assert run["curves"]["val_loss/held_out"] == [[4], [0.7]]
    assert run["phases"] == {"forward": 8.0, "backward": 12.0, "checkpoint": 5.0}


def test_axes_count_tokens_and_minutes_until_each_row(tmp_path: Path):
    axes = read_run(run_folder(tmp_path / "a")).axes()  # 2 s a step, 100 to 400 tokens per second
    assert axes["tokens"] == ([0, 1, 2, 3, 4], [0, 200, 600, 1200, 2000])
    assert axes["minutes"][1] == pytest.approx([0, 2 / 60, 4 / 60, 6 / 60, 8 / 60])


def test_answers_are_grouped_by_prompt_newest_first(tmp_path: Path):
    record = read_run(run_folder(tmp_path / "a"))
    record.rows.extend(
        [{"step": 2, "text/Hi": "x"}, {"step": 4, "text/Hi": "Hello", "text/Bye": "Bye"}]
    )
    assert samples_of(record) == [("Hi", [(4, "Hello"), (2, "x")]), ("Bye", [(4, "Bye")])]


def test_a_folder_stands_for_the_runs_in_it(tmp_path: Path):
    run_folder(tmp_path / "b")
    run_folder(tmp_path / "a<i>")
    (tmp_path / "notes").mkdir()
    assert report_recipe.main([str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "<h1>2 runs</h1>" in text
    assert "<th>a&lt;i&gt;</th><th>b</th>" in text
    with pytest.raises(ConfigError, match="notes is not the folder of a run"):
        report_recipe.main([str(tmp_path / "notes")])


def test_a_run_that_logged_nothing_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("a", "b", "c"):
        run_folder(tmp_path / name)
    (tmp_path / "b/metrics.jsonl").write_text("")  # it has failed before its first step
    (tmp_path / "c/config.yaml").write_text("{{{")
    assert report_recipe.main([str(tmp_path)]) == 0
    page, left_out = (tmp_path / "report.html").read_text(), capsys.readouterr().err.splitlines()
    assert "<h1>a</h1>" in page
    assert left_out[0] == f"left out: {tmp_path}/b has logged no step yet."
    assert left_out[1].startswith(f"left out: {tmp_path}/c/config.yaml cannot be read (")


def test_what_is_noted_and_what_to_do_next(tmp_path: Path):
    record = read_run(run_folder(tmp_path / "a"))
    record.facts.update(command="torchrun train", lines=[["steps", "4\nNOTE: the data are few"]])
    assert warnings_of(record) == ["NOTE: the data are few"]
    folder = RunFolder(tmp_path / "a")
    export, generate = folder.next_commands("finished")
    program, *words = shlex.split(generate)
    assert program.endswith("automodel-lite")
    assert words == ["generate", f"{tmp_path}/a", "..."]
    assert shlex.split(export)[:3] == [program, "export", f"{tmp_path}/a"]
    assert folder.next_commands("preempted") == []
    folder.write_facts([])
    assert folder.next_commands("preempted")[0].endswith("   # starts again")
    folder.write_status("preempted", 4, checkpoint="step_00000004")
    assert folder.next_commands("preempted")[0].endswith("   # continues from step_00000004")
    record.rows.append({"step": 5, "loss": "nan"})
    record.rows.append({"step": 50, "warning": "step 50: rank 1 on b takes 2 s for a layer"})
    slow, nonfinite = warnings_of(record)[1:]
    assert slow == "step 50: rank 1 on b takes 2 s for a layer"
    assert nonfinite == "the loss was not finite at steps 5"


def test_long_curves_keep_their_spikes():
    values = [1.0] * 100_000
    values[54_321] = 99.0
    steps, kept = _thin(list(range(100_000)), values)
    assert len(steps) <= 1502
    assert kept[steps.index(54_321)] == 99.0
    assert (steps[0], steps[-1]) == (0, 99_999)


def test_several_runs_side_by_side(tmp_path: Path):
    runs = [run_folder(tmp_path / "a"), run_folder(tmp_path / "b", lr=0.02, mfu_frac=0.4)]
    with (runs[0] / "config.yaml").open("a") as file:
        file.write("peft: {}\ndataset:\n  columns: null\n")  # as good as not there
    assert differences([read_run(path) for path in runs]) == [("optimizer.lr", ["0.01", "0.02"])]
    page = write_report([read_run(path) for path in runs], tmp_path / "both").read_text()
    assert "Settings that differ" in page
    assert "<td>MFU</td><td>-</td><td>40.0%</td>" in page


def test_folders_that_cannot_be_drawn_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        read_run(tmp_path)
    empty = run_folder(tmp_path / "a")
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has logged no step yet"):
        read_run(empty)


DAMAGE = [
    b"",
    b"{",
    b"[1]",
    b"\xff",
    b'{"lines": 5, "command": 7, "state": ["x"], "step": {}, "fill_frac": "y"}',
    b'{"lines": [5]}',
]


@pytest.mark.parametrize("name", ["packing.json", "lengths.json", "STATUS.json", "run.json"])
@pytest.mark.parametrize("content", DAMAGE, ids=map(str, DAMAGE))
def test_a_small_file_that_is_damaged_is_left_out(tmp_path: Path, name: str, content: bytes):
    path = run_folder(tmp_path / "a")
    (path / name).write_bytes(content)
    assert "<h1>a</h1>" in page_of([read_run(path)])
    assert len(RunFolder(path).next_commands("failed")) == (
        b"command" in content and name == "run.json"
    )
    assert RunFolder(path).read_status().get("step", 4) in (4, {})


def test_a_page_that_cannot_be_drawn_warns_once(tmp_path: Path):
    said: list[tuple[str, str]] = []
    page = LiveReport(tmp_path, True, lambda topic, text: said.append((topic, text)))
    page.update()
    page.update()
    assert len(said) == 1
    assert said[0][1].startswith("WARNING: not drawn: ConfigError")


def test_the_page_refreshes_itself_while_the_run_goes_on(tmp_path: Path):
    page = LiveReport(run_folder(tmp_path / "a"), True, lambda topic, text: pytest.fail(text))
    page.update()
    first = (page.run / "report.html").read_text()
    assert '<meta http-equiv="refresh"' in first
    with (tmp_path / "a/metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 6, "loss": 0.25}) + "\n")
    page.update()
    # not due yet: drawing takes little of the run's time
    assert (page.run / "report.html").read_text() == first
    page.update(is_last=True)
    assert '<meta http-equiv="refresh"' not in (page.run / "report.html").read_text()
    assert "0.2500" in (page.run / "report.html").read_text()


@pytest.mark.system
def test_a_run_of_two_ranks_ends_with_its_report(tmp_path: Path):
    train("smoke", tmp_path / "run", "report=true", "training.max_steps=1", world_size=2)
    page = (tmp_path / "run/report.html").read_text()
    assert "2 processes" in page
    assert '<meta http-equiv="refresh"' not in page


def test_the_loss_is_named_by_what_it_is(tmp_path: Path):
    """A page of a score, a pair or a policy does not speak of tokens."""
    runs = {}
    for name, unit in {
        "chat": "nats per token",
        "pairs": "per pair",
        "policy": "",
        "old": None,
    }.items():
        runs[name] = run_folder(tmp_path / name)
        if unit is not None:
            RunFolder(runs[name]).write_facts([], loss_unit=unit)
    pages = {name: page_of([read_run(path)]) for name, path in runs.items()}
    for name, page in pages.items():
        assert ("how surprised the model is by each token" in page) == (name == "chat")
        assert ('"lossUnit": "nats per token"' in page) == (name == "chat")
    assert "The loss\n(per pair) should fall" in pages["pairs"]
    both = page_of([read_run(runs["chat"]), read_run(runs["pairs"])])
    assert "should fall" not in both
    (runs["old"] / "run.json").write_text('{"loss_unit": ["x"]}')
    assert read_run(runs["old"]).loss_unit == ""
