"""Head and loss in one against plain cross-entropy: CPU seconds and peak memory, forward and backward.

    python -m benchmarks.loss --vocabulary 128000 --tokens 2048 --hidden 256

Each variant is a process of its own, so that its peak memory is its own; one thread; rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

VARIANTS = ("plain", "fused", "torch")


def measure(variant: str, vocabulary: int, tokens: int, hidden: int) -> dict[str, float]:
    """CPU seconds of forward and backward; MiB that they add to the peak of the process."""
    import torch
    import torch.nn.functional as F

    from automodel_lite.models.loss import FusedLinearCrossEntropy, Head, LossInputs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = (torch.randn(vocabulary, hidden) / hidden**0.5).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,))
    (states[:8] @ weight[:64].t()).sum().backward()  # threads and buffers of the library
    states.grad = weight.grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    if variant == "plain":
        loss = F.cross_entropy((states @ weight.t()).float(), labels, reduction="sum")
    elif variant == "torch":
        loss = F.linear_cross_entropy(states, weight, labels, reduction="sum")
    else:
        loss = FusedLinearCrossEntropy()(LossInputs(Head(states, weight), labels)).sum
    loss.backward()
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"cpu_s": seconds, "mib": (peak - before) / 1024, "loss": loss.item() / tokens}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS)
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, args.vocabulary, args.tokens, args.hidden)))
        return
    results: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(args.rounds):
        for variant in VARIANTS:
            command = [sys.executable, "-m", "benchmarks.loss", "--variant", variant]
            sizes = [
                "--vocabulary",
                str(args.vocabulary),
                "--tokens",
                str(args.tokens),
                "--hidden",
                str(args.hidden),
            ]
            done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=True)
            results[variant].append(json.loads(done.stdout.splitlines()[-1]))
    print(
        "| variant | CPU-s | of plain | peak MiB | of plain | loss a token |\n| --- | --- | --- | --- | --- | --- |"
    )
    plain = results["plain"]
    for variant, rounds in results.items():
        seconds, mib = (statistics.median(r[key] for r in rounds) for key in ("cpu_s", "mib"))
        time_ratio = statistics.median(r["cpu_s"] / p["cpu_s"] for r, p in zip(rounds, plain))
        mib_ratio = statistics.median(r["mib"] / p["mib"] for r, p in zip(rounds, plain))
        print(
            f"| {variant} | {seconds:.1f} | {time_ratio:.2f} | {mib:,.0f} | {mib_ratio:.2f} | {rounds[0]['loss']:.5f} |"
        )


if __name__ == "__main__":
    main()
