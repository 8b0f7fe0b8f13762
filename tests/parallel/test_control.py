"""Small messages between ranks: what each says, and whose error all of them raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from automodel_lite.config.schema import MeshConfig
from automodel_lite.errors import ConfigError
from automodel_lite.parallel.control import Control, all_ranks, open_control
from tests.ranks import run_ranks


def _waits_s(rank: int, world_size: int) -> list[float]:
    config = MeshConfig(timeout_s=7)
    groups: list[Any] = [open_control(config, is_slow).group for is_slow in (False, True)]
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups
    ]


def test_a_rank_that_writes_is_waited_for_an_hour() -> None:
    assert run_ranks(_waits_s, 2) == [[7.0, 3600.0]] * 2


class CannotBePickledError(Exception):
    """As libraries have them: made of two arguments, of which one is kept."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


def _say(rank: int, world_size: int) -> dict[str, Any]:
    control = all_ranks()
    calls: list[str] = []

    def own(result: Any) -> Any:
        calls.append(f"rank {rank}")
        if isinstance(result, Exception):
            raise result
        return result

    def error_of(how: str, *errors: Any) -> tuple[str, str]:
        with pytest.raises(Exception) as error:
            getattr(control, how)(lambda: own(errors[rank]))
        return error.type.__name__, str(error.value)

    total = control.start_sum([0.5, float(rank)])
    found = {
        "who": (control.rank, control.world_size, control.is_first),
        "max": control.max([rank, -rank, 2**53 + rank]),
        "first": control.on_first(lambda: own(f"of {rank}")),
        "all": control.on_all(lambda: own(rank * 10)),
        "sum": total(),  # started before the others, waited for after them
        "error of the first": error_of("on_first", ConfigError("a=1: no"), None, None),
        "errors of two": error_of("on_all", 0, OSError(28, "No space"), ValueError("later")),
        "a library's": error_of("on_all", 0, 0, CannotBePickledError(1, "odd")),
        "after errors": control.max([rank]),
    }
    control.barrier()
    return {**found, "calls": calls}


def test_what_ranks_say_and_raise_together() -> None:
    for rank, found in enumerate(run_ranks(_say, 3)):
        assert found["who"] == (rank, 3, rank == 0)
        assert found["max"] == [2, 0, 2**53 + 2]  # exact where floats are not
        assert found["sum"] == [1.5, 3.0]
        assert found["first"] == "of 0"
        assert found["all"] == [0, 10, 20]
        assert found["error of the first"] == ("ConfigError", "a=1: no")
        assert found["errors of two"] == ("OSError", "[Errno 28] No space")
        assert found["a library's"] == ("RuntimeError", "CannotBePickledError: odd")
        assert found["after errors"] == [2]
        assert len(found["calls"]) == (5 if rank == 0 else 3)  # `on_first` calls on rank 0 alone


def test_one_process_asks_nobody() -> None:
    assert not dist.is_initialized()
    for control in (all_ranks(), open_control(MeshConfig()), Control(None)):
        assert (control.group, control.rank, control.world_size, control.is_first) == (
            None,
            0,
            1,
            True,
        )
        assert control.max([3, 1]) == [3, 1]
        assert control.start_sum([0.5])() == [0.5]
        assert control.on_first(lambda: 7) == 7
        assert control.on_all(lambda: 7) == [7]
        with pytest.raises(ZeroDivisionError):
            control.on_all(lambda: 1 // 0)
        control.barrier()
