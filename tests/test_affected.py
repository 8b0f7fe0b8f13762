"""Which tests `make check` runs for a changed file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.affected import affected_tests


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("tests/data/test_cache.py", ["tests/data/test_cache.py"]),
        ("tests/runs.py", []),
        ("automodel_lite/data/cache.py", ["tests/data/test_cache.py"]),
        ("automodel_lite/data/feed/order.py", ["tests/data/test_cache.py", "tests/data/test_x.py"]),
        ("conf/lora.yaml", ["tests/recipes/test_train.py"]),
        ("docs/data.md", []),
    ],
)
def test_a_changed_file_has_tests(tmp_path: Path, changed: str, tests: list[str]) -> None:
    for name in ("data/test_cache.py", "data/test_x.py", "recipes/test_train.py"):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert affected_tests([changed], tmp_path) == tests
