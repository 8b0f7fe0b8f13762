"""Folders of presets and options: the user's before the project's."""

from __future__ import annotations

from pathlib import Path

from automodel_lite.cli import compose_config
from automodel_lite.cli.sources import Sources, groups_of, presets_of
from automodel_lite.config.components import CONF_DIR


def test_a_users_file_hides_the_projects_file_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/adamw.yaml").write_text("_target_: torch.optim.SGD\nlr: 0.1\nmomentum: 0.9\n")
    assert compose_config("finetune", [], config_dir=str(tmp_path)).optimizer.momentum == 0.9


def test_presets_and_options_of_all_folders_are_known(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/own.yaml").write_text("lr: 0.1\n")
    (tmp_path / "mine.yaml").write_text("name: x\n")
    both, alone = Sources.of(str(tmp_path)), Sources.of(None, str(tmp_path))
    assert presets_of(alone) == ["mine"]
    assert groups_of(alone) == {"optimizer": ["own"]}
    assert {"mine", "smoke"} < set(presets_of(both))
    assert {"own", "adamw"} < set(groups_of(both)["optimizer"])
    assert both.file("smoke") == CONF_DIR / "smoke.yaml"
    assert both.file("optimizer/nothing") is None
