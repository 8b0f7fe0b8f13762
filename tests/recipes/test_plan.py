"""From data to a plan, from a plan to a preset that composes and runs dry, and what helps where nothing fits."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from automodel_lite.cli import compose_config, run_recipe
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from automodel_lite.results import write_results
from automodel_lite.training.settings import build_parts
from recipes import plan
from tests.ranks import in_a_process

ROOT = Path(__file__).resolve().parents[2]
CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Quito")
SMALL = [
    "model=llama_smoke",
    "tokenizer=bpe",
    "packed_sequence.packed_sequence_size=512",
    "training.num_epochs=2",
]


def chats(folder: Path, num: int = 120) -> Path:
    """Every third row is a tree: two answers to one prompt."""
    path = folder / "chats.jsonl"
    prompt = [
        {"role": "user", "content": "Tell me about the harbor of " + " and ".join(CITIES * 6)}
    ]
    rows = []
    for number in range(num):
        answers = [
            f"Ship {number} sails to {city} at {number % 24} o'clock."
            for city in CITIES[number % 3 :][:2]
        ]
        if number % 3:
            rows.append({"prompt": prompt, "responses": answers[:1]})
        else:
            rows.append({"prompt": prompt, "responses": answers})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(folder: Path, *options: str) -> str:
    """The screen of the recipe, started in the checkout."""
    code, screen = in_a_process(_in_checkout, folder, list(options))
    assert code == 0, screen
    return screen


def _in_checkout(options: list[str]) -> None:
    os.chdir(ROOT)
    run_recipe("recipes.train_ft:main", options)


@pytest.mark.system
def test_data_become_hours_and_a_preset_that_runs_dry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    overrides = [f"dataset.path={chats(tmp_path)}", *SMALL, f"cache_dir={tmp_path}/cache"]
    overrides += [
        f"output_dir={tmp_path}/run",
        "training.global_batch_size=8",
        "training.allow_few_steps=true",
    ]
    preset, found = tmp_path / "conf" / "mine.yaml", tmp_path / "plan.json"
    arguments = [
        "--config-name",
        "finetune",
        "--gpus",
        "4",
        "--price-per-gpu-hour",
        "2",
        "--write",
        str(preset),
    ]
    assert plan.main([*arguments, "--json", str(found), *overrides]) == 0
    write_results()
    screen = capsys.readouterr().out
    head = screen.splitlines()[0]
    assert "120 documents, a tree as one" in head
    num_packs = int(head.split(" packs")[0].split()[-1].replace(",", ""))
    rows = screen.split("loses by\n")[1].split("\n\n")[0].splitlines()
    assert 9 <= len(rows) <= 10  # transformers before 5.22 has no tp, and fewer plans
    plans = json.loads(found.read_text())["plans"]
    rates = [one["tokens_per_s_per_gpu"] for one in plans]
    assert rates == sorted(rates, reverse=True)
    last_words = {row.split()[-1] for row in rows[1:]}
    assert last_words <= {
        "products",
        "attention",
        "memory",
        "links",
        "exchange",
        "update",
        "recomputation",
    }
    steps = 2 * num_packs / 8
    line = next(line for line in screen.splitlines() if "GPU-hours" in line)
    predicted, least, gpu_hours, money = map(
        float, re.findall(r"(?<![\w-])\d[\d.e-]*", line.replace(",", ""))[:4]
    )
    hours = predicted
    assert least == pytest.approx(steps * plans[0]["step_s"] / 3600, rel=0.01)
    assert predicted == pytest.approx(steps * plans[0]["predicted_step_s"] / 3600, rel=0.01)
    assert gpu_hours == pytest.approx(4 * hours, rel=0.01)
    assert money == round(2 * gpu_hours, 2)

    where = ["--config-dir", str(preset.parent), "--config-name", "mine"]
    composed = train(tmp_path, *where, "--cfg", "job")
    assert all(text.split("=")[1] in composed for text in plans[0]["overrides"])
    fit = "dry run: the settings, the data and the model fit together"
    assert fit in train(tmp_path, *where, "dry_run=true")


CUT: dict[str, tuple[dict[str, object], str, list[int]]] = {
    "split": ({"overlong": "split"}, "10 documents (8 whole, 2 cut into 6 pieces), 280 tokens, mean 20, 7 packs", [10] * 8 + [20] * 2 + [40] * 4),
    "truncated": ({"overlong": "truncate"}, "10 documents (8 whole, 2 cut into 2 pieces), 160 tokens, mean 16, 4 packs", [10] * 8 + [40] * 2),
    "dropped": ({"overlong": "drop"}, "8 of 10 documents, 80 tokens, mean 10, 2 packs", [10] * 8),
    "sampled": ({"overlong": "drop", "max_packs": 1}, "4 of 10 documents, 40 tokens, mean 10, 1 pack", [10] * 4),
}  # fmt: skip


def test_documents_are_counted_as_they_are_packed(tmp_path: Path) -> None:
    """Those of 100 tokens in packs of 40 once counted as one of 40 each, those that are dropped, too."""
    ids = [list(range(5, 5 + length)) for length in (100, *[10] * 4, 100, *[10] * 4)]
    (tmp_path / "ids.jsonl").write_text(
        "\n".join(json.dumps({"input_ids": row, "labels": row}) for row in ids)
    )
    words = Tokenizer(WordLevel({str(number): number for number in range(120)}))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(
        tmp_path / "words"
    )
    data = [
        "dataset=files",
        "~dataset.num_chats",
        f"dataset.path={tmp_path}/ids.jsonl",
        f"cache_dir={tmp_path}",
    ]
    tokens = ["tokenizer=pretrained", f"tokenizer.path={tmp_path}/words", "tokenize.train_on=all"]
    run = [
        "packed_sequence.packed_sequence_size=40",
        "training.max_steps=null",
        "training.num_epochs=2",
    ]
    config = plan.composed("smoke", [*data, *tokens, *run])
    for settings, text, lengths in CUT.values():
        changed = replace(config, packed_sequence={**config.packed_sequence, **settings})
        found = plan.data_of(changed, build_parts(changed), 1024)
        assert (found.text, sorted(found.lengths.tolist())) == (text, lengths)
        assert found.paths.tolist() == found.lengths.tolist()
        assert found.num_packs == 2 * int(text.split()[-2])


def test_the_command_has_what_a_run_needs() -> None:
    """A plan needs no name, and data only for their lengths: without them the command to paste was refused."""
    model = ["model.pretrained=x"]
    assert plan.missing(plan.composed("finetune", model)) == ["name=mine", "dataset.path=..."]
    assert plan.missing(plan.composed("finetune", [*model, "name=a", "dataset.path=a.jsonl"])) == []


@pytest.mark.slow
def test_what_fits_nothing_names_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    """A 0.6B model in fp32 with Adam needs 9 GB of states: a GPU of 24 GB holds it, but not with packs of 131,072."""
    model = ["--config-name", "qwen3_0_6b", "--gpu", "rtx4090-24", "--gpus", "1"]
    long = ["packed_sequence.packed_sequence_size=524288", "training.global_batch_size=1"]
    long += ["model.config.max_position_embeddings=524288"]
    assert plan.main([*model, *long]) == 1
    screen = capsys.readouterr().out
    assert "\nfits: no\nno plan fits: " in screen
    assert "  fits with packed_sequence.packed_sequence_size=" in screen
    assert "  fits 2 GPUs" in screen or "  fits 4 GPUs" in screen or "  fits 8 GPUs" in screen


def test_a_written_preset_is_the_plan(tmp_path: Path) -> None:
    """Groups become defaults, everything else values: cache_dir was once taken for a group."""
    chosen = [
        "dataset=files",
        "dataset.path=chats.jsonl",
        "peft=lora",
        f"cache_dir={tmp_path}",
        "mesh.dp_shard=2",
    ]
    config = plan.composed("finetune", [*chosen, "model.pretrained=any"])
    plan.write_preset(tmp_path / "mine.yaml", "finetune", config, [*chosen, "model.pretrained=any"])
    written = check_config(compose_config("mine", [], str(tmp_path)))
    assert (written.name, written.cache_dir, written.mesh.dp_shard) == ("mine", str(tmp_path), 2)
    assert (written.dataset, written.peft, written.model) == (
        config.dataset,
        config.peft,
        config.model,
    )


def test_a_preset_cannot_remove_an_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a preset cannot remove an option"):
        plan.main(
            [
                "--config-name",
                "smoke",
                "--write",
                str(tmp_path / "mine.yaml"),
                "dataset=files",
                "~dataset.num_chats",
            ]
        )


def test_images_are_planned_with_their_towers() -> None:
    """Qwen3-VL-8B's tower, frozen: 27 layers of 1,152 on the 3,844 patches of an image of 1,024 x 1,024 pixels, and the
    four projections of its 961 tokens.
    """
    config = plan.composed("qwen3_vl_8b", [])
    parts = build_parts(replace(config, attention={}))
    data = plan.data_of(config, parts, 1024)
    assert "half of their tokens images of 1024 x 1024 pixels, 961 tokens each" in data.text
    batch = data.batch(parts)
    assert batch is not None
    assert batch.images is not None
    layers = 27 * (2 * 3844 * (4 * 1152**2 + 2 * 1152 * 4304) + 4 * 3844**2 * 1152)
    projections = 4 * 2 * 961 * (4608 * 4608 + 4608 * 4096)
    patches = 2 * 3844 * 1536 * 1152
    assert batch.images.flops == pytest.approx(4 * (layers + projections + patches), rel=1e-6)
    assert int((batch.input_ids == 151655).sum()) == 4 * 961
