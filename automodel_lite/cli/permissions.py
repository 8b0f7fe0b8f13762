"""What a file may not set, because it would run code or write files before any configuration is checked.

A preset may come from a stranger: with a data set, a run's folder, a bug report. Hydra configures Python's logging,
builds callbacks, launchers and sweepers, and makes folders before the recipe sees a single key. So what a file changes
of that is refused, but for the numbers and names of sweeps; the command line may set the rest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.conf import HydraConf
from hydra.core.utils import JobRuntime
from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.line import split
from automodel_lite.config.components import CONF_DIR, flatten
from automodel_lite.errors import ConfigError

COMMAND_LINE_ONLY = ("security.allow_targets", "model.trust_remote_code")
_WRITTEN_BY_HYDRA = re.compile(r"hydra\.(overrides|runtime|mode|job\.(config|config_name|override_dirname))\b.*")
_OF_SWEEPS = re.compile(  # settings of plugins that are plain numbers and names
    r"hydra\.(sweeper\.(n_trials|n_jobs|direction|max_batch_size|study_name|max_failure_rate|params\..+|sampler\.[a-z]\w*)"
    r"|launcher\.(n_jobs|timeout_min|nodes|tasks_per_node|partition|qos|account|constraint|exclude|gres|comment"
    r"|array_parallelism|signal_delay_s|max_num_timeout|(cpus|gpus|mem)_(per_)?\w+))"
)
_PLAIN = re.compile(r"[\w.,:+*%/() -]*")  # the text of a launcher becomes a line of a shell script
_CODE = ("_target_", "()", "class", "filename")
_BLOCKS = ("launcher", "sweeper", "sweeper/sampler", "job_logging", "hydra_logging", "env", "help", "hydra_help")
_GROUPS = {"output": "hydra", **{group: f"hydra.{group.replace('/', '.')}" for group in _BLOCKS}}


def check_granted(raw: DictConfig, overrides: Sequence[str]) -> None:
    """Raises ConfigError for a permission that a file grants: those are the command line's to give."""
    for key in COMMAND_LINE_ONLY:
        if OmegaConf.select(raw, key, throw_on_missing=False) and not is_typed(key, overrides):
            raise ConfigError(f"{key} is set in a file, but only the command line may set it: {key}=... .")


def check_hydra_settings(settings: DictConfig, loader: ConfigLoaderImpl, overrides: Sequence[str]) -> None:
    """Raises ConfigError for code that a file makes Hydra run, and for files that it makes Hydra write."""
    known = _shipped(loader)
    changed = [
        (key, value)
        for key, value in flatten(OmegaConf.to_container(settings, resolve=False), "hydra")
        if value not in known[key]
        and not _WRITTEN_BY_HYDRA.fullmatch(key)
        and not is_typed(key, overrides)
        and not (_OF_SWEEPS.fullmatch(key) and _PLAIN.fullmatch(str(value)))
    ]
    if changed:  # the sentence is about what names code or a file, if anything does
        key, value = min(changed, key=lambda leaf: leaf[0].rpartition(".")[2] not in _CODE)
        raise ConfigError(f"{key}={value} is set in a file, but only the command line may set it: {key}=... .")


def _shipped(loader: ConfigLoaderImpl) -> dict[str, list[Any]]:
    """Returns the values that each setting has in Hydra itself, in its installed plugins, and in conf/base.yaml."""
    blocks = [("hydra", OmegaConf.structured(HydraConf)), ("hydra", OmegaConf.load(CONF_DIR / "base.yaml").hydra)]
    for group, prefix in _GROUPS.items():
        for option in loader.get_group_options(f"hydra/{group}"):
            found = loader.repository.load_config(f"hydra/{group}/{option}")
            if found and OmegaConf.is_dict(found.config):
                blocks.append((prefix, found.config))
    known: dict[str, list[Any]] = defaultdict(list, {"hydra.job.name": [JobRuntime().get("name")]})
    for prefix, block in blocks:
        for key, value in flatten(OmegaConf.to_container(block, resolve=False), prefix):
            known[key].append(value)
    return known


def is_typed(key: str, overrides: Sequence[str]) -> bool:
    """Returns whether the key, or a group around it, is set on the command line."""
    names = [split(text)[0] for text in overrides]
    return any(key == name or key.startswith(f"{name}.") for name in names)
