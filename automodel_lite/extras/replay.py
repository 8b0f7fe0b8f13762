"""What a run has recorded, checked: the chain of its ledger, its checkpoints by their digests, its
data; and a replayed step beside its line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from automodel_lite.errors import ConfigError
from automodel_lite.extras.certificate import NAME as CERTIFICATE
from automodel_lite.launched import rank
from automodel_lite.models.layers import local
from automodel_lite.parallel.control import Control
from automodel_lite.parallel.peers import Peers
from automodel_lite.run.checkpoint import flat_state
from automodel_lite.run.checkpoint_folder import MANIFEST, STATE, step_of, survey
from automodel_lite.run.durable import read_json, sha256
from automodel_lite.run.folder import RunFolder, json_object
from automodel_lite.telemetry.ledger import NAME, Line, manifest_digest, read_ledger
from automodel_lite.training.engine import TrainingEngine

ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
"""Of a loss, relative, per replayed step; measured in fp32 over 1, 2 and 4 ranks: under 1e-6."""
NORM_FACTOR = 10.0
LARGEST = 0.1  # whatever the number of replayed steps: further apart is different
MOVED_FACTOR = 1e3
"""Of a tensor, to how far it has moved: Adam divides a small gradient by its own size, and moves a
weight whose gradient is rounding alone as far as any other.
"""


def step_number(checkpoint: Path) -> int:
    """Returns the step of a checkpoint that `survey` has found."""
    step = step_of(checkpoint)
    assert step is not None
    return step


@dataclass(frozen=True)
class Recorded:
    """The ledger of a run, the checkpoints that are there, and what is wrong with them."""

    lines_of_ledger: list[Line]
    checkpoints: list[Path]  # by step, those whose line and manifest agree
    problems: list[str]

    @classmethod
    def of(cls, run: RunFolder) -> Recorded:
        """Reads the ledger, and the names and sizes of every checkpoint's files; raises ConfigError
        for a run without a ledger.
        """
        path = run.path / NAME
        if not path.is_file():
            raise ConfigError(
                f"{run.path} has no {NAME}: it was trained by an earlier version, which kept none."
            )
        try:
            lines = read_ledger(path)
        except ConfigError as error:
            return cls([], [], [str(error)])
        problems = list(_gaps(lines))
        checkpoints = []
        # a checkpoint gets its name when it is complete: what is not has lost something since
        complete, damaged = survey(run.checkpoints)
        problems += damaged
        for checkpoint in reversed(complete):
            found = list(_problems_of(checkpoint, lines))
            problems += found
            if not found:
                checkpoints.append(checkpoint)
        certified = json_object(run.hf / CERTIFICATE).get("ledger")
        chains = {line.chain for line in lines}
        if isinstance(certified, dict) and certified.get("head") not in chains:
            problems.append(
                f"{run.hf / CERTIFICATE} was written for another ledger (head "
                f"{str(certified.get('head'))[:12]})"
            )
        return cls(lines, checkpoints, problems)

    def hash_files(self, peers: Peers) -> Recorded:
        """Returns these records with what the content of the checkpoints' files says. Every rank
        calls it, and gets the same answer, or ConfigError: a host with other files is named.
        """
        entries = {
            (checkpoint, file): entry
            for checkpoint in self.checkpoints
            for file, entry in read_json(checkpoint / MANIFEST)["files"].items()
        }
        sizes = {checkpoint / file: entry["bytes"] for (checkpoint, file), entry in entries.items()}
        found = hash_together(sizes, peers)
        problems = [
            f"{checkpoint.name}: {file} has other content than was written"
            for (checkpoint, file), entry in entries.items()
            if found[checkpoint / file] != entry.get("sha256")
        ]
        problems = [*self.problems, *problems]
        peers.compare("records", {"head": self.head, "problems": "; ".join(problems) or "none"})
        return replace(self, problems=problems)

    @property
    def head(self) -> str:
        return self.lines_of_ledger[-1].chain if self.lines_of_ledger else ""

    @cached_property
    def by_step(self) -> dict[int, dict[str, Any]]:
        return {line.step: line.row for line in self.lines_of_ledger if line.step is not None}

    @property
    def lines(self) -> list[tuple[str, str]]:
        """What to print of it, when nothing is wrong."""
        if self.problems:
            return []
        steps = sorted(self.by_step)
        covered = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        names = ", ".join(path.name for path in self.checkpoints)
        agree = f"{names}: the files are those that the ledger names" if names else "none is there"
        return [
            ("ledger", f"{covered}, each line follows from the one before; head {self.head}"),
            ("checkpoints", agree),
        ]

    def row_of(self, step: int) -> dict[str, Any]:
        return self.by_step[step]

    def check_step(self, step: int) -> None:
        """Raises ConfigError for a step that was not recorded, or that nothing here leads to."""
        if step not in self.by_step:
            steps = sorted(self.by_step) or [0]
            raise ConfigError(
                f"--replay {step}: the ledger holds steps {steps[0]} to {steps[-1]}: choose one of "
                "them."
            )
        first = min(self.by_step)
        if first > 1 and self.checkpoint_before(step) is None:
            names = ", ".join(path.name for path in self.checkpoints) or "none"
            raise ConfigError(
                f"--replay {step}: no checkpoint before it is there ({names}), and the ledger "
                f"begins at step {first}: choose a later step."
            )

    def checkpoint_of(self, step: int) -> Path | None:
        return next((path for path in self.checkpoints if step_of(path) == step), None)

    def checkpoint_before(self, step: int) -> Path | None:
        """Returns the newest one that step `step` can be computed from; None: from the start."""
        earlier = [path for path in self.checkpoints if step_number(path) < step]
        return earlier[-1] if earlier else None

    def checkpoint_after(self, step: int) -> Path | None:
        return next((path for path in self.checkpoints if step_number(path) > step), None)

    def start_of(self, step: int | None) -> dict[str, Any]:
        """Returns the line of the start that this step was computed behind; None = the last one."""
        found: dict[str, Any] = {}
        for line in self.lines_of_ledger:
            if line.step == step is not None:
                break
            if "start" in line.row:
                found = line.row
        return found

    def changed_inputs(self, data: Mapping[str, Any], files: Mapping[str, str]) -> list[str]:
        """Returns what is other than the ledger says: packs, documents, files of the model."""
        start = self.start_of(None)
        problems = []
        for kind, recorded, now in (("data", start["data"], data), ("file", start["files"], files)):
            for key in sorted({*recorded, *now}):
                before = recorded.get(key)
                if json.dumps(before) != json.dumps(now.get(key)):
                    problems.append(
                        f"{kind} {key}: the ledger has {before}, here is {now.get(key)}"
                    )
        return problems

    def limits(self, step: int, dtype: str, num_replayed: int) -> Limits:
        """Returns how far rounding may lead a step that was computed in one dtype and again in
        another.
        """
        names = {dtype, str(self.start_of(step).get("dtype", dtype))}
        name = max(names, key=lambda each: ROUNDING.get(each, LARGEST))
        base = ROUNDING.get(name, LARGEST)
        return Limits(
            dtype=name,
            loss=min(LARGEST, base * num_replayed),
            norm=min(LARGEST, NORM_FACTOR * base * num_replayed),
            moved=min(1.0, MOVED_FACTOR * base),
        )


def _gaps(lines: Sequence[Line]) -> list[str]:
    """Names steps that are missing or stand twice: each follows the one before, or a start."""
    before: int | None = None
    found = []
    for line in lines:
        expected = before if before is None else before + 1
        if "start" in line.row:
            before = line.row["start"]
        elif line.step is not None:
            if line.step != expected:
                found.append(f"{NAME}:{line.number} has step {line.step} in place of {expected}")
            before = line.step
    return found


def _problems_of(checkpoint: Path, lines: Sequence[Line]) -> list[str]:
    """Compares a checkpoint with its line, and its state with the chain."""
    step = step_of(checkpoint)
    name = checkpoint.name
    own = [line.row["sha256"] for line in lines if line.row.get("checkpoint") == step]
    if not own:
        return [f"{name} is not in {NAME}"]
    if own[-1] != manifest_digest(checkpoint):
        return [f"{name} is another checkpoint than the one in {NAME}: its manifest differs"]
    head = read_json(checkpoint / STATE).get("ledger")
    if head not in {line.chain for line in lines if line.step == step}:
        return [f"{name} was saved behind another ledger: its step {step} has chain {head}"]
    return []


def hash_together(sizes: Mapping[Path, int], peers: Peers) -> dict[Path, str]:
    """Returns the SHA-256 of each file, which one rank of each host reads: the hosts of a job may
    have copies of their own. Every rank calls it.

    sizes  of the files, in bytes
    """
    ranks = peers.on_this_host()
    mine = shares(sizes, len(ranks))[ranks.index(rank())]
    own = {str(path): sha256(path) for path in mine}
    gathered = peers.gather("sha256", ranks, own)
    return {Path(path): digest for part in gathered for path, digest in part.items()}


def shares(sizes: Mapping[Path, int], num_ranks: int) -> list[list[Path]]:
    """Returns which files each rank reads: the largest first, to the rank with the fewest bytes.

    >>> shares({"a": 9, "b": 5, "c": 5, "d": 1}, 2)
    [['a', 'd'], ['b', 'c']]
    """
    parts: list[list[Path]] = [[] for _ in range(num_ranks)]
    num_bytes = [0] * num_ranks
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        least = num_bytes.index(min(num_bytes))
        parts[least].append(path)
        num_bytes[least] += sizes[path]
    return parts


class Limits(NamedTuple):
    """How far apart rounding may bring two computations of a step: relative, of a tensor to how far
    the replayed steps have moved it.
    """

    dtype: str
    loss: float
    norm: float
    moved: float


class TensorDifference(NamedTuple):
    """A tensor of a replayed step beside that of the checkpoint."""

    name: str
    is_same: bool  # the same bits
    moved: float  # the difference, relative to how far the tensor has moved

    @property
    def text(self) -> str:
        return f"{self.name} (difference {self.moved:.0e} of its movement)"


def local_copies(engine: TrainingEngine) -> dict[str, Tensor]:
    """Returns copies of this rank's parts of weights and of what the optimizer keeps."""
    # torch asks an optimizer without a state for it by a step of rate 0, which its counter keeps:
    # the first real step would be Adam's second
    optimizer = engine.optimizer if engine.optimizer.state else None
    tensors, _ = flat_state(engine.model.loss_model, optimizer)
    return {name: local(tensor.detach()).clone() for name, tensor in tensors.items()}


def compare_tensors(
    before: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    ranks: Control,
) -> list[TensorDifference]:
    """Compares all tensors, in their order; `before` is where the replayed steps began. Every rank
    calls it.
    """
    sums: dict[str, tuple[bool, float, float]] = {}
    for name, replayed in own.items():
        saved = theirs[name]
        start = before.get(name, torch.zeros_like(replayed))
        apart = float((replayed.double() - saved.double()).square().sum())
        moved = float((saved.double() - start.double()).square().sum())
        sums[name] = (torch.equal(replayed, saved), apart, moved)
    shares = ranks.on_all(lambda: sums)
    found = []
    for name in sums:
        is_same = all(share[name][0] for share in shares)
        distance = sum(share[name][1] for share in shares) ** 0.5
        movement = sum(share[name][2] for share in shares) ** 0.5
        relative = distance and distance / (movement or 1e-30)
        found.append(TensorDifference(name, is_same, relative))
    return found


@dataclass(frozen=True)
class Comparison:
    """A step that was computed again beside its line, and its tensors beside a checkpoint's."""

    row: Mapping[str, Any]
    line: Mapping[str, Any]
    limits: Limits
    tensors: Sequence[TensorDifference] = field(default=())
    has_tensors: bool = False

    @property
    def is_different(self) -> bool:
        return bool(self.differing or self.far)

    @property
    def differing(self) -> list[str]:
        """Returns what no rounding changes, or what is beyond it."""
        found = [
            f"{key} {_short(self.line[key])}, here {_short(self.row[key])}"
            for key in ("packs", "labels", "rate")
            if self.row[key] != self.line[key]
        ]
        for key, limit in (("loss", self.limits.loss), ("norm", self.limits.norm)):
            if not self.relative(key) <= limit:
                found.append(
                    f"{key} {self.line[key]!r}, here {self.row[key]!r} "
                    f"({self.relative(key):.0e}, limit {limit:.0e})"
                )
        return found

    @property
    def far(self) -> list[TensorDifference]:
        return [each for each in self.tensors if not each.moved <= self.limits.moved]

    def relative(self, key: str) -> float:
        """Returns the relative difference; that of numbers that are not finite alike is none."""
        own = float(self.row[key])
        line = float(self.line[key])
        if str(own) == str(line):
            return 0.0
        return abs(own - line) / (abs(line) or 1.0)

    @property
    def text(self) -> str:
        compared = f", {len(self.tensors)} tensors compared" if self.has_tensors else ""
        if self.is_different:
            named = [f"first tensor {self.far[0].text}"] if self.far else []
            return f"different: {'; '.join([*self.differing, *named])}"
        is_same = all(each.is_same for each in self.tensors)
        if is_same and not any(self.relative(key) for key in ("loss", "norm")):
            return f"same bits{compared}"
        worst = max((each.moved for each in self.tensors), default=0.0)
        moved = f", weights {worst:.0e} (limit {self.limits.moved:.0e})" if self.tensors else ""
        return (
            f"within rounding of {self.limits.dtype}: loss {self.relative('loss'):.0e} (limit "
            f"{self.limits.loss:.0e}), norm {self.relative('norm'):.0e} (limit "
            f"{self.limits.norm:.0e}){moved}{compared}"
        )


def _short(value: object) -> str:
    text = repr(value)
    return (
        text
        if len(text) <= 40
        else f"{text[:18]} … {hashlib.sha256(text.encode()).hexdigest()[:8]}"
    )
