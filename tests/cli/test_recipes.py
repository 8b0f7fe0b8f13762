"""A recipe of another package: its own keys, its own presets, from any folder, on one and two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_lite.cli import compose_config, run_recipe
from automodel_lite.cli.hydra_app import run_command_line
from automodel_lite.cli.recipes import Recipe
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from tests.forked import warm_python
from tests.ranks import in_a_process

ROOT = Path(__file__).resolve().parents[2]
KD = '''\
"""Distil a model: an example."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from automodel_lite.config.rules import Range
from automodel_lite.config.schema import Config


@dataclass
class Teacher:
    path: str = "none"


@dataclass
class KdConfig:
    temperature: Annotated[float, Range(above=0)] = 1.0
    teacher: Teacher = field(default_factory=Teacher)


def main(config: Config, extra: KdConfig) -> int:
    from automodel_lite.launched import rank
    from recipes_of_automodel import TrainFinetuneRecipe

    print(f"rank {rank()}: {extra.temperature} {extra.teacher.path} {config.extra['temperature']}", flush=True)
    return TrainFinetuneRecipe(config).train()


def plain(config: Config) -> int:
    print(config.name, config.training.max_steps)
    return 0
'''
SHIM = """\
from importlib import import_module
from automodel_lite.cli.line import RECIPES_PACKAGE
TrainFinetuneRecipe = import_module(f"{RECIPES_PACKAGE}.train_ft").TrainFinetuneRecipe
"""
PRESET = (
    "defaults: [smoke, _self_]\nname: kd\nextra: {temperature: 2.0}\ntraining: {max_steps: 2}\n"
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as pip fills it."""
    package = tmp_path / "site/my_package"
    (package / "conf").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kd.py").write_text(KD)
    (package / "conf/kd.yaml").write_text(PRESET)
    (tmp_path / "site/recipes_of_automodel.py").write_text(SHIM)
    (tmp_path / "empty").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path / "empty")
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "site"


def command(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}:{ROOT}",
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [warm_python(), *words],
        cwd=site.parent / "empty",
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_keys_of_its_own_are_checked_like_ours(site: Path) -> None:
    kind = Recipe("my_package.kd:main").extra_type()
    folder = str(site / "my_package/conf")
    config = check_config(compose_config("kd", ["extra.teacher.path=x"], config_dir=folder), kind)
    assert config.extra == {"temperature": 2.0, "teacher": {"path": "x"}}
    for override, said in (
        ("extra.temprature=3", "extra.temprature=3: unknown key; did you mean extra.temperature?"),
        ("extra.temperature=0", "extra.temperature=0 must be over 0."),
        ("extra.temperature=hot", "extra.temperature=hot must be a number."),
        (
            "extra.teacher.pth=3",
            "extra.teacher.pth=3: unknown key; did you mean extra.teacher.path?",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            check_config(compose_config("kd", [override], config_dir=folder), kind)
        assert str(error.value) == said


def test_a_recipe_without_keys_of_its_own_takes_none() -> None:
    with pytest.raises(ConfigError) as error:
        check_config(compose_config("smoke", ["extra.temperature=3"]))
    assert (
        str(error.value) == "extra.temperature=3: unknown key: this recipe has no keys of its own."
    )


@pytest.mark.parametrize(
    ("main", "said"),
    [
        (
            "my_package.kd",
            "'my_package.kd': a recipe is named package.module:function, such as my_package.kd:main.",
        ),
        (
            "my_package.kb:main",
            "my_package.kb:main: there is no module my_package.kb: install its package, or start",
        ),
        (
            "my_package.kd:mian",
            "my_package.kd:mian: my_package.kd has no function mian; did you mean main?",
        ),
    ],
)
def test_a_recipe_that_is_not_there_is_a_sentence(main: str, said: str, site: Path) -> None:
    with pytest.raises(ConfigError) as error:
        run_command_line(main, ["--config-name", "smoke"])
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("recipe", ["evaluate", "inspect_data", "prepare_data", "score", "verify"])
def test_recipes_without_a_run_need_no_name(recipe: str) -> None:
    assert not Recipe(f"recipes.{recipe}:main").writes_a_run
    assert Recipe("recipes.train_ft:main").writes_a_run


def test_its_help_and_its_presets(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line("my_package.kd:main", ["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "Distil a model: an example.\n\nusage: automodel-lite run my_package.kd:main --config-name"
    )
    assert "  kd  " in said


def test_run_recipe_from_python(site: Path) -> None:
    folder = site.parent / "empty"
    code, screen = in_a_process(
        run_recipe, folder, "my_package.kd:plain", ["--config-name", "kd", "~extra"]
    )
    assert (code, screen.splitlines()[-1]) == (0, "kd 2"), screen


@pytest.mark.system
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_trains_from_an_empty_folder(ranks: int, site: Path) -> None:
    flags = ["--nproc", "2"] if ranks == 2 else []
    run = [
        "run",
        "my_package.kd:main",
        *flags,
        "--config-name",
        "kd",
        f"cache_dir={site}/cache",
        "training.num_threads=1",
    ]
    done = command(site, "-m", "automodel_lite", *run)
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert said == [f"rank {rank}: 2.0 none 2.0" for rank in range(ranks)]
    saved = (site.parent / "empty/runs/kd/config.yaml").read_text()
    assert "temperature: 2.0" in saved


@pytest.mark.system
def test_it_trains_under_torchrun(site: Path) -> None:
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "automodel_lite",
    ]
    run = [
        "run",
        "my_package.kd:main",
        "--config-name",
        "kd",
        f"cache_dir={site}/cache",
        "training.num_threads=1",
    ]
    done = command(site, *launcher, *run)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")) == [
        "rank 0: 2.0 none 2.0",
        "rank 1: 2.0 none 2.0",
    ]
