"""Models in memory: one for each base model and its settings, on which several adapters take turns;
and the prompts that wait to be drawn together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel_lite import TrainingClient as Client
from automodel_lite.errors import ConfigError
from automodel_lite.extras.client.sampling import Answer, Request
from automodel_lite.extras.client.seats import Seat, Snapshot
from automodel_lite.parallel.control import all_ranks
from automodel_lite.parallel.mesh import world_size

PRESET = "policy"


@dataclass
class Settings:
    """Of the process, by `install`."""

    models: dict[str, tuple[str, ...]] = field(default_factory=dict)
    folder: Path = Path("runs/tinker")
    overrides: tuple[str, ...] = ()
    engines: dict[tuple[str, ...], Engine] = field(default_factory=dict)

    def given(self, base_model: str) -> tuple[str, tuple[str, ...]]:
        """Returns the preset and overrides of a base model's name."""
        own = self.models.get(base_model, (f"model.pretrained={base_model}",))
        preset = PRESET
        if own and "=" not in own[0] and not own[0].startswith("~"):
            preset, own = own[0], own[1:]
        return preset, (*own, *self.overrides)

    def engine(self, base_model: str, more: Sequence[str]) -> Engine:
        """Returns the model of a name and further overrides, loaded once."""
        preset, own = self.given(base_model)
        # what was given for the name comes last, so that it decides
        overrides = (*more, *own)
        key = (preset, *overrides)
        if key not in self.engines:
            number = len(self.engines)
            self.engines[key] = Engine.load(preset, overrides, self.folder, number)
        return self.engines[key]


SETTINGS = Settings()


@dataclass
class Waiting:
    """A request that waits. source: the snapshot; None = the start model."""

    request: Request
    source: Source
    settle: Callable[[list[Answer]], None]
    fail: Callable[[BaseException], None]


@dataclass(eq=False)
class Source:
    """The weights that answers are drawn from. owner: the run whose weights they are; None = the
    start model's.
    """

    snapshot: Snapshot | None
    owner: object | None


@dataclass(eq=False)
class Engine:
    """A training client whose adapters take turns.

    owner  the run whose weights the client holds; the engine itself while nobody trains
    start  the adapter as it was made
    """

    client: Client
    seats: dict[object, Seat] = field(default_factory=dict)
    owner: object | None = None
    start: Seat | None = None
    waiting: list[Waiting] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def load(cls, preset: str, overrides: Sequence[str], folder: Path, number: int) -> Engine:
        """Loads a model; the client's own run folder is a new one beside those of the runs."""
        if world_size() > 1:
            # no group of ranks is there yet: what all of them know
            name = f"engine-{os.environ['MASTER_PORT']}-{number}"
        else:
            name = new_folder(folder, "engine-").name
        places = (f"output_dir={folder.resolve()}/{name}", f"name={name}", "loss=cross_entropy")
        client = Client(preset, *overrides, *places)
        engine = cls(client)
        if engine.has_adapter:
            engine.start = client.leave()
        return engine

    @property
    def has_adapter(self) -> bool:
        return self.client.built.adapter is not None

    @property
    def adapter_rank(self) -> int:
        """Returns that of the adapter; 0 where all weights are trained."""
        peft = self.client.config.peft
        return int(peft["r"]) if self.has_adapter else 0

    def open_seat(self, owner: object) -> None:
        """Gives a new run its place, at the start of training."""
        with self.lock:
            if self.owner is None or self.owner is self:
                # samplers of the model as it is keep their weights
                self.client.keep_snapshots()
                self.owner = owner
                return
            if self.start is None:
                raise ConfigError(
                    "this model trains all its weights, and another training client holds them: "
                    "one process has one such client per model: train adapters (no peft=none), or "
                    "start a second process."
                )
            self.seats[self.owner] = self.client.leave()
            self.client.take(fresh(self.start))
            self.owner = owner

    @contextmanager
    def of(self, owner: object) -> Iterator[Client]:
        """Inside, the client is that of a run; who waits for answers of other weights has a
        snapshot.
        """
        with self.lock:
            if self.owner is not owner:
                assert self.owner is not None
                self.seats[self.owner] = self.client.leave()
                self.client.take(self.seats.pop(owner))
                self.owner = owner
            yield self.client

    @contextmanager
    def weights_of(self, source: Source) -> Iterator[Client]:
        """Inside, the client draws and scores by these weights."""
        with self.lock:
            if source.snapshot is None:
                with self.client.reference():
                    yield self.client
            elif source.snapshot.values is None:
                with self.of(source.owner):
                    yield self.client
            else:
                with self.client.using(source.snapshot):
                    yield self.client

    def draw_waiting(self) -> None:
        """Draws what waits, all prompts of one source as one call."""
        with self.lock:
            waiting = self.waiting[:]
            self.waiting.clear()
            sources = {id(one.source): one.source for one in waiting}
            for source in sources.values():
                of_source = [one for one in waiting if one.source is source]
                try:
                    with self.weights_of(source) as client:
                        drawn = client.draw([one.request for one in of_source])
                except Exception as error:
                    self._draw_apart(of_source, error)
                    continue
                for one, answers in zip(of_source, drawn):
                    one.settle(answers)

    def _draw_apart(self, waiting: Sequence[Waiting], error: Exception) -> None:
        """Draws each request on its own, so that one which is wrong fails alone."""
        if len(waiting) == 1:
            waiting[0].fail(error)
            return
        for one in waiting:
            try:
                with self.weights_of(one.source) as client:
                    one.settle(client.draw([one.request])[0])
            except Exception as own:
                one.fail(own)


def fresh(start: Seat) -> Seat:
    """Returns a seat that may be changed, as its optimizer and gradients are."""
    return Seat(start.values, [None] * len(start.values), {}, dict(start.counts))


def new_folder(root: Path, prefix: str) -> Path:
    """Makes a folder of the first free number, once for all ranks."""

    def make() -> str:
        root.mkdir(parents=True, exist_ok=True)
        for number in range(10**6):
            folder = root / f"{prefix}{number:06d}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return str(folder)
        raise OSError(f"{root} is full.")

    return Path(all_ranks().on_first(make))


def compare(what: str, value: Any) -> None:
    """Raises ValueError where the ranks have other values."""
    found = all_ranks().on_all(lambda: repr(value))
    for rank, other in enumerate(found):
        if other != found[0]:
            raise ValueError(
                f"rank {rank} has called {what} with {other}, and rank 0 with {found[0]}: under "
                "torchrun every rank runs the same script: draw nothing at random but by one seed."
            )
