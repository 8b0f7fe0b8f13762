"""The sbatch script that is written for a cluster."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.extras.cli import slurm


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [("(null)", 0), ("gpu:8", 8), ("gpu:h100:4(S:0-1)", 4), ("gpu:a:2,gpu:b:2,tmp:1", 4)],
)
def test_gpus_of_a_node(
    resources: str, gpus: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sinfo").write_text(f"#!/bin/bash\necho 'main*|1:00:00|{resources}|96|4'\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm._partition(None) == ("main", "1:00:00", gpus, 96, 4)


def test_the_slurm_script_takes_the_numbers_of_the_partition(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(
        "#!/bin/bash\necho 'debug|30:00|(null)|4|1'\necho 'main*|3-00:00:00|gpu:h100:8(S:0-1)|96|4'\n"
    )
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm.slurm(["--nodes", "2"])
    lines = capsys.readouterr().out.splitlines()
    asked = {line for line in lines if line.startswith("#SBATCH")}
    assert {"#SBATCH --partition=main", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8"} < asked
    assert {
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=12",
        "#SBATCH --time=24:00:00",
    } < asked
    assert not [line for line in lines if "recipes/" in line or " launch/" in line]
    with pytest.raises(
        ConfigError, match="--nodes 5 must be at most 4: the nodes of partition main"
    ):
        slurm.slurm(["--nodes", "5"])
    with pytest.raises(
        ConfigError, match=r"--partition man: there is no such partition; did you mean main\?"
    ):
        slurm.slurm(["--partition", "man"])


def test_the_slurm_script_runs_a_recipe_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/bash\necho 'main*|3-00:00:00|gpu:h100:8(S:0-1)|96|4'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm.slurm(["--recipe", "my_package.kd:main"])
    assert "export RECIPE='-m automodel_lite run my_package.kd:main'" in capsys.readouterr().out


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
    more = ["--qos", "long", "--constraint", "h100", "--mount", "/data", "--mount", "/a b:/in"]
    slurm.slurm(["--account", "lab", "--module", "cuda/12.8", "--container", image, *more])
    script = capsys.readouterr().out
    head = "#SBATCH --account=lab\n#SBATCH --qos=long\n#SBATCH --constraint=h100\n#SBATCH --nodes=1"
    assert head in script
    assert "#SBATCH --mem=0\n" in script
    assert "PYTHONPATH" not in script  # the package is the image's
    monkeypatch.delenv("HF_HOME")
    command = ["bash", "-s", "--", "--config-name", "smoke"]
    done = subprocess.run(
        command, input=script, env=os.environ | {"DRY_RUN": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded, _, step = done.stdout.strip().splitlines()
    assert loaded == "module load cuda/12.8"
    words = shlex.split(step)
    here, data = os.getcwd(), "/data:/data,/a b:/in,/shared/my models:/shared/my models"
    mounts = f"{here}:{here},{data}"
    if image.endswith(".sqsh"):
        assert f"--container-image={image}" in words
        assert f"--container-mounts={mounts}" in words
    else:
        before = ["apptainer", "exec", "--nv", "--bind", mounts, "--pwd", here, image]
        assert words[words.index("apptainer") :][:8] == before
    assert words[words.index("-m") - 1 :] == [
        "python",
        "-m",
        "automodel_lite",
        "train",
        "--config-name",
        "smoke",
    ]
