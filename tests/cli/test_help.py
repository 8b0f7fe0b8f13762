from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from automodel_lite.cli import compose_config, help, slurm
from automodel_lite.cli.schema import json_schema
from automodel_lite.cli.sources import Sources
from automodel_lite.config.check import known_keys
from automodel_lite.config.components import CONF_DIR
from automodel_lite.errors import ConfigError


def test_ls_shows_all_a_group_and_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    help.ls([])
    assert "lr_scheduler/      constant, cosine, linear, wsd" in capsys.readouterr().out
    help.ls(["optimizer"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "adamw",
        "adamw_8bit",
        "adamw_bf16",
        "muon",
    ]
    help.ls(["optimizer/adamw"])
    assert "_target_: automodel_lite.training.optimizers.adamw" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"optimizer/adamv: no such preset or option; did you mean optimizer/adamw\?"):
        help.ls(["optimizer/adamv"])


def test_a_copied_preset_and_option_compose_from_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "optimizer").mkdir()
    for name, copy in (("smoke", "mine"), ("optimizer/adamw", "optimizer/slow")):
        help.ls([name])
        (tmp_path / f"{copy}.yaml").write_text(capsys.readouterr().out)
    with open(tmp_path / "optimizer/slow.yaml", "a") as option:
        option.write("weight_decay: 0.5\n")
    config = compose_config("mine", ["optimizer=slow"], config_dir=str(tmp_path))
    assert (config.name, config.optimizer.weight_decay) == ("smoke", 0.5)


def test_the_json_schema_has_every_key_and_the_rules() -> None:
    schema = json_schema(Sources())
    json.dumps(schema)

    def keys(node: dict, prefix: str = "") -> list[str]:
        found = []
        for name, child in node.get("properties", {}).items():
            found += [f"{prefix}{name}", *keys(child, f"{prefix}{name}.")]
        return found

    assert set(known_keys()) <= set(keys(schema))
    training = schema["properties"]["training"]
    assert training["additionalProperties"] is False
    assert training["properties"]["max_steps"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert {"enum": ["auto", "fp32", "bf16"]} in training["properties"]["precision"]["anyOf"]
    assert "warmup_steps" in schema["properties"]["lr_scheduler"]["properties"]


def test_a_validator_takes_every_preset_and_finds_every_mistake() -> None:
    schema = json_schema(Sources())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for preset in CONF_DIR.glob("*.yaml"):
        assert not list(validator.iter_errors(yaml.safe_load(preset.read_text()))), preset
    wrong = {
        "seed": -1,
        "training": {"max_stepz": 3, "max_steps": 0, "precision": "fp61"},
        "optimizer": {"lr": "high", "weight_decay": 0.1},
        "peft": {"r": "many", "alpha": 16},
    }
    found = {".".join(map(str, error.path)) for error in validator.iter_errors(wrong)}
    assert found == {"seed", "training", "training.max_steps", "training.precision", "optimizer.lr", "peft.r"}


@pytest.mark.parametrize(
    ("resources", "gpus"), [("(null)", 0), ("gpu:8", 8), ("gpu:h100:4(S:0-1)", 4), ("gpu:a:2,gpu:b:2,tmp:1", 4)]
)
def test_gpus_of_a_node(resources: str, gpus: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sinfo").write_text(f"#!/bin/bash\necho 'main*|1:00:00|{resources}|96|4'\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm._partition(None) == ("main", "1:00:00", gpus, 96, 4)


def test_the_slurm_script_takes_the_numbers_of_the_partition(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/bash\necho 'debug|30:00|(null)|4|1'\necho 'main*|3-00:00:00|gpu:h100:8(S:0-1)|96|4'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    lines = slurm._script(2, None, None).splitlines()
    asked = {line for line in lines if line.startswith("#SBATCH")}
    assert {"#SBATCH --partition=main", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8"} < asked
    assert {"#SBATCH --gpus-per-node=8", "#SBATCH --cpus-per-task=12", "#SBATCH --time=24:00:00"} < asked
    assert not [line for line in lines if "recipes/" in line or " launch/" in line]
    with pytest.raises(ConfigError, match="--nodes 5 must be at most 4: the nodes of partition main"):
        slurm._script(5, None, None)
    with pytest.raises(ConfigError, match=r"--partition man: there is no such partition; did you mean main\?"):
        slurm._script(1, "man", None)


def test_the_slurm_script_runs_a_recipe_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/bash\necho 'main*|3-00:00:00|gpu:h100:8(S:0-1)|96|4'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm.slurm(["--recipe", "my_package.kd:main"])
    assert ' -m automodel_lite run my_package.kd:main "$@")' in capsys.readouterr().out


@pytest.mark.parametrize("image", ["/images/train.sqsh", "/images/train.sif"])
def test_a_script_with_an_account_a_module_and_a_container(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {"sinfo": "echo 'main*|1:00:00|gpu:8|96|4'", "module": 'echo "module $*"'}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_HOME", "/shared/my models")
    slurm.slurm(["--account", "lab", "--module", "cuda/12.8", "--container", image])
    script = capsys.readouterr().out
    assert "#SBATCH --account=lab\n#SBATCH --nodes=1" in script
    monkeypatch.delenv("HF_HOME")
    command = ["bash", "-s", "--", "--config-name", "smoke"]
    done = subprocess.run(command, input=script, env=os.environ | {"DRY_RUN": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded, _, step = done.stdout.strip().splitlines()
    assert loaded == "module load cuda/12.8"
    words = shlex.split(step)
    root, here = str(slurm.LAUNCH_DIR.parent), os.getcwd()
    if image.endswith(".sqsh"):
        assert f"--container-image={image}" in words
        mounts = f"{here}:{here},{root}:{root},/shared/my models:/shared/my models"
        assert f"--container-mounts={mounts}" in words
    else:
        assert words[words.index("apptainer") :][:5] == [
            "apptainer",
            "exec",
            "--nv",
            "--bind",
            f"{here},{root},/shared/my models",
        ]
    assert words[words.index("-m") - 1 :] == ["python", "-m", "automodel_lite", "train", "--config-name", "smoke"]
