"""A run goes on with the model and the folder that it began with, on every node."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from automodel_lite.errors import ConfigError
from recipes import score
from tests.ranks import run_ranks
from tests.runs import quick_config, train, train_quick


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    train("smoke", folder / "run", "training.max_steps=1", "checkpoint.every_steps=0")
    return folder / "run" / "hf"


@pytest.mark.system
@pytest.mark.parametrize(
    ("adapter", "file", "is_refused"),
    [
        ("peft=lora", "model.safetensors", True),
        ("peft=none", "model.safetensors", False),
        ("peft=none", "config", True),
    ],
    ids=["lora-weights", "whole-weights", "whole-config"],
)
def test_another_base_on_disk_is_refused_on_resume(
    adapter: str, file: str, is_refused: bool, base: Path, tmp_path: Path
) -> None:
    """An adapter once went on with other weights below it; weights that are trained come from the checkpoint."""
    model = shutil.copytree(base, tmp_path / "model")
    options = ["model=pretrained", f"model.pretrained={model}", adapter]
    assert train_quick(tmp_path / "run", *options, stop_at=2)[0] == 75
    if file == "config":
        config = json.loads((model / "config.json").read_text())
        config["rms_norm_eps"] = 1e-3
        (model / "config.json").write_text(json.dumps(config))
    else:
        weights = {name: value * 1.5 for name, value in load_file(model / file).items()}
        save_file(weights, model / file, {"format": "pt"})
    if not is_refused:
        assert train_quick(tmp_path / "run", *options)[0] == 0
        return
    with pytest.raises(
        ConfigError,
        match=r"model (model.safetensors|config.json): not what the checkpoint was trained",
    ):
        train_quick(tmp_path / "run", *options)
    assert train_quick(tmp_path / "run", *options, "checkpoint.accept_changes=true")[0] == 0


OTHERS = {
    "reference-weights": ("loss=dpo", "reference model.safetensors"),
    "teacher-weights": ("loss=distill", "teacher model.safetensors"),
    "teacher-config": ("loss=distill", "teacher config.json"),
    "stored-teacher": ("loss=distill_topk", "loss.teacher model.safetensors"),
}


@pytest.mark.parametrize(
    ("loss", "changed"),
    [
        pytest.param(*case, id=name, marks=() if name == "teacher-config" else pytest.mark.system)
        for name, case in OTHERS.items()
    ],
)
def test_another_model_beside_the_trained_one_is_refused_on_resume(
    loss: str, changed: str, base: Path, tmp_path: Path
) -> None:
    """What a run compares with is frozen, and part of its numbers."""
    other = shutil.copytree(base, tmp_path / "other")
    options = [loss, f"cache_dir={tmp_path / 'cache'}", "model=pretrained", "tokenizer=pretrained"]
    if loss == "loss=dpo":
        row = {"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."}
        (tmp_path / "pairs.jsonl").write_text((json.dumps(row) + "\n") * 40)
        options += [
            "dataset=files",
            f"dataset.path={tmp_path / 'pairs.jsonl'}",
            "~dataset.num_chats",
        ]
        options += [
            "dataset.val_frac=0.1",
            "dataset.format=preference",
            f"model.pretrained={other}",
        ]
    else:
        options += [f"model.pretrained={base}"]
    if loss == "loss=distill":
        options += ["teacher=pretrained", f"teacher.pretrained={other}"]
    is_scored = loss == "loss=distill_topk"
    if is_scored:
        options += [f"loss.teacher={other}", "loss.top_k=3"]
        assert score.main(quick_config(tmp_path / "run", *options)) == 0
    assert train_quick(tmp_path / "run", *options, stop_at=2)[0] == 75
    if changed.endswith("config.json"):
        config = json.loads((other / "config.json").read_text())
        config["rms_norm_eps"] = 1e-3
        (other / "config.json").write_text(json.dumps(config))
    else:
        weights = load_file(other / "model.safetensors")
        scaled = {name: value * 1.5 for name, value in weights.items()}
        save_file(scaled, other / "model.safetensors", {"format": "pt"})
    if is_scored:
        assert score.main(quick_config(tmp_path / "run", *options)) == 0
    with pytest.raises(ConfigError, match=rf"{changed}: not what the checkpoint was trained with"):
        train_quick(tmp_path / "run", *options)
    assert train_quick(tmp_path / "run", *options, "checkpoint.accept_changes=true")[0] == 0


def _train_on_a_node(rank: int, world_size: int, folder: str, base: str) -> str:
    """Each rank's node has a working folder of its own, with files under the same relative names."""
    node = Path(folder, f"node_{rank}")
    shutil.copytree(base, node / "model")
    if rank == 1:
        config = json.loads((node / "model" / "config.json").read_text())
        config["rms_norm_eps"] = 1e-3
        (node / "model" / "config.json").write_text(json.dumps(config))
    os.chdir(node)
    try:
        train_quick(Path(folder) / "run", "model=pretrained", "model.pretrained=model")
    except ConfigError as error:
        return str(error)
    return "trained"


def test_nodes_with_other_model_files_do_not_start(base: Path, tmp_path: Path) -> None:
    for text in run_ranks(_train_on_a_node, 2, str(tmp_path), str(base)):
        assert "do not agree on its files:\n  model config.json: " in text
