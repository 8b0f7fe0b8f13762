"""Tokenizing in tasks makes the bytes of one process."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.planned import PlannedPacks
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.data.tokens import chunks
from automodel_lite.errors import ConfigError
from automodel_lite.extras import tasks
from automodel_lite.training.settings import build_parts
from recipes.prepare_data import parse_task
from tests.runs import config_of


def write_chats(path: Path, number: int) -> None:
    """Chats, of which later ones have a group, or a turn without a loss: columns begin late."""
    draw = random.Random(0)
    lines = []
    for i in range(number):
        words = [str(draw.randrange(10**6)) for _ in range(draw.randint(1, 9))]
        chat = [
            {"role": "user", "content": words[0]},
            {"role": "assistant", "content": " ".join(words)},
        ]
        row = {"messages": chat}
        if i > number // 2:
            row["group"] = i // 3
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))


def config_in(folder: Path, data: Path) -> Config:
    return config_of(
        "smoke",
        folder / "run",
        f"cache_dir={folder}/cache",
        "dataset=files",
        "~dataset.num_chats",
        f"dataset.path={data}",
        "dataset.val_frac=0.2",
    )


def files_of(folder: Path) -> dict[str, bytes]:
    root = folder / "cache" / "tokens"
    paths = (p for p in root.rglob("*") if p.is_file() and p.suffix != ".lock")
    return {str(path.relative_to(root)): path.read_bytes() for path in paths}


def plan_of(config: Config) -> str:
    data = prepare_data(config, check_sizes(config, 1), build_parts(config).packer)
    assert isinstance(data, PlannedPacks)
    return json.dumps(data.fingerprint())


def test_tasks_in_any_order_make_the_bytes_and_the_plan_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (chunks, tasks):
        monkeypatch.setattr(module, "CHUNK_DOCUMENTS", 8)
    write_chats(tmp_path / "chats.jsonl", 100)
    one, many = (config_in(tmp_path / name, tmp_path / "chats.jsonl") for name in ("one", "many"))
    plan = plan_of(one)
    for task in (3, 1):
        tasks.tokenize_task(many, task, 3)
    with pytest.raises(
        ConfigError, match=r"1 of 3 tasks has not ended, or left damaged files: 2\. Run"
    ):
        tasks.merge_tasks(many, 3)
    tasks.tokenize_task(many, 2, 3)
    assert "cache: hit" in tasks.tokenize_task(many, 2, 3)  # one that has ended is found
    tasks.merge_tasks(many, 3)
    assert plan_of(many) == plan
    want = files_of(tmp_path / "one")
    assert files_of(tmp_path / "many") == want
    assert len(want) > 10


def killed_after(seconds: float, work: Callable[[], object]) -> bool:
    """Returns whether a process of its own was ended by SIGKILL before it had done the work."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.system
def test_tasks_and_the_merge_that_are_killed_make_the_bytes_of_one_process(tmp_path: Path) -> None:
    """SIGKILL at random moments; whoever was killed is begun again until it ends."""
    write_chats(tmp_path / "chats.jsonl", 4500)
    one, many = (config_in(tmp_path / name, tmp_path / "chats.jsonl") for name in ("one", "many"))
    plan = plan_of(one)
    alone = config_in(tmp_path / "alone", tmp_path / "chats.jsonl")
    tasks.tokenize_task(alone, 1, 3)  # trains the tokenizer, too
    began = time.monotonic()
    tasks.tokenize_task(alone, 2, 3)
    whole = time.monotonic() - began
    draw = random.Random(0)
    works = [partial(tasks.tokenize_task, many, task, 3) for task in (1, 2, 3)]
    num_killed = 0
    # the first try is too short for a task, later ones get longer, so that an end comes
    for work in [*works, partial(tasks.merge_tasks, many, 3)]:
        tries = 0
        while killed_after(draw.uniform(0, whole) * (1 + tries / 10 if tries else 0.1), work):
            tries += 1
        num_killed += tries
    assert num_killed >= 3
    assert plan_of(many) == plan
    assert files_of(tmp_path / "many") == files_of(tmp_path / "one")
    left = [path for path in (tmp_path / "many" / "cache").rglob(".*") if path.is_dir()]
    assert left == []  # of those that were killed


def test_the_parts_of_all_tasks_are_whole_chunks_and_all_documents() -> None:
    for number, count in ((0, 3), (1, 4), (5000, 3), (512 * 7, 7), (512 * 3 + 1, 5)):
        parts = [tasks.part_of(number, task, count) for task in range(1, count + 1)]
        assert [i for part in parts for i in part] == list(range(number))
        assert all(part.start % 512 == 0 for part in parts if part)


@pytest.mark.parametrize("given", [("0", "3"), ("4", "3"), ("1", ""), ("x", "3")])
def test_a_task_that_is_none(given: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="a task is one of 1 to the number of tasks"):
        parse_task(*given)
