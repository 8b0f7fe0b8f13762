"""A preset and an option that was typed set the same key: the preset wins, as in plain Hydra, and a line says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from automodel_lite.cli import compose_config
from automodel_lite.cli.compose import Loader, beaten_options, compose
from automodel_lite.cli.sources import Sources, groups_of, presets_of

SGD = "_target_: torch.optim.SGD\nlr: 0.1\nmomentum: 0.9\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/sgd.yaml").write_text(SGD)
    (tmp_path / "optimizer/fast.yaml").write_text("defaults: [sgd]\nmomentum: 0.95\n")
    return tmp_path


def lines(folder: Path, preset: str, *overrides: str) -> list[str]:
    sources = Sources.of(str(folder))
    return list(beaten_options(compose(Loader(sources), preset, overrides), sources, overrides))


def test_the_preset_wins_and_the_line_names_both_values(folder: Path) -> None:
    chosen = compose_config("finetune", ["optimizer=sgd"], config_dir=str(folder))
    assert (chosen.optimizer.lr, chosen.optimizer.momentum) == (1e-5, 0.9)
    line = "optimizer.lr=1e-05 (the preset's, over 0.1 of optimizer/sgd.yaml)"
    assert lines(folder, "finetune", "optimizer=sgd") == [line]


def test_an_option_inherits_from_another(folder: Path) -> None:
    chosen = compose_config("finetune", ["optimizer=fast"], config_dir=str(folder))
    assert chosen.optimizer.momentum == 0.95


def test_what_is_typed_beats_both_without_a_line(folder: Path) -> None:
    chosen = compose_config("finetune", ["optimizer=sgd", "optimizer.lr=0.3"], config_dir=str(folder))
    assert chosen.optimizer.lr == 0.3
    assert lines(folder, "finetune", "optimizer=sgd", "optimizer.lr=0.3") == []


def test_options_of_the_project_are_told_too(folder: Path) -> None:
    line = "optimizer.lr=0.003 (the preset's, over 1e-05 of optimizer/adamw_8bit.yaml)"
    assert lines(folder, "llama_packed", "optimizer=adamw_8bit") == [line]
    assert lines(folder, "llama_packed") == []


def test_a_users_file_hides_the_projects_file_of_the_same_name(folder: Path) -> None:
    (folder / "optimizer/adamw.yaml").write_text(SGD)
    assert compose_config("finetune", [], config_dir=str(folder)).optimizer.momentum == 0.9


FILLED = ["name=x", "model.pretrained=x", "dataset.path=x"]


@pytest.mark.parametrize(
    "preset",
    [name if name == "smoke" else pytest.param(name, marks=pytest.mark.slow) for name in presets_of(Sources())],
)
def test_every_preset_composes_with_every_group_option(preset: str) -> None:
    """One of each group at a time: as many compositions as the largest group has options."""
    groups = groups_of(Sources())
    for number in range(max(map(len, groups.values()))):
        chosen = {group: options[number % len(options)] for group, options in groups.items()}
        raw = compose_config(preset, [*(f"{group}={option}" for group, option in chosen.items()), *FILLED])
        assert raw.name == "x"
        assert {group for group in chosen if OmegaConf.is_missing(raw, group)} == set()
