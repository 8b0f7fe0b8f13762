"""Models in memory: one for each base model and its settings, on which several adapters take turns;
and the prompts that wait to be drawn together.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from automodel_lite import SamplingClient as Server
from automodel_lite import TrainingClient as Client
from automodel_lite.errors import ConfigError
from automodel_lite.extras.client.sampling import Answer, Request
from automodel_lite.extras.client.sampling_client import Gap, Version
from automodel_lite.extras.client.seats import Seat, Snapshot
from automodel_lite.parallel.control import all_ranks
from automodel_lite.tinker.ranks import from_first
from automodel_lite.tinker.refusals import note

PRESET = "policy"
Given = tuple[str, tuple[str, ...]]
"""The preset and overrides of a base model's name."""


@dataclass
class Settings:
    """Of the process, by `install`.

    sampler  address of the inference server that draws; None = the models in memory do
    sampler_folder  that both see, for the weights; None = inside `folder`
    engines  by what was given for the name, and by further overrides
    """

    models: dict[str, tuple[str, ...]] = field(default_factory=dict)
    folder: Path = Path("runs/tinker")
    overrides: tuple[str, ...] = ()
    sampler: str | None = None
    sampler_folder: Path | None = None
    engines: dict[tuple[Given, tuple[str, ...]], Engine] = field(default_factory=dict)

    def given(self, base_model: str) -> Given:
        """Returns the preset and overrides of a base model's name; what follows a colon is a size
        of the service's, such as `:peft:262144`, unless a name was given with it.
        """
        if base_model not in self.models and not Path(base_model).exists():
            base_model, _, size = base_model.partition(":")
            if size:
                note(f"{base_model}:{size} is {base_model}: set mesh and packs by --model")
        own = self.models.get(base_model, (f"model.pretrained={base_model}",))
        preset = PRESET
        if own and "=" not in own[0] and not own[0].startswith("~"):
            preset, own = own[0], own[1:]
        return preset, (*own, *self.overrides)

    def engine(self, base_model: str, more: Sequence[str]) -> Engine:
        """Returns the model of a name and further overrides, loaded once."""
        given = self.given(base_model)
        key = (given, tuple(more))
        if key not in self.engines:
            preset, own = given
            # what was given for the name comes last, so that it decides
            self.engines[key] = Engine.load(preset, (*more, *own), self.folder)
        return self.engines[key]

    def loaded(self, base_model: str) -> list[Engine]:
        """Returns the models of a name that are in memory, whatever their further overrides."""
        given = self.given(base_model)
        return [engine for (of_name, _), engine in self.engines.items() if of_name == given]


SETTINGS = Settings()


@dataclass
class Waiting:
    """A request that waits.

    settle  gets the answers, and the client while it draws and scores by the source's weights
    """

    request: Request
    source: Source
    settle: Callable[[Client, list[Answer]], None]
    fail: Callable[[BaseException], None]


@dataclass(eq=False)
class Source:
    """The weights that answers are drawn from.

    owner    the run whose weights they are; None = the start model's
    version  of them on the inference server, once it has drawn by them
    """

    snapshot: Snapshot | None
    owner: object | None
    version: Version | None = None


@dataclass(eq=False)
class Engine:
    """A training client whose adapters take turns.

    owner  the run whose weights the client holds; the engine itself while nobody trains
    start  the adapter as it was made
    server  that draws in place of the client
    gap    of the server's log-probabilities from the client's, since the last step
    """

    client: Client
    server: Server | None = None
    gap: Gap = field(default_factory=Gap)
    seats: dict[object, Seat] = field(default_factory=dict)
    owner: object | None = None
    start: Seat | None = None
    waiting: list[Waiting] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def load(cls, preset: str, overrides: Sequence[str], folder: Path) -> Engine:
        """Loads a model; the client's own run folder is a new one beside those of the runs."""
        name = _new_name()
        places = (f"output_dir={folder.resolve()}/{name}", f"name={name}", "loss=cross_entropy")
        client = Client(preset, *overrides, *places)
        engine = cls(client)
        if SETTINGS.sampler is not None:
            engine.server = Server(SETTINGS.sampler, client, SETTINGS.sampler_folder)
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
                self._draw([one for one in waiting if one.source is source])

    def _draw(self, waiting: Sequence[Waiting]) -> None:
        """Draws for requests of one source; where one of them is wrong, each on its own, so that it
        fails alone.
        """
        source = waiting[0].source
        try:
            with self.weights_of(source) as client:
                requests = [one.request for one in waiting]
                drawn = self._answers(client, source, requests)
                for one, answers in zip(waiting, drawn):
                    one.settle(client, answers)
        except Exception as error:
            # a server that does not answer, or refuses the weights, fails them all
            if len(waiting) == 1 or isinstance(error, OSError | ConfigError):
                for one in waiting:
                    one.fail(error)
                return
            for one in waiting:
                self._draw([one])

    def _answers(
        self, client: Client, source: Source, requests: Sequence[Request]
    ) -> list[list[Answer]]:
        """Returns the answers with the numbers of what has drawn them: scripts take ratios to
        these. The server has its own start model, which may be another one.
        """
        if self.server is None or source.snapshot is None:
            return client.draw(requests)
        if source.version is None or not self.server.has(source.version):
            source.version = self.server.publish()
        answers = self.server.draw_from(source.version, requests)
        self.server.measured(requests, answers)
        self.gap = self.gap.joined(self.server.gap)
        return answers

    def take_gap(self) -> dict[str, float]:
        """Returns the metrics of the gap since the last step, which ends here."""
        gap, self.gap = self.gap, Gap()
        if not gap.num_tokens:
            return {}
        return {"sampler_gap:mean": gap.mean, "sampler_gap:max": gap.max}


def fresh(start: Seat) -> Seat:
    """Returns a seat that may be changed, as its optimizer and gradients are."""
    return Seat(start.values, [None] * len(start.values), {}, dict(start.counts))


def _new_name() -> str:
    """Returns the name of an engine, the same on all ranks, and another one in each process: a
    folder that a job before has made may be of other settings.
    """
    return from_first("names of engines", lambda: f"engine-{secrets.token_hex(4)}")


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
