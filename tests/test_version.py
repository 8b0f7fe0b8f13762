"""The version stands in several files, and is one."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import automodel_lite
from automodel_lite.version import __version__

ROOT = Path(__file__).resolve().parent.parent


def test_the_version_is_the_same_everywhere() -> None:
    assert automodel_lite.__version__ is __version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert f'\nversion = "{__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_an_index_of_packages_takes_it() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", __version__)  # PEP 440
