"""How fast are documents tokenized, against the tokenizer alone and against other trainers' `datasets.map`?

    python -m benchmarks.tokenizing train.jsonl [--repeats 5]
    PYTHONPATH=P python -m benchmarks.tokenizing chats.jsonl --peers trl axolotl
    (pip install --target P --no-deps trl axolotl colorama addict)

All sides get the same documents, tokenizer and template, and use the same threads. `tokenizer alone` is one call of the
fast tokenizer on the rendered texts of all documents, `input_ids` taken out. `ours` reads the file, renders the template,
tokenizes, makes masks and labels, checks them and writes the cache. `trl` and `axolotl` run their own code, which is a
`datasets.map`, one process, from rows that are in memory to input ids and a mask or labels of the assistant's turns; they
take chats (`messages`) alone. Every side must find as many tokens. Ratios are of the medians; sides take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.encode import Renderer
from automodel_lite.data.tokens.tokenize import Job, tokenize_documents
from automodel_lite.data.tokens.tokenizer import train_bpe_tokenizer
from benchmarks.turns import ratio, take_turns

Count = Callable[[], int]  # tokenizes everything; the number of tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", nargs="*", choices=("trl", "axolotl"), default=[])
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as cache_dir:
        documents = FilesDataset(args.path)
        tokenizer = train_bpe_tokenizer(documents, 4096, cache_dir=cache_dir)
        renderer = Renderer(tokenizer, "assistant", {})
        rows = documents.train
        texts = [
            rendering.text
            for index in range(len(rows))
            for rendering in renderer.renderings(rows[index])
        ]

        def alone() -> int:
            return sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))

        def ours() -> int:
            folder = tempfile.mkdtemp(dir=cache_dir)
            return tokenize_documents(documents, Job(tokenizer), folder).train.num_tokens

        sides: dict[str, Count] = {"ours": ours, "tokenizer alone": alone}
        if args.peers:
            lines = Path(args.path).read_text().splitlines()
            chats = [{"messages": json.loads(line)["messages"]} for line in lines]
            peers = {"trl": trl, "axolotl": axolotl}
            for name in args.peers:
                sides[name] = peers[name](tokenizer, chats)
        seconds, counts = take_turns(sides, args.repeats)
    (num_tokens,) = set(counts.values())
    print(f"{len(texts):,} documents, {num_tokens:,} tokens, {args.repeats} repeats")
    for name, of_side in seconds.items():
        middle = statistics.median(of_side)
        spread = f"{min(of_side):.2f} to {max(of_side):.2f}"
        print(
            f"{name:<16} {middle:6.2f} CPU-s ({spread})  {num_tokens / middle:>9,.0f} tokens per CPU-s  "
            f"ours is {ratio(of_side, seconds['ours'])}"
        )


def trl(tokenizer: Any, chats: list[dict[str, Any]]) -> Count:
    """SFTTrainer's own preparation, without the trainer around it."""
    from trl import SFTConfig, SFTTrainer

    data = in_memory(chats)
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, assistant_only_loss=True, max_length=None, shuffle_dataset=False, use_cpu=True
        )
    trainer = SFTTrainer.__new__(SFTTrainer)
    trainer._tokenizer = tokenizer
    trainer.chat_template = tokenizer.chat_template
    trainer.completion_only_loss = False

    def count() -> int:
        made = trainer._prepare_dataset(data, tokenizer, args, False, None, "train")
        return sum(map(len, made["input_ids"]))

    return count


def axolotl(tokenizer: Any, chats: list[dict[str, Any]]) -> Count:
    """Its strategy for chat templates, with its defaults."""
    from axolotl.datasets import TokenizedPromptDataset
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy

    data = in_memory(chats)
    prompter = ChatTemplatePrompter(tokenizer, tokenizer.chat_template, max_length=1 << 20)
    strategy = ChatTemplateStrategy(
        prompter, tokenizer, False, 1 << 20, roles_to_train=["assistant"], train_on_eos="turn"
    )
    return lambda: sum(map(len, TokenizedPromptDataset(strategy, data)["input_ids"]))


def in_memory(chats: list[dict[str, Any]]) -> Any:
    """Rows as `datasets` holds them; nothing that was mapped before is found again."""
    import datasets

    datasets.disable_caching()
    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(chats)


if __name__ == "__main__":
    main()
