"""The formulas of docs/planning.md beside the recipe itself: bytes on the wire, state in memory and step time of 1, 2 and
4 processes (gloo, one thread each).

    python -m benchmarks.scaling                   bytes, memory and times of a step
    python -m benchmarks.scaling --starts 1 2 4    CPU seconds and peak memory of a rank until its model is built and checked

Every collective of one whole step is counted where it is dispatched, by its tensor's size: of n ranks each receives
(n - 1) / n of what it gathers, or of what it reduces and scatters, and twice that of what is all-reduced. The other
steps are timed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = [
    "training.precision=bf16",
    "packed_sequence.packed_sequence_size=256",
    "dataset.num_chats=200",
]
MODEL += ["packed_sequence.overlong=drop"]
CHECKPOINTED = "training.activation_checkpointing=full"
LAYOUTS: dict[str, tuple[int, list[str]]] = {  # one micro-batch a rank unless said
    "1 process": (1, ["training.global_batch_size=1"]),
    "2, FSDP": (2, ["training.global_batch_size=2"]),
    "4, FSDP": (4, ["training.global_batch_size=4"]),
    "2, FSDP, 3 micro-batches": (2, ["training.global_batch_size=6"]),
    "2, FSDP, full checkpointing": (2, ["training.global_batch_size=2", CHECKPOINTED]),
    "4, HSDP 2 x 2": (4, ["training.global_batch_size=4", "mesh.dp_replicate=2"]),
    "2, cp 2": (2, ["training.global_batch_size=1", "mesh.cp=2"]),
    "4, cp 2": (4, ["training.global_batch_size=2", "mesh.cp=2"]),
    "2, cp 2, full checkpointing": (2, ["training.global_batch_size=1", "mesh.cp=2", CHECKPOINTED]),
}
STEPS = 4
LARGEST_NUMBERS = 256  # bytes of counts, flags and norms; gradients (HSDP) are more


@dataclass(frozen=True)
class Measured:
    """One rank's numbers beside those of the formulas; bytes of one optimizer step."""

    gather_bytes: float
    gather_formula: float
    reduce_bytes: float  # HSDP's all-reduce included
    reduce_formula: float
    exchange_bytes: float
    exchange_formula: float
    other_bytes: float  # counts, flags, the gradient's norm
    state_bytes: int  # weights, gradients, moments: the tensors themselves
    state_formula: float
    resident_mib: float
    step_s: float
    step_cpu_s: float


def measure(overrides: list[str], folder: str) -> Measured:
    """Runs a few steps of the recipe on this rank, which torchrun (or a test) has started."""
    import torch

    from automodel_lite.cli import compose_config
    from automodel_lite.config.check import check_config
    from benchmarks.formulas import Hardware, estimate
    from recipes.train_ft import TrainFinetuneRecipe

    torch.set_num_threads(1)
    more = [
        *MODEL,
        "training.num_threads=1",
        f"output_dir={folder}/run",
        f"cache_dir={folder}/cache",
        *overrides,
    ]
    config = check_config(compose_config("llama_packed", ["name=scaling", *more]))
    recipe = TrainFinetuneRecipe(config)
    recipe.setup()
    recipe.open_feed()
    states: list[int] = []
    recipe.engine.optimizer.register_step_pre_hook(
        lambda optimizer, *_: states.append(_state_bytes(optimizer))
    )
    recipe.step(next(recipe.feed))
    ready = next(recipe.feed)
    with _traffic() as traffic:
        recipe.step(ready)
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        recipe.step(next(recipe.feed))
    step_s, step_cpu_s = (
        (time.perf_counter() - began) / STEPS,
        (time.process_time() - began_cpu) / STEPS,
    )

    shape = recipe.mesh.shape
    model = recipe.model.loss_model.lm.config
    paper = estimate(
        recipe.built.decided,
        model,
        Hardware(1e12, 1.0, 1e9, 1e9),
        shape.world_size,
        600,
        micro_steps=len(ready.inputs),
    )
    memory = recipe.built.memory
    assert memory is not None
    return Measured(
        gather_bytes=traffic["gather"],
        gather_formula=paper.gather_bytes,
        reduce_bytes=traffic["reduce"],
        reduce_formula=paper.reduce_bytes,
        exchange_bytes=traffic["exchange"],
        exchange_formula=paper.exchange_bytes,
        other_bytes=traffic["other"],
        state_bytes=states[-1],
        # gradients are as large as weights by then
        state_formula=2 * memory.weights + memory.optimizer,
        resident_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        step_s=step_s,
        step_cpu_s=step_cpu_s,
    )


@contextmanager
def _traffic() -> Iterator[Counter[str]]:
    """Counts the bytes that this rank receives: gather, reduce, exchange (context parallelism), other."""
    import torch
    from torch.distributed import ProcessGroup
    from torch.utils._python_dispatch import TorchDispatchMode

    from automodel_lite.parallel import exchange

    received: Counter[str] = Counter()
    in_exchange: list[str] = []

    class Traffic(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                groups = [
                    a
                    for a in args
                    if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
                ]
                size = ProcessGroup.unbox(groups[0]).size()
                kind, num_bytes = _received(func._schema.name.removeprefix("c10d::"), args)
                received[in_exchange[0] if in_exchange else kind] += num_bytes * (size - 1) / size
            return func(*args, **(kwargs or {}))

    def marked(collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            in_exchange.append("exchange")
            try:
                return collective(*args, **kwargs)
            finally:
                in_exchange.pop()

        return call

    real = exchange.all_gather_rows, exchange.reduce_scatter_rows
    exchange.all_gather_rows, exchange.reduce_scatter_rows = map(marked, real)
    try:
        with Traffic():
            yield received
    finally:
        exchange.all_gather_rows, exchange.reduce_scatter_rows = real


def _received(name: str, args: Any) -> tuple[str, float]:
    """What it is for, and its bytes before the share of the own rank is taken off."""
    if name == "_allgather_base_":
        return "gather", args[0].nbytes
    if name == "broadcast_":  # of each rank's part in turn: an all-gather
        return "gather", sum(tensor.nbytes for tensor in args[0])
    if name == "_reduce_scatter_base_":
        return "reduce", args[1].nbytes
    if name == "allreduce_":
        size = sum(tensor.nbytes for tensor in args[0])
        return ("reduce" if size > LARGEST_NUMBERS else "other"), 2 * size
    raise AssertionError(f"{name} is not counted yet")


def _state_bytes(optimizer: Any) -> int:
    """Of weights, gradients and moments on this rank; the step counters are left out."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = [
                value for name, value in optimizer.state[parameter].items() if name != "step"
            ]
            total += sum(_local(tensor).nbytes for tensor in [parameter, parameter.grad, *moments])
    return total


def _local(tensor: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Start:
    """Of one rank, above its imports: until the model is loaded or drawn, and checked."""

    cpu_s: float
    peak_gib: float


MODEL_OF_STARTS = {  # 253 M parameters, 0.94 GiB in fp32
    **{
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
    },
    **{"num_key_value_heads": 8, "vocab_size": 8192},
}
ROUNDS = 3


def measure_start(folder: str, overrides: list[str]) -> Start:
    """On this rank; the imports, those of the model's code too, come first."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    import recipes.train_ft  # noqa: F401
    from automodel_lite.cli import compose_config
    from automodel_lite.config.check import check_config
    from automodel_lite.parallel.mesh import init_mesh
    from automodel_lite.training.build import build_model
    from automodel_lite.training.decide import decide
    from automodel_lite.training.plan import build_parts

    torch.set_num_threads(1)
    config = check_config(
        compose_config(
            "smoke", [f"output_dir={folder}/run", f"cache_dir={folder}/cache", *overrides]
        )
    )
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b")
    mesh = init_mesh(config.mesh)
    peak, began = _peak_gib(), time.process_time()
    build_model(decide(build_parts(config), tokenizer, mesh.shape, mesh.device), tokenizer, mesh)
    return Start(time.process_time() - began, _peak_gib() - peak)


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def save_model(folder: str) -> None:
    """The model of starts as a checkpoint in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**MODEL_OF_STARTS)).to(torch.bfloat16).save_pretrained(
        folder, max_shard_size="100MB"
    )


def starts(of_ranks: list[int]) -> None:
    """Ranks take turns over the rounds; medians."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(f"{folder}/model")
        written = {
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        }
        scratch = [
            f"{'' if k in written else '+'}model.config.{k}={v}" for k, v in MODEL_OF_STARTS.items()
        ]
        sources = {
            "from scratch": scratch,
            "bf16": ["model=pretrained", f"model.pretrained={folder}/model"],
        }
        found: dict[tuple[str, int], list[Start]] = {}
        for _ in range(ROUNDS):
            for source, overrides in sources.items():
                for num_processes in of_ranks:
                    start = Start(**on_ranks(num_processes, ["--starts", *overrides]))
                    found.setdefault((source, num_processes), []).append(start)
    print(
        "| checkpoint | ranks | CPU-s of a rank | lowest to highest | peak GiB |\n|" + " --- |" * 5
    )
    for (source, num_processes), of_rounds in found.items():
        seconds = sorted(start.cpu_s for start in of_rounds)
        peak = max(start.peak_gib for start in of_rounds)
        cells = [
            source,
            num_processes,
            f"{median(seconds):.2f}",
            f"{seconds[0]:.2f} to {seconds[-1]:.2f}",
            f"{peak:.2f}",
        ]
        print(f"| {' | '.join(map(str, cells))} |")


def run_layout(num_processes: int, overrides: list[str]) -> Measured:
    return Measured(**on_ranks(num_processes, overrides))


def on_ranks(num_processes: int, arguments: list[str]) -> dict[str, Any]:
    """Rank 0's numbers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={num_processes}",
        ]
        done = subprocess.run(
            [*command, "-m", "benchmarks.scaling", folder, *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def main() -> None:
    if "--starts" in sys.argv:
        starts([int(number) for number in sys.argv[2:]])
        return
    print(
        "| ranks | gathered KiB | on paper | reduced KiB | on paper | cp KiB | on paper | other KiB | state MiB |",
        end="",
    )
    print(" on paper | resident MiB | step s | CPU-s a rank |\n|" + " --- |" * 13)
    for name, (num_processes, overrides) in LAYOUTS.items():
        m = run_layout(num_processes, overrides)
        kib = [m.gather_bytes, m.gather_formula, m.reduce_bytes, m.reduce_formula, m.exchange_bytes]
        kib += [m.exchange_formula, m.other_bytes]
        cells = [f"{value / 2**10:,.1f}" for value in kib]
        cells += [f"{value / 2**20:.2f}" for value in (m.state_bytes, m.state_formula)]
        cells += [f"{m.resident_mib:.0f}", f"{m.step_s:.3f}", f"{m.step_cpu_s:.3f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        folder, *arguments = sys.argv[1:]
        is_start = arguments[0] == "--starts"
        result = measure_start(folder, arguments[1:]) if is_start else measure(arguments, folder)
        if os.environ["RANK"] == "0":
            print("RESULT " + json.dumps(asdict(result)), flush=True)
        os._exit(0)
    main()
