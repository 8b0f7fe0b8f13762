"""A training client: the engine of a run, driven from Python with rows in memory.

    client = TrainingClient("policy", "model.pretrained=...")
    out = client.forward_backward(groups)       # gradients are kept
    client.optim_step(lr=1e-6)                  # divided by what was counted since the last one

A row is a mapping of sequences of one length: `input_ids`, `labels` (labels[i] is the target of
position i, -100 where there is none) and the columns of the loss. A group is a list of rows that
begin alike; their beginning is computed once. Under torchrun every rank makes the same calls with
the same rows.

Several adapters take turns (`leave`, `take`). `SamplingClient` draws from an inference server.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor

from automodel_lite.attention.spec import config_value
from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.components import option
from automodel_lite.config.schema import Config
from automodel_lite.data.prepare import build_documents
from automodel_lite.data.tokens.stop_tokens import stop_ids
from automodel_lite.data.tokens.tokenize import job_of
from automodel_lite.data.tokens.tokenizer import padding_id
from automodel_lite.errors import ConfigError
from automodel_lite.extras.client.drawing import draw_answers
from automodel_lite.extras.client.folder import ClientFolder
from automodel_lite.extras.client.rows import (
    GRAIN_TOKENS,
    PackedRows,
    Row,
    check_rows,
    pack_rows,
)
from automodel_lite.extras.client.sampling import (
    Answer,
    Request,
    Stop,
    requests_of,
    rows_of_answers,
)
from automodel_lite.extras.client.seats import Seat, Snapshot, copies, put_back
from automodel_lite.extras.client.targets import (
    IDS,
    CustomLoss,
    WeightedTargets,
    target_log_probs,
    weights_of_gradient,
    with_labels,
)
from automodel_lite.extras.plan.recompute import choose_recomputation
from automodel_lite.launched import rank
from automodel_lite.models.loss import (
    CrossEntropy,
    Loss,
    LossInputs,
    LossOutput,
    checked_loss,
    label_log_probs,
)
from automodel_lite.models.source import CausalLM, embedding_rows
from automodel_lite.parallel.control import all_ranks
from automodel_lite.parallel.peers import open_peers
from automodel_lite.run.checkpoint import Checkpointer
from automodel_lite.run.export import export_adapter, export_hf
from automodel_lite.run.weight_files import stored_dtypes, whole_weights
from automodel_lite.seed import derive_seed, seed_all
from automodel_lite.telemetry.console import Console, quiet_libraries
from automodel_lite.thd import ThdBatch
from automodel_lite.training import resolve, resume, rules, world
from automodel_lite.training.agreement import compare_settings
from automodel_lite.training.build import build_model
from automodel_lite.training.decide import check_same_vocabulary, decide
from automodel_lite.training.engine import Engine, TrainingEngine
from automodel_lite.training.guards import Guards
from automodel_lite.training.resolve import resolve_auto
from automodel_lite.training.settings import RunParts, as_start, as_teacher

_COUNTS = (
    "num_steps",
    "_num_calls",
    "_num_items",
    "_loss",
    "_has_gradients",
    "_is_broken",
    "_saved_extra",
)


@dataclass(frozen=True)
class Output:
    """log_probs  of the labels, fp32 [length of the row] each, 0 where a row has no label; in the
               order in which the rows were given; of `target_ids` [length, targets]
    top_ids, top_log_probs  [length, top_k] of each row, where `forward` was asked for them
    loss       sum over all rows and ranks, not divided; 0 of `forward`
    num_items  what `optim_step` will divide by for these rows
    parts      sums that the loss reports, and what it counts: `equal_groups`, whose rows have equal
               rewards
    num_tokens computed: what rows of a group share counts once
    """

    log_probs: list[np.ndarray]
    loss: float
    num_items: float
    parts: dict[str, float]
    num_tokens: int
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_log_probs: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """What one optimizer step was: `num_steps` of the client after it, the norm of the divided
    gradients before clipping, and what they were divided by.

    is_skipped  the loss or a gradient was not finite: the weights are as they were
    """

    num_steps: int
    loss: float
    grad_norm: float
    num_items: float
    is_skipped: bool


class TrainingClient:
    """A model on the mesh of its configuration, an optimizer, and calls with rows in memory.

    TrainingClient("policy", "model.pretrained=...", "mesh.cp=2"): a preset and overrides, as on the
    command line; a data set is not needed. Loads the model; raises ConfigError. Every rank makes
    the same calls with the same rows; `close` (or `with`) gives the run's folder back.
    """

    def __init__(self, config_name: str, *overrides: str, config_dir: str | None = None) -> None:
        quiet_libraries()
        raw = compose_config(config_name, list(overrides), config_dir=config_dir)
        if OmegaConf.is_missing(raw, "name"):
            raw.name = "client"
        if OmegaConf.is_missing(raw.dataset, "path"):
            # read by nobody, unless a tokenizer is trained
            raw.dataset = option("dataset", "toy_chat")
        console = Console(is_silent=rank() != 0)
        config = resolve.from_run(check_config(raw))
        peers = open_peers()
        compare_settings(peers, config)
        self.config = resolve_auto(config, console, has_data=False)
        parts = rules.checked_parts(self.config)
        _check_settings(self.config, parts)
        job = job_of(self.config, build_documents(self.config))
        self.tokenizer = job.tokenizer
        guards = Guards(self.config, peers, console.print)
        resume.compare_files(guards, parts, keeps_start=True)
        decided = resume.agree_on_settings(guards, parts, self.tokenizer, choose_recomputation)
        is_first = not dist.is_initialized()
        self.mesh = world.open_world(self.config)
        if is_first and self.mesh.root:
            atexit.register(self.mesh.close)
        self._ranks = all_ranks()
        self.built = build_model(decided, self.tokenizer, self.mesh, seed=self.config.seed)
        self.engine = TrainingEngine.of(self.built, self.mesh)
        self._folder = ClientFolder(guards, self.config, self.engine.model.module)
        self._packer = parts.packer.for_document_kind("other", padding_id(self.tokenizer))
        self._rates = [float(group["lr"]) for group in self.engine.optimizer.param_groups]
        self._is_decayed = [_is_decayed(group) for group in self.engine.optimizer.param_groups]
        self._snapshots: WeakSet[Snapshot] = WeakSet()
        self._scorer: Engine = self.engine  # or the reference
        self._reference: Engine | None = None
        self._teachers: dict[tuple[str, str | None], Engine] = {}
        self._saved_extra: Any = None
        self.num_steps = 0
        self.weights_stamp = 0  # another one after each change of the weights
        self._num_calls = 0
        self._num_items = 0.0
        self._loss = 0.0  # since the last step
        self._has_gradients = False
        self._is_broken = False  # a forward_backward did not end

    def __enter__(self) -> TrainingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------- rows in, numbers out
    def forward(self, groups: Iterable[Any], top_k: int = 0) -> Output:
        """Computes the log-probabilities of the labels, or of `target_ids`, without gradients and
        dropout; columns of the loss are not looked at.

        top_k  so many of the likeliest tokens at each label, too
        """
        num_ids = embedding_rows(self._scorer.model.loss_model.lm)
        if not 0 <= top_k <= min(num_ids, 2**24):
            raise ValueError(f"top_k={top_k} must be from 0 to the {num_ids} tokens.")
        bare = []
        for group in _as_groups(groups):
            rows = [with_labels(row) for row in group]
            kept = ("input_ids", "labels", IDS)
            bare.append([{x: row[x] for x in kept if x in row} for row in rows])
        has_targets = any(IDS in row for group in bare for row in group)
        packed = self._pack(bare, WeightedTargets() if has_targets else CrossEntropy())
        columns = (IDS,) if has_targets else ()

        def values(logits: Tensor, labels: Tensor, *targets: Tensor) -> Tensor:
            if targets:
                own = target_log_probs(logits, labels, *targets)
            else:
                own = label_log_probs(logits, labels)[:, None]
            if not top_k:
                return own
            top = torch.log_softmax(logits, -1).topk(top_k)
            # ids below 2^24 are exact in fp32
            return torch.cat([own, top.values, top.indices.to(own.dtype)], 1)

        num_own = packed.targets_T.shape[1] if has_targets else 1
        values_T = np.full((packed.num_tokens, num_own + 2 * top_k), np.nan, np.float32)
        for _, places, found in self._scorer.values(packed.packs, values, columns=columns):
            values_T[places] = found
        of_rows = packed.of_rows(values_T)
        own = [found[:, :num_own] if has_targets else found[:, 0] for found in of_rows]
        top_ids: list[np.ndarray] = []
        top_log_probs: list[np.ndarray] = []
        if top_k:
            top_log_probs = [found[:, num_own : num_own + top_k] for found in of_rows]
            top_ids = [found[:, num_own + top_k :].astype(np.int64) for found in of_rows]
        return Output(own, 0.0, 0.0, {}, packed.num_tokens, top_ids, top_log_probs)

    def forward_backward(self, groups: Iterable[Any], loss: Loss | None = None) -> Output:
        """Computes the loss and adds its gradients to those of the calls before.

        loss  None = that of the configuration
        Raises ValueError or ConfigError for rows that cannot be trained on, on every rank and
        before anything is computed.
        """
        if self._scorer is not self.engine:
            raise RuntimeError(
                "the reference is frozen, as teachers are: call forward_backward outside the block."
            )
        self._check_whole("forward_backward")
        loss_model = self.engine.model.loss_model
        loss = loss_model.loss if loss is None else self._checked(loss)
        groups = [[with_labels(row) for row in group] for group in _as_groups(groups)]
        packed = self._pack(groups, loss)
        recording = _Recording(loss)
        whole = list(self.engine.micro_batches(packed.packs, loss))
        num_items = self._count_items(whole, loss)
        if loss_model.balance is not None or loss_model.heads is not None:
            # it counts labels, and is divided by the items with the loss
            num_labels = self._count_items(whole, CrossEntropy())
            if num_labels:
                own = num_items / num_labels
                before = loss_model.items_per_label
                if self._has_gradients and not math.isclose(own, before, rel_tol=1e-6):
                    raise ValueError(
                        "model.router_aux_loss is a mean over the labels of a step, and this loss "
                        f"counts {own:.3g} items per label of these rows, {before:.3g} of the call "
                        "before: give all rows of a step to one forward_backward."
                    )
                loss_model.items_per_label = own
        self._num_calls += 1
        seed_all(self.config.seed, self._num_calls, self.mesh.token_rank)
        if loss_model.noise:
            loss_model.noise.seed = derive_seed(self.config.seed, self._num_calls, "noise")
        self._is_broken = True
        self.engine.model.module.train()  # an interrupted `sample` leaves it in eval mode
        placed = [self.engine.place(batch, loss).to(self.mesh.device) for batch in whole]
        sums = self.engine.forward_backward(placed, loss=recording)
        summed = self.engine.total(sums, of_model=False)
        totals = {name: float(value) for name, value in summed.items()}
        log_probs = self._of_rows(packed, recording.found)
        self._is_broken = False
        self._has_gradients = True
        total = totals.pop("loss")
        self._num_items += num_items
        self._loss += total
        parts = totals | loss.counts_of(groups)
        return Output(log_probs, total, num_items, parts, packed.num_tokens)

    def forward_backward_custom(self, groups: Iterable[Any], loss: CustomLoss) -> Output:
        """Adds the gradients of a function of the log-probabilities of all rows.

        loss  gets what `forward(groups).log_probs` gives, as tensors [length] (of `target_ids`
              [length, targets]), and returns a scalar, or (scalar, parts for the output)
        Two passes: one gives the log-probabilities, the second the gradients of their sum with the
        weights that autograd finds; exact on any mesh, as no rank needs another one's graph. The
        first is without dropout. It counts 1: `optim_step` divides by the number of these calls.
        """
        if self.engine.model.loss_model.balance is not None:
            raise ConfigError(
                "model.router_aux_loss is a mean over labels, and a custom loss counts none: set "
                "model.router_aux_loss=0."
            )
        given = [with_labels(row) for group in _as_groups(groups) for row in group]
        for number, row in enumerate(given):
            if unused := sorted(row.keys() - {"input_ids", "labels", IDS}):
                raise ValueError(
                    f"row {number} brings {', '.join(unused)}, which a custom loss does not get: "
                    "let the function hold them."
                )
        found = self.forward(given)
        weighted, value, parts = weights_of_gradient(given, found.log_probs, loss)
        is_many = any(IDS in row for row in given)
        out = self.forward_backward(weighted, WeightedTargets() if is_many else CrossEntropy())
        # the weights are gradients, and no number of labels
        self._num_items += 1.0 - out.num_items
        self._loss += value - out.loss
        return Output(found.log_probs, value, 1.0, parts, found.num_tokens + out.num_tokens)

    def optim_step(
        self,
        lr: float | None = None,
        max_grad_norm: float | None = None,
        divide_by: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
    ) -> Step:
        """Divides the gradients by what the losses have counted since the last step, and applies
        them. None is what the configuration sets, in every call.

        max_grad_norm  0 = not clipped
        divide_by      what the gradients are divided by in place of what was counted; 1 = their sum
        betas, eps, weight_decay  of this step; parameters that the configuration never decays
                       (biases and norms) are not decayed here either
        Raises RuntimeError without gradients, ConfigError for a value that the optimizer does not
        know.
        """
        self._check_whole("optim_step")
        if not self._has_gradients:
            raise RuntimeError(
                "optim_step without gradients: call forward_backward first; a step has used those "
                "of the calls before it."
            )
        divisor = self._num_items if divide_by is None else float(divide_by)
        if divide_by is None and divisor == 0:
            raise RuntimeError(
                "optim_step: the losses since the last step have counted nothing, so there is no "
                "mean to take: are all weights of the rows 0? divide_by=1 takes the sum."
            )
        if not math.isfinite(divisor) or divisor <= 0:
            raise ValueError(
                f"optim_step divides by {divisor:g}, which must be a finite number above 0: "
                "divide_by=1 takes the sum of the gradients."
            )
        _check_settings_of_step(lr, max_grad_norm, betas, eps, weight_decay)
        given = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
        of_step = {name: value for name, value in given.items() if value is not None}
        self._same([lr, max_grad_norm, divide_by, of_step], "settings of optim_step")
        groups = self.engine.optimizer.param_groups
        if unknown := sorted({name for name in of_step if any(name not in x for x in groups)}):
            raise ConfigError(
                f"optim_step({unknown[0]}=...): optimizer={type(self.engine.optimizer).__name__} "
                f"has no {unknown[0]}: leave it out, or use optimizer=adamw."
            )
        if max_grad_norm is None:
            max_grad_norm = self.config.training.max_grad_norm
        self.keep_snapshots()
        mean = self._loss / divisor
        loss_sum = torch.tensor(mean, device=self.mesh.device)
        before = [{name: group[name] for name in of_step} for group in groups]
        try:
            for group, rate, is_decayed in zip(groups, self._rates, self._is_decayed):
                group["lr"] = rate
                if lr is not None:
                    group["lr"] = lr * (rate / self._rates[0] if self._rates[0] else 1.0)
                group.update({x: y for x, y in of_step.items() if x != "weight_decay"})
                if weight_decay is not None and is_decayed:
                    group["weight_decay"] = weight_decay
            norm = float(self.engine.step(loss_sum, max_grad_norm, divisor))
        finally:
            for group, values in zip(groups, before):
                group.update(values)
        self.num_steps += 1
        self.weights_stamp += 1
        is_skipped = not math.isfinite(norm + mean)
        step = Step(self.num_steps, mean, norm, divisor, is_skipped)
        self.zero_grad()
        return step

    def zero_grad(self) -> None:
        """Drops the gradients since the last step, also of a call that was interrupted."""
        self.engine.optimizer.zero_grad()
        self._num_items = 0.0
        self._loss = 0.0
        self._has_gradients = self._is_broken = False

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int = 1,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        batch_size: int = 64,
        seed: int = 0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Stop = None,
    ) -> list[list[list[int]]]:
        """Draws answers to each prompt (token ids) from the weights as they are, whatever the
        model's generation_config.json says: [prompt][sample] -> ids, with the end token where the
        model has ended. See `Request` for how; `draw` gives log-probabilities, too.

        seed  of this call: another one gives other answers
        """
        requests = requests_of(
            prompts, num_samples, max_new_tokens, temperature, seed, top_p, top_k, stop
        )
        return [[ids for ids, _ in answers] for answers in self._draw(requests, batch_size)]

    def draw(self, requests: Sequence[Request], batch_size: int = 64) -> list[list[Answer]]:
        """Draws the answers to requests that may differ in everything, [request][sample], and
        computes their log-probabilities as `forward` does.

        An answer follows from its request alone: what else is in the batch does not change it.
        """
        drawn = self._draw(requests, batch_size)
        scored = self.score_answers(requests, [[ids for ids, _ in answers] for answers in drawn])
        return [
            [Answer(ids, own, is_ended) for (ids, is_ended), own in zip(answers, of_request)]
            for answers, of_request in zip(drawn, scored)
        ]

    def score_answers(
        self, requests: Sequence[Request], answers: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[np.ndarray]]:
        """Returns the log-probabilities of the answers' ids, [request][sample], with one `forward`
        in which the answers to a prompt are a group.
        """
        if not requests:
            return []
        groups = [rows_of_answers(x.prompt, of_one) for x, of_one in zip(requests, answers)]
        found = iter(self.forward(groups).log_probs)
        return [[next(found)[-len(ids) :] for ids in of_one] for of_one in answers]

    @property
    def most_tokens(self) -> int:
        """Returns how long a prompt and its answer may be: a pack, and the model's positions."""
        return min(self._packer.packed_sequence_size + 1, self._positions)

    @property
    def _positions(self) -> int:
        """Returns how many positions the model has whose `forward` and `sample` it is now."""
        text = self._scorer.model.loss_model.lm.config.get_text_config()
        return config_value(text, "max_position_embeddings", None) or 2**31

    def check_requests(self, requests: Sequence[Request]) -> list[int]:
        """Returns the ids that end an answer; raises ValueError for requests that nothing can be
        drawn from, or that differ between ranks.
        """
        lm = self._scorer.model.loss_model.lm
        ends = stop_ids(lm, self.tokenizer, self.config.tokenize.template_kwargs)
        limits = (embedding_rows(lm), self.most_tokens)

        def check() -> str:
            for number, request in enumerate(requests):
                request.check(number, *limits)
                request.stop_parts(ends)
            whole = json.dumps([vars(request) for request in requests], default=_as_json)
            return hashlib.sha256(whole.encode()).hexdigest()

        _compare(self._ranks.on_all(check), "prompts")
        return ends

    def _draw(
        self, requests: Sequence[Request], batch_size: int
    ) -> list[list[tuple[list[int], bool]]]:
        """Returns ids, and whether something has ended them; every rank gets all answers."""
        model = self._scorer.model
        mesh = self.mesh
        ends = self.check_requests(requests)
        if not requests:
            return []
        drawn = draw_answers(
            model, mesh, requests, batch_size, ends, self.tokenizer, self.config.seed
        )
        assert drawn is not None  # nobody stops it
        return drawn

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, `forward` and `sample` are those of the start model: without the adapter, or a
        second, frozen model, which is loaded when it is first asked for.
        """
        adapter = self.built.adapter
        before = self._scorer
        try:
            if adapter and not adapter.is_continued:
                self._scorer = Engine(self.mesh, self.engine.model, self.engine.decided)
                with adapter.wrapped.disable_adapter():
                    yield
            else:
                self._scorer = self._frozen()
                yield
        finally:
            self._scorer = before

    @contextmanager
    def teacher(self, pretrained: str | Path, revision: str | None = None) -> Iterator[None]:
        """Inside, `forward`, `draw` and `sample` are those of another model: frozen, its weights in
        the compute dtype, on the same mesh; loaded when it is first asked for, and kept.

        pretrained  a folder or hub name
        Raises ConfigError for one with another tokenizer.
        """
        self._same([str(pretrained), revision], "teachers")
        before = self._scorer
        try:
            self._scorer = self._teacher(str(pretrained), revision)
            yield
        finally:
            self._scorer = before

    def snapshot(self) -> Snapshot:
        """Returns the weights as they are now, for `using`: copied when they are about to change,
        if somebody still holds the snapshot then.
        """
        taken = Snapshot()
        self._snapshots.add(taken)
        return taken

    @contextmanager
    def using(self, snapshot: Snapshot) -> Iterator[None]:
        """Inside, `forward`, `draw` and `sample` are those of a snapshot of this client."""
        if snapshot.values is None:
            yield
            return
        trained = self._trained()
        before = copies(trained)
        put_back(trained, snapshot.values)
        try:
            yield
        finally:
            put_back(trained, before)

    def leave(self) -> Seat:
        """Returns what this client has trained: weights, optimizer, gradients and counts, for
        `take`; the client goes on with it until then.
        """
        self.keep_snapshots()
        optimizer = self.engine.optimizer
        parameters = self._trained()
        counts = {name: vars(self)[name] for name in _COUNTS}
        return Seat(copies(parameters), [p.grad for p in parameters], dict(optimizer.state), counts)

    def take(self, seat: Seat) -> None:
        """Goes on with what `leave` has returned: several adapters of one model take turns, each
        with an optimizer of its own. What the client held is gone unless it was left.
        """
        self.keep_snapshots()
        self.weights_stamp += 1
        parameters = self._trained()
        put_back(parameters, seat.values)
        for parameter, gradient in zip(parameters, seat.gradients):
            parameter.grad = gradient
        state = self.engine.optimizer.state
        state.clear()
        state.update(seat.optimizer)
        vars(self).update(seat.counts)

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.engine.model.module.parameters() if p.requires_grad]

    def keep_snapshots(self) -> None:
        """Copies the weights for snapshots that are still theirs: they are about to change."""
        waiting = [taken for taken in self._snapshots if taken.values is None]
        if waiting:
            values = copies(self._trained())
            for taken in waiting:
                taken.values = values
        self._snapshots.clear()

    # ---------------------------------------------- to the disk and back
    def save_state(
        self,
        extra: Any = None,
        name: str | Path | None = None,
        overwrite: bool = False,
        optimizer: bool = True,
        with_pending: bool = False,
    ) -> Path:
        """Writes a checkpoint of the run's folder, complete or not at all, and waits for it;
        returns its path.

        extra      JSON that `load_state` returns: where a loop stands
        name       of a state that is kept beside the run's checkpoints until somebody deletes it; a
                   path with a "/" is a folder of one's own
        overwrite  replaces the state of that name, which stays until the new one is whole
        optimizer  False = the weights alone, of a state with a name
        with_pending  also with gradients that no step has taken, which the state does not hold
        Raises RuntimeError with gradients that no step has taken, as a checkpoint has none, and
        when the checkpoint could not be written; ConfigError in the folder of other settings.
        """
        self._check_whole("save_state")
        if self._has_gradients and not with_pending:
            raise RuntimeError(
                "save_state between forward_backward and optim_step: a checkpoint holds no "
                "gradients: call optim_step, or zero_grad to drop them."
            )
        saver = self._folder.open()
        self._folder.write_config()
        if name is not None:
            return self._save_as(saver, self._folder.path_of(name), extra, overwrite, optimizer)
        if overwrite or not optimizer:
            raise ValueError("overwrite=True and optimizer=False are for a state with a name=...")
        if saver.holds(self.num_steps) and extra != self._saved_extra:
            raise RuntimeError(
                f"save_state: step {self.num_steps} is saved already, with another `extra`: save "
                "once a step."
            )
        model = self.engine.model.loss_model
        whole = self._state_of(extra)
        if not saver.save(self.num_steps, model, self.engine.optimizer, whole, wait=True):
            raise RuntimeError(
                f"step {self.num_steps} is not saved: the line above says why; the newest "
                f"checkpoint is {saver.newest_name or 'none'}."
            )
        assert saver.newest is not None
        self._saved_extra = extra
        return saver.newest

    def _state_of(self, extra: Any) -> dict[str, Any]:
        own = {"step": self.num_steps, "calls": self._num_calls, "extra": extra}
        return {"client": own, "sources": self._folder.guards.state.sources}

    def _save_as(
        self, saver: Checkpointer, path: Path, extra: Any, overwrite: bool, optimizer: bool
    ) -> Path:
        self._same([str(path), overwrite, optimizer], "names of a state")
        if self._ranks.on_first(path.exists) and not overwrite:
            raise FileExistsError(
                f"{path} is there already: a state keeps its name until it is deleted: take "
                "another name, or overwrite=True."
            )
        of_steps = self.engine.optimizer if optimizer else None
        model = self.engine.model.loss_model
        saver.save_as(path, model, of_steps, self._state_of(extra), overwrite)
        return path

    def load_state(self, name: str | Path | None = None, optimizer: bool = True) -> Any:
        """Takes weights, optimizer and counts from the newest checkpoint of the run's folder that
        loads; returns its `extra`, None without a checkpoint.

        name       of a state that `save_state` has named; a path with a "/" is a folder, also that
                   of another run of the same model
        optimizer  False = its weights alone: the counts begin at 0
        Raises ConfigError where the folder has checkpoints and none loads, where it is a recipe's,
        and for other settings or files than the checkpoint's, unless checkpoint.accept_changes is
        set.
        """
        saver = self._folder.open()
        self.keep_snapshots()
        self.weights_stamp += 1
        model = self.engine.model.loss_model
        if name is not None:
            return self._load_from(saver, self._folder.path_of(name), optimizer)
        if not optimizer:
            raise ValueError("optimizer=False is for a state with a name=...")
        state = saver.load_newest(model, self.engine.optimizer, self._folder.check_state)
        self.zero_grad()
        self._folder.write_config()
        if state is None:
            return None
        of_client = state["client"]
        self.num_steps = of_client["step"]
        self._num_calls = of_client["calls"]
        self._saved_extra = of_client["extra"]
        return self._saved_extra

    def _load_from(self, saver: Checkpointer, path: Path, optimizer: bool) -> Any:
        self._same([str(path), optimizer], "names of a state")
        of_steps = self.engine.optimizer if optimizer else None
        state = saver.load_from(
            path, self.engine.model.loss_model, of_steps, self._folder.check_sources
        )
        if not optimizer:
            self.engine.optimizer.state.clear()
        self.zero_grad()
        own = state["client"]
        self.num_steps = own["step"] if optimizer else 0
        self._num_calls = own["calls"] if optimizer else 0
        self._saved_extra = None
        return own["extra"]

    def read_snapshot(self, name: str | Path) -> Snapshot:
        """Returns the weights of a state with a name, for `using`; the client's own stay."""
        self.keep_snapshots()
        saver = self._folder.open()
        trained = self._trained()
        before = copies(trained)
        path = self._folder.path_of(name)
        self._same(str(path), "names of a state")
        try:
            saver.load_from(path, self.engine.model.loss_model, None, self._folder.check_sources)
            return Snapshot(copies(trained))
        finally:
            put_back(trained, before)

    def save_weights(self, folder: str | Path) -> None:
        """Writes a folder that `from_pretrained`, or an inference server, loads: the model, or the
        adapter; complete or not at all.
        """
        built = self.built
        path = Path(folder)
        self._same(str(path), "names of a folder")
        model = built.model
        if built.adapter:
            export_adapter(
                path,
                model.loss_model,
                built.adapter,
                self.tokenizer,
                self.num_steps,
                self.config.dataset,
            )
            return
        export_hf(
            path,
            model.loss_model,
            self.tokenizer,
            built.decided.model.dtype,
            model.logits,
            self.num_steps,
            model.sharded_over,
            self.config.dataset,
        )

    def own_folder(self, name: str) -> Path:
        """Returns a folder inside the run's, which this client takes for it."""
        self._folder.open()
        return self._folder.guards.folder.path / name

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and whole tensor of each weight, one at a time, as `save_weights` writes
        them; of an adapter its own. Every rank iterates to the end.
        """
        built = self.built
        if not built.adapter:
            lm = built.model.loss_model.lm
            yield from whole_weights(lm, stored_dtypes(lm, built.decided.model.dtype))
            return
        for name, parameter in built.model.loss_model.lm.named_parameters():
            if parameter.requires_grad:
                value = parameter.detach()
                name = "base_model.model." + name.replace(".default.", ".")
                yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def close(self) -> None:
        """Gives the run's folder back, which a later save takes again; the groups of ranks stay
        until the process ends.
        """
        self._folder.close()

    # ---------------------------------------------- the pieces
    def _frozen(self) -> Engine:
        """Returns the start model, loaded once more and frozen."""
        if self._reference is None:
            mesh = self.mesh
            parts = as_start(self.built.decided)
            frozen = decide(parts, self.tokenizer, mesh.shape, mesh.device, trains=False)
            seed = self.config.seed
            built = build_model(frozen, self.tokenizer, mesh, trains=False, seed=seed)
            self._reference = Engine(mesh, built.model, frozen)
        return self._reference

    def _teacher(self, pretrained: str, revision: str | None) -> Engine:
        """Returns a frozen second model, loaded once."""
        mesh = self.mesh
        if (pretrained, revision) not in self._teachers:
            model = CausalLM(pretrained=pretrained, revision=revision, key="teacher")
            model.resolve_model_config({})
            parts = as_teacher(self.built.decided, model)
            check_same_vocabulary(parts, self.tokenizer)
            frozen = decide(parts, self.tokenizer, mesh.shape, mesh.device, trains=False)
            built = build_model(frozen, self.tokenizer, mesh, trains=False)
            self._teachers[pretrained, revision] = Engine(mesh, built.model, frozen)
        return self._teachers[pretrained, revision]

    def _pack(self, groups: list[list[Any]], loss: Loss) -> PackedRows:
        """Checks that the ranks were called with the same rows and loss, and packs them."""
        lm = self._scorer.model.loss_model.lm
        limits = (self._packer.packed_sequence_size, embedding_rows(lm), self._positions)

        rows: list[list[Row]] = []

        def check() -> tuple[str, str]:
            rows.extend(check_rows(loss.complete(groups), loss, *limits))
            digest = hashlib.sha256()
            for row in (row for group in rows for row in group):
                for name, values in row.items():
                    digest.update(f"{name} {values.shape}".encode() + values.tobytes())
            return digest.hexdigest(), _description(loss)

        found = self._ranks.on_all(check)
        _compare([of_loss for _, of_loss in found], "losses")
        _compare([of_rows for of_rows, _ in found], "rows")
        shape = self.mesh.shape
        size = self.config.training.micro_batch_size
        is_compiled = self.built.compiled.partition(":")[0] != "off"
        grain = 0 if is_compiled else GRAIN_TOKENS * shape.cp
        return pack_rows(rows, loss, self._packer, shape.dp * size, grain)

    def _count_items(self, micro_batches: Iterable[ThdBatch], loss: Loss) -> float:
        """Returns what the loss counts in whole streams of all ranks."""
        mesh = self.engine.mesh
        # the ranks of cp and tp read the same streams
        own = torch.tensor(sum(map(loss.num_items, micro_batches)), dtype=torch.float64)
        return float(mesh.sum(own.to(mesh.device))) / mesh.shape.cp

    def _of_rows(self, packed: PackedRows, found: list[tuple[Tensor, Tensor]]) -> list[np.ndarray]:
        """Brings (places, values) of all ranks to the rows."""
        width = packed.targets_T.shape[1:]
        values_T = np.full((packed.num_tokens, *width), np.nan, np.float32)
        own = [torch.cat([x.cpu() for x in parts]).numpy() for parts in zip(*found)]
        for places, values in self.mesh.gather(own):
            values_T[places] = values
        return packed.of_rows(values_T)

    def _checked(self, loss: Any) -> Loss:
        loss = checked_loss(loss)
        if loss.needs_teacher and self.engine.decided.teacher is None:
            raise ConfigError(
                f"loss={type(loss).__name__} needs a teacher: make the client with "
                "teacher=pretrained teacher.pretrained=... and this loss."
            )
        return loss

    def _check_whole(self, doing: str) -> None:
        if self._is_broken:
            raise RuntimeError(
                f"{doing}: the last forward_backward did not end, and its gradients are those of "
                "some rows only: call zero_grad, then repeat the calls since the last step."
            )

    def _same(self, value: object, what: str) -> None:
        _compare(self._ranks.on_all(lambda: json.dumps(value, default=str)), what)


class _Recording(Loss):
    """A loss that also keeps the log-probabilities of its labels, and where they stand."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.columns = loss.columns | {"row_place"}  # type: ignore[misc]
        for name in (
            "required",
            "needs_logits",
            "needs_documents",
            "needs_teacher",
            "num_items",
            "example_columns",
        ):
            setattr(self, name, getattr(loss, name))
        self.found: list[tuple[Tensor, Tensor]] = []

    def __call__(self, inputs: LossInputs) -> LossOutput:
        output = self.loss(inputs)
        with torch.no_grad():  # most losses have computed them
            log_probs_R = vars(inputs).get("target_log_probs")
            if log_probs_R is None:
                log_probs_R = inputs.log_probs().detach()
        if "row_place" in inputs.columns:
            self.found.append((inputs.columns["row_place"], log_probs_R))
        return output


def _is_decayed(group: dict[str, Any]) -> bool:
    """Is a weight decay for this group, by the rule of `param_groups`: matrices, whatever the
    configured decay is?
    """
    return bool(group.get("weight_decay")) or any(p.ndim > 1 for p in group["params"])


def _check_settings_of_step(
    lr: float | None,
    max_grad_norm: float | None,
    betas: tuple[float, float] | None,
    eps: float | None,
    weight_decay: float | None,
) -> None:
    """Raises ValueError for a number that no optimizer takes: a step by it ruins the weights."""
    at_least_0 = {
        "lr": lr,
        "max_grad_norm": max_grad_norm,
        "eps": eps,
        "weight_decay": weight_decay,
    }
    for name, value in at_least_0.items():
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"optim_step({name}={value:g}) must be a finite number of at least 0.")
    for beta in betas or ():
        if not 0 <= beta < 1:
            raise ValueError(f"optim_step: betas={betas} must each be at least 0 and below 1.")


def _as_groups(groups: Iterable[Any]) -> list[list[Any]]:
    """Returns lists of rows; a row that stands alone is a group."""
    if isinstance(groups, Mapping):
        raise TypeError("one row was given where a list of rows or groups belongs: [row].")
    found = [[group] if isinstance(group, Mapping) else list(group) for group in groups]
    return [group for group in found if group]


def _check_settings(config: Config, parts: RunParts) -> None:
    """Raises ConfigError for settings of which the client would make something else."""
    parts.packer.keep_whole("the client keeps rows whole", ())
    if parts.model.head == "score":
        raise ConfigError(
            "model.head=score: the client's losses are of tokens",
            key="model.head",
            cure="train a score head with automodel-lite train --config-name classify or reward",
        )
    if config.training.ema_decay:
        raise ConfigError(
            f"training.ema_decay={config.training.ema_decay}: the client keeps no average of the "
            "weights: set training.ema_decay=0."
        )
    if parts.model.mtp_loss:
        raise ConfigError(
            f"model.mtp_loss={parts.model.mtp_loss}: the client's losses train no heads that "
            "predict further tokens: set model.mtp_loss=0."
        )


def _as_json(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else list(value)  # type: ignore[call-overload]


def _description(loss: Loss) -> str:
    """Returns what tells a loss from others: its class and the numbers that it was made with."""
    numbers = {
        name: value
        for name, value in vars(loss).items()
        if isinstance(value, bool | int | float | str)
    }
    return f"{type(loss).__module__}.{type(loss).__qualname__} {numbers}"


def _compare(digests: list[str], what: str) -> None:
    if len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise ValueError(
            f"rank {other} was called with other {what} than rank 0: under torchrun every rank "
            "makes the same calls with the same rows (draw them from one seed, or send them)."
        )
