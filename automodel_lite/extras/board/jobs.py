"""Stopping a run, and starting its own command again.

A run's folder may be a stranger's, so nothing in it is believed. A process gets a signal only if it
has the run's lock open. A command is started only if it trains with this package and nothing else:
it is taken apart and put together again around our own interpreter, without a shell, and what only
a person may type (a permission, a place that results go to) must not be in it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from automodel_lite.cli.line import read_line
from automodel_lite.config.components import IS_INSTALLED, PACKAGE, flatten
from automodel_lite.config.permissions import needs_the_command_line
from automodel_lite.errors import ConfigError
from automodel_lite.run.folder import RunFolder, json_object
from automodel_lite.run.lock import Holder, RunLock

_SCREEN = "board.log"  # in logs/: what a started command prints
_SHOWN_BYTES = 8_000  # of its end
_ANSWERED_WITHIN_S = 120.0  # of the settings of a command
_TORCHRUN_SWITCHES = ("--standalone",)
_TORCHRUN_VALUES = ("--nproc-per-node", "--nproc_per_node", "--shutdown-timeout")


@dataclass(frozen=True)
class Command:
    """What a run recorded of its own start.

    typed    the command line, as it can be typed again in `folder`
    argv     the same around our own interpreter; empty where it is not ours to start
    refusal  why not
    """

    typed: str
    folder: str
    argv: tuple[str, ...] = ()
    refusal: str = ""


@dataclass
class Jobs:
    """The trainings of some folders: those that run, and those that were started here."""

    _started: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)
    _commands: dict[Path, tuple[int, Command]] = field(default_factory=dict)  # by time of run.json
    _one: threading.Lock = field(default_factory=threading.Lock)  # composes, or starts, at a time

    def state_of(self, run: RunFolder) -> str:
        """Returns the state in STATUS.json; of a process that is gone `killed`, of one that was
        started here and has not begun `starting`.
        """
        if self._child(run) and working_on(run) is None:
            return "starting"
        state = str(run.read_status().get("state", ""))
        if state == "running" and not is_held(run):
            return "killed"
        return state or "unknown"

    def stop(self, run: RunFolder) -> None:
        """Asks the run to save at its next step and to end, by the signal of schedulers; raises
        ConfigError where it cannot be asked from here.
        """
        child = self._child(run)
        holder = RunLock(run.lock).holder()
        if holder is None and child:  # before its first step: there is nothing to save
            child.terminate()
            return
        if holder is None:
            raise ConfigError(f"{run.path} is not running: there is nothing to stop.")
        if not holder.is_here():
            raise ConfigError(
                f"{run.path} is trained by {holder}, which only that host can stop: kill -TERM "
                f"{holder.pid} there, or the scheduler's command for its job."
            )
        try:
            descriptor = os.pidfd_open(holder.pid)  # from here on the number stands for one process
        except ProcessLookupError:
            raise ConfigError(f"{run.path} is not running: {holder} is gone.") from None
        try:
            if holder.is_gone() or not _has_open(holder, run.lock):
                raise ConfigError(f"{run.path} is not running: {holder} does not hold its lock.")
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        finally:
            os.close(descriptor)

    def start_again(self, run: RunFolder, shown: str) -> None:
        """Starts the run's own command, which must be the one that was `shown`; it goes on when the
        board ends. Raises ConfigError where it is not ours to start.
        """
        command = self.command_of(run)
        if command.typed != shown:
            raise ConfigError(f"{run.path} has another command by now: look at it, and try again.")
        if command.refusal:
            raise ConfigError(command.refusal)
        with self._one:
            if self._child(run) or is_held(run):
                raise ConfigError(f"{run.path} is in use already: there is nothing to start.")
            self._started[run.path] = _start(command, run.logs / _SCREEN)

    def command_of(self, run: RunFolder) -> Command:
        """Returns the run's command, taken apart once for each time that it is recorded."""
        recorded_ns = run.facts.stat().st_mtime_ns if run.facts.is_file() else 0
        with self._one:
            known, command = self._commands.get(run.path, (-1, Command("", "")))
            if known != recorded_ns:
                command = read_command(run)
                self._commands[run.path] = (recorded_ns, command)
        return command

    def screen_of(self, run: RunFolder) -> str:
        """Returns the end of what the command that was started here has printed."""
        with suppress(OSError), open(run.logs / _SCREEN, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _SHOWN_BYTES))
            return file.read().decode(errors="replace")
        return ""

    def _child(self, run: RunFolder) -> subprocess.Popen[bytes] | None:
        """Returns the process that was started here for a run, while it lives."""
        child = self._started.get(run.path)
        return child if child and child.poll() is None else None


def _start(command: Command, screen: Path) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own: Ctrl-C ends the board, not the training."""
    # never through a link: the folder may be a stranger's
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    if screen.parent.is_symlink():
        raise ConfigError(f"{screen.parent} is a link: nothing is written through it.")
    with os.fdopen(os.open(screen, flags, 0o666), "wb") as file:
        return subprocess.Popen(
            command.argv,
            cwd=command.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def working_on(run: RunFolder) -> Holder | None:
    """Returns who trains a run; None where nobody does, as far as this host can know."""
    holder = RunLock(run.lock).holder()
    return None if holder is None or holder.is_gone() or not holder.host else holder


def is_held(run: RunFolder) -> bool:
    return working_on(run) is not None


def _has_open(holder: Holder, lock: Path) -> bool:
    """Returns whether a process of this host has the lock's own file open, as who took it does."""
    with suppress(OSError):
        wanted = lock.stat()
        for name in os.listdir(f"/proc/{holder.pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{holder.pid}/fd/{name}"), wanted):
                    return True
    return False


def read_command(run: RunFolder) -> Command:
    """Reads the command of a run's run.json, and decides whether it may be started from here."""
    facts = json_object(run.facts)
    typed = str(facts.get("command", ""))
    started = facts.get("started")
    started = started if isinstance(started, dict) else {}
    folder = str(started.get("folder", ""))
    try:
        _check_place(started, typed)
        launcher, line = _our_words(shlex.split(typed), Path(folder))
        _check_settings(run, Path(folder), line)
    except (ConfigError, ValueError, OSError, subprocess.SubprocessError) as error:
        return Command(typed, folder, refusal=f"{error}")
    return Command(typed, folder, argv=(*launcher, "-m", "automodel_lite", "train", *line))


def _check_place(started: dict[str, Any], typed: str) -> None:
    """Raises ConfigError where the command means something else here than where it was typed."""
    if not typed.strip() or not Path(str(started.get("folder") or "-")).is_dir():
        raise ConfigError("run.json does not name a command, and a folder of this machine for it.")
    if started.get("host") != socket.gethostname():
        raise ConfigError(
            f"the run was started on {started.get('host')}, not on this machine: look at its "
            "command, and type it yourself."
        )
    if started.get("slurm_job"):
        raise ConfigError("the run was a job of SLURM: continue it with sbatch.")


def _our_words(words: list[str], folder: Path) -> tuple[list[str], list[str]]:
    """Takes a command that was typed in `folder` apart: (interpreter and launcher, arguments of
    `train`). Raises ConfigError for any other program.

    automodel-lite train --nproc 2 name=a -> [sys.executable], ["--nproc", "2", "name=a"]
    """
    launcher = [sys.executable]
    program = Path(words[0]).name
    rest = words[1:]
    is_python = re.fullmatch(r"python[\d.]*", program) is not None
    if is_python and rest[:2] == ["-m", "torch.distributed.run"]:
        program = "torchrun"
        rest = rest[2:]
    if program == "torchrun":
        launcher += ["-m", "torch.distributed.run"]
        while rest and rest[0].startswith("--"):
            name, has_value, _ = rest[0].partition("=")
            length = 1 if has_value or name in _TORCHRUN_SWITCHES else 2
            if name not in (*_TORCHRUN_SWITCHES, *_TORCHRUN_VALUES):
                raise ConfigError(f"torchrun {name} is not known here: type the command yourself.")
            launcher += rest[:length]
            rest = rest[length:]
    if program == "automodel-lite" and rest[:1] == ["train"]:
        return launcher, rest[1:]
    if (is_python or program == "torchrun") and rest[:3] == ["-m", "automodel_lite", "train"]:
        return launcher, rest[3:]
    recipe = (PACKAGE if IS_INSTALLED else PACKAGE.parent) / "recipes" / "train_ft.py"
    if (is_python or program == "torchrun") and rest and (folder / rest[0]).resolve() == recipe:
        return launcher, rest[1:]
    raise ConfigError("only trainings of this package are started here: type the command yourself.")


def _composed(folder: Path, words: list[str]) -> str:
    """Returns the settings of a command as YAML, asked of the command line itself in the folder
    where it was typed: it may name a model and its data alone. Raises ConfigError as it does.
    """
    command = [sys.executable, "-m", "automodel_lite", "train", *words, "--cfg", "job", "--resolve"]
    asked = subprocess.run(
        command,
        cwd=folder,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_ANSWERED_WITHIN_S,
    )
    if asked.returncode:
        raise ConfigError(asked.stderr.strip() or "its settings cannot be read.")
    return asked.stdout


def _environment() -> dict[str, str]:
    """Returns the environment of a command: no module is taken from the folder it starts in."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if not IS_INSTALLED:
        paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _check_settings(run: RunFolder, folder: Path, words: list[str]) -> None:
    """Raises ConfigError for a command of several runs, of another run, or that does what only a
    person may ask for.
    """
    line = read_line(words)
    given = [name for name in ("json", "html", "card", "task", "tasks") if getattr(line, name)]
    if line.is_multirun or line.is_question or line.config_path or given:
        raise ConfigError("only the training of one run is started here: type it yourself.")
    if hydra := [text for text in line.overrides if text.lstrip("+~").startswith("hydra")]:
        raise ConfigError(f"{hydra[0]} sets Hydra itself: type the command yourself.")
    raw = OmegaConf.create(_composed(folder, words))
    values = dict(flatten(OmegaConf.to_container(raw)))
    if granted := [key for key, value in values.items() if value and needs_the_command_line(key)]:
        raise ConfigError(
            f"{granted[0]} is a permission, which a person types: type the command yourself."
        )
    output_dir = OmegaConf.select(raw, "output_dir")
    if (folder / str(output_dir)).resolve() != run.path:
        raise ConfigError(f"the command trains in {output_dir}, another folder: type it yourself.")
