"""Our step on one GPU beside random padding, sorted padding and transformers' own packing.

Random weights, bf16 compute over fp32 masters (or weights in bf16), lengths of documents like GSM8K's or long-tailed
chats. Batches are drawn and laid out before the clock starts, for every contestant, and the tokens of documents are
counted, not slots. MFU counts what documents need: 6 FLOPs a weight and token, 12 a visible pair and channel, no
padding, nothing recomputed.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from automodel_lite.attention.interface import choose_attention, install
from automodel_lite.attention.spec import attention_specs
from automodel_lite.graphs import compiled_graphs
from automodel_lite.models.flops import cost_model
from automodel_lite.models.fused_head import linear_cross_entropy
from automodel_lite.models.layers import compile_layers, decoder_layers, recompute_layers
from automodel_lite.models.loss import CrossEntropy, FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.source import model_class
from automodel_lite.parts.optimizers.adamw import adamw
from automodel_lite.thd import stream_of, to_thd
from automodel_lite.training.optimizers import apply_gradients
from benchmarks.gpu.documents import SEED, batches_of
from benchmarks.gpu.machine import clocks
from benchmarks.gpu.variant import SHAPES, Variant

LORA_TARGETS: dict[str, str | list[str]] = {
    "all-linear": "all-linear",
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
}


def build(variant: Variant, device: str) -> Any:
    """The loss-returning model on the device, in the order in which the recipe builds it."""
    settings = {"model_type": "llama", "max_position_embeddings": 131072, "use_cache": False}
    config = AutoConfig.for_model(**settings | SHAPES[variant.shape])
    compute = compute_dtype(variant, device)
    # an 8B base in fp32 would not fit beside itself
    is_bf16 = variant.weights == "bf16" or (bool(variant.lora) and device == "cuda")
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    torch.manual_seed(SEED)
    # a family chooses its own, which the kernel of packs replaces
    attention = {"flex": "flex_attention", "packed": None}.get(variant.attention, "sdpa")
    with torch.device(device):
        make = model_class(config).from_config
        lm = make(config, dtype=dtype, attn_implementation=attention).train()
    # as the recipe does: a frozen base in bf16, adapters in fp32, autocast around both
    if variant.lora:
        from automodel_lite.parts.adapters.lora import Lora  # its peft may be missing here

        Lora(r=8, target_modules=LORA_TARGETS[variant.lora]).adapt(lm, "random weights")
    if variant.attention == "packed":
        kernel, _ = choose_attention(None, attention_specs(config, torch.device(device), compute))
        install(lm, kernel)
    model = LossModel(lm, CrossEntropy() if variant.loss == "plain" else FusedLinearCrossEntropy())
    if variant.compiled and variant.attention == "packed":
        # layers are called uncompiled first, as by the recipe's probe: they would compile twice
        with torch.no_grad(), torch.autocast(device, compute, enabled=compute != torch.float32):
            model(stream_of([torch.arange(8)], device))
        compile_layers(decoder_layers(lm))
    elif variant.compiled:  # as transformers' users do
        lm.model.compile(dynamic=False)
    recompute_layers(decoder_layers(lm), variant.recompute, 1)
    # compiled with the layers, as the recipe does
    if variant.compiled and device == "cuda" and variant.loss != "plain":
        model.loss_backend = "inductor"
    return model


def compute_dtype(variant: Variant, device: str) -> Any:
    is_rounded = variant.weights == "bf16" or (device == "cuda" and variant.computes == "bf16")
    return torch.bfloat16 if is_rounded else torch.float32


def inputs_of(variant: Variant, batch: dict[str, Any], is_cuda: bool) -> Any:
    """What the contestant's forward takes, on the host, ready to be copied."""
    if variant.attention == "packed":
        thd = to_thd(batch)
        return thd.pin_memory() if is_cuda else thd
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    if variant.attention in ("padded", "sorted"):
        places = torch.arange(batch["input_ids"].shape[1])[None]
        mask = (places < batch["seq_lens"][:, :1]).long()
        inputs = {"input_ids": batch["input_ids"], "attention_mask": mask}
    else:  # one row: transformers finds the documents by their positions
        inputs = {key: value.reshape(1, -1) for key, value in inputs.items()}
    labels = batch["labels"].reshape(-1)
    inputs |= {"rows": (labels != -100).nonzero().squeeze(1), "labels": labels[labels != -100]}
    return {key: value.pin_memory() if is_cuda else value for key, value in inputs.items()}


def loss_of(variant: Variant, model: Any, inputs: Any, device: str) -> Any:
    """Summed loss of a micro-batch."""
    if variant.attention == "packed":
        return model(inputs.to(device)).sum
    inputs = {key: value.to(device, non_blocking=True) for key, value in inputs.items()}
    rows, labels = inputs.pop("rows"), inputs.pop("labels")
    hidden = model.lm.model(**inputs, use_cache=False).last_hidden_state
    hidden = hidden.flatten(0, 1).index_select(0, rows)
    weight = model.lm.get_output_embeddings().weight
    if variant.loss == "fused":  # ours, for everyone
        return linear_cross_entropy(hidden, weight, labels, max(512, hidden.shape[1]))
    return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")


@dataclass
class Work:
    """What one or more steps did."""

    tokens: int = 0
    flops: float = 0.0  # of the documents
    documents: int = 0
    longest: int = 0
    pairs: float = 0.0  # visible


class Trainer:
    """The variant's model, its optimizer and endless micro-batches; `step` is one optimizer step."""

    def __init__(self, variant: Variant, device: str, batches: Any = None) -> None:
        self.variant, self.device = variant, device
        self.model = build(variant, device)
        self.optimizer: Any = adamw(self.model, lr=1e-5, moments=variant.moments or variant.weights)
        self.costs = cost_model(self.model.lm.config)
        vocabulary = self.model.lm.config.get_text_config().vocab_size
        self.batches = batches or batches_of(variant, vocabulary)
        self.mean_loss: Any = None

    def drawn(self, num_steps: int) -> list[list[tuple[Any, int, list[int]]]]:
        """Of each step its micro-batches: inputs on the host, labels, and the lengths of the documents."""
        return [[self._draw() for _ in range(self.variant.micro_steps)] for _ in range(num_steps)]

    def _draw(self) -> tuple[Any, int, list[int]]:
        batch, lens = next(self.batches)
        inputs = inputs_of(self.variant, batch, self.device == "cuda")
        return inputs, int((batch["labels"] != -100).sum()), lens

    def step(self, micro_batches: list[tuple[Any, int, list[int]]]) -> None:
        num_labels = sum(number for _, number, _ in micro_batches)
        total = torch.zeros((), device=self.device)
        # no cache of cast weights: with recomputation it is 13 GiB of an 8B model that nobody reads
        cached, variant = self.variant.recompute == "none", self.variant
        casts = variant.weights == "fp32" and compute_dtype(variant, self.device) == torch.bfloat16
        for inputs, _, _ in micro_batches:
            with torch.autocast(self.device, torch.bfloat16, enabled=casts, cache_enabled=cached):
                loss = loss_of(variant, self.model, inputs, self.device)
            (loss / num_labels).backward()
            total += loss.detach()
        apply_gradients(self.optimizer, self.model.parameters(), total, 1.0)
        self.optimizer.zero_grad()
        self.mean_loss = total / num_labels

    def work(self, steps: list[list[tuple[Any, int, list[int]]]]) -> Work:
        """Of drawn steps."""
        documents = np.array([n for step in steps for _, _, lens in step for n in lens])
        share = 2 / 3 if self.variant.lora else 1.0  # a frozen weight needs no gradient of its own
        pairs = float(self.costs.pairs(documents).sum())
        flops = self.costs.per_token * share * float(documents.sum()) + self.costs.per_pair * pairs
        return Work(int(documents.sum()), flops, len(documents), int(documents.max()), pairs)

    def timed(self, num_steps: int) -> tuple[Work, float]:
        """What so many steps did, and their seconds; all batches are drawn before the clock starts."""
        steps = self.drawn(num_steps)
        wait(self.device)
        began = time.perf_counter()
        for micro_batches in steps:
            self.step(micro_batches)
        wait(self.device)
        return self.work(steps), time.perf_counter() - began


def measure(
    settings: dict[str, Any], device: str, peak_tflops: float | None, ceiling_tflops: float | None
) -> dict[str, Any]:
    """Tokens per second (median of the repeats, and their spread), MFU, memory, recompilations after warm-up; clocks
    and power in the middle of a step more.
    """
    variant = Variant(**settings)
    is_cuda = device == "cuda"
    trainer = Trainer(variant, device)
    _, first_step_s = trainer.timed(1)
    if variant.warmup > 1:
        trainer.timed(variant.warmup - 1)
    graphs = compiled_graphs()
    held: dict[str, float | None] = dict.fromkeys(("reserved_gib_warm", "reserved_gib", "peak_gib"))
    if is_cuda:
        held["reserved_gib_warm"] = torch.cuda.memory_reserved() / 2**30
        torch.cuda.reset_peak_memory_stats()
    timed = [trainer.timed(variant.steps) for _ in range(variant.repeats)]
    if is_cuda:
        held["reserved_gib"] = torch.cuda.memory_reserved() / 2**30
        held["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    for micro_batches in trainer.drawn(2):  # launched, and not waited for
        trainer.step(micro_batches)
    found = asdict(variant) | held | clocks(device) | {"verdict": "pass"}
    rates = [work.tokens / seconds for work, seconds in timed]
    rate = statistics.median(rates)
    tflops = statistics.median(work.flops / seconds for work, seconds in timed) / 1e12
    works = [work for work, _ in timed]
    num_documents = sum(work.documents for work in works)
    return found | {
        "tokens_per_s": rate,
        "spread_frac": (max(rates) - min(rates)) / rate,
        "tflops_per_s": tflops,
        "mfu_frac": tflops / peak_tflops if peak_tflops else None,
        "of_ceiling_frac": tflops / ceiling_tflops if ceiling_tflops else None,
        "first_step_s": first_step_s,
        "graphs_after_warmup": compiled_graphs() - graphs,
        "mean_loss": float(trainer.mean_loss),
        "mean_document": sum(work.tokens for work in works) / num_documents,
        "longest_document": max(work.longest for work in works),
        "visible_pairs": sum(work.pairs for work in works),
    }


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
