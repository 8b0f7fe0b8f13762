"""Devices and threads that a rank takes, and what one process alone is."""

from __future__ import annotations

import inspect
import math
import os
import resource
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.config.schema import MeshConfig
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import decoder_layers
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel import mesh
from automodel_lite.parallel.mesh import (
    MeshShape,
    allow_open_files,
    cgroup_cores,
    choose_strategy,
    init_mesh,
    open_mesh,
    threads_of,
)
from automodel_lite.parallel.sharding import (
    ParallelModel,
    copies_of_experts,
    parallelize,
)
from automodel_lite.thd import stream_of
from tests.ranks import free_port, run_ranks
from tests.runs import losses_by_step, train_on, train_quick


@pytest.mark.parametrize(
    ("num_visible", "index"), [(8, 3), (1, 0), (4, 3)], ids=["all", "its own alone", "half"]
)
def test_a_rank_takes_a_gpu_that_it_sees(
    num_visible: int, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun --gpus-per-task=1` leaves LOCAL_RANK up to 7 and one visible GPU."""
    taken: list[torch.device] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert init_mesh(MeshConfig(strategy="none")).device == torch.device("cuda", index)
    assert taken == [torch.device("cuda", index)]


def test_a_rank_waits_for_rank_0_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch's own client would print a page of C++ for each try."""
    port = free_port()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(mesh, "LINE_EVERY_S", 0.5)
    of_rank_0: list[dist.Store] = []

    def start_late() -> None:
        time.sleep(1.2)
        of_rank_0.append(dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False))

    thread = threading.Thread(target=start_late)
    thread.start()
    store = mesh.launchers_store.__wrapped__()
    thread.join()
    store.set("rank 1", "is here")
    assert of_rank_0[0].get("rank 1") == b"is here"
    line = f"[rank 1] waiting for rank 0 at 127.0.0.1:{port}"
    assert set(capfd.readouterr().err.splitlines()) == {line}
    monkeypatch.setattr(mesh, "_START_S", 0.5)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(ConfigError, match=r"does not answer .*Connection refused"):
        mesh.launchers_store.__wrapped__()


def test_nccl_connects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given its device; the groups of the mesh are then split off the first, each with one call."""
    asked: list[dict[str, Any]] = []
    signature = inspect.signature(dist.init_process_group)

    class Opened(Exception):
        pass

    def open_group(*args: Any, **options: Any) -> None:
        asked.append(signature.bind(*args, **options).arguments)
        raise Opened

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "set_device": print,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(dist, "init_process_group", open_group)
    with pytest.raises(Opened):
        init_mesh(MeshConfig())
    assert (asked[0]["backend"], asked[0]["device_id"]) == (
        "cpu:gloo,cuda:nccl",
        torch.device("cuda", 3),
    )


def test_many_ranks_and_packs_may_open_their_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        allow_open_files()
        most = mesh.MOST_OPEN_FILES
        reached = most if hard < 0 else min(hard, most)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (reached, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("num_experts", "num_shards", "copies"),
    [
        (128, 1024, 8),
        (128, 128, 1),
        (128, 64, 1),
        (60, 1024, 16),
        (8, 64, 8),
        (3, 4, 1),
        (0, 64, 1),
    ],
)
def test_experts_are_sharded_over_no_more_ranks_than_there_are(
    num_experts: int, num_shards: int, copies: int
) -> None:
    """60 over 64 of 1,024 ranks: every rank gathers padding for 4 of 64, not for 964."""
    assert copies_of_experts(num_experts, num_shards) == copies


@pytest.mark.parametrize(
    ("axes", "num_groups"),
    [({"dp_shard": 1024}, 0), ({"dp_shard": 128, "cp": 8}, 128 + 8), ({"dp_replicate": 4, "dp_shard": 32, "cp": 8}, 256 + 4 + 128 + 8)],
)  # fmt: skip
def test_axes_of_size_1_make_no_groups(
    axes: dict[str, int], num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At (1, 1024, 1, 1) there were 3,072 calls, each of them a barrier in the store where a site has set that."""
    made: list[object] = []
    real = dist.distributed_c10d._new_group_with_tag
    counted = lambda *args, **more: made.append(args) or real(*args, **more)  # noqa: E731
    monkeypatch.setattr(dist.distributed_c10d, "_new_group_with_tag", counted)
    monkeypatch.setenv("WORLD_SIZE", "1024")
    monkeypatch.setenv("RANK", "0")
    dist.init_process_group("fake", rank=0, world_size=1024)
    try:
        mesh = init_mesh(MeshConfig(**axes))
        assert (mesh.cp.size() if mesh.cp else 1) == axes.get("cp", 1)
    finally:
        dist.destroy_process_group()
    assert len(made) == num_groups


def test_one_process_has_no_fsdp_unless_it_is_asked_for() -> None:
    one, eight = MeshShape(1, 1, 1), MeshShape(1, 8, 1)
    assert choose_strategy("auto", one) == "none"
    assert choose_strategy("auto", one, offloads=True) == "fsdp"
    assert choose_strategy("fsdp", one) == "fsdp"
    assert choose_strategy("auto", eight) == "fsdp"


def test_embedding_and_head_are_gathered_apart() -> None:
    """As one group they are all there before anything runs, and reduced after everything: 4.2 GB of an 8B model."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    seen: dict[str, list[str]] = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        lm = LlamaForCausalLM(
            LlamaConfig(vocab_size=64, tie_word_embeddings=False, **sizes)
        ).train()
        install(lm, ReferenceAttention())
        mesh = open_mesh(MeshShape(1, 1, 1), torch.device("cpu"))
        model = parallelize(LossModel(lm, FusedLinearCrossEntropy()), mesh, "fsdp", torch.bfloat16)
        embedding, head, first = (
            lm.get_input_embeddings(),
            lm.get_output_embeddings(),
            decoder_layers(lm)[0],
        )

        def look(moment: str) -> None:
            whole = {"embedding": embedding, "layer": first.mlp.up_proj, "head": head}
            seen[moment] = [
                name for name, module in whole.items() if not isinstance(module.weight, DTensor)
            ]
            seen[moment] += [
                f"{name}'s gradient"
                for name, module in whole.items()
                if module.weight.grad is not None
            ]

        def watch(module: torch.nn.Module, moment: str) -> None:
            def hook(_: Any, args: Any, out: torch.Tensor) -> None:
                out.register_hook(lambda grad: look(moment))

            module.register_forward_hook(hook)

        first.register_forward_pre_hook(lambda *call: look("first layer"))
        watch(first, "its backward")
        watch(embedding, "the embedding's backward")
        loss = model(stream_of(torch.arange(32)[None], "cpu")).sum
        look("loss")
        loss.backward()
    finally:
        dist.destroy_process_group()
    assert seen == {
        "first layer": ["layer"],  # the embedding is used up
        "loss": ["head"],
        "its backward": ["layer", "head's gradient"],
        # which needs no weight
        "the embedding's backward": ["layer's gradient", "head's gradient"],
    }


def test_autocast_keeps_no_casts_of_weights() -> None:
    """13 GiB of an 8B model in training, in validation and in samples."""

    class Asked(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()

        logits = probe = forward

    model: Any = Asked()
    parallel = ParallelModel(model, model, 1, torch.bfloat16)
    batch = stream_of(torch.zeros(1, 4, dtype=torch.long), "cpu")
    assert all([parallel(batch), parallel.logits(batch), parallel.probe(batch)])


@pytest.mark.system
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_alone_has_the_numbers_of_two(precision: str, tmp_path: Path) -> None:
    """The way of one GPU, on gloo: a group of one rank, saved and resumed. Under autocast a step of bf16 is 4e-3."""
    options = [
        "mesh.strategy=fsdp",
        f"training.precision={precision}",
        "training.log_every_steps=1",
        "training.max_steps=4",
    ]
    assert train_quick(tmp_path / "one", *options, stop_at=2)[0] == 75
    code, screen = train_quick(tmp_path / "one", *options)
    assert code == 0, screen
    assert "continues from step_00000002" in screen
    assert train_on(2, tmp_path / "two", *options)[0] == 0
    one, two = losses_by_step(tmp_path / "one"), losses_by_step(tmp_path / "two")
    assert one.keys() == two.keys()
    for step, (loss, norm) in one.items():
        assert (loss, norm) == pytest.approx(two[step], rel=1e-5 if precision == "fp32" else 5e-3)


def test_ddp_of_one_process(tmp_path: Path) -> None:
    short = "training.max_steps=3"
    assert train_quick(tmp_path / "none", short)[0] == 0
    assert train_quick(tmp_path / "ddp", short, "mesh.strategy=ddp")[0] == 0
    for step, values in losses_by_step(tmp_path / "ddp").items():
        assert values == pytest.approx(losses_by_step(tmp_path / "none")[step], rel=1e-6)


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(mesh, "cgroup_cores", lambda: math.inf)


@pytest.mark.parametrize(
    ("asked", "ranks", "found"),
    [
        ("", 1, (8, "8 cores")),
        ("1", 1, (1, "OMP_NUM_THREADS")),
        ("3", 2, (3, "OMP_NUM_THREADS")),
        ("1", 2, (4, "8 cores, 2 processes")),  # torchrun's own choice
        ("x", 1, (8, "8 cores")),
    ],
)
def test_omp_num_threads_is_respected(
    asked: str, ranks: int, found: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads_of(0) == found
    assert threads_of(5) == (5, "training.num_threads")


def test_a_containers_limit_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "cgroup_cores", lambda: 2.5)
    assert threads_of(0) == (2, "the container's limit of 2.5 cores")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "250000 100000"}, 2.5),
        ({}, math.inf),
    ],
)
def test_the_limit_of_a_cgroup(files: dict[str, str], cores: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cgroup_cores(tmp_path) == cores


def groups_of_a_rank(
    rank: int, world_size: int, shapes: list[MeshShape]
) -> list[list[tuple[list[int], float]]]:
    """Of each mesh: the ranks of every group that sends, beside the default one, and its timeout
    in s.
    """
    found = []
    for shape in shapes:
        before = {*dist.distributed_c10d._world.pg_map}
        open_mesh(shape, torch.device("cpu"), timedelta(seconds=77))
        opened = [
            (dist.get_process_group_ranks(group), group._get_backend(torch.device("cpu")))
            for group, (backend, _) in dist.distributed_c10d._world.pg_map.items()
            if group not in before and backend != "fake"
        ]
        found.append([(r, x.options._timeout.total_seconds()) for r, x in opened])
    return found


def test_an_axis_has_one_group_that_waits_as_long_as_is_set() -> None:
    """torch gives groups of a mesh 30 minutes; a link that hangs in one would be waited for."""
    shapes = [MeshShape(1, 4, 1), MeshShape(2, 2, 1), MeshShape(1, 2, 2), MeshShape(1, 1, 2, 2)]
    assert run_ranks(groups_of_a_rank, 4, shapes)[3] == [
        [],  # FSDP alone: the default group
        [([1, 3], 77.0), ([2, 3], 77.0)],  # replicas, shards
        [([2, 3], 77.0)],  # cp; shards lie on all ranks
        [([1, 3], 77.0), ([2, 3], 77.0), ([1, 3], 77.0)],  # shards over cp, tp, cp
    ]
