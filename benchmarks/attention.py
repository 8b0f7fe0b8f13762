"""The reference kernel against SDPA with a [T, T] mask, forward and backward, on CPU.

    python benchmarks/attention.py

One stream of 4096 tokens and 20 documents (8 query heads, 4 key/value heads, head dim 64, fp32, one thread). Both in
one process, CPU seconds of the best of several runs, outputs and gradients compared. Claim: at least 5 times faster.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.data.packing.packs import join_packs
from automodel_lite.nemo_api.collaters import pack_features_for_thd
from automodel_lite.thd import AttentionOptions, Segments, to_thd

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4, 64
CLAIM = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = random_lengths(arguments.tokens, arguments.documents)
    print(
        f"torch {torch.__version__}, T={arguments.tokens}, {len(lengths)} documents of {min(lengths)}..{max(lengths)}"
    )
    of_kernel = compare_kernels(lengths, arguments.repeats)
    compare_models(lengths, max(1, arguments.repeats // 2))
    print(
        f"\nclaim: at least {CLAIM:.0f}x, measured {of_kernel:.1f}x: {'PASS' if of_kernel >= CLAIM else 'FAIL'}"
    )
    return int(of_kernel < CLAIM)


def random_lengths(tokens: int, documents: int) -> list[int]:
    weights = torch.rand(documents) + 0.2
    lengths = (weights / weights.sum() * tokens).long().tolist()
    return [*lengths[:-1], lengths[-1] + tokens - sum(lengths)]


def compare_kernels(lengths: list[int], repeats: int) -> float:
    """Attention alone; the ratio of the [T, T] mask's time to the reference kernel's."""
    tokens = sum(lengths)
    q, k, v = (
        torch.randn(tokens, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    grad = torch.randn(tokens, NUM_HEADS, HEAD_DIM)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = (document[:, None] == document[None]).tril()
    kernel, segments = ReferenceAttention(), Segments(cu, cu, max(lengths), max(lengths))

    def per_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k, v, segments, AttentionOptions(HEAD_DIM**-0.5))

    def with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)[0].transpose(
            0, 1
        )

    def step(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        out.backward(grad)
        return [out.detach(), *(x.grad for x in leaves)]

    largest = max(float((a - b).abs().max()) for a, b in zip(step(per_document), step(with_mask)))
    times = {
        attend.__name__: best_cpu_s(lambda f=attend: step(f), repeats)
        for attend in (per_document, with_mask)
    }
    ratio = times["with_mask"] / times["per_document"]
    visible = float(mask.float().mean())
    print(
        f"\nattention, forward + backward    largest difference {largest:.0e}, visible pairs {visible:.3f} of T^2"
    )
    print(f"  SDPA with a [T, T] mask  {times['with_mask'] * 1e3:8.0f} ms")
    print(f"  SDPA per document        {times['per_document'] * 1e3:8.0f} ms   {ratio:.1f}x")
    return ratio


def compare_models(lengths: list[int], repeats: int) -> None:
    """A step of a small Llama: transformers' own packing (a mask from position_ids) against the reference kernel."""
    hidden = NUM_HEADS * HEAD_DIM
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
    )
    model = AutoModelForCausalLM.from_config(config)
    rows = [{"input_ids": torch.randint(1, 1024, (length,)).tolist()} for length in lengths]
    batch = to_thd(join_packs([pack_features_for_thd(rows)]))
    inputs = batch.model_inputs()

    def step(implementation: str) -> None:
        if implementation == "sdpa":
            model.set_attn_implementation("sdpa")
            logits = model(
                input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False
            ).logits
        else:
            install(model, ReferenceAttention())
            logits = model(**inputs).logits
        F.cross_entropy(logits[0], batch.input_ids).backward()
        model.zero_grad()

    times = {name: best_cpu_s(lambda n=name: step(n), repeats) for name in ("sdpa", "reference")}
    print("\n2-layer Llama, forward + backward")
    print(f"  transformers' sdpa, mask from position_ids  {times['sdpa'] * 1e3:8.0f} ms")
    ratio = times["sdpa"] / times["reference"]
    print(
        f"  reference kernel                            {times['reference'] * 1e3:8.0f} ms   {ratio:.1f}x"
    )


def best_cpu_s(run: Callable[[], object], repeats: int) -> float:
    """CPU seconds of the best run, so that other load on the machine does not count."""
    run()
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
    return best


if __name__ == "__main__":
    sys.exit(main())
