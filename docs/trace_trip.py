"""Counts the files and functions that a run enters, for the table in docs/architecture.md.

    python docs/trace_trip.py           one line per trip
    python docs/trace_trip.py --all     and every function, by file

The smoke preset trains on one process, on chats of a JSON Lines file. Three trips are counted, each
with everything that it enters, in every thread:

set-up   from `train()` to the first step of the loop: the way of a setting
data     from a line of the file to its loss: `prepare_data`, the plan of an epoch, the feed of
         batches, the forward and backward passes
a step   one turn of the loop, the second

Functions, methods and lambdas of `automodel_lite/` and of the recipe count once each. A
comprehension belongs to the function around it, the body of a class is not a function.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.data.feeding.feed import DeviceFeed
from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.telemetry.metrics import Meter
from automodel_lite.training import resume
from recipes import train_ft

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (ROOT / "automodel_lite", ROOT / "recipes")

Entered = dict[str, set[tuple[str, str]]]  # (file, function) by trip


class Tracer:
    """Notes which functions are entered during each trip."""

    def __init__(self) -> None:
        self.entered: Entered = defaultdict(set)
        self.of_the_run = "set-up"
        self.depth_of_data = 0
        # most calls are torch's own; the code is kept, so that no other one gets its id
        self.names: dict[int, tuple[CodeType, tuple[str, str] | None]] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if id(code) not in self.names:
            self.names[id(code)] = code, name_of(code)
        function = self.names[id(code)][1]
        if function is None:
            return
        self.entered[self.of_the_run].add(function)
        if self.depth_of_data:
            self.entered["data"].add(function)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Traces this thread and those that begin inside."""
        sys.setprofile(self)
        threading.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def data(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a stretch of the way of the data."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.depth_of_data += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.depth_of_data -= 1

        return call

    def turn(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """`Meter.start`, which begins a turn of the loop."""

        def call(meter: Meter, step: int) -> Any:
            self.of_the_run = "a step" if step == 2 else "other steps"
            return start(meter, step)

        return call


def name_of(code: CodeType) -> tuple[str, str] | None:
    """Returns the file and the name of a function of ours, None for others."""
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return None
    if code.co_name.startswith("<") and code.co_name != "<lambda>":
        return None
    path = Path(code.co_filename)
    if not any(path.is_relative_to(room) for room in ROOMS):
        return None
    return str(path.relative_to(ROOT)), f"{code.co_name}:{code.co_firstlineno}"


def write_chats(path: Path) -> None:
    """Writes 120 chats of one turn."""
    lines = []
    for n in range(120):
        question = {"role": "user", "content": f"What is {n}?"}
        answer = {"role": "assistant", "content": f"It is {n}, and it stays {n}."}
        lines.append(json.dumps({"messages": [question, answer]}))
    path.write_text("\n".join(lines))


def trace(folder: Path) -> Entered:
    """Trains the smoke preset in `folder`; returns what each trip entered."""
    chats = folder / "chats.jsonl"
    write_chats(chats)
    overrides = [
        "dataset=files",
        "~dataset.num_chats",
        f"dataset.path={chats}",
        f"cache_dir={folder / 'cache'}",
        f"output_dir={folder / 'run'}",
        "tokenize.num_proc=1",
        "training.allow_few_steps=true",
    ]
    tracer = Tracer()
    recipe: Any = train_ft.TrainFinetuneRecipe
    feed: Any = DeviceFeed
    train_ft.prepare_data = tracer.data(train_ft.prepare_data)
    PlannedPacks.plan = tracer.data(PlannedPacks.plan)  # type: ignore[method-assign]
    recipe.open_feed = tracer.data(recipe.open_feed)
    feed.peek = tracer.data(feed.peek)
    feed.__next__ = tracer.data(feed.__next__)
    recipe.forward_backward = tracer.data(recipe.forward_backward)
    Meter.start = tracer.turn(Meter.start)  # type: ignore[method-assign]
    with resume.join_ranks(check_config(compose_config("smoke", overrides))) as (config, peers, _):
        run = recipe(config, peers)
        with tracer.recording():
            run.train()
    return tracer.entered


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every function, by file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        entered = trace(Path(folder))
    for trip in ("set-up", "data", "a step"):
        functions = sorted(entered[trip])
        files = sorted({file for file, _ in functions})
        print(f"{trip}: {len(files)} files, {len(functions)} functions")
        for file in files if args.all else ():
            print(f"  {file}: {', '.join(name for owner, name in functions if owner == file)}")


if __name__ == "__main__":
    main()
