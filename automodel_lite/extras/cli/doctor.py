"""`automodel-lite doctor`: is this machine, or every machine of a job, fit to train?"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.utils.benchmark import Timer

from automodel_lite.attention.interface import AUTO_KERNELS
from automodel_lite.attention.kernel import AttentionKernel, ReferenceAttention
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.cli.line import argument_parser
from automodel_lite.compat import TESTED
from automodel_lite.config.components import build, option
from automodel_lite.config.schema import MeshConfig
from automodel_lite.errors import ConfigError, explained, one_line
from automodel_lite.parallel.mesh import init_mesh
from automodel_lite.results import RESULTS
from automodel_lite.telemetry.console import Console
from automodel_lite.telemetry.metrics import peak_of
from automodel_lite.thd import AttentionOptions, Segments
from automodel_lite.version import __version__

LEAST_OF_MEDIAN = 0.9  # a rank whose product is slower than that is an outlier
LEAST_OF_MEDIAN_LINKS = 0.8
LEAST_OF_DATA_SHEET = 0.5  # what a card that is not throttled reaches easily
LEAST_SHM_BYTES = (
    2**30
)  # of /dev/shm: loaders and NCCL pass data there; containers start with 64 MB
LEAST_DISK_BYTES = 20 * 10**9
LEAST_OPEN_FILES = 4096
OPTIONAL_KERNELS = ("flash", "te")


def doctor(argv: list[str]) -> int:
    """Check a machine before a job: versions, kernels, the rate of each GPU and of the links, disk.

    automodel-lite doctor                                  this process and its GPU
    torchrun --nproc-per-node 8 -m automodel_lite doctor   every GPU of this machine
    srun ... automodel-lite doctor                         every GPU of a job

    Exits with 2 where something has to be mended first; notes are for you to judge. Works without
    a GPU.
    """
    parser = argument_parser(doctor.__doc__, has_results=True)
    parser.add_argument("--output-dir", default=".", type=Path, help="where runs will be written")
    folder = parser.parse_args(argv).output_dir
    mesh = init_mesh(MeshConfig())
    try:
        own = examine(mesh.device, folder)
        found = [own]
        if mesh.root:
            found = [own] * dist.get_world_size()
            dist.all_gather_object(found, own)
            measure_links(found, mesh.device)
        problems, notes = judge(found)
        RESULTS.update(ranks=[*map(asdict, found)], problems=problems, notes=notes)
        if mesh.rank == 0:
            Console().show(page(found, notes))
    finally:
        mesh.close()
    if problems:
        raise ConfigError("\n".join(problems))
    return 0


@dataclass
class Findings:
    """What one rank found about its process, its GPU and its host."""

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    tflops: float
    peak_tflops: float | None  # of the data sheet
    clocks: str  # during the product; empty without nvidia-smi
    kernels: dict[str, str]  # name -> "ok", or what keeps it from working
    disk_bytes: int
    disk_mb_per_s: float
    shm_bytes: int | None  # None where there is no /dev/shm
    open_files: int
    host_gb_per_s: float | None = None  # of an all-reduce inside the host
    world_gb_per_s: float | None = None


# --------------------------------------------------------------------------------------- one rank
def examine(device: torch.device, folder: Path) -> Findings:
    """Looks at this process' host and device."""
    import resource

    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else "cpu"
    tflops, clocks = measure_product(device)
    peak = peak_of(name)
    free_bytes, mb_per_s = measure_disk(folder)
    shm = Path("/dev/shm")
    return Findings(
        rank=int(os.environ.get("RANK", "0")),
        host=socket.gethostname(),
        device=name,
        versions={package: _version(package) for package in (*TESTED, "triton")},
        tflops=tflops,
        peak_tflops=None if peak is None else peak / 1e12,
        clocks=clocks,
        kernels=try_kernels(device),
        disk_bytes=free_bytes,
        disk_mb_per_s=mb_per_s,
        shm_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def measure_product(device: torch.device) -> tuple[float, str]:
    """Returns the TFLOP/s of a product of square matrices, bf16 on a GPU, the median of five, and
    the card's clocks meanwhile.
    """
    is_cuda = device.type == "cuda"
    size = 8192 if is_cuda else 512
    dtype = torch.bfloat16 if is_cuda else torch.float32
    a = torch.ones(size, size, device=device, dtype=dtype)
    seconds = _timed(lambda: a @ a, 20 if is_cuda else 2, rounds=5)
    clocks = ""
    if is_cuda:
        # two seconds of work, as the clocks are read by a program that takes one
        for _ in range(min(2000, int(2 / seconds))):
            a @ a
        clocks = _smi("clocks.sm,clocks_event_reasons.active,temperature.gpu", device)
    return 2 * size**3 / seconds / 1e12, clocks


def _timed(run: Callable[[], Any], times: int, rounds: int) -> float:
    """Returns the seconds of one call, the median of the rounds; each of them is warmed up."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return statistics.median(timer.timeit(times).mean for _ in range(rounds))


def _smi(query: str, device: torch.device) -> str:
    """Returns what nvidia-smi answers for a device; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i"]
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        done = subprocess.run([*command, f"GPU-{uuid}"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def try_kernels(device: torch.device) -> dict[str, str]:
    """Runs each kernel for packed attention forward and backward over two documents, beside the
    reference.
    """
    if device.type != "cuda":
        return {"reference": _tried(ReferenceAttention(), device)}
    found = {}
    for name in (*AUTO_KERNELS, *OPTIONAL_KERNELS):
        try:
            found[name] = _tried(build(option("attention", name)), device)
        except ConfigError as error:
            found[name] = one_line(error, 200)
    return found


def _tried(kernel: AttentionKernel, device: torch.device) -> str:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    boundaries = torch.tensor([0, 100, 256], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(256, 4, 64, generator=generator).to(dtype) for _ in "qkv"]
    host = torch.device("cpu")
    try:
        kernel.check(AttentionSpec("llama", device, dtype, 64, 64))
        results = []
        # the reference on the host, in fp32
        for each, place, kind in ((kernel, device, dtype), (ReferenceAttention(), host, None)):
            q, k, v = (x.to(place, kind or torch.float32).requires_grad_() for x in inputs)
            cu = boundaries.to(place)
            out = each(q, k, v, Segments(cu, cu, 156, 156), AttentionOptions(0.125))
            out.float().square().sum().backward()
            results.append([x.to(device) for x in (out, q.grad, k.grad, v.grad) if x is not None])
    except ConfigError as error:
        return one_line(error, 200)
    except Exception as error:  # whatever a binary of another version raises
        return f"fails: {type(error).__name__}: {one_line(error, 160)}"
    for got, want in zip(*results):
        if not (got - want).abs().max() <= 0.05 * want.abs().max():
            return "gives other numbers than the reference"
    return "ok"


def measure_disk(folder: Path) -> tuple[int, float]:
    """Returns the free bytes where runs will be written, and the MB/s of a file that reaches the
    disk; raises ConfigError.
    """
    content = os.urandom(2**20) * 16
    path = folder / f".doctor_{socket.gethostname()}_{os.getpid()}"
    try:
        with explained(f"--output-dir {folder} cannot be written"):
            folder.mkdir(parents=True, exist_ok=True)
            began = time.perf_counter()
            with path.open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            free_bytes = shutil.disk_usage(folder).free
    finally:
        with suppress(OSError):
            path.unlink()
    return free_bytes, len(content) / seconds / 1e6


# -------------------------------------------------------------------------------------- all ranks
def measure_links(found: list[Findings], device: torch.device) -> None:
    """Times an all-reduce inside each host and over all ranks, and adds the rates to `found`."""
    rank = dist.get_rank()
    by_host: dict[str, list[int]] = {}
    for each in found:
        by_host.setdefault(each.host, []).append(each.rank)
    inside: float | None = None
    for ranks in by_host.values():
        group = dist.new_group(ranks)  # every rank calls it for every host
        if rank in ranks and len(ranks) > 1:
            inside = _all_reduce_gb_per_s(group, len(ranks), device)
    world = _all_reduce_gb_per_s(None, len(found), device) if len(found) > 1 else None
    rates: list[Any] = [None] * len(found)
    dist.all_gather_object(rates, (inside, world))
    for each, (own, common) in zip(found, rates):
        each.host_gb_per_s = own
        each.world_gb_per_s = common


def _all_reduce_gb_per_s(group: Any, num_ranks: int, device: torch.device) -> float:
    """Returns the GB/s that leave a rank, as NCCL's tests count it."""
    num_bytes = 2**28 if device.type == "cuda" else 2**20
    values = torch.zeros(num_bytes // 4, device=device)
    seconds = _timed(lambda: dist.all_reduce(values, group=group), 3, rounds=3)
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds / 1e9


def outliers(rates: Mapping[str, float], least_frac: float) -> dict[str, float]:
    """Returns those below a fraction of the median, with their fraction of it.

    >>> outliers({"a": 600, "b": 610, "c": 450}, 0.9)
    {'c': 0.75}
    """
    if not rates:
        return {}
    median = statistics.median(rates.values())
    return {name: rate / median for name, rate in rates.items() if rate < least_frac * median}


def judge(found: list[Findings]) -> tuple[list[str], list[str]]:
    """Returns sentences for what has to be mended first, and for what may be meant."""
    problems = []
    notes: list[str] = []
    on_gpu = [each for each in found if each.device != "cpu"]
    if len({each.device for each in found}) > 1:
        kinds = ", ".join(sorted({each.device for each in found}))
        problems.append(f"the ranks have different devices ({kinds}): the slowest sets the pace.")
    differing = [
        package for package in found[0].versions if len({x.versions[package] for x in found}) > 1
    ]
    if differing:
        names = ", ".join(differing)
        problems.append(f"hosts have different versions of {names}: install the same everywhere.")
    products = {f"rank {x.rank} on {x.host}": x.tflops for x in found if on_gpu}
    for name, frac in outliers(products, LEAST_OF_MEDIAN).items():
        problems.append(
            f"{name}: its product runs at {frac:.0%} of the others' rate, and all ranks wait for "
            f"it: leave this host out, or look at nvidia-smi -q -d PERFORMANCE there."
        )
    links = {x.host: x.host_gb_per_s for x in on_gpu if x.host_gb_per_s is not None}
    for host, frac in outliers(links, LEAST_OF_MEDIAN_LINKS).items():
        problems.append(
            f"{host}: its GPUs exchange at {frac:.0%} of the other hosts' rate: leave this host "
            "out, or look at nvidia-smi topo -m and nvlink --status there."
        )
    for each in on_gpu:
        if each.peak_tflops and each.tflops < LEAST_OF_DATA_SHEET * each.peak_tflops:
            problems.append(
                f"rank {each.rank} on {each.host}: {each.tflops:.0f} TFLOP/s where {each.device} "
                f"has {each.peak_tflops:.0f}: another process uses the card, or it is throttled "
                f"({each.clocks or 'no nvidia-smi'})."
            )
    for each in {each.host: each for each in found}.values():
        _judge_host(each, problems, notes)
    return problems, notes


def _judge_host(each: Findings, problems: list[str], notes: list[str]) -> None:
    for package, (oldest, newest) in TESTED.items():
        own = each.versions[package]
        if not own or Version(own).release < Version(oldest).release:
            problems.append(f"{each.host}: {package} {own or 'is missing'}: install {newest}.")
        elif Version(own).release > Version(newest).release:
            notes.append(f"{package} {own} is newer than {newest}, the newest that was tested")
    for name, text in each.kernels.items():
        is_chosen = name not in OPTIONAL_KERNELS
        if text.startswith(("fails", "gives")) and (is_chosen or text.startswith("gives")):
            problems.append(f"{each.host}: attention kernel {name} {text}.")
    if each.shm_bytes is not None and each.shm_bytes < LEAST_SHM_BYTES:
        mib = each.shm_bytes / 2**20
        problems.append(
            f"{each.host}: /dev/shm has {mib:.0f} MiB, through which loaders and NCCL pass data: "
            "start the container with --shm-size=16g or --ipc=host."
        )
    if each.disk_bytes < LEAST_DISK_BYTES:
        gb = each.disk_bytes / 1e9
        notes.append(
            f"{each.host} has {gb:.1f} GB of free disk; a checkpoint takes 12 bytes per weight"
        )
    if each.open_files < LEAST_OPEN_FILES:
        notes.append(f"{each.host} allows {each.open_files} open files: ulimit -n 65536")


def page(found: list[Findings], notes: list[str]) -> list[tuple[str, str]]:
    """Returns the lines that are printed: (topic, text)."""
    first = found[0]
    packages = ", ".join(f"{name} {number or '-'}" for name, number in first.versions.items())
    python = ".".join(map(str, sys.version_info[:3]))
    lines = [("version", f"automodel_lite {__version__} (Python {python}, {packages})")]
    hosts = {each.host for each in found}
    where = "1 host" if len(hosts) == 1 else f"{len(hosts)} hosts"
    lines.append(("device", f"{len(found)} x {first.device} on {where}"))
    rates = [each.tflops for each in found]
    spread = f"{min(rates):.3g} to {max(rates):.3g}" if len(rates) > 1 else f"{rates[0]:.3g}"
    sheet = f", data sheet {first.peak_tflops:.0f}" if first.peak_tflops else ""
    lines.append(("product", f"{spread} TFLOP/s{sheet}"))
    if first.clocks:
        lines.append(("clocks", f"{first.clocks} (SM clock, reasons for less, temperature)"))
    inside = [x.host_gb_per_s for x in found if x.host_gb_per_s is not None]
    if inside:
        lines.append(("host", f"all-reduce {min(inside):.3g} to {max(inside):.3g} GB/s"))
    if first.world_gb_per_s is not None and len(hosts) > 1:
        lines.append(("links", f"all-reduce over all hosts {first.world_gb_per_s:.3g} GB/s"))
    lines += [("kernel", f"{name}: {text}") for name, text in first.kernels.items()]
    disk = f"{first.disk_bytes / 1e9:.0f} GB free, written at {first.disk_mb_per_s:.0f} MB/s"
    shm = "none" if first.shm_bytes is None else f"{first.shm_bytes / 2**30:.1f} GiB"
    lines += [("disk", disk), ("/dev/shm", shm), ("open files", str(first.open_files))]
    return lines + [("", f"NOTE: {text}") for text in notes]
