"""What docs/extending.md shows of packers, exchanges and presets, from an empty folder with a module of one's own."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from tests.forked import warm_python
from tests.runs import losses, problems, rows_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def shown(function: str) -> str:
    """The block of the page that defines it, as a function and no method."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (block,) = [x for x in blocks if re.search(rf"^def {function}\(", x, re.M)]
    return block


def test_code_is_named_on_the_command_line() -> None:
    assert problems("mesh.cp_exchange=mine:plan") == [
        "mesh.cp_exchange=mine:plan names code: allow it on the command line, security.allow_targets=[mine]."
    ]
    (sentence,) = problems("mesh.cp_exchange=rings")
    assert sentence.startswith(
        "mesh.cp_exchange=rings must be one of auto, all_gather, all_to_all, ring, package"
    )


def test_a_preset_takes_keys_out(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    lines = ["defaults: [smoke, override dataset: files, _self_]", "remove: [dataset.num_chats]"]
    lines.append("dataset: {path: chats.jsonl}")
    preset.write_text("\n".join(lines))
    (tmp_path / "next.yaml").write_text("defaults: [mine, _self_]\nremove: [dataset.path]\n")
    config = check_config(compose_config("mine", [], config_dir=str(tmp_path)))
    assert "num_chats" not in config.dataset
    assert config.dataset["path"] == "chats.jsonl"
    raw = compose_config("next", ["dataset.path=mine.csv"], config_dir=str(tmp_path))
    assert raw.dataset.path == "mine.csv"  # what is typed stays
    assert "num_chats" not in raw.dataset
    preset.write_text(f"{lines[0]}\nremove: [dataset.num_chat]\n")
    with pytest.raises(ConfigError, match=r"remove: dataset\.num_chat: no file sets it"):
        compose_config("mine", [], config_dir=str(tmp_path))


def test_the_packer_of_the_page_is_a_first_fit() -> None:
    made: dict[str, object] = {}
    exec(shown("first_fit"), made)
    packed = made["first_fit"](np.array([5, 4, 3, 2, 2]), 8, 0, 0)  # type: ignore[operator]
    assert (packed.order.tolist(), packed.offsets.tolist()) == ([0, 2, 1, 3, 4], [0, 2, 5])


@pytest.mark.system
def test_a_packer_and_an_exchange_of_ones_own_train(tmp_path: Path) -> None:
    (tmp_path / "my_packing.py").write_text(shown("first_fit"))
    (tmp_path / "my_exchange.py").write_text(shown("plan"))
    found = {}
    own = ["packed_sequence.own_strategy=my_packing:first_fit", "mesh.cp_exchange=my_exchange:plan"]
    own.append("security.allow_targets=[my_packing, my_exchange]")
    for name, more in {
        "plain": ["mesh.cp_exchange=all_gather", own[0], own[2]],
        "own": own,
    }.items():
        command = [
            warm_python(),
            "-m",
            "automodel_lite",
            "train",
            "--nproc",
            "2",
            "--config-name",
            "smoke",
        ]
        settings = [f"name={name}", "mesh.cp=2", "training.num_threads=1", "training.max_steps=2"]
        settings += [
            "packed_sequence.packed_sequence_size=256",
            "checkpoint.export_hf=false",
            "dataset.num_chats=40",
        ]
        done = subprocess.run(
            [*command, *settings, *more],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = losses(rows_of(tmp_path / "runs" / name))
    assert found["own"] == found["plain"]
    assert len(found["own"]) == 2


@pytest.mark.system
def test_a_source_of_packs_of_ones_own_trains_and_continues(tmp_path: Path) -> None:
    (tmp_path / "my_sums.py").write_text(shown("a_sum"))
    (tmp_path / "conf" / "dataset").mkdir(parents=True)
    (tmp_path / "conf" / "dataset" / "sums.yaml").write_text("_target_: my_sums.Sums\n")
    settings = [
        "--config-dir",
        "conf",
        "--config-name",
        "smoke",
        "dataset=sums",
        "~dataset.num_chats",
    ]
    settings += [
        "security.allow_targets=[my_sums]",
        "training.num_threads=1",
        "lr_scheduler=constant",
    ]
    settings += [
        "checkpoint.export_hf=false",
        "checkpoint.every_steps=2",
        "training.val_every_steps=0",
    ]
    for runs in (
        ["name=whole training.max_steps=4"],
        [
            "name=cut training.max_steps=2",
            "name=cut training.max_steps=4 checkpoint.accept_changes=true",
        ],
    ):
        for more in runs:
            done = subprocess.run(
                [warm_python(), "-m", "automodel_lite", "train", *settings, *more.split()],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    whole, cut = (losses(rows_of(tmp_path / "runs" / name)) for name in ("whole", "cut"))
    assert len(whole) == 4
    assert whole == cut
