"""What the user sees: a block at the start, then a row per logged step. Only rank 0 prints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence

from transformers.utils.logging import disable_progress_bar as disable_transformers_bar

from automodel_lite.errors import harmless
from automodel_lite.launched import rank
from automodel_lite.progress import duration, print_above_bars, wrap_lines
from automodel_lite.redact import scrub
from automodel_lite.telemetry.metrics import StepMetrics

_HEADER = "   step      loss        lr  grad norm  tokens/s   fill   memory      ETA"


def quiet_libraries() -> None:
    """No progress bars and deprecation notes of libraries between the rows of the run."""
    # read when `datasets` is imported, if it ever is
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    disable_transformers_bar()
    # torchdata 0.11 on torch 2.13
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
    # peft 0.21
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    # Under tensor parallelism the embedding answers with a view, and what is called at the start
    # with gradients; some vision towers and projectors always do.
    # torch warns of `x += y` on it; no family does that, and the gradients of all layouts are
    # compared with those of one process.
    warnings.filterwarnings(
        "ignore",
        message=r"FSDP2-wrapped module \(FSDP"
        r"(Embedding|Linear|LossModel|\w*(Vision|Projector)\w*)\) returned a view tensor",
    )
    # torch 2.13; 2.11 knows no other
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    # one process saves alone, as meant
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Console:
    """Prints on rank 0, is silent elsewhere."""

    def __init__(self, is_silent: bool | None = None) -> None:
        self.is_silent = rank() != 0 if is_silent is None else is_silent
        self.lines: list[tuple[str, str]] = []  # of the start block
        self._rows = 0

    def say(self, topic: str, text: str) -> None:
        """A line of the start block: `packing    exact_fill: 61 packs ...`, wrapped at words on a
        terminal.
        """
        for number, line in enumerate(scrub(text).splitlines() or [""]):
            self.print(wrap_lines(f"{topic if number == 0 else '':<10} {line}", indent=11))

    def show(self, lines: Sequence[tuple[str, str]]) -> None:
        """Lines of the start block: (topic, text), printed as soon as they are known and kept for
        run.json.
        """
        self.lines += lines
        for topic, text in lines:
            self.say(topic, text)

    def commands(self, topic: str, commands: Sequence[str]) -> None:
        """Lines to copy: a terminal breaks those that are too long, and copies them whole."""
        for number, command in enumerate(commands):
            self.print(f"{topic if number == 0 else '':<10} {scrub(command)}", wraps=False)

    def print(self, text: str, wraps: bool = True) -> None:
        text = harmless(text)
        if not self.is_silent:
            print_above_bars(
                "\n".join(wrap_lines(line, indent=11) for line in text.splitlines())
                if wraps
                else text
            )

    def validation(
        self, step: int, numbers: Mapping[str, float], answers: Sequence[tuple[str, str]]
    ) -> None:
        """Prints a line per set of numbers by their keys in metrics.jsonl (`val_loss/easy`), and
        (prompt, answer)s.
        """
        sets: dict[str, dict[str, float]] = {}
        for key, value in numbers.items():
            kind, _, name = key.removeprefix("val_").partition("/")
            sets.setdefault(name, {})[kind] = value
        for name, kinds in sets.items():
            loss = kinds.pop("loss")
            others = "".join(f"  {kind} {value:.4g}" for kind, value in kinds.items())
            self.print(f"{step:7d}  {loss:8.4f}  validation ({name}){others}")
        for prompt, answer in answers:
            self.print(f"{'':9}{prompt}\n{'':9}-> {answer}")

    def tasks(self, step: int, lines: Sequence[str]) -> None:
        """Prints the scores of task files."""
        for line in lines:
            self.print(f"{step:7d}  task {line}")

    def step(self, m: StepMetrics) -> None:
        if self._rows % 25 == 0:
            self.print(_HEADER if m.mfu_frac is None else f"{_HEADER}    MFU")
        self._rows += 1
        self.print(
            f"{m.step:7d}  {m.loss:8.4f}  {m.lr:8.2e}  {m.grad_norm:9.3f}  {m.tokens_per_s:8,.0f}  "
            f"{m.fill_frac:5.1%}  {m.memory_gib:4.1f}GiB  {duration(m.eta_s):>7}"
            + ("" if m.mfu_frac is None else f"  {m.mfu_frac:5.1%}")
            + "".join(f"  {name} {value:.4g}" for name, value in m.parts.items())
        )
