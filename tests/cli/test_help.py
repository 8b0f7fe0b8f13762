from __future__ import annotations

from pathlib import Path

import pytest

from automodel_lite.cli import compose_config, help
from automodel_lite.cli.help import help_of
from automodel_lite.cli.recipes import Recipe
from automodel_lite.cli.sources import Sources, presets_of
from automodel_lite.errors import ConfigError


def test_ls_shows_all_a_group_and_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    help.ls([])
    assert "lr_scheduler/      constant, cosine, linear, wsd" in capsys.readouterr().out
    help.ls(["optimizer"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "adamw",
        "adamw_8bit",
        "adamw_bf16",
        "muon",
    ]
    help.ls(["optimizer/adamw"])
    assert "_target_: automodel_lite.training.optimizers.adamw" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"optimizer/adamv: no such preset or option; did you mean optimizer/adamw\?"):
        help.ls(["optimizer/adamv"])


def test_a_copied_preset_and_option_compose_from_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "optimizer").mkdir()
    for name, copy in (("smoke", "mine"), ("optimizer/adamw", "optimizer/slow")):
        help.ls([name])
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
    assert said[2] == "usage: python recipes/inspect_data.py --config-name PRESET [--config-dir FOLDER] [key=value ...]"


def test_help_lists_presets_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# Mine: for me\ndefaults: [smoke]\n")
    (tmp_path / "bare.yaml").write_text("defaults: [smoke]\n")
    lines = help_of(Recipe("recipes.train_ft:main"), Sources.of(str(tmp_path))).splitlines()
    assert "  mine             Mine" in lines
    assert "  bare             " in lines
