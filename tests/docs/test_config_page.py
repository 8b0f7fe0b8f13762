import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_configuration_reference_is_fresh(capsys: pytest.CaptureFixture[str]):
    spec = importlib.util.spec_from_file_location("write_config", ROOT / "docs/write_config.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/config.md").read_text() == module.page(), (
        "stale: python docs/write_config.py"
    )
