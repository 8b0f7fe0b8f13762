"""Numbers that a launcher sets."""

from __future__ import annotations

import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.launched import check_launched

LAUNCHED = [
    ("RANK=abc", "the environment has RANK=abc, which must be a whole number: torchrun"),
    ("RANK=-1", "the environment has RANK=-1, which must be a whole number: torchrun"),
    ("RANK=", "the environment has RANK=, which must be a whole number: torchrun"),
    ("WORLD_SIZE=x", "the environment has WORLD_SIZE=x, which must be a whole number over 0"),
    ("WORLD_SIZE=0", "the environment has WORLD_SIZE=0, which must be a whole number over 0"),
    (
        "LOCAL_RANK=99",
        "the environment has LOCAL_RANK=99 of WORLD_SIZE=1 processes, which count from 0",
    ),
    ("RANK=3 WORLD_SIZE=2", "the environment has RANK=3 of WORLD_SIZE=2 processes"),
    (
        "WORLD_SIZE=2",
        "the environment has WORLD_SIZE=2 and no RANK and no MASTER_ADDR and no MASTER_PORT: start with",
    ),
    (
        "RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=abc",
        "the environment has MASTER_PORT=abc, which must be a whole number",
    ),
    (
        "LOCAL_WORLD_SIZE=0",
        "the environment has LOCAL_WORLD_SIZE=0, which must be a whole number over 0",
    ),
]


@pytest.mark.parametrize(
    ("environment", "words"), LAUNCHED, ids=[environment for environment, _ in LAUNCHED]
)
def test_numbers_of_a_launcher_that_are_none(
    environment: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    check_launched()
    for assignment in environment.split():
        monkeypatch.setenv(*assignment.split("="))
    with pytest.raises(ConfigError) as error:
        check_launched()
    assert str(error.value).startswith(words)
