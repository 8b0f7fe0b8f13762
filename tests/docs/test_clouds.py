"""The blocks of docs/clouds.md: read as each service reads them, and the command in each composed."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from automodel_lite.cli.line import read_line
from automodel_lite.config.check import check_config
from tests.runs import composed

PAGE = (Path(__file__).resolve().parents[2] / "docs/clouds.md").read_text()
SECTIONS = {text.splitlines()[0]: text for text in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


def block(section: str, language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], flags=re.DOTALL)
    return str(found)


def of_yaml(section: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(block(section, "yaml"))
    return found


def command_in(section: str) -> list[str]:
    """The words of the training that a block starts."""
    if section == "Kubernetes":
        (container,) = of_yaml(section)["spec"]["template"]["spec"]["containers"]
        return list(container["command"])
    text = SECTIONS[section].replace("\\\n", " ")
    (found,) = re.findall(r"automodel-lite train [^\]\"\n]*", text)
    return shlex.split(found)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_training_is_one_of_ours(section: str) -> None:
    program, command, *words = command_in(section)
    assert (program, command) == ("automodel-lite", "train")
    line = read_line(words)
    assert line.nproc == "gpu"
    # what has no value is the reader's own: the data
    found = composed(line.config_name, *line.overrides)
    assert found.name == "big"
    assert found.output_dir.endswith("/big")


def test_what_python_starts_is_checked_too() -> None:
    for section in ("Modal", "SageMaker"):
        ast.parse(block(section, "python"))
    more = re.search(r'"(training.max_time=[\d:]+)"', block("Modal", "python"))
    assert more
    config = check_config(composed("smoke", more[1]))
    assert config.training.max_time == "23:00:00"


def test_skypilot() -> None:
    task = of_yaml("SkyPilot")
    assert set(task) == {"name", "resources", "file_mounts", "run"}
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    # its own validator: that of jsonschema does not know all that its schemas ask for
    validate = pytest.importorskip("sky.utils.common_utils").validate_schema
    validate(task, schemas.get_task_schema())
    validate(task["resources"], schemas.get_resources_schema())
    for mount in task["file_mounts"].values():
        validate(mount, schemas.get_storage_schema())


def test_dstack() -> None:
    task = of_yaml("dstack")
    assert task["type"] == "task"
    models = pytest.importorskip(
        "dstack._internal.core.models.configurations", reason="dstack is not installed"
    )
    assert models.parse_run_configuration(task).type == "task"


@pytest.mark.parametrize("name", ["clouds", "example"])
def test_kubernetes(name: str) -> None:
    example = Path(__file__).resolve().parents[2] / "launch/examples/kubernetes.yaml"
    found = [of_yaml("Kubernetes")] if name == "clouds" else [*yaml.safe_load_all(example.open())]
    job = found[-1]
    pod = job["spec"]["template"]["spec"]
    mounted = {mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    validate = pytest.importorskip("kubernetes_validate", reason="it is not installed").validate
    for resource in found:
        validate(resource, "1.30", strict=True)


def test_hf_jobs() -> None:
    """The command line of huggingface_hub, which says what it would start."""
    words = shlex.split(block("HF Jobs", "bash").replace("\\\n", " "))
    assert words[:3] == ["hf", "jobs", "run"]
    program = Path(sys.executable).with_name("hf")
    if not program.exists():
        pytest.skip("huggingface_hub has no command here")
    command = [program, "jobs", "run", "--dry-run", *words[3:]]
    environment = {"PATH": "/usr/bin:/bin", "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "No such option" in done.stderr and "dry-run" in done.stderr:
        pytest.skip("this version of huggingface_hub cannot say what it would start")
    assert done.returncode == 0, done.stderr
    assert "hf://buckets/me/runs:/runs" in done.stdout
