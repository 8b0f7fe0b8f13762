"""What scripts of tinker-cookbook keep outside the clients: tokenizers by the names of models, and
a folder of logs, which is the first rank's.

Every rank runs the script. The others write theirs to FOLDER/ranks/N, and go on from the
checkpoints that the first rank's list names, so that a job that was killed while they wrote goes
on from one place.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from automodel_lite.launched import rank, world_size
from automodel_lite.tinker.ranks import from_first

_LOG_PATH = re.compile(r"((?:--)?log[_-]path=)(.+)")


def own_arguments(arguments: Sequence[str], folder: Path) -> list[str]:
    """Returns a script's arguments with a folder of logs of this rank's own, unless it is the
    first.
    """
    if rank() == 0:
        return list(arguments)
    found = []
    for argument in arguments:
        match = _LOG_PATH.fullmatch(argument)
        if match:
            own = _own_folder(folder) / "logs" / match[2].strip("/").replace("..", "_")
            print(f"tinker     rank {rank()} writes its logs to {own}", file=sys.stderr)
            argument = f"{match[1]}{own}"
        found.append(argument)
    return found


def _own_folder(folder: Path) -> Path:
    return folder.resolve() / "ranks" / str(rank())


def adapt(models: Mapping[str, Sequence[str]], folder: Path) -> None:
    """Lets the cookbook find the tokenizers of names that stand for folders, and makes the ranks
    share what one of them writes.
    """
    if find_spec("tinker_cookbook") is None:
        return
    _register_tokenizers(models)
    if world_size() > 1:
        _share_checkpoints()
    if rank():
        # where logs are that no argument names; a run has one page of a tracker
        os.environ["TINKER_COOKBOOK_RUNS_DIR"] = str(_own_folder(folder) / "logs")
        os.environ["WANDB_MODE"] = "disabled"


def _register_tokenizers(models: Mapping[str, Sequence[str]]) -> None:
    from tinker_cookbook.tokenizer_utils import register_tokenizer
    from transformers import AutoTokenizer

    for name, given in models.items():
        for override in given:
            key, _, source = override.partition("=")
            if key == "model.pretrained":
                register_tokenizer(name, partial(AutoTokenizer.from_pretrained, source))


def _share_checkpoints() -> None:
    from tinker_cookbook import checkpoint_utils

    theirs = checkpoint_utils.load_checkpoints_file

    def load_checkpoints_file(log_dir: str) -> list[Any]:
        text = from_first(
            "checkpoints of the cookbook",
            lambda: json.dumps([record.to_dict() for record in theirs(log_dir)]),
        )
        return [checkpoint_utils.CheckpointRecord.from_dict(x) for x in json.loads(text)]

    checkpoint_utils.load_checkpoints_file = load_checkpoints_file
