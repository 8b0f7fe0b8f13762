"""Whole runs on the fake GPU: in this process, or on several ranks with a fake GPU each."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import free_port
from tests.runs import _composed

ON_FAKE_GPU = "libcuda.so.1" in os.environ.get("LD_PRELOAD", "")
only_on_fake_gpu = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ON_FAKE_GPU,
        reason="needs torch's CUDA wheel: python -m tests.gpu_paths.fake.run -m pytest tests/gpu_paths/fake",
    ),
]
# a card that computes runs the same jobs, and its numbers are compared
only_on_gpu = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ON_FAKE_GPU or torch.cuda.is_available()), reason="needs a GPU, a fake one will do"
    ),
]
if ON_FAKE_GPU:
    # there is no cuDNN whose graphs could be built
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
EAGER, COMPILED = "training.compile=false", "training.compile=true"
LIMIT_S = 900


def train(
    folder: Path,
    *overrides: str,
    preset: str = "smoke",
    recipe: str = "train_ft",
    strict_from: int = 0,
) -> str:
    """Runs a recipe in this process, which must end well; returns its screen.

    strict_from  the first step in which a wait of the host for the device is an error; 0 = none
    """
    _forget_graphs()
    code, screen = _run(_raw(preset, folder, overrides), recipe, strict_from)
    assert code == 0, screen[-6000:]
    return screen


def train_on(
    world_size: int, folder: Path, *overrides: str, preset: str = "smoke", strict_from: int = 0
) -> str:
    """The same on so many ranks; their collectives must agree. Returns rank 0's screen."""
    raw = _raw(preset, folder, overrides)
    logs = folder.parent / f"{folder.name}_sent"
    logs.mkdir(parents=True)
    contexts = logs / "contexts"
    contexts.mkdir()
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
    }
    shared |= {
        "LOCAL_WORLD_SIZE": str(world_size),
        "FAKE_GPUS": str(world_size),
        "FAKE_NCCL_LOG": str(logs),
        "FAKE_GPU_CONTEXTS": str(contexts),
    }
    processes = []
    # not tests.warm: some modules look at the device, and children of such a process have none
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "datasets"])
    for rank in range(world_size):
        place = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        screen = str(logs / f"screen_{rank}")
        arguments = (place, raw, strict_from, screen)
        process = context.Process(target=_rank, args=arguments)
        process.start()
        processes.append(process)
    for process in processes:
        process.join(LIMIT_S)
    screens = [(logs / f"screen_{rank}").read_text() for rank in range(world_size)]
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world_size, f"{codes}\n" + "\n".join(text[-4000:] for text in screens)
    check_collectives(logs)
    check_contexts(contexts, {process.pid: rank for rank, process in enumerate(processes)})
    return screens[0]


def check_contexts(folder: Path, rank_of: dict[int | None, int]) -> None:
    """Fails where a rank has opened another card than its own, or a worker of its any card: half a gigabyte each."""
    for path in folder.iterdir():
        opened = path.read_text().splitlines()
        assert int(path.name) in rank_of, f"a worker opened a card: {opened}"
        rank = rank_of[int(path.name)]
        assert [line.split()[0] for line in opened] == [str(rank)], f"rank {rank}: {opened}"
    assert len(list(folder.iterdir())) == len(rank_of)


def check_collectives(logs: Path) -> int:
    """Returns the number of communicators, in each of which all ranks have called the same collectives in one order,
    and received what the others sent: anything else would hang on real links. Each of several ranks has sent something:
    one that is opened and never used holds buffers on every card.
    """
    calls: dict[str, dict[int, list[tuple[str, ...]]]] = defaultdict(lambda: defaultdict(list))
    for path in logs.iterdir():
        if path.name.isdigit():
            for line in path.read_text().splitlines():
                name, rank, _, *call = line.split()
                calls[name][int(rank)].append(tuple(call))
    assert calls
    for name, of_ranks in calls.items():
        lists = [
            [call for call in made if "_" not in call[0] or not _is_point_to_point(call)]
            for made in of_ranks.values()
        ]
        assert all(made == lists[0] for made in lists), (
            f"communicator {name}: {_first_difference(lists)}"
        )
        sent = {call[0] for made in of_ranks.values() for call in made}
        is_used = len(of_ranks) == 1 or sent - {"open"}
        assert is_used, f"communicator {name} of {len(of_ranks)} ranks sends nothing"
        for rank, made in of_ranks.items():
            for call in made:
                if call[0].startswith("send_to_"):
                    peer = int(call[0].removeprefix("send_to_"))
                    wanted = (f"receive_from_{rank}", *call[1:])
                    sent, received = made.count(call), of_ranks[peer].count(wanted)
                    assert sent == received, (
                        f"{name}: rank {rank} {call} {sent} times, rank {peer} {received}"
                    )
    return len(calls)


def _is_point_to_point(call: tuple[str, ...]) -> bool:
    return call[0].startswith(("send_to_", "receive_from_"))


def _first_difference(lists: list[list[tuple[str, ...]]]) -> str:
    for number, alike in enumerate(zip(*lists)):
        if len(set(alike)) > 1:
            return f"call {number}: {alike}"
    return f"{[len(made) for made in lists]} calls"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _raw(preset: str, folder: Path, overrides: tuple[str, ...]) -> Any:
    return _composed(preset, folder, *overrides)


def _run(raw: Any, recipe: str, strict_from: int) -> tuple[int, str]:
    import io
    from contextlib import redirect_stdout
    from importlib import import_module

    from automodel_lite.config.check import check_config
    from recipes import train_ft

    real = train_ft.TrainFinetuneRecipe.step

    def step(self: Any, ready: Any) -> Any:
        is_strict = 0 < strict_from <= self.num_steps + 1
        torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
        try:
            return real(self, ready)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    train_ft.TrainFinetuneRecipe.step = step  # type: ignore[method-assign]
    screen = io.StringIO()
    try:
        with redirect_stdout(screen):
            code = import_module(f"recipes.{recipe}").main(check_config(raw))
    finally:
        train_ft.TrainFinetuneRecipe.step = real  # type: ignore[method-assign]
    return int(code or 0), screen.getvalue()


def _rank(place: dict[str, str], raw: Any, strict_from: int, screen: str) -> None:
    os.environ.update(place)
    torch.set_num_threads(1)
    if raw.mesh.get("ep", 1) > 1:
        _share_tokens_equally()
    code = 1
    with open(screen, "w") as file:
        os.dup2(file.fileno(), 2)
        try:
            code, text = _run(raw, "train_ft", strict_from)
            file.write(text)
        except BaseException:
            import traceback

            traceback.print_exc(file=file)
    os._exit(code)


def _share_tokens_equally() -> None:
    """The host reads from the device how many tokens go to each rank's experts: here each gets as many."""
    from automodel_lite.parallel.expert_dispatch import ExpertDispatch

    forward = ExpertDispatch.__call__
    read = torch.Tensor.tolist

    def forward_equally(self: Any, hidden: Any, chosen: Any, weights: Any) -> Any:
        sizes = split_sizes(
            len(chosen),
            chosen.shape[-1],
            self.tp.size(),
            self.ep.size(),
            self.ep.get_local_rank(),
        )

        def equal(counts: torch.Tensor) -> Any:
            found = read(counts)  # an error where the host would wait for them
            return sizes if counts.shape == (2, self.ep.size()) else found

        torch.Tensor.tolist = equal  # type: ignore[method-assign]
        try:
            return forward(self, hidden, chosen, weights)
        finally:
            torch.Tensor.tolist = read  # type: ignore[method-assign]

    ExpertDispatch.__call__ = forward_equally  # type: ignore[method-assign]


def split_sizes(
    num_tokens: int, top_k: int, tp_size: int, ep_size: int, ep_rank: int
) -> list[list[int]]:
    """How many (token, expert) pairs a rank sends to each rank of its experts' group, and receives from each. The ranks
    of a tensor-parallel group, which lie side by side, cut their tokens as `torch.chunk` does: the last has fewer.

    >>> split_sizes(5, 2, tp_size=2, ep_size=2, ep_rank=0)
    [[3, 3], [3, 2]]
    >>> split_sizes(5, 2, tp_size=2, ep_size=2, ep_rank=1)
    [[2, 2], [3, 2]]
    """
    most = -(-num_tokens // tp_size)

    def sent(sender: int, receiver: int) -> int:
        num_before = min(num_tokens, sender % tp_size * most)
        num_pairs = top_k * min(most, num_tokens - num_before)
        return num_pairs // ep_size + (receiver < num_pairs % ep_size)

    members = range(ep_size)
    return [[sent(ep_rank, rank) for rank in members], [sent(rank, ep_rank) for rank in members]]


def _forget_graphs() -> None:
    """And the run before: its model would be counted with the next one's."""
    torch._dynamo.reset()
    gc.collect()
    with suppress(KeyError):
        torch._dynamo.utils.counters.clear()
