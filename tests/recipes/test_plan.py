"""A plan is written as a preset that composes to what was planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from recipes import plan


def test_a_written_preset_is_the_plan(tmp_path: Path) -> None:
    """Groups become defaults, everything else values: cache_dir was once taken for a group."""
    chosen = ["dataset=files", "dataset.path=chats.jsonl", "peft=lora", f"cache_dir={tmp_path}", "mesh.dp_shard=2"]
    config = plan.composed("finetune", [*chosen, "model.pretrained=any"])
    plan.write_preset(tmp_path / "mine.yaml", "finetune", config, [*chosen, "model.pretrained=any"])
    written = check_config(compose_config("mine", [], str(tmp_path)))
    assert (written.name, written.cache_dir, written.mesh.dp_shard) == ("mine", str(tmp_path), 2)
    assert (written.dataset, written.peft, written.model) == (config.dataset, config.peft, config.model)


def test_a_preset_cannot_remove_an_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a preset cannot remove an option"):
        plan.main(
            ["--config-name", "smoke", "--write", str(tmp_path / "mine.yaml"), "dataset=files", "~dataset.num_chats"]
        )
