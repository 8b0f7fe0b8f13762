"""Which code a configuration may name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.components import locate, own_targets, text_of
from automodel_lite.errors import ConfigError


def check(*overrides: str) -> None:
    check_config(compose_config("smoke", [*overrides]))


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "builtins.exec",
        "pathlib.Path.write_text",
        "subprocess.run",
        "torch.load",
        "torch.hub.load",
        "torch.nn.modules.module.os.system",
        "automodel_lite.config.components.importlib.import_module",
        "automodel_lite.run.durable.write_file",
        "automodel_lite.parts.optimizers.adamw.torch.load",
        "torch.optimism",
        "torch.optim.SGD",
        "automodel_lite.data.reading.files.FilesDataset.__init__",
        "automodel_lite.data.reading.files.os",
        "notes/evil.py",
        "evil",
    ],
)
def test_foreign_targets_are_refused_before_they_are_imported(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_import(path: str) -> object:
        assert path in own_targets(), f"{path} was imported"
        return locate(path)

    monkeypatch.setattr("automodel_lite.config.check.locate", no_import)
    with pytest.raises(
        ConfigError, match=r"optimizer\._target_=.*(is not allowed|not the dotted path)"
    ):
        check(f"optimizer._target_={target}")


def test_a_module_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed command has another folder in its path, and the ranks of --nproc have this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    (tmp_path / "my_optimizers.py").write_text("from torch.optim import SGD as Mine")
    assert locate("my_optimizers.Mine").__name__ == "SGD"
    with pytest.raises(ConfigError, match=r"no module my_oddity: install its package, or start"):
        locate("my_oddity.Mine")


def test_an_allowed_module_does_not_lead_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"it is functools.partial, outside torch.optim"):
        check(
            "optimizer._target_=torch.optim.optimizer.functools.partial",
            "security.allow_targets=[torch.optim]",
        )


def test_a_nested_target_is_seen() -> None:
    with pytest.raises(ConfigError, match=r"_target_=os.system is not allowed"):
        check("model.config.x={_target_:os.system,command:date}")


def test_own_code_is_allowed_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_schedules.py").write_text(
        "import os\ndef schedule(optimizer, max_steps): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["~lr_scheduler.warmup_steps", "lr_scheduler._target_=my_schedules.schedule"]
    with pytest.raises(ConfigError, match=r"security.allow_targets=\[my_schedules\]"):
        check(*mine)
    check(*mine, "security.allow_targets=[my_schedules]")
    with pytest.raises(ConfigError, match=r"outside my_schedules"):
        check(
            *mine[:2],
            "lr_scheduler._target_=my_schedules.os.system",
            "security.allow_targets=[my_schedules]",
        )


STREAM = ["dataset=streaming", "~dataset.num_chats"]


@pytest.mark.parametrize(
    "generator",
    ["os:abort", "my_rows:rows", "automodel_lite.data.reading.files:os.abort", "os.abort"],
)
def test_a_generator_is_code_and_needs_the_permission(generator: str, tmp_path: Path) -> None:
    """Wherever it stands, also deep in a mixture, and before anything of it is imported."""
    rule = r"dataset\.generator=.*(names code: allow it on the command line, security.allow_targets|must be package)"
    with pytest.raises(ConfigError, match=rule):
        check(*STREAM, f"dataset.generator={generator}")
    nested = f"{{_target_: automodel_lite.parts.datasets.streams.StreamingDataset, generator: '{generator}'}}"
    with pytest.raises(ConfigError, match=rule.replace("dataset", "dataset.sources.a", 1)):
        check("dataset=mixture", "~dataset.num_chats", f"dataset.sources.a={nested}")


def test_an_allowed_generator_does_not_lead_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rows.py").write_text(
        "from os import abort\nN = 3\ndef rows(): yield {'text': 'a'}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    allowed = [*STREAM, "security.allow_targets=[my_rows]"]
    check(*allowed, "dataset.generator=my_rows:rows")
    for generator, said in (
        ("abort", "it is .*abort"),
        ("N", "is not a function"),
        ("none", "has no none"),
    ):
        with pytest.raises(ConfigError, match=rf"dataset.generator=my_rows:{generator}.*{said}"):
            check(*allowed, f"dataset.generator=my_rows:{generator}")


def test_a_part_is_shown_as_it_is_typed() -> None:
    part = {
        "_target_": "a.schedules.cosine",
        "warmup_steps": None,
        "frac": 0.03,
        "cuts": True,
        "betas": [0.9, 0.95],
    }
    assert text_of(part) == "cosine (warmup_steps null, frac 0.03, cuts true, betas [0.9, 0.95])"
