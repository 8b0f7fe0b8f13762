"""How fast are documents tokenised, against the tokenizer alone on the finished text?

    python benchmarks/tokenizing.py train.jsonl [--vocab-size 4096] [--repeats 5]

Both sides get the same documents and use the same threads. `tokenizer alone` is one call of the fast tokenizer on the
rendered texts of all documents, `input_ids` taken out. `ours` reads the file, renders the template, tokenises, makes
masks and labels, checks them and writes the cache. The ratio is of the medians; sides take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from automodel_lite.datasets.files import FilesDataset
from automodel_lite.datasets.render import SampleRenderer
from automodel_lite.datasets.tokenize import tokenize_documents
from automodel_lite.datasets.tokenize_chunks import num_cores
from automodel_lite.datasets.tokenizer import train_bpe_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as cache_dir:
        documents = FilesDataset(args.path)
        tokenizer = train_bpe_tokenizer(documents, args.vocab_size, cache_dir=cache_dir)
        renderer = SampleRenderer(tokenizer, "assistant", {})
        rows = documents.train
        texts = [sample.text for index in range(len(rows)) for sample in renderer.samples(rows[index])]
        alone_s, ours_s = [], []
        for repeat in range(args.repeats):
            start = time.perf_counter()
            ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
            alone_s.append(time.perf_counter() - start)
            start = time.perf_counter()
            data = tokenize_documents(documents, tokenizer, cache_dir=Path(cache_dir) / str(repeat))
            ours_s.append(time.perf_counter() - start)
        num_tokens = sum(map(len, ids))
        assert num_tokens == data.train.num_tokens
    alone, ours = statistics.median(alone_s), statistics.median(ours_s)
    print(f"{len(texts):,} documents, {num_tokens:,} tokens, {num_cores()} cores")
    print(f"tokenizer alone {num_tokens / alone:,.0f} tokens/s   (spread {min(alone_s):.2f} to {max(alone_s):.2f} s)")
    print(f"ours            {num_tokens / ours:,.0f} tokens/s   (spread {min(ours_s):.2f} to {max(ours_s):.2f} s)")
    print(f"ratio           {alone / ours:.2f}")


if __name__ == "__main__":
    main()
