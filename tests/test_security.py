"""What a configuration may call, and what a run never writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from automodel_lite.redact import scrub, secrets

ROOT = Path(__file__).resolve().parents[1]


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
        "automodel_lite.training.optimizers.torch.load",
        "torch.optimism",
        "automodel_lite.data.files.FilesDataset.__init__",
        "automodel_lite.data.files.os",
        "notes/evil.py",
        "evil",
    ],
)
def test_foreign_targets_are_refused_before_they_are_imported(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_import(path: str) -> None:
        raise AssertionError(f"{path} was imported")

    monkeypatch.setattr("automodel_lite.config.check.locate", no_import)
    with pytest.raises(ConfigError, match=r"optimizer\._target_=.*(is not allowed|not the dotted path)"):
        check(f"optimizer._target_={target}")


def test_an_allowed_module_does_not_lead_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"it is functools.partial, outside of torch.optim"):
        check("optimizer._target_=torch.optim.optimizer.functools.partial")


def test_a_nested_target_is_seen() -> None:
    with pytest.raises(ConfigError, match=r"_target_=os.system is not allowed"):
        check("model.config.x={_target_:os.system,command:date}")


def test_own_code_is_allowed_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_parts.py").write_text("import os\ndef schedule(optimizer, max_steps): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = ["~lr_scheduler.warmup_steps", "~lr_scheduler.min_lr_frac", "lr_scheduler._target_=my_parts.schedule"]
    with pytest.raises(ConfigError, match=r"security.allow_targets=\[my_parts\]"):
        check(*mine)
    check(*mine, "security.allow_targets=[my_parts]")
    with pytest.raises(ConfigError, match=r"outside of torch.optim, my_parts"):
        check(*mine[:2], "lr_scheduler._target_=my_parts.os.system", "security.allow_targets=[my_parts]")


@pytest.mark.parametrize("grant", ["security:\n  allow_targets: [os]\n", "model:\n  trust_remote_code: true\n"])
def test_a_preset_cannot_grant_anything(tmp_path: Path, grant: str) -> None:
    (tmp_path / "strange.yaml").write_text(f"defaults:\n  - smoke\n  - _self_\n{grant}")
    with pytest.raises(ConfigError, match=r"is set in a file: it is taken from the command line only"):
        compose_config("strange", [], config_dir=str(tmp_path))


@pytest.mark.parametrize("revision", ["null", "main", "v1.0", "abc123"])
def test_remote_code_needs_a_pinned_commit(revision: str) -> None:
    from automodel_lite.config.components import build

    chosen = ["model=pretrained", "model.pretrained=someone/model", "model.trust_remote_code=true"]
    config = check_config(compose_config("smoke", [*chosen, f"model.revision={revision}"]))
    with pytest.raises(ConfigError, match=r"pin what you have read by model.revision=<commit"):
        build(config.model)


def test_secrets_are_found_by_value() -> None:
    environment = {"HF_TOKEN": "hf_abcdef", "WANDB_API_KEY": "0123456789", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"SSL_KEY_FILE": str(ROOT / "pyproject.toml"), "HOME": "/home/abc"}
    assert secrets(environment) == {"hf_abcdef": "HF_TOKEN", "0123456789": "WANDB_API_KEY"}


def test_credentials_in_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "swordfish")
    assert scrub("from https://me:hunter2@host/x with swordfish") == (
        "from https://<credentials>@host/x with <MY_PASSWORD>"
    )
    assert scrub("max_tokens=5 tokenizer=abc") == "max_tokens=5 tokenizer=abc"


CANARIES = {
    "HF_TOKEN": "hf_canary_one",
    "WANDB_API_KEY": "canary_two_0123456789",
    "MY_DB_PASSWORD": "canary-three",
    "AWS_SECRET_ACCESS_KEY": "canary/four+5",
}


@pytest.mark.parametrize("ending", ["finishes", "fails", "is-refused"])
def test_no_canary_in_anything_that_a_run_writes(tmp_path: Path, ending: str) -> None:
    """Secrets in the configuration (by ${oc.env:...}), in the chat template's variables, and in an error's text."""
    more = {
        "finishes": [],
        "fails": ["dataset=files", "~dataset.num_chats", "dataset.path=${oc.env:MY_DB_PASSWORD}"],
        "is-refused": ["optimizer.lr=${oc.env:HF_TOKEN}"],
    }[ending]
    command = [sys.executable, "recipes/train_ft.py", "--config-name", "smoke", f"output_dir={tmp_path}/run"]
    options = [f"cache_dir={tmp_path}/cache", "training.max_steps=2", "training.num_threads=1"]
    options += ["+tokenize.template_kwargs.a=${oc.env:HF_TOKEN}", "+tokenize.template_kwargs.b=${oc.env:WANDB_API_KEY}"]
    options += ["+tokenize.template_kwargs.c=x-${oc.env:AWS_SECRET_ACCESS_KEY}-y", *more]
    environment = os.environ | CANARIES | {"PYTHONPATH": str(ROOT), "MY_DB_PASSWORD": "canary-three"}
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, timeout=300)
    assert (done.returncode == 0) == (ending == "finishes"), done.stderr
    written = {"screen": done.stdout + done.stderr}
    written |= {str(p): str(p).encode() + p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert len(written) > 10 or ending != "finishes"
    for place, content in written.items():
        for canary in CANARIES.values():
            assert canary.encode() not in content, (place, canary)
    if ending == "finishes":
        assert b"<HF_TOKEN>" in (tmp_path / "run" / "config.yaml").read_bytes()
        again = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, timeout=300)
        assert b"nothing to do" in again.stdout  # the scrubbed configuration is the same one


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a/b", ".hidden", "x\0y", ""])
def test_a_name_cannot_lead_out_of_the_runs_folder(name: str) -> None:
    from omegaconf import OmegaConf

    raw = OmegaConf.merge(compose_config("smoke", []), {"name": name})
    with pytest.raises(ConfigError, match=r"name=.* must be a plain folder name"):
        check_config(raw)  # type: ignore[arg-type]
