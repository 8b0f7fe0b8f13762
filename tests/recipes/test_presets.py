"""Presets that are for trying out: one that overfits, and a folder of experiments."""

from __future__ import annotations

import json
import re
from pathlib import Path

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from recipes import train_ft
from tests.runs import config_of, rows_of, train

PAGE = Path(__file__).resolve().parents[2] / "docs/settings.md"


def test_a_handful_of_documents_is_learned_by_heart(tmp_path: Path) -> None:
    few = ["training.max_steps=1", "training.global_batch_size=1", "dataset.num_chats=50"]
    train("smoke", tmp_path / "start", *few)
    chats = tmp_path / "chats.jsonl"
    pairs = [("Which port?", "The harbor of Oslo."), ("Who sails?", "Two brothers.")] + [
        ("Never?", "Not seen.")
    ] * 20
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    chats.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    given = [
        f"model.pretrained={tmp_path / 'start' / 'hf'}",
        f"dataset.path={chats}",
        "training.num_threads=1",
    ]
    small = [
        "dataset.max_documents=2",
        "optimizer.lr=0.03",
        "packed_sequence.packed_sequence_size=128",
    ]
    assert train_ft.main(config_of("overfit", tmp_path / "run", *given, *small)) == 0
    losses = [row["loss"] for row in rows_of(tmp_path / "run") if "loss" in row]
    assert losses[0] > 4
    assert losses[-1] < 0.1
    assert not (tmp_path / "run" / "hf").exists()


def test_experiments_live_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my_conf" / "experiment"
    folder.mkdir(parents=True)
    (shown,) = re.findall(r"```yaml\n([^`]*@package.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "hot.yaml").write_text(shown)
    (folder / "whole.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /smoke\n  - _self_\nname: whole\n"
    )
    conf = str(folder.parent)
    added = check_config(compose_config("smoke", ["+experiment=hot"], config_dir=conf))
    assert (added.name, added.optimizer["lr"]) == ("smoke", 1e-3)
    whole = check_config(compose_config("experiment/whole", [], config_dir=conf))
    assert (whole.name, whole.optimizer["lr"]) == ("whole", 0.003)
