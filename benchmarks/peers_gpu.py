"""Our own step on one GPU beside random padding, a [T, T] mask and transformers' packing by position ids.

    python -m benchmarks.peers_gpu --plan 1b | 1b_8192 | 8b | 8b_lora | compile    each fits a command of 9 minutes
    python -m benchmarks.peers_gpu --plan smoke --device cpu

Random weights, bf16 compute over fp32 masters (8b: bf16 weights, so that one GPU holds them), lengths of documents
like GSM8K's or long-tailed chats. MFU counts what documents need: 6 FLOPs a weight and token, 12 a visible pair and
channel, no padding, nothing recomputed. Each variant is a process of its own, with the deadline of the whole command.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

PLANS: dict[str, list[dict[str, Any]]] = {
    "smoke": [
        {"shape": "tiny", "pack": 256, "attention": a, "steps": 2, "warmup": 1}
        for a in ("packed", "padded", "mask", "position_ids")
    ]
    + [{"shape": "tiny", "pack": 256, "loss": "plain", "steps": 2, "warmup": 1}],
    "1b": [
        {"shape": "1b", "pack": 4096, "micro": 2, "attention": a} for a in ("packed", "padded", "mask", "position_ids")
    ],
    "1b_8192": [
        {"shape": "1b", "pack": 8192, "attention": "packed"},
        {"shape": "1b", "pack": 8192, "attention": "mask", "loss": "plain"},
        {"shape": "1b", "pack": 8192, "attention": "packed", "loss": "plain"},
        {"shape": "1b", "pack": 8192, "attention": "packed", "loss": "liger"},
        {"shape": "1b", "pack": 8192, "attention": "packed", "documents": "gsm8k"},
    ],
    "compile": [
        {"shape": "1b", "pack": 8192},
        {"shape": "1b", "pack": 8192, "compiled": True},
        {"shape": "1b", "pack": 8192, "compiled": True, "recompute": "full"},
        {"shape": "1b", "pack": 8192, "recompute": "full"},
    ],
    "8b": [
        {"shape": "8b", "pack": 8192, "compiled": True, "recompute": "full", "weights": "bf16"},
        {"shape": "8b", "pack": 8192, "compiled": False, "recompute": "full", "weights": "bf16"},
        {"shape": "8b", "pack": 8192, "attention": "padded", "recompute": "full", "weights": "bf16"},
    ],
    "8b_lora": [{"shape": "8b", "pack": 4096, "compiled": c, "lora": True, "weights": "bf16"} for c in (False, True)],
}
SHAPES = {
    "tiny": (64, 2, 4, 2, 128, 512, True),
    "1b": (2048, 16, 32, 8, 8192, 128256, True),  # Llama-3.2-1B
    "8b": (4096, 32, 32, 8, 14336, 128256, False),  # Llama-3.1-8B
}
H100_PEAK_FLOPS = 989e12
COMMAND_S = 540


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    shape: str
    pack: int
    micro: int = 1  # packs a step
    attention: str = "packed"  # packed (ours) | padded | mask | position_ids (transformers with flash or SDPA)
    documents: str = "chat"
    loss: str = "fused"
    compiled: bool = False
    recompute: str = "none"
    lora: bool = False
    weights: str = "fp32"
    steps: int = 10
    warmup: int = 4


def lengths(kind: str, longest: int) -> Iterator[int]:
    """Endless lengths of documents: gsm8k (median 150) or chat (median 420, long-tailed)."""
    median, spread = {"gsm8k": (150, 0.37), "chat": (420, 0.85)}[kind]
    rng = np.random.default_rng(0)
    while True:
        yield int(np.clip(rng.lognormal(np.log(median), spread), 16, longest))


def steps_of(variant: Variant, vocabulary: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Collated batches of one micro-batch, and the lengths of their documents."""
    import torch

    source = lengths(variant.documents, variant.pack)
    generator = torch.Generator().manual_seed(0)
    left = 0
    while True:
        rows: list[list[int]] = []
        if variant.attention == "padded":  # as many documents as the packs hold, a row each
            mean = {"gsm8k": 160, "chat": 600}[variant.documents]
            rows = [[next(source)] for _ in range(max(1, variant.micro * variant.pack // mean))]
            width = max(row[0] for row in rows)
        else:
            width = variant.pack
            for _ in range(variant.micro):
                row: list[int] = []
                while sum(row) < width:
                    left = left or next(source)
                    row.append(min(left, width - sum(row)))
                    left = 0
                rows.append(row)
        ids = torch.randint(3, vocabulary, (len(rows), width), generator=generator)
        labels = ids.roll(-1, 1)
        positions = torch.zeros_like(ids)
        slots = [[*row[:-1], row[-1] + width - sum(row)] for row in rows]
        for r, row in enumerate(rows):
            ends = torch.tensor(row).cumsum(0)
            labels[r, ends - 1] = -100
            labels[r, sum(row) :] = -100
            positions[r] = torch.cat([torch.arange(n) for n in slots[r]])
        longest = max(map(len, rows))
        batch = {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "seq_lens": torch.tensor([row + [-1000] * (longest - len(row)) for row in rows]),
            "seq_lens_padded": torch.tensor([slot + [-1000] * (longest - len(slot)) for slot in slots]),
        }
        yield batch, [n for row in rows for n in row]


def build(variant: Variant, device: str) -> Any:
    """The loss-returning model on the device, in the order in which the recipe builds it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from automodel_lite.attention.adapter import install
    from automodel_lite.attention.auto import auto_attention
    from automodel_lite.attention.spec import attention_spec
    from automodel_lite.config.components import locate
    from automodel_lite.models.layers import compile_layers, decoder_layers, recompute_layers
    from automodel_lite.models.loss import CrossEntropy, FusedLinearCrossEntropy, LossModel

    hidden, layers, heads, kv_heads, inner, vocabulary, tied = SHAPES[variant.shape]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
        use_cache=False,
        attn_implementation="sdpa",
    )
    dtype = torch.bfloat16 if variant.weights == "bf16" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        lm = LlamaForCausalLM(config).train()
        torch.set_default_dtype(torch.float32)
    if variant.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lm = get_peft_model(lm, LoraConfig(r=8, target_modules=targets)).base_model.model
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    if variant.attention == "packed":
        kernel, _ = auto_attention(attention_spec(config, torch.device(device), compute))
        install(lm, kernel)
    if variant.compiled:
        compile_layers(decoder_layers(lm))
    recompute_layers(decoder_layers(lm), variant.recompute, 1)
    losses = {
        "fused": FusedLinearCrossEntropy,
        "plain": CrossEntropy,
        "liger": lambda: locate("automodel_lite.models.liger.LigerLinearCrossEntropy")(),
    }
    return LossModel(lm, losses[variant.loss]())


def loss_of(variant: Variant, model: Any, batch: dict[str, Any], device: str) -> Any:
    """Summed loss of a micro-batch."""
    import torch

    from automodel_lite.thd import to_thd

    if variant.attention == "packed":
        thd = to_thd(batch)
        return model((thd.pin_memory() if device == "cuda" else thd).to(device))
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    if variant.attention == "padded":
        inputs = {"input_ids": batch["input_ids"], "attention_mask": padding_mask(batch)}
    elif variant.attention == "mask":
        inputs["attention_mask"] = document_mask(batch)
    else:  # one row: transformers finds the documents by their positions
        inputs = {key: value.reshape(1, -1) for key, value in inputs.items()}
    inputs = {key: value.to(device) for key, value in inputs.items()}
    rows = (batch["labels"].reshape(-1) != -100).nonzero().squeeze(1).to(device)
    labels = batch["labels"].reshape(-1).to(device)[rows]
    hidden = model.lm.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1).index_select(0, rows)
    weight = model.lm.get_output_embeddings().weight
    if model.loss.includes_head:
        return model.loss(hidden, weight, labels, None)
    return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")


def padding_mask(batch: dict[str, Any]) -> Any:
    import torch

    width = batch["input_ids"].shape[1]
    return (torch.arange(width)[None] < batch["seq_lens"][:, :1]).long()


def document_mask(batch: dict[str, Any]) -> Any:
    """bool [B, 1, S, S]."""
    import torch

    slots = batch["seq_lens_padded"].clamp(min=0)
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), row) for row in slots])
    return (documents[:, :, None] == documents[:, None]).tril()[:, None]


def measure(variant: Variant, device: str) -> dict[str, Any]:
    """Tokens a second, MFU, peak memory and recompilations after warm-up of one variant."""
    import torch

    from automodel_lite.graphs import compiled_graphs
    from automodel_lite.models.flops import cost_model
    from automodel_lite.training.optimizers import adamw, apply_gradients

    is_cuda = device == "cuda"
    wait = torch.cuda.synchronize if is_cuda else (lambda: None)
    model = build(variant, device)
    optimizer = adamw(model, lr=1e-5)
    costs = cost_model(model.lm.config)
    steps = steps_of(variant, model.lm.config.vocab_size)
    prepared = [next(steps) for _ in range(variant.warmup + variant.steps)]
    tokens, flops, graphs, began = 0, 0.0, 0, 0.0
    for number, (batch, documents) in enumerate(prepared):
        if number == variant.warmup:
            wait()
            graphs = compiled_graphs() if variant.compiled else 0
            began, tokens, flops = time.perf_counter(), 0, 0.0
            if is_cuda:
                torch.cuda.reset_peak_memory_stats()
        num_labels = int((batch["labels"] != -100).sum())
        with torch.autocast(device, torch.bfloat16, enabled=is_cuda and variant.weights == "fp32"):
            loss = loss_of(variant, model, batch, device)
        (loss / num_labels).backward()
        apply_gradients(optimizer, model.parameters(), loss.detach(), 1.0)
        optimizer.zero_grad()
        tokens += sum(documents)
        flops += costs.per_token * sum(documents) + costs.per_pair * float(costs.pairs(np.array(documents)).sum())
    wait()
    seconds = time.perf_counter() - began
    return asdict(variant) | {
        "tokens_per_s": tokens / seconds,
        "mfu_frac": flops / seconds / H100_PEAK_FLOPS if is_cuda else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None,
        "graphs_after_warmup": compiled_graphs() - graphs if variant.compiled else 0,
        "loss": loss.item() / num_labels,
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=list(PLANS), default="smoke")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--variant", help="JSON: measure one variant in this process")
    args = parser.parse_args(argv)
    if args.variant:
        found = measure(Variant(**json.loads(args.variant)), args.device)
        print("RESULT " + json.dumps(found))
        return [found]
    deadline = time.monotonic() + COMMAND_S
    results = []
    for settings in PLANS[args.plan]:
        command = [sys.executable, "-m", "benchmarks.peers_gpu", "--device", args.device]
        try:
            done = subprocess.run(
                [*command, "--variant", json.dumps(settings)],
                capture_output=True,
                text=True,
                timeout=max(1.0, deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired:
            print(f"{settings}: no time left")
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"{settings} failed: {done.stderr[-800:]}")
            continue
        results.append(json.loads(lines[0].removeprefix("RESULT ")))
        print(lines[0], flush=True)
    return results


if __name__ == "__main__":
    main()
