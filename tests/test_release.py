"""What a release needs: one address, links that lead somewhere, an image whose commands run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest
import yaml

from automodel_lite.version import __version__
from docs.site_links import repository, with_repository_links

ROOT = Path(__file__).resolve().parent.parent


def test_the_site_names_every_page_once():
    def pages(node: object) -> list[str]:
        children = (
            node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
        )
        return (
            [node]
            if isinstance(node, str)
            else [page for child in children for page in pages(child)]
        )

    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(named) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )


def test_the_address_of_the_repository_is_the_same_wherever_it_stands():
    """In pyproject.toml, in what is read without the tree around it, and in the first line that is typed."""
    address = repository()
    named = {
        path.relative_to(ROOT).as_posix(): set(
            re.findall(rf"https://[\w./-]+/{address.rpartition('/')[2]}", path.read_text())
        )
        for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "mkdocs.yml"]
    }
    assert {path: found for path, found in named.items() if found} == {
        path: {address} for path in ("README.md", "docs/README.md", "mkdocs.yml")
    }
    for page in ("README.md", "docs/README.md"):
        first = re.search(r"^```bash\n(.*)\n", (ROOT / page).read_text(), flags=re.MULTILINE)
        assert first
        assert first[1] == f"git clone {address}"
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["repo_url"] == address
    project = (ROOT / "pyproject.toml").read_text()
    assert len(re.findall(r"https://(?:raw\.)?github(?:usercontent)?\.com/", project)) == 5
    assert project.count("automodel-lite/automodel_lite") == 5


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/**/*.yml")), ids=lambda path: path.name)
def test_workflows_and_templates_are_yaml(path: Path):
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_registries_are_named_by_workflows_alone():
    """Whoever forks the project publishes to a place of their own."""
    registry = re.compile(r"\b(ghcr|quay|docker)\.io\b|(test\.)?pypi\.org/(legacy|simple)")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in listed.stdout.splitlines() if not name.startswith("tests/")]
    found = [
        name
        for name in names
        if (path := ROOT / name).is_file()
        and path.suffix not in (".png", ".bin")
        and registry.search(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == [".github/workflows/image.yml"] or not names  # a source distribution has no git


def test_the_changelog_has_the_version_that_is_next():
    """`## 1.2.3 (unreleased)`, with the date in place of the word once it is published."""
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0].startswith(f"{__version__} (")
    for heading in headings:
        assert re.fullmatch(r"\d+\.\d+\.\d+ \((unreleased|\d{4}-\d\d-\d\d)\)", heading)


def test_the_image_has_every_extra_that_needs_no_compiler():
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert '".[all]"' in dockerfile
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    (everything,) = project["optional-dependencies"]["all"]
    named = set(everything.partition("[")[2].rstrip("]").split(","))
    # peft is in qlora; the next two are compiled, and built before; the last are no part of a job
    assert extras - named == {"all", "peft", "flash", "te", "tinker", "docs", "dev"}
    assert "flash-attn==" in dockerfile
    assert "transformer-engine[pytorch]==" in dockerfile


def test_the_wheel_has_what_its_build_reads():
    """Files that the Dockerfile copies are all that pyproject.toml and the build hook name."""
    copied = set()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            copied |= set(line.split()[1:-1])
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    needed = {"pyproject.toml", "README.md", "LICENSE", "hatch_build.py", "docs"}
    needed |= {*wheel["targets"]["wheel"]["packages"], *wheel["targets"]["wheel"]["force-include"]}
    assert needed <= copied
    assert needed <= {*wheel["targets"]["sdist"]["include"], "pyproject.toml"}


def test_links_out_of_the_docs_lead_to_the_repository():
    text = "[a](../../README.md) [b](../packing.md) [c](#x)"
    found = with_repository_links(text, PurePosixPath("cookbook"))
    assert found == f"[a]({repository()}/blob/main/README.md) [b](../packing.md) [c](#x)"
    with pytest.raises(FileNotFoundError, match="leads nowhere"):
        with_repository_links("[a](../nothing.md)", PurePosixPath("."))


LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), ROOT / "llms.txt"]), ids=lambda path: path.name
)
def test_links_of_the_top_pages_lead_to_files(page: Path):
    for target, _ in LINK.findall(page.read_text()):
        assert (ROOT / target).exists(), f"{page.name}: {target}"


@pytest.mark.slow
def test_the_commands_of_the_image_run_in_order(tmp_path: Path):
    """All of the Dockerfile but its base image and the two packages that need a CUDA compiler."""
    image = tmp_path / "image"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
    }
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    torch = next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    # what the base image brings
    subprocess.run([tmp_path / "venv/bin/pip", "install", "-q", torch], check=True)
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    done = []
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                to = image / target if len(sources) == 1 and target != "./" else image / source
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                to.parent.mkdir(parents=True, exist_ok=True)
                copy(ROOT / source, to)
        elif word == "RUN" and "flash-attn" not in rest:
            subprocess.run(
                rest.replace("/tmp/", f"{tmp_path}/"),
                shell=True,
                check=True,
                cwd=image,
                env=environment,
            )
            done.append(rest)
    assert done
    subprocess.run(["automodel-lite", "train", "--help"], check=True, cwd=tmp_path, env=environment)
