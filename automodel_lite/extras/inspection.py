"""What a run would be trained on: lengths, packs, a mask, samples, and all that is left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from automodel_lite.columns import CHOSEN, IGNORE_INDEX, REJECTED
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.order import batch_shape
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.prepare import PlannedPacks, build_documents, build_packer
from automodel_lite.data.tokens.findings import mark_trained
from automodel_lite.extras.report import READ, TRAINED, Inspection
from automodel_lite.parts.images import images_lines, shown_pictures
from automodel_lite.prefix_trees import find_nodes
from automodel_lite.training.classes import classes_of_documents

NUM_PACKS = 8
NUM_SAMPLES = 3  # on the screen
NUM_SAMPLES_OF_A_PAGE = 12
SHOWN_TOKENS = 400
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BAR = "█"
# tokens of an image
REPEATED = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])(?:\s?\1){3,}")


def inspection_of(data: PlannedPacks, is_page: bool = True, mark: str = "⟦ ⟧") -> Inspection:
    """Returns all that is shown: on a page more samples, with their pictures. `mark`: how a screen
    shows what is trained on.
    """
    packs = data.packs_of(0)
    documents = shown_documents(packs, NUM_SAMPLES_OF_A_PAGE if is_page else NUM_SAMPLES)
    sections = {
        "DATA": counts(data),
        "LENGTHS (tokens of a document, number of documents)": lengths(data, packs),
        "PACKING": iter([str(data.report())]),
        **drawn_packs(packs),
        # last, where the screen stops: what the model learns to write
        f"SAMPLES (trained on: {mark})": samples(data, documents),
    }
    pictures = [
        (f"document {index}, {picture.caption}", picture.thumbnail)
        for index, _, _ in (documents if is_page else ())
        for picture in shown_pictures(data, data.tokens.train[index])
    ]
    name = data.documents.description.partition(":")[0]
    drawn = [(heading, [*lines]) for heading, lines in sections.items()]
    return Inspection(name, drawn, data.lengths(), pictures)


def first_documents(config: Config) -> PlannedPacks:
    """Returns the packs of a run's data; of a stream, its first documents as if they were all."""
    shape = batch_shape(config.training, dp_size=1)
    return PlannedPacks.prepare(config, build_documents(config), build_packer(config), shape)


def counts(data: PlannedPacks) -> Iterator[str]:
    """What was read, skipped, dropped and cut."""
    yield f"  {data.documents.description}"
    yield from (f"  {note}" for note in data.tokens.notes)
    yield from (f"  {line}" for _, line in images_lines(data))


def lengths(data: PlannedPacks, packs: PackedDataset) -> Iterator[str]:
    """The histogram of lengths, and which are too long."""
    limit = packs.plan.packed_sequence_size
    yield from (f"  {line}" for line in draw_histogram(data.tokens.train.lengths, limit))


def drawn_packs(packs: PackedDataset) -> dict[str, Iterator[str]]:
    """The first packs, a line each, and the attention mask of one; sections by their headings."""
    if packs.plan.ragged:
        return {"PACKS: none, every document is a row of its own": iter(())}
    rows = [layout_of(packs[index]) for index in range(min(NUM_PACKS, len(packs)))]
    lines = (
        f"  {number:>3} |{draw_pack(seq_lens, slots)}| {sum(length > 0 for length in seq_lens)}"
        for number, (seq_lens, slots) in enumerate(rows)
    )
    shown = next((n for n, (seq_lens, _) in enumerate(rows) if len(seq_lens) > 1), 0)
    size = (
        f"{packs.plan.packed_sequence_size:,} tokens (a letter per document, . padding), documents "
        "in each"
    )
    mask = (f"  {line}" for line in draw_mask(*rows[shown], positions=packs[shown]["position_ids"]))
    return {f"PACKS of {size}": lines, f"ATTENTION MASK of pack {shown} (rows see columns)": mask}


def layout_of(pack: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Real tokens and slots of each document of a pack."""
    return [int(n) for n in pack["seq_lens"]], [int(n) for n in pack["seq_lens_padded"]]


def draw_pack(seq_lens: Sequence[int], slots: Sequence[int], width: int = 64) -> str:
    """A pack as one line: a letter per document, dots for padding; a character stands for size /
    width tokens.

    >>> draw_pack([3, 4, 0], [4, 4, 8], width=16)
    'AAA.BBBB........'
    """
    size = sum(slots)
    tokens = np.zeros(size, np.int64)
    starts = np.cumsum([0, *slots[:-1]])
    for number, (start, length) in enumerate(zip(starts, seq_lens), start=1):
        tokens[start : start + length] = number
    places = (np.arange(width) * size / width).astype(np.int64)
    return "".join(
        "." if number == 0 else LETTERS[(number - 1) % len(LETTERS)]
        for number in tokens[places].tolist()
    )


def draw_mask(
    seq_lens: Sequence[int], slots: Sequence[int], width: int = 32, positions: Tensor | None = None
) -> list[str]:
    """Which tokens (rows) see which (columns): `█` all of a cell, `▄` some, `·` none; padding sees
    nothing here. Where documents branch, their positions say so.

    >>> print("\\n".join(draw_mask([2, 2], [2, 2], width=4)))
    █···
    ██··
    ··█·
    ··██
    """
    ends = np.cumsum(slots)
    size = int(ends[-1])
    starts = ends - slots
    is_real = np.concatenate([np.arange(slot) < length for slot, length in zip(slots, seq_lens)])
    # A key is seen by the queries at or behind it, until its document, or its branch, ends.
    until = ends.repeat(slots)
    if positions is not None:
        cu = torch.tensor([*starts.tolist(), size])
        nodes = find_nodes(cu, positions, torch.tensor(seq_lens))
        until = until if nodes is None else nodes.until.numpy()
    width = min(width, size)
    edges = (np.arange(width + 1) * size / width).astype(np.int64)
    cells = [np.arange(start, stop) for start, stop in pairwise(edges)]
    return ["".join(_cell(is_real, until, queries, keys) for keys in cells) for queries in cells]


def _cell(is_real: np.ndarray, until: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> str:
    seen = is_real[queries][:, None] & (queries[:, None] >= keys) & (queries[:, None] < until[keys])
    return (
        BAR if seen.all() or (seen.any() and keys[0] == queries[0]) else "▄" if seen.any() else "·"
    )


def draw_tree(branches: np.ndarray, width: int = 64) -> list[str]:
    """A line per row of a tree, from where it leaves the row before it: its own tokens, each at its
    place in the row.

    draw_tree(branches of rows of 5, 5 and 6 tokens that share 3 and 4, width 6) -> "█████", "
    ███", "   ███"
    """
    starts = np.concatenate([[0], np.flatnonzero(branches)])
    firsts = np.maximum(branches[starts] - 1, 0)
    lengths = np.diff(np.append(starts, len(branches)))
    scale = width / max(1, int((firsts + lengths).max()))
    return [
        f"    {' ' * round(first * scale)}{BAR * max(1, round(length * scale))} {length:,} of "
        f"{first + length:,} tokens"
        for first, length in zip(firsts.tolist(), lengths.tolist())
    ]


def pair_of(tokenizer: PreTrainedTokenizerBase, row: Mapping[str, np.ndarray]) -> list[str]:
    """The prompt of a preference pair, and its answers, as far as they are trained on."""
    is_chosen, is_rejected = (row["answers"] == which for which in (CHOSEN, REJECTED))
    first = int((is_chosen | is_rejected).argmax()) + 1
    texts = {
        "prompt  ": row["input_ids"][:first],
        "chosen  ": row["labels"][is_chosen],
        "rejected": row["labels"][is_rejected],
    }
    return [
        f"{name} {tokenizer.decode(ids[:SHOWN_TOKENS].tolist())!r}" for name, ids in texts.items()
    ]


def scored_of(
    data: PlannedPacks, row: Mapping[str, np.ndarray], begins: np.ndarray, shown: slice
) -> Iterator[str]:
    """Yields a document, of a tree each row's own tokens, and behind each what it is scored."""
    classes = classes_of_documents(data.documents)
    answers = {CHOSEN: "chosen", REJECTED: "rejected"}
    edges = [shown.start, *(shown.start + begins).tolist(), shown.stop]
    for start, stop in pairwise(edges):
        text = data.tokenizer.decode(row["input_ids"][start:stop].tolist())
        ends = start + np.flatnonzero(row["labels"][start:stop] != IGNORE_INDEX)
        said = []
        for end in ends.tolist():
            if "answers" in row:
                said.append(answers[int(row["answers"][end])])
            elif "targets" in row:
                said.append(f"{row['targets'][end]:g}")
            elif classes:
                said.append(classes.name_of_code(int(row["labels"][end])))
            if "margins" in row and row["margins"][end]:
                said[-1] += f" by {row['margins'][end]:g}"
            if "loss_weights" in row and row["loss_weights"][end] != 1:
                said[-1] += f" (weight {row['loss_weights'][end]:g})"
        yield f"{text} → {', '.join(said)}" if said else text


def draw_histogram(
    lengths: np.ndarray, limit: int | None = None, bins: int = 12, width: int = 40
) -> list[str]:
    """Lengths in tokens, a line a range; `limit` marks the ranges that are too long for a pack."""
    ends = [] if limit is None or not lengths.min() <= limit < lengths.max() else [limit + 1]
    edges = np.unique(
        np.append(np.linspace(lengths.min(), lengths.max() + 1, bins + 1).astype(np.int64), ends)
    )
    counts, edges = np.histogram(lengths, edges)
    most = max(1, int(counts.max()))
    digits = len(f"{int(lengths.max()):,}")
    lines = []
    for count, start, stop in zip(
        counts.tolist(), edges[:-1].astype(int).tolist(), edges[1:].astype(int).tolist()
    ):
        bar = BAR * (-(-count * width // most))
        too_long = "  over packed_sequence_size" if limit is not None and start > limit else ""
        lines.append(
            f"{start:>{digits},} to {stop - 1:>{digits},}  {bar:<{width}} {count:,}{too_long}"
        )
    return lines


def shown_documents(packs: PackedDataset, most: int) -> list[tuple[int, int, int]]:
    """Returns documents of the plan, in their order, whatever the order of the packs, and which of
    their tokens are packed: (document, start, stop).
    """
    plan = packs.plan
    lengths = packs.rows.lengths
    entries = np.argsort(plan.doc_ids, kind="stable")
    found = []
    for number in range(min(most, len(entries))):
        entry = int(entries[number * len(entries) // min(most, len(entries))])
        index = int(plan.doc_ids[entry])
        start = 0
        stop = int(lengths[index])
        if plan.starts is not None and plan.stops is not None:
            start = int(plan.starts[entry])
            stop = int(plan.stops[entry])
        found.append((index, start, stop))
    return found


def samples(data: PlannedPacks, documents: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    """Yields documents as the packs hold them, cut where they are cut, with what is trained on
    between TRAINED and READ.
    """
    for index, start, stop in documents:
        row = data.tokens.train[index]
        shown = slice(start, min(stop, start + SHOWN_TOKENS))
        # Of a tree, each row's own tokens are a line of their own.
        begins = np.flatnonzero(row["branches"][shown]) if "branches" in row else np.array([], int)
        parts = zip(
            np.split(row["input_ids"][shown], begins), np.split(row["labels"][shown], begins)
        )
        text = "\n".join(
            mark_trained(data.tokenizer, ids, labels, (TRAINED, READ)) for ids, labels in parts
        )
        if data.job.scores:
            text = "\n".join(scored_of(data, row, begins, shown))
        text = REPEATED.sub(lambda found: f"{found[1]} × {found[0].count(found[1])}", text)
        more = f" … ({stop - start:,} tokens)" if stop - start > SHOWN_TOKENS else ""
        is_cut = stop - start < len(row["input_ids"])
        yield f"  document {index}{f', tokens {start:,} to {stop - 1:,}' if is_cut else ''}:"
        if "branches" in row:
            yield from draw_tree(row["branches"])
        if "answers" in row and not data.job.scores:
            text = "\n".join(pair_of(data.tokenizer, row))
            more = ""
        yield "\n".join(f"    {line}" for line in f"{text}{more}".splitlines())
        for picture in shown_pictures(data, row):
            yield f"    image {picture.caption}"
