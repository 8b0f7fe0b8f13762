"""A preset and an option that was typed set the same key: the preset wins, as in plain Hydra, and a line says so."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli import compose_config, run_recipe
from automodel_lite.cli.compose import Loader, compose
from automodel_lite.cli.hydra_app import run_command_line
from automodel_lite.cli.sources import Sources, groups_of, presets_of
from automodel_lite.errors import ConfigError
from automodel_lite.extras.cli.ls import overridden_options
from tests.ranks import in_a_process
from tests.runs import composed

SGD = "_target_: torch.optim.SGD\nlr: 0.1\nmomentum: 0.9\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/sgd.yaml").write_text(SGD)
    (tmp_path / "optimizer/fast.yaml").write_text("defaults: [sgd]\nmomentum: 0.95\n")
    return tmp_path


def lines(folder: Path, preset: str, *overrides: str) -> list[str]:
    sources = Sources.of(str(folder))
    return list(overridden_options(compose(Loader(sources), preset, overrides), sources, overrides))


def test_the_preset_wins_and_the_line_names_both_values(folder: Path) -> None:
    chosen = compose_config("pretrain", ["optimizer=sgd"], config_dir=str(folder))
    assert (chosen.optimizer.lr, chosen.optimizer.momentum) == (2e-5, 0.9)
    line = "optimizer.lr=2e-05 (the preset's, over 0.1 of optimizer/sgd.yaml)"
    assert lines(folder, "pretrain", "optimizer=sgd") == [line]
    # fine-tuning leaves the rate to the optimizer
    assert compose_config("finetune", ["optimizer=sgd"], config_dir=str(folder)).optimizer.lr == 0.1


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer=adamw_8bit", "optimizer.lr=0.1", "training.max_steps=null", "name='a b'"),
        ("name=x", "seed=5", "output_dir=/a/b", "cache_dir=null", "dry_run=true"),
        ("dataset=streaming", "dataset.path=a.jsonl", "dataset.num_shards=4"),
        ("~model.config", "model.config.model_type=gpt2", "model.config.layers=[1,2]"),
        ("model=pretrained", "peft=lora", "peft.target_modules=[q_proj]", "model.pretrained=x"),
        (
            "dataset.path='${output_dir}/a,b'",
            "dataset._target_=own.data.Rows",
            "dataset.own={a: 1}",
        ),
        ("optimizer.lr='", "training.max_steps=1"),
    ],
)
def test_values_set_afterwards_are_those_of_the_command_line(overrides: tuple[str, ...]) -> None:
    """What the other tests' runs are made of."""

    def outcome(compose: Callable[[], DictConfig]) -> object:
        try:
            return OmegaConf.to_container(compose())
        except ConfigError as error:
            return str(error)

    assert outcome(lambda: composed("smoke", *overrides)) == outcome(
        lambda: compose_config("smoke", overrides)
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(bytes(9), "unacceptable character"), (b"3", r"mine.yaml, or a file .* holds no keys")],
    ids=["zero bytes", "a number"],
)
def test_a_preset_of_something_else_gets_a_sentence(
    content: bytes, sentence: str, folder: Path
) -> None:
    (folder / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        compose_config("mine", [], config_dir=str(folder))


def test_an_option_inherits_from_another(folder: Path) -> None:
    chosen = compose_config("finetune", ["optimizer=fast"], config_dir=str(folder))
    assert chosen.optimizer.momentum == 0.95


def test_what_is_typed_beats_both_without_a_line(folder: Path) -> None:
    chosen = compose_config(
        "finetune", ["optimizer=sgd", "optimizer.lr=0.3"], config_dir=str(folder)
    )
    assert chosen.optimizer.lr == 0.3
    assert lines(folder, "finetune", "optimizer=sgd", "optimizer.lr=0.3") == []


def test_options_of_the_project_are_told_too(folder: Path) -> None:
    line = "optimizer.lr=0.003 (the preset's, over auto of optimizer/adamw_8bit.yaml)"
    assert lines(folder, "llama_packed", "optimizer=adamw_8bit") == [line]
    assert lines(folder, "llama_packed") == []


FILLED = ["name=x", "model.pretrained=x", "dataset.path=x"]


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=pytest.mark.system if name == "smoke" else pytest.mark.slow)
        for name in presets_of(Sources())
    ],
)
def test_every_preset_composes_with_every_group_option(preset: str) -> None:
    """One of each group at a time: as many compositions as the largest group has options."""
    groups = groups_of(Sources())
    for number in range(max(map(len, groups.values()))):
        chosen = {group: options[number % len(options)] for group, options in groups.items()}
        raw = compose_config(
            preset, [*(f"{group}={option}" for group, option in chosen.items()), *FILLED]
        )
        assert raw.name == "x"
        assert {group for group in chosen if OmegaConf.is_missing(raw, group)} == set()


RECIPES = ["train_ft", "inspect_data", "prepare_data", "verify"]


WRITER = """\
  {group}:
    version: 1
    formatters: {{f: {{format: 'echo owned'}}}}
    handlers: {{h: {{class: logging.FileHandler, formatter: f, filename: {target}}}}}
    root: {{level: DEBUG, handlers: [h]}}
"""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("group", ["hydra_logging", "job_logging"])
def test_a_strangers_preset_writes_no_file(recipe: str, group: str, tmp_path: Path) -> None:
    target = tmp_path / ".bashrc"
    block = WRITER.format(group=group, target=target)
    (tmp_path / "strange.yaml").write_text(f"defaults: [smoke, _self_]\nhydra:\n{block}")
    options = ["--config-dir", str(tmp_path), "--config-name", "strange", "dry_run=true"]
    code, screen = in_a_process(run_recipe, tmp_path, f"recipes.{recipe}:main", options)
    assert (code, target.exists()) == (2, False), screen
    assert f"hydra.{group}.handlers.h." in screen
    assert "is set in a file, but only the command line may set it" in screen


SETTINGS = [
    ("callbacks:\n    mine:\n      _target_: os.system", "hydra.callbacks.mine._target_=os.system"),
    (
        "callbacks:\n    mine:\n      _target_: logging.FileHandler",
        "hydra.callbacks.mine._target_=logging.FileHandler",
    ),
    (
        "callbacks:\n    mine:\n      _target_: automodel_lite.cli.hydra_app.Job",
        "hydra.callbacks.mine._target_=",
    ),
    (
        "sweeper:\n    sampler: {_target_: hydra_plugins.x.y}",
        "hydra.sweeper.sampler._target_=hydra_plugins.x.y",
    ),
    (
        "job_logging:\n    handlers:\n      x:\n        (): os.getpid",
        "hydra.job_logging.handlers.x.()=os.getpid",
    ),
    ("job_logging: {filters: {x: {level: 1}}}", "hydra.job_logging.filters.x.level=1"),
    ("job:\n    env_set:\n      LD_PRELOAD: x.so", "hydra.job.env_set.LD_PRELOAD=x.so"),
    ("output_subdir: ../../home", "hydra.output_subdir=../../home"),
    ("sweep: {dir: /tmp}", "hydra.sweep.dir=/tmp"),
    ("job: {name: ../../x}", "hydra.job.name=../../x"),
    ("sweeper: {storage: 'sqlite:////x'}", "hydra.sweeper.storage=sqlite:////x"),
    ("launcher: {setup: [./evil]}", "hydra.launcher.setup=['./evil']"),
    ('launcher: {partition: "a\\ncurl x | sh"}', "hydra.launcher.partition=a"),
]


FLAGS = [[], ["--cfg", "job"], ["--multirun", "seed=0,1"]]
# the first setting with all flags, the others with one of them in turns
FLAGGED = [
    pytest.param(block, key, flags, id=f"{' '.join(flags)}-{key}")
    for number, (block, key) in enumerate(SETTINGS)
    for flags in (FLAGS if number == 0 else FLAGS[number % 3 :][:1])
]


@pytest.mark.parametrize(("block", "key", "flags"), FLAGGED)
def test_a_file_sets_nothing_that_runs_or_writes(
    block: str, key: str, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_ft.py"])
    monkeypatch.chdir(tmp_path)
    group, _, rest = block.partition(":")
    more = {"sweeper": ["hydra/sweeper=optuna"], "launcher": ["hydra/launcher=submitit_slurm"]}.get(
        group, []
    )
    flags = flags or ["--multirun", "seed=0,1"] if more else flags
    (tmp_path / "strange.yaml").write_text(f"defaults: [smoke, _self_]\nhydra:\n  {group}:{rest}\n")
    with pytest.raises(
        ConfigError, match="is set in a file, but only the command line may"
    ) as error:
        run_command_line(
            "recipes.train_ft:main",
            ["--config-dir", ".", "--config-name", "strange", *more, *flags],
        )
    assert str(error.value).startswith(key)
    assert [path.name for path in tmp_path.iterdir()] == ["strange.yaml"]


def test_an_option_of_a_sweep_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_ft.py"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "optimizer").mkdir()
    block = WRITER.format(group="job_logging", target=tmp_path / "out")
    header = "# @package _global_\n"
    (tmp_path / "optimizer/evil.yaml").write_text(
        f"{header}optimizer: {{lr: 1.0}}\nhydra:\n{block}"
    )
    (tmp_path / "mine.yaml").write_text("defaults: [smoke, _self_]\n")
    line = ["--config-dir", ".", "--config-name", "mine", "--multirun", "optimizer=adamw,evil"]
    with pytest.raises(ConfigError, match="may set it"):
        run_command_line("recipes.train_ft:main", line)
    assert not (tmp_path / "out").exists()


def test_settings_of_a_sweep_may_stand_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_ft.py"])
    block = "launcher: {partition: gpu, nodes: 2, timeout_min: 60}\n  sweeper: {n_trials: 3, sampler: {seed: 1}}"
    defaults = (
        "[smoke, override hydra/launcher: submitit_slurm, override hydra/sweeper: optuna, _self_]"
    )
    (tmp_path / "mine.yaml").write_text(f"defaults: {defaults}\nhydra:\n  {block}\n")
    raw = compose(Loader(Sources.of(str(tmp_path))), "mine", [])
    assert raw.hydra.launcher.nodes == 2


def test_a_reference_is_no_way_around(tmp_path: Path) -> None:
    block = "defaults: [smoke, _self_]\nhydra: ${evil}\nevil: {callbacks: {mine: {_target_: os.system}}}\n"
    (tmp_path / "mine.yaml").write_text(block)
    with pytest.raises(ConfigError, match=r"hydra=\$\{evil\} is set in a file|must be literal"):
        compose(Loader(Sources.of(str(tmp_path))), "mine", [])


def test_an_option_of_ours_is_no_callback_of_hydras(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [smoke, /callbacks@hydra.callbacks: early_stopping, _self_]\n"
    )
    with pytest.raises(
        ConfigError, match=r"hydra\.callbacks\.early_stopping\._target_=.* is set in a file"
    ):
        compose(Loader(Sources.of(str(tmp_path))), "mine", [])


@pytest.mark.parametrize(
    "text",
    [
        "dataset.path=[c.jsonl,a=b.jsonl]",
        "tokenizer.added_tokens=[<call>]",
        "dataset.path=c(1).jsonl",
    ],
)
def test_closed_brackets_are_not_told_to_be_closed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_config("finetune", [text])
    cure = re.search(r"stands in quotes, '(.+)'\.$", str(caught.value))
    assert cure
    compose_config("finetune", [cure[1]])


def test_brackets_too_deep_for_the_parser_are_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^samples.prompts: brackets inside over 64 others"):
        compose_config("smoke", [f"samples.prompts={'[' * 3000}x{']' * 3000}"])
