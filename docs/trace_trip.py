"""Counts the files and functions of the package that a line of a JSON file enters until its loss.

    python docs/trace_trip.py           one line a stage
    python docs/trace_trip.py --all     and every function, by file

Traced are four stages of the smoke preset on one process: `prepare_data` (reading, tokenizing, the
plan of packs), the plan of an epoch, the feed of batches, and the forward and backward passes of a
step. Functions and methods of `automodel_lite/` and of the recipe count once each; comprehensions,
lambdas and what dataclasses generate do not. Nor does what `send_counts` and `receive_counts`
enter: messages between the ranks about how many tokens a step has, and whether to stop. A line does
not pass there. Of what it enters, SERVING names the files that never hold it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.training import resume
from recipes import train_ft

ROOT = Path(__file__).resolve().parent.parent

SERVING = {
    "config/components": "builds the objects that settings describe",
    "errors": "sentences",
    "redact": "keeps secrets out of what is written",
    "progress": "the bar",
    "seed": "orders, from seeds",
    "models/flops": "costs of packs, from lengths",
    "parallel/mesh": "numbers of ranks",
    "parallel/stragglers": "times",
    "telemetry/metrics": "times and counts",
    "data/reading/paths": "finds files",
    "data/feeding/order": "sees numbers of packs, and their costs",
    "data/packing/plan": "sees lengths alone",
    "data/packing/histogram": "sees lengths alone",
}
"""Files that a line enters and that never hold it (its text, its tokens, its pack, its hidden
states), and what for.
"""

Entered = dict[str, set[tuple[str, str]]]  # (file, function) by stage


class Tracer:
    """Notes which functions are entered inside `stage`."""

    def __init__(self) -> None:
        self.entered: Entered = defaultdict(set)
        self.now = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        is_ours = path.is_relative_to(ROOT / "automodel_lite") or path.is_relative_to(
            ROOT / "recipes"
        )
        if self.now and event == "call" and is_ours and not code.co_name.startswith("<"):
            self.entered[self.now].add(
                (str(path.relative_to(ROOT)), f"{code.co_name}:{code.co_firstlineno}")
            )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        outer, self.now = self.now, name
        for setprofile in (sys.setprofile, threading.setprofile):
            setprofile(self)
        try:
            yield
        finally:
            self.now = outer
            for setprofile in (sys.setprofile, threading.setprofile):
                setprofile(self if outer else None)

    def traced(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        """`function` as a part of `stage`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.stage(stage):
                return function(*args, **kwargs)

        return call


def trace(folder: Path) -> Entered:
    """Trains the smoke preset on chats of a file, in `folder`; returns what each stage entered."""
    chats = folder / "chats.jsonl"
    turns = (
        {"role": "user", "content": "What is {n}?"},
        {"role": "assistant", "content": "It is {n}, and it stays {n}."},
    )
    rows = [
        {"messages": [{**t, "content": t["content"].format(n=n)} for t in turns]}
        for n in range(120)
    ]
    chats.write_text("\n".join(map(json.dumps, rows)))
    overrides = [
        "dataset=files",
        "~dataset.num_chats",
        f"dataset.path={chats}",
        f"cache_dir={folder / 'cache'}",
    ]
    overrides += [
        f"output_dir={folder / 'run'}",
        "tokenize.num_proc=1",
        "training.allow_few_steps=true",
    ]
    tracer = Tracer()
    recipe: Any = train_ft.TrainFinetuneRecipe
    train_ft.prepare_data = tracer.traced(train_ft.prepare_data, "prepare_data")
    PlannedPacks.plan = tracer.traced(PlannedPacks.plan, "plan")  # type: ignore[method-assign]
    recipe.open_feed = tracer.traced(recipe.open_feed, "feed")
    feed: Any = train_ft.DeviceFeed
    feed.peek, feed.__next__ = (
        tracer.traced(feed.peek, "feed"),
        tracer.traced(feed.__next__, "feed"),
    )
    recipe.send_counts = tracer.traced(recipe.send_counts, "")
    guards: Any = train_ft.Guards
    guards.receive_counts = tracer.traced(guards.receive_counts, "")
    recipe.forward_backward = tracer.traced(recipe.forward_backward, "forward and backward")
    with resume.join_ranks(check_config(compose_config("smoke", overrides))) as (config, peers, _):
        recipe(config, peers).train()
    return tracer.entered


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="every function, by file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        entered = trace(Path(folder))
    for stage, found in entered.items():
        print(f"{stage}: {len({file for file, _ in found})} files, {len(found)} functions")
    every = sorted(set().union(*entered.values()))
    files = sorted({file for file, _ in every})
    for file in files if args.all else ():
        print(f"  {file}: {', '.join(name for owner, name in every if owner == file)}")
    print(f"together: {len(files)} files, {len(every)} functions")
    holding = [
        file
        for file in files
        if file.removeprefix("automodel_lite/").removesuffix(".py") not in SERVING
    ]
    num_functions = sum(owner in holding for owner, _ in every)
    print(f"of these hold the line: {len(holding)} files, {num_functions} functions")


if __name__ == "__main__":
    main()
