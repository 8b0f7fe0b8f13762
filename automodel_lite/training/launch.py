"""How a recipe begins: its ranks, its settings, a finished run or a dry run answered."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from automodel_lite.config.schema import Config
from automodel_lite.parallel.peers import Peers, end_together, open_peers
from automodel_lite.run.ending import ending_of, exit_as
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.stopping import StoppedEarly
from automodel_lite.telemetry.console import Console, quiet_libraries
from automodel_lite.telemetry.metrics import STARTUP
from automodel_lite.training.agreement import compare_settings
from automodel_lite.training.resolve import as_the_run_began, from_run, resolve_auto

_LAUNCHES = itertools.count()  # of this process: more than one in a notebook


def launch(
    recipe: Callable[..., Any],
    config: Config,
    *more: object,
    dry_run: Callable[[Config], int],
) -> int:
    """Makes a recipe and trains it, unless its run is finished; counts a step with `dry_run` where
    that is asked for. Returns the exit code.
    """
    if next(_LAUNCHES):
        STARTUP.restart()
    STARTUP.lap("imports")
    quiet_libraries()
    config = from_run(config)
    if config.dry_run:
        return dry_run(resolve_auto(config))
    with join_ranks(config) as (config, peers, finished):
        if finished:
            Console().print(finished)
            return 0
        return recipe(resolve_auto(config), peers, *more).train()


@contextmanager
def watch_ranks() -> Iterator[Peers]:
    """Watches the other ranks of a recipe: an error of one ends all, with one sentence on the
    screen. A rank that waits in a collective would end in a traceback, or after mesh.timeout_s.
    """
    peers = open_peers()
    peers.on_failure = exit_as
    with end_together(peers):
        try:
            yield peers
        except (StoppedEarly, KeyboardInterrupt) as stopped:
            # One that waits in C++ for this rank hears no signal of its own until the wait is over.
            peers.record(*ending_of(stopped)[:2])
            raise


@contextmanager
def join_ranks(config: Config) -> Iterator[tuple[Config, Peers, str | None]]:
    """The other ranks, the configuration with what the run in its folder began with, and a message
    for a run that is finished. A mistake that any rank meets inside ends all of them.

    Raises ConfigError when the ranks were started differently, or the folder is another run's.
    """
    folder = RunFolder(config.output_dir)
    with watch_ranks() as peers:
        config = as_the_run_began(config, folder)
        message = folder.finished_message(config)
        state = {"output_dir (what it holds)": folder.read_status().get("state", "no run")}
        compare_settings(peers, config, state)
        STARTUP.lap("ranks")
        yield config, peers, message
