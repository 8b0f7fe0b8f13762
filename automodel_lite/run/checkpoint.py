"""Saving and loading a run: complete or absent, sharded, without pickle, in the foreground or
behind the training.

    save      stage (copy, asynchronous only) -> temporary folder -> shards of every rank ->
              manifest -> rename
    load      newest complete one -> checksums -> shards; if it does not load, the one before it

A save that fails (no space, a network disk that is gone) is a warning: it leaves nothing behind and
is retried.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, RunStoppedError, one_line
from automodel_lite.parallel.control import Control
from automodel_lite.redact import scrub
from automodel_lite.run import checkpoint_folder as on_disk
from automodel_lite.run import durable
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.sharded_files import (
    INDEX,
    BrokenCheckpointError,
    OtherTensorsError,
    check_fits,
    index_text,
    own_parts,
    read_index,
    read_tensors,
    write_parts,
)
from automodel_lite.run.weight_files import Tensors

JsonState = dict[str, Any]
_MODEL = "model."
_OPTIMIZER = "optimizer.state."  # and the parameter's name, and that of its state
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True)
_BROKEN = (SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError)


@dataclass
class _Save:
    """A save under way; the fields below are set by the thread that writes."""

    step: int
    path: Path
    began: float  # time.monotonic()
    num_bytes: int
    replaces: bool = False
    error: Exception | None = None
    is_done: bool = False
    thread: threading.Thread | None = None


@dataclass(frozen=True)
class _Contents:
    """What a rank writes: its parts of the tensors, and the small files, which rank 0 writes.

    num_bytes  of the whole tensors
    """

    parts: Tensors
    texts: dict[str, str]
    num_bytes: int


@dataclass
class Checkpointer:
    """Saves and loads; every rank calls every method. A save in the background has control messages
    of its own.
    """

    run: RunFolder
    run_config: Config
    control: Control
    saver: Control
    say: Callable[[str], None]
    # raises RunStoppedError when the folder is another job's by now
    fence: Callable[[], None] = lambda: None
    # is called with each checkpoint that is complete, as its save is finished
    saved: Callable[[Path], None] = lambda path: None
    newest: Path | None = None  # loaded or written by this process
    failed_step: int | None = None  # of the last save, when it failed
    longest_s: float = 0.0  # of a save, from its start to the rename
    _is_pending: bool = False
    _current: _Save | None = None
    _copies: Tensors = field(default_factory=dict)  # see _stage

    def __post_init__(self) -> None:
        # of this process' temporary folders: a job that was thought dead has others
        self._token = self.control.on_first(lambda: uuid.uuid4().hex[:8])

    @property
    def newest_name(self) -> str | None:
        return self.newest.name if self.newest else None

    # ---------------------------------------------- saving
    def is_due(self, step: int, is_planned: bool) -> bool:
        """Planned, pending since a step that could not be saved, or failed a while ago."""
        pause_steps = max(1, self.run_config.checkpoint.every_steps // 10)
        if self.failed_step is not None:
            is_planned |= step >= self.failed_step + pause_steps
        self._is_pending |= is_planned
        return self._is_pending

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: JsonState,
        *,
        wait: bool = False,
    ) -> bool:
        """Starts a checkpoint (`mode=sync`, or `wait`: writes it); returns whether it is on disk.
        Reports a failure.
        """
        began = time.monotonic()
        self.finish()
        path = self.run.checkpoints / on_disk.name_of(step)
        if self.newest == path:
            return True
        contents = self._contents(model, optimizer, state)
        current = _Save(step, path, began, contents.num_bytes)
        self._current = current
        self._is_pending = False

        # In the foreground the weights stay as they are until they are written.
        if self.run_config.checkpoint.mode == "sync" or wait:
            self._write(current, contents)
            self.finish()
            return self.newest == path

        # In the background the training goes on, so the thread writes copies.
        try:
            contents = replace(contents, parts=self._stage(contents.parts))
        except (OSError, RuntimeError) as error:
            # A host without room for a copy: the thread starts anyway, so that the other ranks
            # learn of it.
            current.error = error
        current.thread = threading.Thread(target=self._write, args=(current, contents), daemon=True)
        current.thread.start()
        return self.newest == path

    def save_as(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        state: JsonState,
        replaces: bool = False,
    ) -> None:
        """Writes a checkpoint to a folder of its own, which no rule deletes, and waits for it.

        optimizer  None = the weights alone
        replaces   one of that name, which stays until the new one is whole
        Raises RuntimeError where it could not be written.
        """
        self.finish()
        contents = self._contents(model, optimizer, state)
        current = _Save(0, path, time.monotonic(), contents.num_bytes, replaces)
        self.saver.on_first(lambda: on_disk.restore_replaced(path))
        self._write(current, contents)
        if isinstance(current.error, RunStoppedError):
            raise current.error
        if current.error is not None:
            raise RuntimeError(f"{path} is not saved: {scrub(_cause(current.error))}")

    def load_from(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        check: Callable[[JsonState], None] = lambda state: None,
    ) -> JsonState:
        """Restores what `save_as` has written, and returns its JSON state.

        optimizer  None = the weights alone, of any checkpoint
        Raises ConfigError for a folder that holds none, or one that does not load.
        """
        self.control.on_first(lambda: on_disk.restore_replaced(path))
        if reason := self.control.on_first(lambda: on_disk.why_incomplete(path)):
            raise ConfigError(
                f"{path} holds no complete state ({reason}): name one that was saved."
            )
        newest = self.newest
        try:
            return self._load(path, model, optimizer, check)
        except ConfigError:
            raise
        except _BROKEN as error:
            raise ConfigError(
                f"{path} does not load: {_cause(error)}: name a state of the same model, adapter "
                "and optimizer."
            ) from error
        finally:
            self.newest = newest

    def _contents(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, state: JsonState
    ) -> _Contents:
        """Returns what this rank writes. The texts are as of now: what the training changes later
        stays out of them.
        """
        tensors, scalars = flat_state(model, optimizer)
        parts, layouts = own_parts(tensors, self.saver.rank, self.saver.world_size)
        texts = {
            f"{on_disk.TENSORS}/{INDEX}": index_text(layouts),
            on_disk.STATE: json.dumps({**state, "optimizer_scalars": scalars}, indent=1),
            "config.yaml": self.run.config_text,
        }
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return _Contents(parts, texts, num_bytes)

    @torch.no_grad()
    def _stage(self, parts: Mapping[str, Tensor]) -> Tensors:
        """Returns copies on the host for the thread that writes; their memory is taken once, and
        may not be there.
        """
        for key, part in parts.items():
            if key not in self._copies:
                # page-locked memory takes a GPU's copy at 25 GB/s and more, other at 3 to 6; to
                # lock it takes longer
                self._copies[key] = torch.empty(
                    part.shape, dtype=part.dtype, pin_memory=part.is_cuda
                )
            self._copies[key].copy_(part, non_blocking=True)
        if any(part.is_cuda for part in parts.values()):
            # the next step changes the weights, and the writer reads the copies: both wait for the
            # last of them
            torch.cuda.current_stream().record_event().synchronize()
        return self._copies

    def holds(self, step: int) -> bool:
        """Is the newest checkpoint, loaded or written, of this step?"""
        return self.newest == self.run.checkpoints / on_disk.name_of(step) and self.newest.is_dir()

    def rate(self, val_loss: float | None, rating: on_disk.Rating | None) -> None:
        """Records the validation that the loaded checkpoint was saved before, for `keep_best`."""
        assert self.newest is not None
        path = self.newest / on_disk.RATING
        text = json.dumps({"val_loss": val_loss, "rating": rating and rating.to_json()})
        self.control.on_first(lambda: durable.write_atomically(path, text))

    def is_busy(self) -> bool:
        """Is this rank still writing?"""
        return self._current is not None and not self._current.is_done

    def finish(self) -> None:
        """Waits for a pending save and reports its outcome. Ranks call it at the same step."""
        current = self._current
        self._current = None
        if current is None:
            return
        if current.thread:
            current.thread.join()
        took_s = time.monotonic() - current.began
        self.longest_s = max(self.longest_s, took_s)
        if isinstance(current.error, RunStoppedError):
            raise current.error
        if current.error is None:
            self.newest = current.path
            self.failed_step = None
            self.saved(current.path)
            if self.control.is_first and self.run.status.is_file():
                with suppress(OSError):
                    self.run.write_status("running", current.step, checkpoint=current.path.name)
            gib = current.num_bytes / 2**30
            size = f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 2**10:.1f} MiB"
            self.say(f"{current.step:7d}  saved {current.path.name} ({size}, {took_s:.1f} s)")
        else:
            self.failed_step = current.step
            text = scrub(_cause(current.error))
            self.say(
                f"{current.step:7d}  WARNING: step {current.step} is not saved: {text}; will retry"
            )

    def _write(self, current: _Save, contents: _Contents) -> None:
        """Writes a checkpoint from its temporary folder to its name, in this thread; leaves the
        outcome in `current`, alike on all ranks.

        Each step ends on all ranks, or raises on all of them: `on_first` and `on_all` pass errors
        on. So no rank waits for one that has failed.
        """
        temporary = current.path.with_name(f".tmp-{self._token}-{current.path.name}")

        def begin() -> None:
            self.fence()
            on_disk.begin(temporary, current.num_bytes)

        def write() -> tuple[str, durable.Digests] | None:
            if current.error is not None:
                raise current.error
            return write_parts(temporary / on_disk.TENSORS, self.saver.rank, contents.parts)

        def complete() -> None:
            on_disk.complete(
                temporary, current.path, contents.texts, digests, self.fence, current.replaces
            )

        def clean_up() -> None:
            self.fence()
            shutil.rmtree(temporary, ignore_errors=True)

        try:
            # 1. Rank 0 makes the temporary folder, when there is room on the disk.
            self.saver.on_first(begin)
            # 2. Every rank writes its parts; ranks without any have no file and no digests.
            digests = dict(filter(None, self.saver.on_all(write)))
            # 3. Rank 0 writes the small files and the manifest, and renames the folder.
            self.saver.on_first(complete)
        except Exception as error:  # any failure: the run continues without this checkpoint
            current.error = error
            with suppress(Exception):  # a rank is gone: the training finds out
                try:
                    self.saver.on_first(clean_up)
                except RunStoppedError as lost:
                    # The folder is another job's by now, on all ranks: that is why the save failed.
                    current.error = lost
        else:
            # 4. Rank 0 deletes what no rule keeps. The new checkpoint is there, whatever happens.
            try:
                if self.saver.is_first and current.path.parent == self.run.checkpoints:
                    on_disk.delete_old(self.run.checkpoints, self.run_config.checkpoint)
            except OSError as error:
                self.say(
                    f"WARNING: old checkpoints could not be deleted ({error}); will retry after "
                    "the next save"
                )
        finally:
            current.is_done = True

    # ---------------------------------------------- loading
    def load_newest(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        check: Callable[[JsonState], None] = lambda state: None,
    ) -> JsonState | None:
        """Restores the newest checkpoint that is complete and loads, and returns its JSON state;
        None without any. Reports which it skipped and why; raises ConfigError when there are some
        and none loads.

        check  is called with the state before a tensor is changed; its ConfigError is raised here
        """
        # 1. List the complete ones, newest first; incomplete ones are named, not tried.
        self.control.on_first(lambda: on_disk.clean(self.run.checkpoints))
        complete, skipped = self.control.on_first(lambda: on_disk.survey(self.run.checkpoints))
        for sentence in skipped:
            self.say(sentence)

        # 2. Load the first one that can be loaded.
        reasons = []
        for path in complete:
            try:
                state = self._load(path, model, optimizer, check)
            except ConfigError:
                raise
            except _BROKEN as error:
                # Other tensors after a change of the configuration are no damage: an older
                # checkpoint would not fit either.
                has_other_tensors = isinstance(error, OtherTensorsError)
                if has_other_tensors and (changes := self.run.changes(self.run_config)):
                    name = self.run.display_path
                    raise ConfigError(
                        f"{path.name} cannot be continued with what has changed "
                        f"({', '.join(changes)}): {error}. Change it back; or begin a new run with "
                        f"its weights: automodel-lite export {name}, then "
                        f"model.pretrained={name} name=... ."
                    ) from error
                reasons.append(f"{path.name} does not load: {_cause(error)}")
                self.say(reasons[-1])
                continue
            # Those before it are broken: no rule may count them as a checkpoint that is kept.
            for broken in complete[: len(reasons)]:
                self.control.on_first(partial(on_disk.set_aside, broken))
            return state

        # 3. None loads. With some there, starting from step 0 would hide the loss of the run.
        if reasons := [*reasons, *skipped]:
            raise ConfigError(
                f"{self.run.checkpoints} has no loadable checkpoint ({'; '.join(reasons)}): "
                "restore one from a backup, move the folder away to start from step 0, or start a "
                "new run with name=... ."
            )
        return None

    def _load(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        check: Callable[[JsonState], None],
    ) -> JsonState:
        self._check_bytes(path)
        state: JsonState = self.control.on_first(lambda: durable.read_json(path / on_disk.STATE))
        check(state)
        tensors, _ = flat_state(model, optimizer)

        def read() -> None:
            index = read_index(path / on_disk.TENSORS)
            if optimizer is None:
                index = {name: x for name, x in index.items() if name.startswith(_MODEL)}
            saved = _with_gradients(tensors, index)
            check_fits(index, saved)
            read_tensors(path / on_disk.TENSORS, index, saved)

        self.control.on_all(read)
        # all tensors are the model's and the optimizer's own, and loaded in place
        scalars = state.pop("optimizer_scalars")
        if scalars and optimizer is not None:
            values: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=_FLAT))
            set_optimizer_state_dict(model, optimizer, values | scalars, options=_FLAT)
        self.newest = path
        return state

    def load_weights(self, path: Path, model: nn.Module) -> None:
        """Restores the weights of a checkpoint alone; raises BrokenCheckpointError for one that is
        not whole.
        """
        self._check_bytes(path)
        self.control.on_all(lambda: load_weights(path, model))

    def _check_bytes(self, path: Path) -> None:
        shares = self.control.on_all(
            lambda: on_disk.broken_files(path, self.control.rank, self.control.world_size)
        )
        if broken := [name for share in shares for name in share]:
            raise BrokenCheckpointError(f"a file does not match its checksum ({broken[0]})")


def _with_gradients(tensors: Tensors, index: Iterable[str]) -> Tensors:
    """Returns the tensors without the optimizer's of parameters that it has never stepped: no loss
    reaches them, as a vision tower's pooling head, and a new optimizer has zeros for them, too.
    """
    stepped = {name.rpartition(".")[0] for name in index if name.startswith(_OPTIMIZER)}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not stepped or not name.startswith(_OPTIMIZER) or name.rpartition(".")[0] in stepped
    }


def flat_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[Tensors, JsonState]:
    """Tensors by name, and the optimizer's other values that are state (settings are the
    configuration's).
    """
    tensors = {f"{_MODEL}{name}": value for name, value in weights_of(model).items()}
    scalars: JsonState = {}
    if optimizer is None:
        return tensors, scalars
    for name, value in get_optimizer_state_dict(model, optimizer, options=_FLAT).items():
        if isinstance(value, Tensor):
            tensors[f"optimizer.{name}"] = value
        elif not name.startswith("param_groups."):
            scalars[name] = value
    return tensors, scalars


def weights_of(model: nn.Module) -> Tensors:
    """Returns what is trained, and the frozen weights of a model from scratch, which no file has;
    of tied weights one copy, chosen by identity, so that all ranks find the same one.
    """
    is_loaded = any(
        isinstance(module, transformers.PreTrainedModel) and module.name_or_path
        for module in model.modules()
    )
    options = StateDictOptions(ignore_frozen_params=is_loaded, strict=False)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            state.pop(name, None)
    return state


def load_weights(path: Path, model: nn.Module) -> None:
    """Restores the weights alone; with training.ema_decay their average."""
    index = read_index(path / on_disk.TENSORS)
    stored = {}
    for name, weight in weights_of(model).items():
        average = f"optimizer.state.{name}.ema"
        stored[average if average in index else f"model.{name}"] = weight
    if missing := sorted(stored.keys() - index.keys()):
        raise BrokenCheckpointError(
            f"{path}: {len(missing)} weights are missing, {missing[0]} first"
        )
    read_tensors(path / on_disk.TENSORS, index, stored)


def _cause(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
