"""Folders of presets and options: the user's before the project's."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.cli.recipes import Recipe
from automodel_lite.cli.sources import Sources, groups_of, presets_of
from automodel_lite.config.components import CONF_DIR
from automodel_lite.errors import ConfigError
from automodel_lite.extras.cli.ls import help_of, ls


def test_a_users_file_hides_the_projects_file_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/adamw.yaml").write_text(
        "_target_: torch.optim.SGD\nlr: 0.1\nmomentum: 0.9\n"
    )
    assert compose_config("finetune", [], config_dir=str(tmp_path)).optimizer.momentum == 0.9


def test_presets_and_options_of_all_folders_are_known(tmp_path: Path) -> None:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/own.yaml").write_text("lr: 0.1\n")
    (tmp_path / "mine.yaml").write_text("name: x\n")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "optimizer" / "folder.yaml").mkdir()
    both, alone = Sources.of(str(tmp_path)), Sources.of(None, str(tmp_path))
    assert presets_of(alone) == ["mine"]
    assert groups_of(alone) == {"optimizer": ["own"]}
    assert {"mine", "smoke"} < set(presets_of(both))
    assert {"own", "adamw"} < set(groups_of(both)["optimizer"])
    assert both.file("smoke") == CONF_DIR / "smoke.yaml"
    assert both.file("optimizer/nothing") is None


def test_ls_shows_all_a_group_and_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    ls([])
    assert "lr_scheduler/      constant, cosine, linear, wsd" in capsys.readouterr().out
    ls(["optimizer"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "adamw",
        "adamw_8bit",
        "adamw_bf16",
        "muon",
    ]
    ls(["optimizer/adamw"])
    assert "_target_: automodel_lite.parts.optimizers.adamw.adamw" in capsys.readouterr().out
    with pytest.raises(
        ConfigError,
        match=r"optimizer/adamv: no such preset or option; did you mean optimizer/adamw\?",
    ):
        ls(["optimizer/adamv"])


def test_a_copied_preset_and_option_compose_from_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "optimizer").mkdir()
    for name, copy in (("smoke", "mine"), ("optimizer/adamw", "optimizer/slow")):
        ls([name])
        (tmp_path / f"{copy}.yaml").write_text(capsys.readouterr().out)
    with open(tmp_path / "optimizer/slow.yaml", "a") as option:
        option.write("weight_decay: 0.5\n")
    config = compose_config("mine", ["optimizer=slow"], config_dir=str(tmp_path))
    assert (config.name, config.optimizer.weight_decay) == ("smoke", 0.5)


def test_help_names_presets_groups_and_examples() -> None:
    text = help_of(Recipe("recipes.train_ft:main"), Sources())
    assert all(preset in text for preset in presets_of(Sources()))
    assert "attention" in text
    assert text.count("torchrun recipes/train_ft.py") >= 4


def test_each_recipe_says_what_it_is_and_how_it_is_started() -> None:
    said = help_of(Recipe("recipes.inspect_data:main"), Sources()).splitlines()
    assert said[0] == "Look at documents as tokens, labels and packs."
    assert (
        said[2]
        == "usage: python recipes/inspect_data.py --config-name PRESET [--config-dir FOLDER] [key=value ...]"
    )


def test_help_lists_presets_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# Mine: for me\ndefaults: [smoke]\n")
    (tmp_path / "bare.yaml").write_text("defaults: [smoke]\n")
    lines = help_of(Recipe("recipes.train_ft:main"), Sources.of(str(tmp_path))).splitlines()
    assert "  mine              Mine" in lines
    assert "  bare              " in lines


def test_help_names_the_flags_of_the_command_and_no_other_ones() -> None:
    verify = help_of(Recipe("recipes.verify:main"), Sources())
    assert "verify RUN --replay 130 computes a recorded step again" in verify
    assert "[--replay REPLAY]" in verify
    assert "--html" not in verify
    assert "[--html HTML]" in help_of(Recipe("recipes.inspect_data:main"), Sources())
    assert "--replay" not in help_of(Recipe("recipes.train_ft:main"), Sources())
