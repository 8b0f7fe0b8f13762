"""What kernels and compiled layers become on an H100: cubins for sm_90, their registers and spills, in a table.

    python -m tests.gpu_paths.fake.run -m tests.gpu_paths.fake.cubins                  every case, the table of the page
    python -m tests.gpu_paths.fake.run -m tests.gpu_paths.fake.cubins llama3_1_8b      one of them

Each case compiles in a process of its own with empty caches: what it makes is what it needs. Spilled bytes are of the
stack of a thread; ptxas chose them, as it would on a machine with the card. The cases of flash-attn-4 are there where it
is installed (`pip install --pre flash-attn-4`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from automodel_lite.cli import compose_config

TOKENS = 2048
VOCABULARY = 32768
# every size of conf/: the other presets of a size have its layers, with another optimizer, adapter or pack
SIZES = (
    "llama3_2_1b",
    "llama3_1_8b",
    "llama3_1_70b",
    "llama3_1_405b",
    "qwen3_0_6b",
    "qwen3_8b_1m",
    "qwen3_32b",
    "qwen3_30b_a3b",
    "qwen3_vl_8b",
    "qwen3_5_9b",
)
# no preset has softcaps: the layers of Gemma 2 9B, a window and none
GEMMA_2 = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": VOCABULARY,
}


@dataclass(frozen=True)
class Kernel:
    """registers  of a thread; `stack` and `shared` in bytes, of a thread and of a block; None is chosen at the launch"""

    name: str
    registers: int
    stack: int
    shared: int | None


def shape_of(preset: str) -> dict[str, Any]:
    """The preset's model with two layers of each kind that it has, and a small vocabulary; of a tower one layer."""
    from automodel_lite.config.check import check_config
    from automodel_lite.training.settings import build_parts

    config = check_config(compose_config(preset, ["dataset.path=any"]))
    parts = build_parts(replace(config, attention={}))
    shape: dict[str, Any] = parts.model.resolve_model_config({}).to_dict()
    text = shape.get("text_config", shape)
    text |= {"num_hidden_layers": 2, "vocab_size": VOCABULARY}
    if kinds := text.get("layer_types"):
        text["layer_types"] = [kind for kind in dict.fromkeys(kinds) for _ in "ab"]
        text["num_hidden_layers"] = len(text["layer_types"])
    if "vision_config" in shape:
        shape["vision_config"] |= {"depth": 1, "deepstack_visual_indexes": [0]}
    return shape


def layers(preset: str, **how: Any) -> None:
    """A step of a preset's model: layers, the loss and the optimizer, as gpu_check compiles them."""
    from benchmarks.gpu.steps import Trainer
    from benchmarks.gpu.variant import SHAPES, Variant

    SHAPES[preset] = GEMMA_2 if preset == "gemma2_9b" else shape_of(preset)
    settings = {"pack": TOKENS, "compiled": True, "weights": "bf16"} | how
    Trainer(Variant(shape=preset, **settings), "cuda").timed(2)


def _stream(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: Any
) -> tuple[Any, Any, Any, Any]:
    import torch

    from automodel_lite.thd import Segments

    ends = [0, 600, 1000, TOKENS]
    cu = torch.tensor(ends, dtype=torch.int32).cuda()
    widths = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    q, k, v = (
        torch.empty(TOKENS, *width, device="cuda", dtype=dtype).requires_grad_(True)
        for width in widths
    )
    return q, k, v, Segments(cu, cu, 1048, 1048)


def flex(
    softcap: float | None = None,
    window: int | None = None,
    sinks: bool = False,
    dims: tuple[int, int] = (128, 128),
    dtype: str = "bfloat16",
) -> None:
    """Forward and backward of `attention=flex` over three documents."""
    import torch

    from automodel_lite.parts.kernels.flex import FlexAttention
    from automodel_lite.thd import AttentionOptions

    kv_heads = 2 if dims[0] == dims[1] else 8
    q, k, v, segments = _stream(8, kv_heads, *dims, getattr(torch, dtype))
    heads = torch.empty(8, device="cuda").requires_grad_(True) if sinks else None
    options = AttentionOptions(dims[0] ** -0.5, window, softcap, heads)
    FlexAttention()(q, k, v, segments, options).sum().backward()


def flash_4(
    softcap: float | None = None,
    window: int | None = None,
    sinks: bool = False,
    dims: tuple[int, int] = (128, 128),
) -> None:
    """The same of `attention=flash` by flash-attn-4, which compiles for tensors without memory, and launches nothing."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from automodel_lite.parts.kernels.flash import FlashAttention
    from automodel_lite.thd import AttentionOptions

    with FakeTensorMode():
        q, k, v, segments = _stream(8, 2 if dims[0] == dims[1] else 8, *dims, torch.bfloat16)
        heads = None
        if sinks:
            heads = torch.empty(8, device="cuda", dtype=torch.bfloat16).requires_grad_(True)
        options = AttentionOptions(dims[0] ** -0.5, window, softcap, heads)
        FlashAttention()(q, k, v, segments, options).sum().backward()
        assert q.grad is not None


def flex_tree() -> None:
    import torch

    from automodel_lite.parts.kernels.flex import FlexAttention
    from automodel_lite.thd import AttentionInputs, AttentionOptions, TreeKeys

    q, k, v, segments = _stream(8, 2, 128, 128, torch.bfloat16)
    zeros = [torch.zeros(TOKENS, dtype=torch.int64).cuda() for _ in range(3)]
    inputs = AttentionInputs(q, k, v, segments, AttentionOptions(0.09))
    FlexAttention().attend_tree(inputs, TreeKeys(*zeros)).sum().backward()


def muon() -> None:
    import torch

    from automodel_lite.parts.optimizers.muon import muon as build
    from automodel_lite.training.optimizers import apply_gradients

    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(512, 1024), torch.nn.LayerNorm(1024), linear(1024, 512))
    model = model.cuda()
    optimizer = build(model, lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply_gradients(optimizer, model.parameters(), torch.zeros((), device="cuda"), 1.0)


CASES: dict[str, Callable[[], None]] = {
    **{preset: partial(layers, preset) for preset in SIZES},
    "llama3_1_8b, fp32 masters": lambda: layers("llama3_1_8b", weights="fp32"),
    "llama3_1_8b, 8-bit states": lambda: layers("llama3_1_8b", moments="8bit"),
    "llama3_1_8b, LoRA": lambda: layers("llama3_1_8b", lora=True, weights="fp32"),
    "gemma2_9b, softcap": lambda: layers("gemma2_9b"),
    "muon": muon,
    "flex": flex,
    "flex, window": lambda: flex(window=256),
    "flex, softcap": lambda: flex(softcap=30.0),
    "flex, softcap, head dim 256": lambda: flex(softcap=50.0, dims=(256, 256)),
    "flex, sinks, window": lambda: flex(window=128, sinks=True, dims=(64, 64)),
    "flex, latent 192/128": lambda: flex(dims=(192, 128)),
    "flex, trees": flex_tree,
    "flex, fp32": lambda: flex(dtype="float32"),
}
if find_spec("flash_attn") and find_spec("flash_attn.cute"):
    CASES |= {
        "flash-attn-4": flash_4,
        "flash-attn-4, window": lambda: flash_4(window=256),
        "flash-attn-4, softcap": lambda: flash_4(softcap=30.0),
        "flash-attn-4, softcap, head dim 256": lambda: flash_4(softcap=50.0, dims=(256, 256)),
        "flash-attn-4, sinks, window": lambda: flash_4(window=128, sinks=True, dims=(64, 64)),
        "flash-attn-4, latent 192/128": lambda: flash_4(dims=(192, 128)),
    }


def compiled(case: str) -> dict[str, Any]:
    """Compiles a case in a process of its own; returns its seconds, its graphs and its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/t", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/i"}
        # of the compiler of flash-attn-4
        caches |= {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu_paths.fake.cubins", "--here", case],
            env=os.environ | caches,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1][:300]
            return {"case": case, "error": f"exit code {done.returncode}: {last}"}
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        kernels = [used(path) for path in sorted(Path(folder).rglob("*.cubin"))]
        found |= {"case": case, "seconds": round(time.monotonic() - began)}
        return found | {"kernels": [vars(kernel) for kernel in kernels]}


def used(cubin: Path) -> Kernel:
    """What ptxas gave a kernel, read by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    assert found, text
    name = cubin.stem
    shared = None
    if class_ := re.search(r"(FlashAttention[A-Z]\w+?)_object_at.*\.sm_90a", name):
        name = class_[1]
    else:
        described = json.loads(cubin.with_suffix(".json").read_text())
        assert described["target"]["arch"] == 90
        shared = int(described["shared"])
    return Kernel(name, int(found[1]), int(found[2]), shared)


def table(rows: list[dict[str, Any]]) -> str:
    """One line per case."""
    lines = [
        "| case | graphs | kernels | most registers | kernels that spill | most bytes spilled, by | most shared KiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['case']} | FAILS: {row['error']} | | | | | |")
            continue
        kernels = [Kernel(**kernel) for kernel in row["kernels"]]
        worst = max(kernels, key=lambda kernel: kernel.stack)
        spills = sum(kernel.stack > 0 for kernel in kernels)
        most = f"{worst.stack:,}, `{worst.name[:60]}`" if worst.stack else "0"
        registers = max(kernel.registers for kernel in kernels)
        shared = [kernel.shared for kernel in kernels if kernel.shared is not None]
        largest = f"{max(shared) / 1024:.0f}" if shared else "at the launch"
        cells = [row["case"], row["graphs"], len(kernels), registers, spills, most, largest]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _here(case: str) -> None:
    import torch

    from automodel_lite.graphs import compiled_graphs, graph_breaks

    torch.backends.cuda.enable_cudnn_sdp(False)
    CASES[case]()
    print(json.dumps({"graphs": compiled_graphs(), "breaks": dict(graph_breaks())}))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--here"]:
        _here(arguments[1])
        return
    rows = []
    for case in arguments or CASES:
        rows.append(compiled(case))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
