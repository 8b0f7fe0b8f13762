"""Mistakes on the command line: their exact text, on one process and under torchrun with two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from automodel_lite.cli import compose_config, run_recipe
from automodel_lite.cli.help import help_of
from automodel_lite.cli.hydra_app import choose_allocator
from automodel_lite.cli.recipes import Recipe
from automodel_lite.cli.sources import Sources, groups_of, presets_of
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from tests.ranks import in_a_process

ROOT = Path(__file__).resolve().parent.parent
FILLED = ["name=x", "model.pretrained=x", "dataset.path=x"]

MISTAKES = [
    ("training.max_stepz=3", "training.max_stepz=3: unknown key; did you mean training.max_steps?"),
    ("max_steps=3", "max_steps=3: unknown key; did you mean training.max_steps?"),
    ("optimizr.lr=1", "optimizr.lr=1: unknown key; did you mean optimizer.lr?"),
    ("optimizer.lrr=1", "optimizer.lrr=1: unknown key; did you mean optimizer.lr?"),
    ("+training.max_stepz=3", "training.max_stepz=3: unknown key; did you mean training.max_steps?"),
    ("training.max_steps=abc", "training.max_steps=abc must be a whole number or null."),
    ("optimizer.lr=fast", "optimizer.lr=fast must be a number."),
    ("training.log_every_steps=0", "training.log_every_steps=0 must be at least 1."),
    ("training.precision=fp61", "training.precision=fp61 must be one of auto, fp32, bf16."),
    ("name=${oc.env:NOT_SET_ANYWHERE}", "name=${oc.env:NOT_SET_ANYWHERE}: Environment variable 'NOT_SET_ANYWHERE' not found."),
    ("name=???", "name has no value: set name=..."),
    ("name=${name}", "name=${name}: Recursive interpolation detected."),
    ("mesh=4", "mesh=4 is a group of keys: set mesh.dp_replicate=..."),
    ("lr_scheduler=cosin", "lr_scheduler=cosin: no such option; did you mean cosine? The options are constant, cosine, linear, wsd."),
    ("peft=null", "peft=null: choose an option of the group: dora, lora, none, qlora."),
    ("seed=[1", "seed=[1: cannot be read as key=value: close every bracket and quote, or put a text with brackets into quotes, 'seed=\"...\"'."),
    ("training.max_steps", "training.max_steps: cannot be read as key=value: there is no `=`."),
    ("~dataset.seed", "~dataset.seed: no file sets it, so there is nothing to remove."),
    ("dataset.path=x.jsonl", "dataset.path=x.jsonl is an option of dataset=files or dataset=memmap or dataset=streaming: choose that, or remove it, ~dataset.path."),
    ("peft.r=8", "peft.r=8 is an option of peft=lora or peft=qlora: choose that, or remove it, ~peft.r."),
    ("logger.wandb.project=x", "logger.wandb={'project': 'x'} is an option of logger=wandb: choose that, or remove it, ~logger.wandb."),
    ("callbacks.patience=3", "callbacks.patience=3 is an option of callbacks=early_stopping: choose that, or remove it, ~callbacks.patience."),
    ("evaluation.nothing=1", "evaluation.nothing=1: unknown key; if the preset sets it, ~evaluation.nothing removes it."),
    ("~packed_sequence.strategy._target_", "packed_sequence.strategy={} must be text or a block with a _target_."),
    ("optimizer._target_=torch.optim.AdamWW", "optimizer._target_=torch.optim.AdamWW: torch.optim has no AdamWW; did you mean AdamW?"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "message"), MISTAKES, ids=[override for override, _ in MISTAKES])
def test_a_mistake_is_one_sentence(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(compose_config("smoke", [override]))
    assert str(error.value) == message


PATHS = [
    "~/a.jsonl",
    "/x/a (1).jsonl",
    "/x/a#b;c&d!.jsonl",
    "/x/it's.jsonl",
    "C:\\x#\\",
    "/x/[1].jsonl",
    "ü ö\\'",
    "a=b",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_needs_no_quotes(path: str) -> None:
    assert compose_config("finetune", [f"dataset.path={path}"]).dataset.path == path


def test_a_part_that_is_refused_hides_no_mistake_of_another() -> None:
    raw = compose_config("smoke", ["packed_sequence.slot_multiple=''", "optimizer.lr=-1"])
    raw.attention = None
    with pytest.raises(ConfigError) as error:
        check_config(raw)
    assert str(error.value).splitlines() == [
        "attention=null: attention is a part with options, such as attention._target_=...",
        "packed_sequence.slot_multiple= must be a whole number or null.",
        "optimizer.lr=-1 must be at least 0.",
    ]


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


@pytest.mark.parametrize("preset", presets_of(Sources()))
def test_every_preset_is_valid(preset: str) -> None:
    is_open = "???" in OmegaConf.to_yaml(compose_config(preset, []))
    filled = [*FILLED, *(["teacher.pretrained=x"] if preset == "distill" else [])]
    assert check_config(compose_config(preset, filled if is_open else [])).seed == 0


def test_help_names_presets_groups_and_examples() -> None:
    text = help_of(Recipe("recipes.train_ft:main"), Sources())
    assert all(preset in text for preset in presets_of(Sources()))
    assert "attention" in text
    assert text.count("torchrun recipes/train_ft.py") >= 4


SIZES = [
    (
        "packed_sequence.packed_sequence_size=63 mesh.cp=2",
        "packed_sequence.packed_sequence_size=63 must be a multiple of 4 (2 * mesh.cp): use 64.",
    ),
    (
        "training.global_batch_size=7",
        "training.global_batch_size=7 must be a multiple of 2 (training.micro_batch_size=1 x 2 data-parallel ranks): use 8.",
    ),
    ("mesh.cp=3 packed_sequence.packed_sequence_size=126", "mesh.dp_replicate=1 x mesh.cp=3 = 3 must divide the number of processes, 2: start 3 (torchrun --nproc-per-node), or lower these."),
    ("training.max_stepz=3", "training.max_stepz=3: unknown key; did you mean training.max_steps?"),
    ("model=pretrained model.pretrained=./missing", "model.pretrained=./missing: there is no such folder."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *(pytest.param(*case, marks=pytest.mark.system) for case in (SIZES[0], SIZES[-1])),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SIZES[1:-1]),
    ],
)
def test_under_torchrun_the_summary_quotes_the_sentence(overrides: str, message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    recipe = [str(ROOT / "recipes" / "train_ft.py"), "--config-name", "smoke", f"output_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [*command, *recipe, *overrides.split()],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode != 0
    assert f"\n{message}\n" in done.stderr, done.stderr  # above torchrun's summary, which quotes it
    assert done.stderr.count(message) >= 2
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_reader_that_leaves_early_sees_no_traceback(tmp_path: Path) -> None:
    recipe = f"{sys.executable} recipes/inspect_data.py --config-name smoke cache_dir={tmp_path} | head -1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(recipe, shell=True, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert (done.stdout, done.stderr) == ("DATA\n", "")


def test_each_recipe_says_what_it_is_and_how_it_is_started() -> None:
    said = help_of(Recipe("recipes.inspect_data:main"), Sources()).splitlines()
    assert said[0] == "Look at documents as tokens, labels and packs."
    assert said[2] == "usage: python recipes/inspect_data.py --config-name PRESET [--config-dir FOLDER] [key=value ...]"


def test_help_lists_presets_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# Mine: for me\ndefaults: [smoke]\n")
    (tmp_path / "bare.yaml").write_text("defaults: [smoke]\n")
    lines = help_of(Recipe("recipes.train_ft:main"), Sources.of(str(tmp_path))).splitlines()
    assert "  mine             Mine" in lines
    assert "  bare             " in lines


def test_a_chosen_allocator_stays() -> None:
    plain: dict[str, str] = {}
    choose_allocator(plain)
    assert plain == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        chosen = {name: "max_split_size_mb:64"}
        choose_allocator(chosen)
        assert chosen == {name: "max_split_size_mb:64"}


def test_a_name_is_asked_for_where_a_folder_is_made(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text('{"text": "Hi"}\n')
    options = f"--config-name finetune model.pretrained={tmp_path}/no dataset.path={tmp_path}/data.jsonl"
    for recipe, said in (("train_ft", "name has no value: set name=..."), ("inspect_data", f"{tmp_path}/no")):
        code, screen = in_a_process(run_recipe, tmp_path, f"recipes.{recipe}:main", options.split())
        assert code == 2
        assert said in screen
