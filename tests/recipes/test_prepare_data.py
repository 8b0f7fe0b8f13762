"""prepare_data: what it prints, and what it leaves in the cache."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from automodel_lite.errors import ConfigError
from recipes import inspect_data, prepare_data
from tests.recipes.test_inspect_data import config_of


def test_preparing_fills_the_cache_that_a_second_call_hits(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert prepare_data.main(config_of(tmp_path)) == 0
    assert "cache: miss (first time)" in capsys.readouterr().out
    assert prepare_data.main(config_of(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "cache: hit" in printed
    assert "cache: miss" not in printed
    assert "fill" in printed


@pytest.mark.parametrize("strategy", ["best_fit", "next_fit", "wrapped"])
def test_a_strategy_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture, strategy: str
) -> None:
    few = [
        "dataset.num_chats=40",
        f"packed_sequence={strategy}",
        "packed_sequence.packed_sequence_size=256",
    ]
    assert prepare_data.main(config_of(tmp_path, *few)) == 0
    assert (
        f"  strategy            {strategy}, 256 tokens per pack, seed 0" in capsys.readouterr().out
    )


@pytest.mark.parametrize("recipe", [prepare_data, inspect_data], ids=["prepare", "inspect"])
def test_one_process_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: ModuleType
) -> None:
    config = config_of(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2 processes would each do all of this work"):
        recipe.main(config)
    assert not (tmp_path / "cache").exists()
