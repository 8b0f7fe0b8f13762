"""How fast are documents tokenized, against the tokenizer alone on the finished text?

    python benchmarks/tokenizing.py train.jsonl [--vocab-size 4096] [--repeats 5]

Both sides get the same documents and use the same threads. `tokenizer alone` is one call of the fast tokenizer on the
rendered texts of all documents, `input_ids` taken out. `ours` reads the file, renders the template, tokenizes, makes
masks and labels, checks them and writes the cache. The ratio is of the medians; sides take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.encode import Renderer
from automodel_lite.data.tokens.tokenize import Job, tokenize_documents
from automodel_lite.data.tokens.tokenizer import train_bpe_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as cache_dir:
        documents = FilesDataset(args.path)
        tokenizer = train_bpe_tokenizer(documents, args.vocab_size, cache_dir=cache_dir)
        renderer = Renderer(tokenizer, "assistant", {})
        rows = documents.train
        texts = [
            rendering.text
            for index in range(len(rows))
            for rendering in renderer.renderings(rows[index])
        ]
        alone, ours = [], []
        for repeat in range(args.repeats):
            ids, used = timed(lambda: tokenizer(texts, add_special_tokens=False)["input_ids"])
            alone.append(used)
            folder = Path(cache_dir) / str(repeat)
            data, used = timed(partial(tokenize_documents, documents, Job(tokenizer), folder))
            ours.append(used)
        num_tokens = sum(map(len, ids))
        assert num_tokens == data.train.num_tokens
    cores = len(os.sched_getaffinity(0))
    print(
        f"{len(texts):,} documents, {num_tokens:,} tokens, {cores} cores, {args.repeats} repeats each"
    )
    print("                      wall s: tokens/s  (spread)            CPU s: tokens/s")
    for name, runs in (("tokenizer alone", alone), ("ours", ours)):
        wall, cpu = (sorted(run[kind] for run in runs) for kind in (0, 1))
        middle, cpu_middle = statistics.median(wall), statistics.median(cpu)
        print(
            f"{name:<18} {middle:9.2f}: {num_tokens / middle:>9,.0f} ({wall[0]:.2f} to {wall[-1]:.2f} s)"
            f"   {cpu_middle:9.2f}: {num_tokens / cpu_middle:>9,.0f}"
        )
    ratios = [
        statistics.median(run[kind] for run in alone) / statistics.median(run[kind] for run in ours)
        for kind in (0, 1)
    ]
    print(f"ratio              {ratios[0]:9.2f} {' ':32} {ratios[1]:9.2f}")


def timed(call: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """The result of a call, its wall seconds and CPU seconds (all threads)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, (time.perf_counter() - wall, time.process_time() - cpu)


if __name__ == "__main__":
    main()
