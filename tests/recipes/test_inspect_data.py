"""inspect_data: what it prints, and how it exits."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from automodel_lite.cli import compose_config, hydra_app
from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.extras.inspection import draw_tree
from recipes import inspect_data
from tests.ranks import in_a_process


def config_of(tmp_path: Path, *overrides: str, preset: str = "smoke") -> Config:
    return check_config(compose_config(preset, [f"cache_dir={tmp_path / 'cache'}", *overrides]))


def test_the_page_shows_samples_first_and_is_self_contained(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [
        {"role": "user", "content": "<script>alert(1)</script>"},
        {"role": "assistant", "content": "No & never."},
    ]
    chats.write_text(
        "".join(json.dumps({"messages": turns * (1 + 40 * (n == 3))}) + "\n" for n in range(12))
    )
    files = ["dataset=files", "~dataset.num_chats", f"dataset.path={chats}", "evaluation=none"]
    assert inspect_data.main(config_of(tmp_path, *files), html=tmp_path / "deep" / "data.html") == 0
    page = (tmp_path / "deep" / "data.html").read_text()
    headings = re.findall(r"<h2>([A-Za-z]+)", page)
    assert headings == ["Samples", "Data", "Lengths", "Packing", "Packs"]
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    assert "<mark>No &amp; never." in page
    assert "over packed_sequence_size" in page  # the one chat that is dropped, and why
    assert json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["runs"][0]["lengths"][
        "documents"
    ]
    assert not re.search(r"(src|href)=", page)
    screen = capsys.readouterr().out
    assert screen.endswith("deep/data.html\n")


def _started(options: list[str]) -> None:
    sys.argv = ["recipes/inspect_data.py", *options]
    runpy.run_module("recipes.inspect_data", run_name="__main__")


def test_the_page_is_a_flag_of_this_recipe(tmp_path: Path) -> None:
    options = ["--config-name", "smoke", f"cache_dir={tmp_path}", "--html", "x.html"]
    code, screen = in_a_process(_started, tmp_path, options)
    assert code == 0, screen
    assert (tmp_path / "x.html").is_file()
    with pytest.raises(ConfigError, match=r"--html: .*automodel-lite inspect alone takes it"):
        hydra_app.run_command_line(
            "recipes.train_ft:main", ["--config-name", "smoke", "--html", "x.html"]
        )


def test_inspecting_shows_every_part(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert inspect_data.main(config_of(tmp_path)) == 0
    printed = capsys.readouterr().out
    headings = re.findall(r"^([A-Z]{2,})\b", printed, flags=re.MULTILINE)
    # the screen stops at what the model learns to write
    assert headings == ["DATA", "LENGTHS", "PACKING", "PACKS", "ATTENTION", "SAMPLES"]
    assert "<|assistant|>⟦The capital of" in printed
    assert "\x1b[" not in printed
    assert "padded batches" in printed


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [{"messages": [{"role": "user", "content": "Hi"}]}],
            "a.jsonl:1: has no assistant message",
        ),
        (
            [{"prompt": "x" * 300, "completion": "y" * 300}],
            "1 of 1 document is over packed_sequence.packed_sequence_size=64",
        ),
    ],
    ids=["no answer", "all too long"],
)
def test_inspecting_is_an_error_when_nothing_would_be_trained_on(
    tmp_path: Path, rows: list, sentence: str
) -> None:
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
    with pytest.raises(DataError, match=re.escape(sentence)):
        inspect_data.main(config)


def test_a_tree_is_drawn_row_by_row() -> None:
    drawn = draw_tree(np.array([0, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0]), width=6)
    assert drawn == [
        "    █████ 5 of 5 tokens",
        "      ███ 3 of 5 tokens",
        "       ███ 3 of 6 tokens",
    ]


def test_a_preference_pair_is_shown_as_prompt_and_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pair = {
        "prompt": "Name a ship.",
        "chosen": "The gray harbor ship.",
        "rejected": "No idea at all.",
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(pair) + "\n")
    config = config_of(
        tmp_path,
        "dataset=files",
        "dataset.format=preference",
        f"dataset.path={tmp_path / 'a.jsonl'}",
        "tokenizer=bpe",
        "tokenizer.vocab_size=262",
        "loss=dpo",
        preset="llama_packed",
    )
    assert inspect_data.main(config) == 0
    shown = capsys.readouterr().out
    assert re.search(r"prompt   '.*Name a ship\.", shown)
    assert re.search(r"chosen   'The gray harbor ship\.", shown)
    assert re.search(r"rejected 'No idea at all\.", shown)
