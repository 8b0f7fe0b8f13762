"""A sampling client: answers from an inference server, by the weights of a training client.

    sampler = SamplingClient("http://localhost:8000", client)
    for step in range(100):
        sampler.update()                                  # the weights as they are, one number up
        answers = sampler.draw(requests)                  # [request][sample]
        groups = [policy_rows(x.prompt, y, rewards(y)) for x, y in zip(requests, answers)]
        client.forward_backward(groups, Ppo(truncation=2.0))
        client.optim_step(lr=1e-6)

Weights go by a folder that both sides see. A version is what one `publish` has sent: an adapter has
a name of its own on the server, so that several are there at once and no cached prefix is another
one's; of all weights the server has the last.

Under torchrun every rank makes the same calls; the first one talks to the server.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from weakref import ReferenceType, ref

import numpy as np

from automodel_lite.errors import ConfigError
from automodel_lite.extras.client import TrainingClient
from automodel_lite.extras.client.json_http import Http
from automodel_lite.extras.client.sampling import (
    Answer,
    Request,
    Stop,
    requests_of,
)
from automodel_lite.extras.client.servers import Job, Kind, find_server
from automodel_lite.parallel.control import all_ranks

KEY = "SAMPLER_API_KEY"
"""The variable that has the server's key, if it wants one."""
_FOLDER = "sampler"


@dataclass(frozen=True)
class Gap:
    """How far the server's numbers are from the trainer's, over the tokens of one `draw`, in nats.

    mean, max  of |log p(server) - log p(trainer)|
    """

    num_tokens: int = 0
    mean: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, answers: Sequence[Sequence[Answer]]) -> Gap:
        pairs = [
            np.abs(answer.sampler_log_probs - answer.log_probs)
            for of_request in answers
            for answer in of_request
            if answer.sampler_log_probs is not None
        ]
        if not pairs:
            return cls()
        distances = np.concatenate(pairs)
        return cls(len(distances), float(distances.mean()), float(distances.max()))

    def joined(self, other: Gap) -> Gap:
        """Returns that over the tokens of both."""
        num_tokens = self.num_tokens + other.num_tokens
        if not num_tokens:
            return self
        total = self.mean * self.num_tokens + other.mean * other.num_tokens
        return Gap(num_tokens, total / num_tokens, max(self.max, other.max))


@dataclass(eq=False)
class Version:
    """Weights that a server has. number: 1 for the first. stamp: of the client's weights."""

    number: int
    name: str
    folder: Path
    is_adapter: bool
    stamp: int


class SamplingClient:
    """Draws from vLLM or SGLang, by the weights of a training client.

    url      of the server: http://localhost:8000
    folder   that both sides see, for the weights; None = `sampler` in the client's run folder
    seen_as  the same folder as the server sees it, where that is another path
    kind     auto, vllm or sglang
    api_key  None = that of the variable SAMPLER_API_KEY, if there is one
    max_gap  nats; a mean distance of the server's log-probabilities from the trainer's that is
             larger is an error: it is no rounding, the server has other weights
    """

    def __init__(
        self,
        url: str,
        client: TrainingClient,
        folder: str | Path | None = None,
        seen_as: str | None = None,
        kind: Kind = "auto",
        api_key: str | None = None,
        timeout_s: float = 600.0,
        max_gap: float = 0.5,
    ) -> None:
        self.client = client
        self.gap = Gap()
        self.current: Version | None = None
        self._max_gap = max_gap
        self._folder = None if folder is None else Path(folder).resolve()
        self._seen_as = seen_as
        self._is_adapter = client.built.adapter is not None
        self._sent: list[tuple[ReferenceType[Version], str, Path]] = []
        self._newest: Version | None = None
        self._number = 0
        self._gate = _Gate()
        self._ranks = all_ranks()
        http = Http.of(url, api_key or os.environ.get(KEY), timeout_s)
        # only the first rank may reach it
        self._ranks.on_first(lambda: self._find(http, kind))
        prefix = f"{client.config.name}-{secrets.token_hex(4)}"
        self._prefix = self._ranks.on_first(lambda: prefix)

    def _find(self, http: Http, kind: Kind) -> None:
        self._server = find_server(http, kind)

    def __enter__(self) -> SamplingClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---------------------------------------------- weights
    def update(self) -> int:
        """Sends the client's weights as they are, and draws by them from now on; returns their
        number. Waits for answers that are being drawn. Every rank calls it.
        """
        self.current = self.publish()
        with self._gate.alone():
            self._drop_unused()  # what was current before
        return self.current.number

    def publish(self) -> Version:
        """Sends the client's weights as they are; `draw` goes on with those of `update`."""
        with self._gate.alone():
            number = self._number + 1
            name = f"{self._prefix}-{number:06d}"
            folder = self._own_folder() / name
            self._newest = None  # of all weights the server may have parts, if this fails
            self.client.save_weights(folder)
            self._ranks.on_first(lambda: self._load(name, folder))
            version = Version(number, name, folder, self._is_adapter, self.client.weights_stamp)
            self._sent.append((ref(version), name, folder))
            self._number = number
            self._newest = version
            self._drop_unused()
            return version

    def _own_folder(self) -> Path:
        if self._folder is None:
            self._folder = self.client.own_folder(_FOLDER)
            folder = self._folder
            # of a process that was killed: nobody else writes into the run's folder
            self._ranks.on_first(lambda: shutil.rmtree(folder, ignore_errors=True))
        folder = self._folder
        self._ranks.on_first(lambda: folder.mkdir(parents=True, exist_ok=True))
        return folder

    def _load(self, name: str, folder: Path) -> None:
        seen = str(folder) if self._seen_as is None else f"{self._seen_as.rstrip('/')}/{name}"
        if self._is_adapter:
            rank = int(self.client.config.peft["r"])
            self._server.load_adapter(name, seen, rank)
        else:
            self._server.load_all(name, seen)

    def _drop_unused(self) -> None:
        """Drops the versions that nobody draws from any more: of all weights each but the last."""

        def drop() -> list[str]:
            dropped = []
            for version, name, folder in self._sent:
                held = version()
                if held is not None and (self._is_adapter or held is self._newest):
                    continue
                if self._is_adapter:
                    self._server.unload_adapter(name)
                shutil.rmtree(folder, ignore_errors=True)
                dropped.append(name)
            return dropped

        # what is still held may differ between ranks for a moment: the first one decides
        dropped = self._ranks.on_first(drop)
        self._sent = [one for one in self._sent if one[1] not in dropped]

    def close(self) -> None:
        """Takes this client's adapters off the server, and removes the folders."""
        with self._gate.alone():
            self.current = self._newest = None
            sent, self._sent = self._sent, []

            def drop() -> None:
                for _, name, folder in sent:
                    if self._is_adapter:
                        self._server.unload_adapter(name)
                    shutil.rmtree(folder, ignore_errors=True)

            self._ranks.on_first(drop)

    # ---------------------------------------------- answers
    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int = 1,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        seed: int = 0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Stop = None,
    ) -> list[list[list[int]]]:
        """Draws answers to each prompt, as the training client's `sample` does: [prompt][sample]
        -> ids.
        """
        requests = requests_of(
            prompts, num_samples, max_new_tokens, temperature, seed, top_p, top_k, stop
        )
        drawn = self.draw_from(self._own_version(), requests)
        return [[answer.ids for answer in answers] for answers in drawn]

    def draw(self, requests: Sequence[Request], measure: bool = True) -> list[list[Answer]]:
        """Draws the answers to requests, [request][sample], by the weights of the last `update`.

        measure  computes the log-probabilities by the trainer, too, with one forward pass: `gap`
                 is then how far both are from each other. False = `log_probs` are the server's
        Raises RuntimeError where the weights have changed since `update`, and they are measured.
        """
        version = self._own_version()
        if measure and version.stamp != self.client.weights_stamp:
            raise RuntimeError(
                f"the weights have changed since update() sent version {version.number}, so the "
                "trainer cannot compute what the server did: call update(), or "
                "draw(..., measure=False)."
            )
        answers = self.draw_from(version, requests)
        return self.measured(requests, answers) if measure else answers

    def _own_version(self) -> Version:
        if self.current is None:
            raise RuntimeError("the server has no weights of this client: call update() first.")
        return self.current

    def has(self, version: Version) -> bool:
        """Can the server draw by these weights?"""
        return version.is_adapter or version is self._newest

    def draw_from(self, version: Version, requests: Sequence[Request]) -> list[list[Answer]]:
        """Draws by the weights of a version; `log_probs` are the server's. Every rank calls it and
        gets all answers.
        """
        ends = self.client.check_requests(requests)
        if not requests:
            return []
        with self._gate.shared():
            if not self.has(version):
                raise RuntimeError(
                    f"the server has other weights by now than those of version {version.number}: "
                    "draw before the next update, or train an adapter, of which a server holds "
                    "several."
                )
            jobs = [Job.of(request, ends) for request in requests]

            def ask() -> list[list[tuple[list[int], list[float], bool]]]:
                for job in jobs:
                    self._server.check_log_probs(job, version.name, version.is_adapter)
                drawn = self._server.draw(jobs, version.name, version.is_adapter)
                return [[(x.ids, x.log_probs, x.is_ended) for x in of_job] for of_job in drawn]

            found = self._ranks.on_first(ask)
        answers = []
        for of_request in found:
            own = []
            for ids, values, is_ended in of_request:
                log_probs = np.asarray(values, np.float32)
                own.append(Answer(ids, log_probs, is_ended, log_probs, version.number))
            answers.append(own)
        return answers

    def measured(
        self, requests: Sequence[Request], answers: Sequence[Sequence[Answer]]
    ) -> list[list[Answer]]:
        """Returns the answers with `log_probs` of the training client as it is, and sets `gap`;
        raises ConfigError for a gap that no rounding makes.
        """
        scored = self.client.score_answers(
            requests, [[answer.ids for answer in of_request] for of_request in answers]
        )
        own = [
            [replace(answer, log_probs=values) for answer, values in zip(of_request, of_scores)]
            for of_request, of_scores in zip(answers, scored)
        ]
        self.gap = Gap.of(own)
        if self.gap.mean > self._max_gap:
            raise ConfigError(
                f"the server's log-probabilities are {self.gap.mean:.3g} nats from the trainer's "
                f"on average, more than max_gap={self._max_gap:g}",
                key="max_gap",
                cure="check that it serves the same base model, and at which precision; a larger "
                "max_gap= lets it pass",
            )
        return own

    def metrics(self) -> dict[str, float]:
        """Returns what a loop logs of the last `draw`."""
        version = self.current.number if self.current else 0
        return {
            "sampler_version": float(version),
            "sampler_tokens": float(self.gap.num_tokens),
            "sampler_gap_mean": self.gap.mean,
            "sampler_gap_max": self.gap.max,
        }


class _Gate:
    """Lets many draw at once, and nobody while weights are replaced; who waits to replace them goes
    before who comes later.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_inside = 0
        self._is_taken = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._is_taken)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_inside -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._is_taken)
            self._is_taken = True
            self._condition.wait_for(lambda: self._num_inside == 0)
        try:
            yield
        finally:
            with self._condition:
                self._is_taken = False
                self._condition.notify_all()
