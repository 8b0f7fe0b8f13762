"""Trackers of packages that somebody else has installed: a real entry point, of a package in a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.cli.sources import Sources, groups_of
from automodel_lite.config.installed import installed_trackers
from automodel_lite.errors import ConfigError
from tests.runs import train

MODULE = """
import json

from automodel_lite.telemetry.callbacks import Callback

class Comet(Callback):
    def __init__(self, run, project="mine", address=None):
        self.file = open(run.folder / "comet.jsonl", "a")
        self.state_before = run.state
        self.project = project
        self.rows = 0

    def log(self, row):
        self.rows += 1
        print(json.dumps({"project": self.project, "before": self.state_before, "step": row["step"]}), file=self.file, flush=True)

    def state(self):
        return {"rows": self.rows}
"""
POINTS = """[automodel_lite.trackers]
comet = comet_of_others.trackers:Comet
wandb = comet_of_others.trackers:Comet
Bad-Name = comet_of_others.trackers:Comet
extras = comet_of_others.trackers:Comet [fast]
module = comet_of_others.trackers
[console_scripts]
other = comet_of_others.trackers:Comet
"""
TARGET = "comet_of_others.trackers.Comet"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed package, as pip leaves it."""
    folder = tmp_path / "site-packages"
    info = folder / "comet_of_others-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: comet-of-others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (folder / "comet_of_others").mkdir()
    (folder / "comet_of_others" / "__init__.py").touch()
    (folder / "comet_of_others" / "trackers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.startswith("comet_of_others")]:
        del sys.modules[name]


def test_what_packages_offer(package: Path) -> None:
    found = installed_trackers()
    assert {name: found.get(name) for name in ("comet", "Bad-Name", "module", "other")} == {
        "comet": TARGET,
        "Bad-Name": None,
        "module": None,
        "other": None,
    }
    assert {"comet", "wandb", "trackio"} <= set(groups_of(Sources())["logger"])
    assert "comet_of_others.trackers" not in sys.modules  # nothing is imported for a name


def test_an_option_of_ours_keeps_its_name(package: Path) -> None:
    composed = compose_config("smoke", ["name=a", "logger=wandb"])
    assert composed.logger.wandb._target_ == "automodel_lite.parts.trackers.wandb.WandbTracker"


def test_a_tracker_of_another_package_gets_the_rows(package: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["logger=comet", "logger.comet.project=theirs", "lr_scheduler=constant"]
    options += ["training.val_every_steps=0", "training.log_every_steps=1"]
    train("smoke", run, *options, "training.max_steps=1")
    train("smoke", run, *options, "training.max_steps=2", "checkpoint.accept_changes=true")
    rows = [json.loads(line) for line in (run / "comet.jsonl").read_text().splitlines()]
    assert {row["project"] for row in rows} == {"theirs"}
    assert rows[0] == {"project": "theirs", "before": {}, "step": 0}
    assert rows[-1]["step"] == 2
    assert rows[-1]["before"]["rows"] > 0  # kept in the checkpoint


@pytest.mark.parametrize(
    ("text", "overrides", "problem"),
    [
        ("override /logger: comet", [], None),
        ("override /logger: comet", ["logger.comet.address=http://mine"], None),
        (
            "override /logger: comet",
            ["logger.comet.other=1"],
            "logger.comet.other",
        ),
    ],
    ids=["chosen", "typed", "misspelt"],
)
def test_a_preset_may_choose_it(
    package: Path, tmp_path: Path, text: str, overrides: list[str], problem: str | None
) -> None:
    from automodel_lite.config.check import check_config

    (tmp_path / "mine.yaml").write_text(f"defaults: [smoke, {text}, _self_]\n")
    composed = compose_config("mine", ["name=a", *overrides], str(tmp_path))
    if problem is None:
        assert check_config(composed).logger["comet"]["_target_"] == TARGET
    else:
        with pytest.raises(ConfigError, match=problem):
            check_config(composed)


@pytest.mark.parametrize(
    "block",
    [
        "logger: {comet: {address: 'http://evil'}}",
        "logger: {comet: {address: {deep: 'http://evil'}}}",
        f"callbacks: {{x: {{_target_: {TARGET}, address: 'http://evil'}}}}",
    ],
    ids=["option", "nested", "callback"],
)
def test_a_file_does_not_say_where_its_results_go(
    package: Path, tmp_path: Path, block: str
) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [smoke, _self_]\n{block}\n")
    with pytest.raises(
        ConfigError, match="only the command line may set a tracker of an installed"
    ):
        compose_config("mine", ["name=a", "logger=comet"], str(tmp_path))


def test_a_name_that_nobody_offers(package: Path) -> None:
    with pytest.raises(ConfigError, match="logger=commet: no such option; did you mean comet"):
        compose_config("smoke", ["name=a", "logger=commet"])
