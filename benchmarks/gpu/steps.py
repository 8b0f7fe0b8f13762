"""Our step on one GPU beside random padding, sorted padding, a [T, T] mask and transformers' packing by position ids.

Random weights, bf16 compute over fp32 masters, lengths of documents like GSM8K's or long-tailed chats. MFU counts what
documents need: 6 FLOPs a weight and token, 12 a visible pair and channel, no padding, nothing recomputed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

SHAPES = {
    "tiny": (64, 2, 4, 2, 128, 512, True),
    "1b": (2048, 16, 32, 8, 8192, 128256, True),  # Llama-3.2-1B
    "8b": (4096, 32, 32, 8, 14336, 128256, False),  # Llama-3.1-8B
}


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    shape: str
    pack: int
    micro: int = 1  # packs per step
    attention: str = "packed"  # packed (ours) | padded | sorted (padded) | mask | position_ids (transformers, SDPA)
    documents: str = "chat"
    loss: str = "fused"
    compiled: bool = False
    recompute: str = "none"
    lora: bool = False
    micro_steps: int = 1  # forwards an optimizer step
    steps: int = 8  # a repeat
    repeats: int = 3
    warmup: int = 4


def lengths(kind: str, longest: int) -> Iterator[int]:
    """Endless lengths of documents: gsm8k (median 150) or chat (median 420, long-tailed)."""
    median, spread = {"gsm8k": (150, 0.37), "chat": (420, 0.85)}[kind]
    rng = np.random.default_rng(0)
    while True:
        yield int(np.clip(rng.lognormal(np.log(median), spread), 16, longest))


def padded_batches(variant: Variant, source: Iterator[int]) -> Iterator[list[int]]:
    """Documents of one batch, a row each: as many as the packs hold; sorted: of like length, in random order of batches."""
    mean = {"gsm8k": 160, "chat": 600}[variant.documents]
    num_rows = max(1, variant.micro * variant.pack // mean)
    if variant.attention == "padded":
        while True:
            yield [next(source) for _ in range(num_rows)]
    rng = np.random.default_rng(1)
    while True:
        pool = sorted(next(source) for _ in range(32 * num_rows))
        batches, batch = [], []
        for length in pool:
            if batch and length * (len(batch) + 1) > variant.micro * variant.pack:  # slots of a batch, as in a pack
                batches.append(batch)
                batch = []
            batch.append(length)
        for index in rng.permutation(len(batches)):
            yield batches[index]


def steps_of(variant: Variant, vocabulary: int) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Collated batches of one micro-batch, and the lengths of their documents."""
    import torch

    source = lengths(variant.documents, variant.pack)
    padded = padded_batches(variant, source)
    generator = torch.Generator().manual_seed(0)
    left = 0
    while True:
        rows: list[list[int]] = []
        if variant.attention in ("padded", "sorted"):
            rows = [[length] for length in next(padded)]
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

    from automodel_lite.attention.interface import choose_attention, install
    from automodel_lite.attention.spec import attention_specs
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
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    torch.set_default_dtype(
        compute if variant.lora else torch.float32
    )  # an 8B base in fp32 would not fit beside itself
    with torch.device(device):
        lm = LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    if variant.lora:  # as the recipe does: a frozen base in bf16, adapters in fp32, autocast around both
        from automodel_lite.models.lora import Lora

        Lora(r=8).adapt(lm, "random weights")
    if variant.attention == "packed":
        kernel, _ = choose_attention(None, attention_specs(config, torch.device(device), compute))
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
    if variant.attention in ("padded", "sorted"):
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


@dataclass
class Work:
    """What one or more steps did."""

    tokens: int = 0
    flops: float = 0.0  # of the documents
    drawing_s: float = 0.0  # random documents were made: not part of a step


class Trainer:
    """The variant's model, its optimizer and endless micro-batches; `step` is one optimizer step."""

    def __init__(self, variant: Variant, device: str) -> None:
        from automodel_lite.models.flops import cost_model
        from automodel_lite.training.optimizers import adamw

        self.variant, self.device = variant, device
        self.model = build(variant, device)
        self.optimizer = adamw(self.model, lr=1e-5)
        self.costs = cost_model(self.model.lm.config)
        self.batches = steps_of(variant, self.model.lm.config.vocab_size)
        self.mean_loss: Any = None

    def step(self) -> Work:
        import torch

        from automodel_lite.training.optimizers import apply_gradients

        began = time.perf_counter()
        made = [next(self.batches) for _ in range(self.variant.micro_steps)]
        drawing_s = time.perf_counter() - began
        num_labels = sum(int((batch["labels"] != -100).sum()) for batch, _ in made)
        total = torch.zeros((), device=self.device)
        # no cache of cast weights: with recomputation it is 13 GiB of an 8B model that nobody reads
        cached, is_cuda = self.variant.recompute == "none", self.device == "cuda"
        for batch, _ in made:
            with torch.autocast(self.device, torch.bfloat16, enabled=is_cuda, cache_enabled=cached):
                loss = loss_of(self.variant, self.model, batch, self.device)
            (loss / num_labels).backward()
            total += loss.detach()
        apply_gradients(self.optimizer, self.model.parameters(), total, 1.0)
        self.optimizer.zero_grad()
        self.mean_loss = total / num_labels
        documents = np.array([length for _, lengths in made for length in lengths])
        return Work(int(documents.sum()), self.flops(documents), drawing_s)

    def flops(self, documents: np.ndarray) -> float:
        share = 2 / 3 if self.variant.lora else 1.0  # a frozen weight needs no gradient of its own
        of_pairs = self.costs.per_pair * float(self.costs.pairs(documents).sum())
        return self.costs.per_token * share * float(documents.sum()) + of_pairs

    def timed(self, num_steps: int) -> tuple[Work, float]:
        """What so many steps did, and their seconds."""
        began, done = time.perf_counter(), Work()
        for _ in range(num_steps):
            work = self.step()
            done = Work(done.tokens + work.tokens, done.flops + work.flops, done.drawing_s + work.drawing_s)
        wait(self.device)
        return done, time.perf_counter() - began - done.drawing_s


def measure(
    settings: dict[str, Any], device: str, peak_tflops: float | None, ceiling_tflops: float | None
) -> dict[str, Any]:
    """Tokens per second (median of the repeats, and their spread), MFU, peak memory, recompilations after warm-up."""
    import torch

    from automodel_lite.graphs import compiled_graphs

    variant = Variant(**settings)
    is_cuda = device == "cuda"
    trainer = Trainer(variant, device)
    _, first_step_s = trainer.timed(1)
    trainer.timed(variant.warmup - 1)
    graphs = compiled_graphs()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    timed = [trainer.timed(variant.steps) for _ in range(variant.repeats)]
    rates = [work.tokens / seconds for work, seconds in timed]
    rate = statistics.median(rates)
    tflops = statistics.median(work.flops / seconds for work, seconds in timed) / 1e12
    return asdict(variant) | {
        "verdict": "pass",
        "tokens_per_s": rate,
        "spread_frac": (max(rates) - min(rates)) / rate,
        "tflops_per_s": tflops,
        "mfu_frac": tflops / peak_tflops if peak_tflops else None,
        "of_ceiling_frac": tflops / ceiling_tflops if ceiling_tflops else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None,
        "first_step_s": first_step_s,
        "graphs_after_warmup": compiled_graphs() - graphs,
        "mean_loss": float(trainer.mean_loss),
    }


def wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
