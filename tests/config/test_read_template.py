"""A template's file is its text, without what an editor adds to files."""

from __future__ import annotations

from pathlib import Path

import pytest

from automodel_lite.config.rules import read_template


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf"], ids=["", "byte order mark"])
@pytest.mark.parametrize("after", [b"", b"\n", b"\r\n", b"\n\n\n", b"\n  \n\t\n"], ids=repr)
def test_what_an_editor_adds_is_cut(tmp_path: Path, before: bytes, after: bytes) -> None:
    (tmp_path / "t.jinja").write_bytes(before + b"\n{{ 'a' }}\n{{ 'b' }} " + after)
    assert read_template(str(tmp_path / "t.jinja")) == "\n{{ 'a' }}\n{{ 'b' }} "


def test_a_template_that_is_given_as_text_stays() -> None:
    assert read_template("{{ 'a' }}\n\n") == "{{ 'a' }}\n\n"
