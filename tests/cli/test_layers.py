"""A preset and an option file set the same key: who wins, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.cli.sources import Sources, composed, settled

SGD = "_target_: torch.optim.SGD\nlr: 0.1\nmomentum: 0.9\n"
MINE = "defaults:\n  - finetune\n  - override optimizer: sgd\n  - _self_\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/sgd.yaml").write_text(SGD)
    (tmp_path / "optimizer/fast.yaml").write_text("defaults: [sgd]\nmomentum: 0.95\n")
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path


def lines(folder: Path, preset: str, *overrides: str) -> list[str]:
    sources = Sources.of(str(folder))
    return settled(*composed(sources, preset, overrides), sources, preset, overrides)[2]


def test_an_option_file_of_ones_own_that_was_typed_beats_the_preset(folder: Path) -> None:
    chosen = compose_config("finetune", ["optimizer=sgd"], config_dir=str(folder))
    assert (chosen.optimizer.lr, chosen.optimizer.momentum) == (0.1, 0.9)
    assert lines(folder, "finetune", "optimizer=sgd") == ["optimizer.lr=0.1 (optimizer/sgd.yaml over finetune.yaml)"]


def test_the_values_that_an_option_file_inherits_count_as_its_own(folder: Path) -> None:
    chosen = compose_config("finetune", ["optimizer=fast"], config_dir=str(folder))
    assert (chosen.optimizer.lr, chosen.optimizer.momentum) == (0.1, 0.95)


def test_chosen_by_a_preset_the_preset_wins(folder: Path) -> None:
    assert compose_config("mine", [], config_dir=str(folder)).optimizer.lr == 1e-5
    assert lines(folder, "mine") == ["optimizer.lr=1e-05 (finetune.yaml over optimizer/sgd.yaml)"]


def test_what_is_typed_beats_both(folder: Path) -> None:
    chosen = compose_config("finetune", ["optimizer=sgd", "optimizer.lr=0.3"], config_dir=str(folder))
    assert chosen.optimizer.lr == 0.3
    assert lines(folder, "finetune", "optimizer=sgd", "optimizer.lr=0.3") == []


def test_of_the_projects_own_options_the_preset_wins_and_it_is_said(folder: Path) -> None:
    overrides = ["optimizer=adamw_8bit"]
    assert compose_config("llama_packed", overrides).optimizer.lr == 3e-3
    assert lines(folder, "llama_packed", *overrides) == [
        "optimizer.lr=0.003 (llama_packed.yaml over optimizer/adamw_8bit.yaml)"
    ]
    assert lines(folder, "llama_packed") == []


def test_a_users_file_hides_the_projects_file_of_the_same_name(folder: Path) -> None:
    (folder / "optimizer/adamw.yaml").write_text(SGD)
    assert compose_config("finetune", [], config_dir=str(folder)).optimizer.momentum == 0.9
