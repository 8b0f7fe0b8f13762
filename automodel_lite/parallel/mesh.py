"""The device mesh: dp_replicate x dp_shard x cp, and what each axis means for data and
gradients.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from automodel_lite import compat
from automodel_lite.config.schema import MeshConfig
from automodel_lite.config.sizes import MeshShape, mesh_shape
from automodel_lite.errors import ConfigError, explained, one_line
from automodel_lite.launched import is_first_here, launch_variable, rank, world_size

T = TypeVar("T")
# ranks in this order, those of tp next to each other
AXES = ("dp_replicate", "dp_shard", "cp", "tp")
SHARDS = "dp_shard_cp"  # dp_shard x cp: the ranks over which FSDP shards


@dataclass(frozen=True)
class Mesh:
    """The process groups of a run. Without a launcher (one process) there are none and the
    sub-meshes are None.
    """

    shape: MeshShape
    device: torch.device
    root: DeviceMesh | None  # dp_replicate x SHARDS x tp, those that are larger than 1
    cp: DeviceMesh | None = None
    timeout: timedelta | None = None  # of the groups that are opened later; None = torch's

    @property
    def rank(self) -> int:
        return self.root.get_rank() if self.root else 0

    @property
    def dp_rank(self) -> int:
        """Which packs this rank reads: ranks that share a pack (cp) or its tokens (tp) read the
        same.
        """
        return self.rank // (self.shape.cp * self.shape.tp)

    @property
    def token_rank(self) -> int:
        """Which tokens this rank computes: the ranks of tp compute the same."""
        return self.rank // self.shape.tp

    @property
    def tp(self) -> DeviceMesh | None:
        return self.root["tp"] if self.root and self.shape.tp > 1 else None

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, of those of tp the first; value is left as it is."""
        total = value.detach().clone()
        if self.rank % self.shape.tp:
            total.zero_()
        if self.root:
            dist.all_reduce(total)
        return total

    def largest(self, own: int) -> int:
        """Returns the largest of the ranks' numbers; waits for all of them."""
        largest = torch.tensor(own, device=self.device)
        if self.root:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def gather(self, own: T) -> list[T]:
        """Returns the objects of all ranks, in their order."""
        gathered = [own] * self.shape.world_size
        if self.root:
            dist.all_gather_object(gathered, own)
        return gathered

    def barrier(self) -> None:
        if self.root:
            dist.barrier()

    def close(self) -> None:
        # a client's program may have closed its groups itself
        if self.root and dist.is_initialized():
            dist.destroy_process_group()


LINE_EVERY_S = 30.0
_START_S = 600.0  # for rank 0 to start
# read weights: more open thousands of files in one second, which a shared file system may not stand
HOSTS_AT_ONCE = 16
_TURN_S = 1800.0  # the longest wait for them
# containers may have a thousand times as many, and programs that go through all of them are slow
MOST_OPEN_FILES = 2**20


def holds_store() -> bool:
    """Returns whether the store ends with this process, as that of rank 0 under srun."""
    return rank() == 0 and not _has_agent()


def _has_agent() -> bool:
    """torchrun has one on each host, which holds the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@lru_cache(maxsize=1)
def launchers_store() -> dist.Store:
    """Returns the launcher's store, where the ranks meet; raises ConfigError when its address is
    wrong, with a line every 30 s until then.
    """
    host = os.environ["MASTER_ADDR"]
    port = launch_variable("MASTER_PORT", 0)
    with explained(f"MASTER_ADDR={host} is no host that this one knows"):
        socket.getaddrinfo(host, port)
    timeout = timedelta(seconds=_START_S)
    try:
        if _has_agent():  # which opened it before it started this rank, or is gone
            store: dist.Store = next(
                dist.rendezvous("env://", timeout=timedelta(seconds=LINE_EVERY_S))
            )[0]
            store.set_timeout(timeout)
            return store
        if rank():
            _wait_for_store(host, port)
        # nobody waits in there for all ranks: who is missing is named by `Peers`
        return dist.TCPStore(
            host,
            port,
            world_size(),
            holds_store(),
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (OSError, dist.DistError) as error:
        cause = (
            "is taken by another program, or two processes have RANK=0"
            if holds_store()
            else "does not answer"
        )
        raise ConfigError(
            f"MASTER_ADDR={host} MASTER_PORT={port} {cause} ({one_line(error, 120)}): set "
            "the same free port on every node."
        ) from None


def _wait_for_store(host: str, port: int) -> None:
    """Returns when rank 0 listens: torch's client, which waits too, prints pages of C++ meanwhile.
    Raises OSError when it is too late.
    """
    latest = time.monotonic() + _START_S
    next_line = time.monotonic() + LINE_EVERY_S
    while True:
        try:
            return socket.create_connection((host, port), LINE_EVERY_S).close()
        except OSError:
            if time.monotonic() > latest:
                raise
        if time.monotonic() > next_line and is_first_here():
            next_line += LINE_EVERY_S
            print(
                f"[rank {rank()}] waiting for rank 0 at {host}:{port}", file=sys.stderr, flush=True
            )
        time.sleep(1)


@contextlib.contextmanager
def reading_turn() -> Iterator[None]:
    """Lets the ranks of 16 hosts read weights at a time, without collectives; one that fails lets
    the next go on.
    """
    ahead = HOSTS_AT_ONCE * launch_variable("LOCAL_WORLD_SIZE", 1)
    if world_size() <= ahead:
        yield
        return
    store = dist.PrefixStore(
        "has read weights",
        launchers_store().clone(),  # type: ignore[attr-defined]
    )
    if rank() >= ahead:
        with contextlib.suppress(dist.DistError):  # too late to wait longer
            store.wait([str(rank() - ahead)], timedelta(seconds=_TURN_S))
    try:
        yield
    finally:
        store.set(str(rank()), "")


def allow_open_files() -> None:
    """Raises this process's limit of open files, as far as it may, up to 2^20: the usual soft limit
    is 1,024.

    Three groups of gloo connect every two ranks: it ends at 340 of them. A tensor that a data
    worker has read is an open file, in the worker and here: it ends at a step of 70 packs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, MOST_OPEN_FILES) if hard >= 0 else MOST_OPEN_FILES  # -1 is no limit
    if 0 <= soft < most:
        with contextlib.suppress(ValueError, OSError):  # more than the system allows is refused
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def threads_of(num_threads: int) -> tuple[int, str]:
    """(threads, why): as set, else OMP_NUM_THREADS, else this process's share of the cores that it
    may use.
    """
    if num_threads:
        return num_threads, "training.num_threads"
    ranks = launch_variable("LOCAL_WORLD_SIZE", 1)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    # launchers set it to 1 for several ranks where nobody has chosen: that 1 says nothing
    if re.fullmatch(r"[1-9]\d{0,3}", asked, flags=re.ASCII) and not (ranks > 1 and asked == "1"):
        return int(asked), "OMP_NUM_THREADS"
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_cores()
    if quota < cores:
        return max(1, int(quota) // ranks), f"the container's limit of {quota:g} cores"
    of_ranks = f", {ranks} processes" if ranks > 1 else ""
    return max(1, cores // ranks), f"{cores} cores{of_ranks}"


def cgroup_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """The CPU time per second that a container's limit leaves; infinite without one."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return math.inf if quota == "max" else max(1.0, int(quota) / int(period))
    return math.inf


def choose_strategy(strategy: str, shape: MeshShape, offloads: bool = False) -> str:
    """Turns auto into fsdp with several processes, or where weights are offloaded, else none;
    raises ConfigError for what cannot work.
    """
    if strategy == "auto":
        return "fsdp" if shape.world_size > 1 or offloads else "none"
    if strategy == "none" and shape.world_size > 1:
        raise ConfigError(
            f"mesh.strategy=none with {shape.world_size} processes would train as many models: use "
            "fsdp or ddp."
        )
    if strategy == "ddp" and shape.dp_replicate > 1:
        raise ConfigError(
            "mesh.strategy=ddp replicates over all ranks: set mesh.dp_replicate=1, or use fsdp "
            "for HSDP."
        )
    return strategy


def init_mesh(config: MeshConfig) -> Mesh:
    """Starts the process group (gloo on CPU, nccl on GPU), and lays the mesh over it.

    Without a launcher one process is a group of one rank on a GPU, whose memory may ask for FSDP,
    and where a strategy is asked for.
    """
    shape = mesh_shape(config, world_size())

    # 1. Choose this rank's device.
    has_gpu = torch.cuda.is_available()
    # SLURM may show each task its own GPU alone (--gpus-per-task=1): then it is number 0 to all of
    # them.
    index = launch_variable("LOCAL_RANK", 0) % max(torch.cuda.device_count(), 1)
    device = torch.device("cpu")
    if has_gpu:
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    allow_open_files()

    # 2. A process without a launcher has a group only where something needs one.
    is_launched = "RANK" in os.environ
    needs_group = config.strategy in ("fsdp", "ddp") or (config.strategy == "auto" and has_gpu)
    if not is_launched and not needs_group:
        return Mesh(shape, device, None)

    # 3. Start the default group.
    timeout = timedelta(seconds=config.timeout_s)
    if not dist.is_initialized():
        backend = "gloo"
        device_id = None
        if has_gpu:
            # NCCL is given its device and connects at once: a bad link shows before the weights are
            # read, and the mesh's groups are split off this one.
            backend = "cpu:gloo,cuda:nccl"
            device_id = device
        store: dist.Store = dist.HashStore()
        if is_launched:
            store = dist.PrefixStore("groups", launchers_store())
        dist.init_process_group(
            backend,
            timeout=timeout,
            device_id=device_id,
            store=store,
            rank=rank(),
            world_size=world_size(),
        )
        # Wait until all ranks are connected. One that fails at once would close connections that
        # others still open, and theirs would be the first error.
        if store.add("connected", 1) == world_size():
            store.set("all_connected", "")
        store.wait(["all_connected"], timeout)

    # 4. Lay the mesh over it.
    return open_mesh(shape, device, timeout)


def open_mesh(shape: MeshShape, device: torch.device, timeout: timedelta | None = None) -> Mesh:
    """Returns the mesh of the ranks whose default group is up; each axis that is used has one group
    of ranks, and waits for `timeout` (None: torch's).
    """
    # The axes over which parameters lie. One of size 1 would make a group of each rank, 3,072 of
    # them at 1,024 ranks, so only FSDP's is always there.
    sizes = {}
    if shape.dp_replicate > 1:
        sizes["dp_replicate"] = shape.dp_replicate
    sizes[SHARDS] = shape.dp_shard * shape.cp
    if shape.tp > 1 or shape.ep > 1:
        sizes["tp"] = shape.tp
    root = open_axes(device, sizes, timeout)

    # The axes over which tokens lie, of which only cp sends anything along them.
    cp = None
    if shape.cp > 1:
        token_sizes = {"dp": shape.dp, "cp": shape.cp, "tp": shape.tp}
        token_sizes = {axis: size for axis, size in token_sizes.items() if size > 1}
        cp = open_axes(device, token_sizes, timeout, used=["cp"])["cp"]
    return Mesh(shape, device, root, cp, timeout)


def open_axes(
    device: torch.device,
    sizes: dict[str, int],
    timeout: timedelta | None,
    used: Iterable[str] | None = None,
) -> DeviceMesh:
    """Lays all ranks over axes, the last of which are next to each other.

    used  the axes that get groups (None: all); others get some that send nothing, as a communicator
          of NCCL takes buffers on the GPU
    """
    closed = set() if used is None else sizes.keys() - set(used)
    if closed:
        _ = compat.FakeStore  # its module registers the backend "fake"
    mesh = init_device_mesh(
        device.type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=dict.fromkeys(closed, "fake") if closed else None,
    )
    # torch gives groups of a mesh its own default, 30 minutes
    if timeout is not None:
        for axis in sizes.keys() - closed:
            # public from torch 2.14 on, where the private one warns
            set_timeout = vars(dist).get("set_timeout") or compat.set_group_timeout
            set_timeout(timeout, mesh.get_group(axis))
    return mesh
