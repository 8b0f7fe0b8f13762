"""What a file may not set, because it would run code or write files before any configuration is checked.

A preset may come from a stranger: with a data set, a run's folder, a bug report. Hydra configures Python's logging,
builds callbacks, launchers and sweepers, and makes folders before the recipe sees a single key. So what a file changes
of that is refused, but for the numbers and names of sweeps; the command line may set the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.line import split
from automodel_lite.cli.sources import read
from automodel_lite.config.components import CONF_DIR, flatten
from automodel_lite.errors import ConfigError

COMMAND_LINE_ONLY = ("security.allow_targets", "model.trust_remote_code")
_OF_SWEEPS = re.compile(  # settings of plugins that are plain numbers and names
    r"hydra\.(sweeper\.(n_trials|n_jobs|direction|max_batch_size|study_name|max_failure_rate|params\..+|sampler\.[a-z]\w*)"
    r"|launcher\.(n_jobs|timeout_min|nodes|tasks_per_node|partition|qos|account|constraint|exclude|gres|comment"
    r"|array_parallelism|signal_delay_s|max_num_timeout|(cpus|gpus|mem)_(per_)?\w+))"
)
_PLAIN = re.compile(r"[\w.,:+*%/() -]*")  # the text of a launcher becomes a line of a shell script
_CODE = ("_target_", "()", "class", "filename")


def check_granted(raw: DictConfig, overrides: Sequence[str]) -> None:
    """Raises ConfigError for a permission that a file grants: those are the command line's to give."""
    for key in COMMAND_LINE_ONLY:
        if OmegaConf.select(raw, key, throw_on_missing=False) and not is_typed(key, overrides):
            raise ConfigError(f"{key} is set in a file, but only the command line may set it: {key}=... .")


def check_hydra_settings(content: Any, overrides: Sequence[str]) -> None:
    """Raises ConfigError for code that a file makes Hydra run, and for files that it makes Hydra write."""
    ours, theirs = (
        list(flatten(OmegaConf.to_container(OmegaConf.masked_copy(file, "hydra"), resolve=False)))
        for file in (read(CONF_DIR / "base.yaml"), content)
    )
    changed = [
        (key, value)
        for key, value in theirs
        if (key, value) not in ours
        and not is_typed(key, overrides)
        and not (_OF_SWEEPS.fullmatch(key) and _PLAIN.fullmatch(str(value)))
    ]
    if changed:  # the sentence is about what names code or a file, if anything does
        key, value = min(changed, key=lambda leaf: leaf[0].rpartition(".")[2] not in _CODE)
        raise ConfigError(f"{key}={value} is set in a file, but only the command line may set it: {key}=... .")


def is_typed(key: str, overrides: Sequence[str]) -> bool:
    """Returns whether the key, or a group around it, is set on the command line."""
    names = [split(text)[0] for text in overrides]
    return any(key == name or key.startswith(f"{name}.") for name in names)
