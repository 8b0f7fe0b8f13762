"""Private names of other libraries: each is listed in one file, exists, and nobody else imports one."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from pydoc import locate

import pytest

from automodel_lite import compat

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "automodel_lite").rglob("*.py"), *(ROOT / "recipes").glob("*.py")])


@pytest.mark.parametrize("name", compat.IMPORTED)
def test_a_private_name_is_found_with_its_reason(name: str) -> None:
    assert getattr(compat, name) is not None
    assert compat.IMPORTED[name][2]


@pytest.mark.parametrize("name", compat.ATTRIBUTES)
def test_an_attribute_is_where_the_list_says(name: str) -> None:
    owner, why = compat.ATTRIBUTES[name]
    found = locate(owner)
    assert name in dir(found) or name in getattr(found, "__annotations__", {})
    assert why


def test_a_name_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(AttributeError, match="'unlisted'"):
        _ = compat.unlisted


def private_imports(source: str) -> list[str]:
    """Returns the modules and names that begin with an underscore, of other libraries."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            if node.module.split(".")[0] in ("automodel_lite", "recipes", "__future__"):
                continue
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        else:
            continue
        found += [name for name in names if name.startswith("_") and name != "__version__"]
    return found


def test_the_search_sees_a_private_import() -> None:
    assert private_imports("from torch._dynamo import x") == ["_dynamo"]
    assert private_imports("from torch.utils import _pytree as pytree") == ["_pytree"]
    assert private_imports("import hydra._internal.hydra") == ["_internal"]


def test_no_other_module_imports_a_private_one() -> None:
    found = {str(path.relative_to(ROOT)): private_imports(path.read_text()) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_tested_versions_are_the_range_of_the_package_and_the_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    for package, (oldest, newest) in compat.TESTED.items():
        (declared,) = [text for text in project["dependencies"] if text.startswith(f"{package}>=")]
        least = declared.partition(">=")[2].split(",")[0]
        assert f"{oldest}.".startswith(f"{least}.")
        assert f"{package}=={newest}" in pins


def test_the_oldest_python_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = project["project"]["requires-python"].removeprefix(">=")
    said = {
        "README.md": f"Python ≥ {oldest},",
        "docs/install.md": f"Python {oldest} or newer",
        "Makefile": f"and {oldest} or newer is needed",
        ".github/workflows/ci.yml": f'python: ["{oldest}", ',
    }
    assert [name for name, text in said.items() if text not in (ROOT / name).read_text()] == []
    assert project["tool"]["mypy"]["python_version"] == oldest
    assert project["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")


def test_an_older_python_is_told_before_anything_is_installed(tmp_path: Path) -> None:
    older = tmp_path / "python3.10"
    older.write_text(
        f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c 'import sys; sys.version_info = (3, 10, 4); '\"$2\"\n"
    )
    older.chmod(0o755)
    command = ["make", f"VENV={tmp_path}/venv", f"PYTHON={older}"]
    done = subprocess.run(
        [*command, f"{tmp_path}/venv/.ready"], cwd=ROOT, capture_output=True, text=True
    )
    assert f"{older} is Python 3.10, and 3.11 or newer is needed" in done.stderr
    assert not (tmp_path / "venv").exists()
