"""Look at what a run would be trained on, before it is: lengths, packs, a mask, samples, and all that is left out.

    python recipes/inspect_data.py --config-name llama_packed

Takes the arguments of train_ft.py. Exits with 2 when nothing would be trained on.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

if __name__ == "__main__":  # --help, --cfg and mistakes are answered before torch is imported; this does not return
    run_recipe("recipes.inspect_data:main")

import os
import sys
from collections.abc import Iterator
from typing import Any

from automodel_lite.config.schema import Config, check_alone
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.packing.report import draw_histogram, draw_mask, draw_pack, packing_report
from automodel_lite.data.prepare import PlannedPacks, build_packer, prepare_first_documents
from automodel_lite.data.token_rows import mark_trained
from automodel_lite.errors import DataError

NUM_PACKS = 8
NUM_SAMPLES = 3
SHOWN_TOKENS = 400


def main(config: Config) -> int:
    """Prints everything; raises DataError when nothing would be trained on."""
    check_alone()
    try:
        data = prepare_first_documents(config, build_packer(config))
        packs = data.packs_of(0)
    except DataError as error:
        raise DataError(f"nothing would be trained on: {error}") from error
    in_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in [*counts(data), *lengths(data, packs), *drawn_packs(packs), *samples(data, in_color)]:
        print(line)
    if not any(count.num_label_tokens for count in data.tokens.counts.values()) or not len(packs):
        raise DataError("nothing would be trained on: no pack has a label.")
    return 0


def counts(data: PlannedPacks) -> Iterator[str]:
    """What was read, skipped, dropped and cut."""
    yield "DATA"
    yield f"  {data.documents.description}"
    yield from (f"  {note}" for note in data.tokens.notes)


def lengths(data: PlannedPacks, packs: PackedDataset) -> Iterator[str]:
    """The histogram, and what packing gains."""
    yield "\nLENGTHS (tokens of a document, number of documents)"
    limit = packs.plan.packed_sequence_size
    yield from (f"  {line}" for line in draw_histogram(data.tokens.train.lengths, limit))
    yield "\nPACKING"
    yield str(packing_report(packs.plan, data.tokens.train.lengths))


def drawn_packs(packs: PackedDataset) -> Iterator[str]:
    """The first packs, a line each, and the attention mask of one."""
    if packs.plan.ragged:
        yield "\nPACKS: none, every document is a row of its own"
        return
    rows = [layout_of(packs[index]) for index in range(min(NUM_PACKS, len(packs)))]
    yield f"\nPACKS of {packs.plan.packed_sequence_size:,} tokens (a letter per document, . padding), documents in each"
    for number, (seq_lens, slots) in enumerate(rows):
        num_documents = sum(length > 0 for length in seq_lens)
        yield f"  {number:>3} |{draw_pack(seq_lens, slots)}| {num_documents}"
    shown = next((n for n, (seq_lens, _) in enumerate(rows) if len(seq_lens) > 1), 0)
    yield f"\nATTENTION MASK of pack {shown} (rows see columns)"
    yield from (f"  {line}" for line in draw_mask(*rows[shown]))


def layout_of(pack: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Real tokens and slots of each document of a pack."""
    return [int(n) for n in pack["seq_lens"]], [int(n) for n in pack["seq_lens_padded"]]


def samples(data: PlannedPacks, in_color: bool) -> Iterator[str]:
    """Some documents, spread over the set, with what is trained on marked."""
    yield f"\nSAMPLES (trained on: {'green' if in_color else '⟦ ⟧'})"
    rows = data.tokens.train
    for number in range(min(NUM_SAMPLES, len(rows))):
        index = number * len(rows) // NUM_SAMPLES
        row = rows[index]
        text = mark_trained(data.tokenizer, row["input_ids"][:SHOWN_TOKENS], row["labels"][:SHOWN_TOKENS], in_color)
        more = f" … ({len(row['input_ids']):,} tokens)" if len(row["input_ids"]) > SHOWN_TOKENS else ""
        yield f"  document {index}:"
        yield "\n".join(f"    {line}" for line in f"{text}{more}".splitlines())
