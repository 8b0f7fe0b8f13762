"""prepare_data and inspect_data: what they print, what they leave in the cache, how they exit."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, DataError
from recipes import inspect_data, prepare_data


def config_of(tmp_path: Path, *overrides: str, preset: str = "smoke") -> Config:
    return check_config(compose_config(preset, [f"cache_dir={tmp_path / 'cache'}", *overrides]))


def test_preparing_fills_the_cache_that_a_second_call_hits(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert prepare_data.main(config_of(tmp_path)) == 0
    assert "cache: miss (first time)" in capsys.readouterr().out
    assert prepare_data.main(config_of(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "cache: hit" in printed
    assert "cache: miss" not in printed
    assert "fill" in printed


SHARDS = ["dataset=files", "dataset.val_frac=0.1", "tokenizer=bpe", "tokenizer.vocab_size=262", "tokenize.num_shards=3"]


def config_of_shards(tmp_path: Path, *overrides: str) -> Config:
    chats = [[{"role": "user", "content": "?" * n}, {"role": "assistant", "content": f"{n}"}] for n in range(1, 41)]
    path = tmp_path / "chats.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats) + "no row\n")
    bad = ["tokenize.on_bad_row=skip", f"dataset.path={path}"]
    return config_of(tmp_path, *SHARDS, *bad, *overrides, preset="llama_packed")


def tokens_of(cache: Path) -> dict[str, bytes]:
    """The files of the sets, without their times; shards are gone once they are joined."""
    folders = [path for path in (cache / "tokens").iterdir() if path.is_dir()]
    assert [path for path in folders if "-part-" in path.name] == []
    return {f"{folder.name}/{file.name}": file.read_bytes() for folder in folders for file in sorted(folder.iterdir())}


def test_tasks_that_share_the_documents_leave_what_one_leaves(tmp_path: Path) -> None:
    assert prepare_data.main(config_of_shards(tmp_path, "tokenize.num_shards=1", f"cache_dir={tmp_path}/one")) == 0
    configs = [config_of_shards(tmp_path, f"tokenize.shard={shard}") for shard in range(3)]
    tasks = [multiprocessing.get_context("fork").Process(target=prepare_data.main, args=(c,)) for c in configs]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(60)
        assert task.exitcode == 0
    assert tokens_of(tmp_path / "cache") == tokens_of(tmp_path / "one")


def test_a_shard_that_is_missing_is_named_and_made_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for shard in (0, 2, 0):
        assert prepare_data.main(config_of_shards(tmp_path, f"tokenize.shard={shard}")) == 0
    printed = capsys.readouterr().out
    assert "still missing: shard 1, 2; the last task joins them" in printed
    assert "1 bad skipped" in printed  # 1 of 13, more than max_bad_frac, and fewer of the whole set
    assert "cache: hit" in printed  # the second time
    with pytest.raises(
        ConfigError, match=r"lacks shard 1 in .*: run this task of the array again \(sbatch --array=1\)"
    ):
        prepare_data.main(config_of_shards(tmp_path))
    damaged = next((tmp_path / "cache" / "tokens").glob("*train-part*[!k]")) / "labels.npy"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"xxxx")
    with pytest.raises(ConfigError, match=r"lacks shard [02],1|lacks shard 1,2 "):
        prepare_data.main(config_of_shards(tmp_path))
    shutil.rmtree(damaged.parent)
    for shard in range(3):
        assert prepare_data.main(config_of_shards(tmp_path, f"tokenize.shard={shard}")) == 0
    assert "still missing" not in capsys.readouterr().out.split("shard 2 of 3")[-1]
    assert prepare_data.main(config_of_shards(tmp_path, "tokenize.num_shards=1")) == 0  # what training finds
    assert "cache: miss" not in capsys.readouterr().out


def test_shards_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenize.part=0: unknown key; it is tokenize.shard now\."):
        config_of_shards(tmp_path, "tokenize.part=0")
    with pytest.raises(ConfigError, match=r"tokenize.shard=3 must be under tokenize.num_shards=3: tasks count from 0"):
        prepare_data.main(config_of_shards(tmp_path, "tokenize.shard=3"))
    with pytest.raises(ConfigError, match=r"tokenize.shard=0: a stream is tokenized while it is trained on"):
        prepare_data.main(config_of_shards(tmp_path, "dataset=streaming", "~dataset.val_frac", "tokenize.shard=0"))
    with pytest.raises(ConfigError, match=r"tokenize.shard=0 is only for recipes/prepare_data.py"):
        inspect_data.main(config_of_shards(tmp_path, "tokenize.shard=0"))


@pytest.mark.parametrize("strategy", ["best_fit", "next_fit", "wrapped"])
def test_a_strategy_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture, strategy: str) -> None:
    few = ["dataset.num_chats=40", f"packed_sequence={strategy}", "packed_sequence.packed_sequence_size=256"]
    assert prepare_data.main(config_of(tmp_path, *few)) == 0
    assert f"  strategy            {strategy}, 256 tokens per pack, seed 0" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", [prepare_data, inspect_data], ids=["prepare", "inspect"])
def test_one_process_prepares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: ModuleType) -> None:
    config = config_of(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=2 processes would each do all of this work"):
        recipe.main(config)
    assert not (tmp_path / "cache").exists()


def test_inspecting_shows_every_part(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert inspect_data.main(config_of(tmp_path)) == 0
    printed = capsys.readouterr().out
    for heading in ("DATA", "LENGTHS", "PACKING", "PACKS", "ATTENTION MASK", "SAMPLES (trained on: ⟦ ⟧)"):
        assert heading in printed
    assert "<|assistant|>⟦The capital of" in printed
    assert "\x1b[" not in printed
    assert "padded batches" in printed


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"messages": [{"role": "user", "content": "Hi"}]}], "a.jsonl:1: has no assistant message"),
        ([{"prompt": "x" * 300, "completion": "y" * 300}], "would be dropped"),
    ],
    ids=["no answer", "all too long"],
)
def test_inspecting_is_an_error_when_nothing_would_be_trained_on(tmp_path: Path, rows: list, sentence: str) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        tmp_path,
        "dataset=files",
        f"dataset.path={tmp_path / 'a.jsonl'}",
        "tokenizer=bpe",
        "tokenizer.vocab_size=262",
        "packed_sequence.packed_sequence_size=64",
        "packed_sequence.overlong=drop",
        preset="llama_packed",
    )
    with pytest.raises(DataError, match=r"^nothing would be trained on: ") as error:
        inspect_data.main(config)
    assert sentence in str(error.value)


def test_a_tree_is_drawn_row_by_row() -> None:
    drawn = inspect_data.draw_tree(np.array([0, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0]), width=6)
    assert drawn == ["    █████ 5 of 5 tokens", "      ███ 3 of 5 tokens", "       ███ 3 of 6 tokens"]
