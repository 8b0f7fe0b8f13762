"""What is wrong with a set of documents is found before it is written: counted row by row, judged
at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.tokens.token_rows import PAIRED, RowCounts, places_within
from automodel_lite.errors import DataError, counted, harmless

MAX_UNSTOPPED_FRAC = 0.01
SHOWN_TOKENS = 300

NOTES = {
    "special": "{documents} special tokens in the text, which become real ones (first: {first})",
    "trained_special": "{documents} special tokens in answers, where they are trained on (first: "
    "{first})",
    "color_profile": "{documents} images in other colors than sRGB's, which are read as they are "
    "stored (first: {first}): as transformers and vLLM read them; convert them to sRGB where their "
    "colors matter",
    "no_value": "{documents} what tables write for no value as an answer or the end of a prompt "
    "(first: {first}): it is trained on as text; leave such rows out where it is none",
    "unasked": "{documents} a last answer that is trained without the end of the prompt that the "
    "chat template writes for one (first: {first}): let it ask as they answer, many by "
    "tokenize.template_kwargs.enable_thinking=false, or train on answers that begin so",
}
"""What is said of documents by what was found in them; of several documents `has` is `have`."""

Example = tuple[list[int], list[int]]
"""input_ids and labels of the beginning of a row."""


@dataclass(frozen=True)
class Findings:
    """What was found in some documents: counts, and the first example of each fault. The sum is
    that of all of them.
    """

    counts: RowCounts = field(default_factory=RowCounts)
    num_fully_trained: int = 0
    num_unstopped: int = 0
    num_blank: int = 0  # train nothing but the end of an answer
    first_row: Example | None = None
    fully_masked: Example | None = None
    unstopped: Example | None = None
    first_error: str = ""
    num_noted: dict[str, int] = field(default_factory=dict)  # documents of each kind of NOTES
    first_noted: dict[str, str] = field(default_factory=dict)  # place, and what was found
    # column, or key of a turn -> place of the first one
    unused: dict[str, str] = field(default_factory=dict)

    def __add__(self, other: Findings) -> Findings:
        """Adds what is counted; of examples, the first one stays."""
        pairs = {name: (value, getattr(other, name)) for name, value in vars(self).items()}
        sums = {name: a + b for name, (a, b) in pairs.items() if isinstance(a, (int, RowCounts))}
        sums["num_noted"] = dict(Counter(self.num_noted) + Counter(other.num_noted))
        sums["first_noted"] = other.first_noted | self.first_noted
        sums["unused"] = other.unused | self.unused
        return Findings(**{name: a or b for name, (a, b) in pairs.items()} | sums)


@dataclass(frozen=True)
class Chunk:
    """Rows of some documents, end to end, those that train nothing left out."""

    columns: Mapping[str, np.ndarray]  # of columns.COLUMNS, [total, ...]
    lengths: np.ndarray  # int64 [N]
    num_rows: np.ndarray  # int64 [documents], of each document that was read
    found: Findings
    groups: np.ndarray | None = (
        None  # int64 [N], see `TokenizedDocuments`; None where no two rows share one
    )


def check_rows(
    columns: Mapping[str, np.ndarray],
    lengths: np.ndarray,
    num_rows: Sequence[int],
    stop_ids: Set[int] | None,
    found: Findings,
    groups: np.ndarray | None = None,
) -> Chunk:
    """Leaves out rows without a label, and with one answer of a pair the other; counts rows where
    all is trained on, or that train no stop token last.

    num_rows: of each document that was read; found: in the reading of these documents; stop_ids:
    None where labels are no tokens.
    """
    input_ids = columns["input_ids"]
    labels = columns["labels"]
    offsets = np.append(0, np.cumsum(lengths))
    has_label = labels != IGNORE_INDEX
    num_labels = np.diff(np.append(0, np.cumsum(has_label))[offsets])
    kept = num_labels > 0
    document = np.repeat(np.arange(len(num_rows)), num_rows)
    num_equal_pairs = 0
    masked = ~kept
    if not PAIRED.isdisjoint(columns):
        kept &= ~np.isin(document, document[~kept])
        masked = ~kept
    if "answers" in columns:
        # texts that differ may be one to a tokenizer that strips or normalizes them
        equal = _equal_pairs(columns, offsets, document)
        num_equal_pairs = len(np.unique(document[equal & kept]))
        kept &= ~equal
    last_labels = labels[has_label][np.cumsum(num_labels)[kept] - 1]
    unstopped = kept.copy()
    if stop_ids is None:
        unstopped[:] = False
    else:
        unstopped[kept] = ~np.isin(last_labels, sorted(stop_ids))
    is_text = stop_ids is not None
    kept_tokens = np.repeat(kept, lengths)
    counts = RowCounts(
        num_rows=int(kept.sum()),
        num_tokens=int(lengths[kept].sum()),
        num_label_tokens=int(num_labels[kept].sum()),
        num_empty=int((lengths == 0).sum()),
        num_fully_masked=int((masked & (lengths > 0)).sum()),
        num_equal_pairs=num_equal_pairs,
    )

    def first(rows: np.ndarray) -> Example | None:
        if not rows.any():
            return None
        row = rows.argmax()
        part = slice(offsets[row], min(offsets[row + 1], offsets[row] + SHOWN_TOKENS))
        return input_ids[part].tolist(), labels[part].tolist()

    found += Findings(
        counts=counts,
        num_fully_trained=int((kept & (num_labels == lengths - 1)).sum()) if is_text else 0,
        num_unstopped=int(unstopped.sum()),
        num_blank=int((kept & ~unstopped & (num_labels == 1)).sum()) if is_text else 0,
        first_row=first(kept),
        fully_masked=first(masked & (lengths > 0)),
        unstopped=first(unstopped),
    )
    return Chunk(
        {name: values[kept_tokens] for name, values in columns.items()},
        lengths[kept],
        np.bincount(document[kept], minlength=len(num_rows)),
        found,
        None if groups is None else groups[kept],
    )


def _equal_pairs(
    columns: Mapping[str, np.ndarray], offsets: np.ndarray, document: np.ndarray
) -> np.ndarray:
    """Returns bool [N]: is the row one of two of its document that differ in nothing but which of
    them is preferred?
    """
    equal = np.zeros(len(document), bool)
    compared = [values for name, values in columns.items() if name != "answers"]
    firsts = np.flatnonzero(document[:-1] == document[1:])
    for row in firsts.tolist():
        one = slice(offsets[row], offsets[row + 1])
        other = slice(offsets[row + 1], offsets[row + 2])
        if all(np.array_equal(values[one], values[other]) for values in compared):
            equal[row : row + 2] = True
    return equal


def hash_rows(input_ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns uint64 [N] of rows that lie end to end, none of them empty: equal for equal ids."""
    starts = np.cumsum(lengths) - lengths
    places = places_within(lengths).astype(np.uint64)
    # splitmix64 of place and id; the sum over a row wraps around
    mixed = (places << np.uint64(32)) ^ input_ids.astype(np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.add.reduceat(mixed, starts) if len(starts) else mixed


def also_trained(name: str, own: np.ndarray, trained: np.ndarray) -> list[str]:
    """Says how many rows of a validation set are trained on; `hash_rows` of both."""
    num_shared = int(np.isin(own, trained).sum())
    if not num_shared:
        return []
    return [
        f"NOTE: {name}: {counted(num_shared, 'row', 'is', of=len(own))} also trained on, word for "
        "word: what is measured on them is not held out"
    ]


def limit_exceeded(num_unusable: int, num_documents: int, settings: TokenizeConfig) -> str:
    """Judges whether too many documents of a set cannot be trained on, whatever the reason: returns
    `tokenize.max_bad_frac=0.01 allows 12`, or nothing where so many may be.
    """
    allowed = settings.max_bad_frac * num_documents
    if num_unusable <= allowed:
        return ""
    return f"tokenize.max_bad_frac={settings.max_bad_frac} allows {int(allowed):,}"


def check_set(
    name: str,
    kind: str,
    found: Findings,
    settings: TokenizeConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Stops when too much of a set cannot be trained on.

    kind: of the documents, see `Documents`; text is meant to be trained on whole, and what ends
    given token ids is their maker's choice.

    Raises DataError: too many unusable documents, no row, everything trained on, or no trained stop
    token.
    """

    def shown(row: Example | None) -> str:
        assert row is not None
        input_ids, labels = map(np.array, row)
        return f"One of them, trained tokens in ⟦ ⟧: {mark_trained(tokenizer, input_ids, labels)!r}"

    counts = found.counts
    if not counts.num_documents:
        raise DataError(f"{name}: there is no document in it.")
    num_unusable = counts.num_bad + counts.num_empty + counts.num_fully_masked
    num_unusable += counts.num_equal_pairs
    too_many = limit_exceeded(num_unusable, counts.num_documents, settings)
    if counts.num_rows == 0:
        too_many = "nothing is left to train on"
    if too_many:
        text = (
            f"{name}: {counted(counts.num_documents, 'document')}: {counts.num_bad:,} bad, "
            f"{counts.num_empty:,} empty, {counts.num_fully_masked:,} with nothing trained on "
            f"(tokenize.train_on={settings.train_on}); {too_many}."
        )
        if counts.num_equal_pairs:
            text += (
                f" Of {counts.num_equal_pairs:,} pairs, chosen and rejected become the same "
                "tokens, so there is nothing to prefer: take them out, or make them differ."
            )
        if found.first_error:
            text += f" First bad row: {found.first_error}"
        if found.fully_masked:
            text += f" {shown(found.fully_masked)}"
        raise DataError(text)
    if found.num_fully_trained == counts.num_rows and kind != "text" and settings.train_on != "all":
        raise DataError(
            f"{name}: every token of {counted(counts.num_rows, 'row')} is trained on, including "
            "the questions; only train_on=all should do that, "
            f"train_on={settings.train_on} does not. "
            f"{shown(found.first_row)}"
        )
    # a decision is one token, behind which nobody goes on
    if (
        kind not in ("tokens", "decisions")
        and found.num_unstopped > MAX_UNSTOPPED_FRAC * counts.num_rows
    ):
        raise DataError(
            f"{name}: {counted(found.num_unstopped, 'row', 'does', of=counts.num_rows)} not end on "
            "a trained stop token, so the model would not learn to stop: fix the chat template. "
            f"{shown(found.unstopped)}"
        )


def mark_trained(
    tokenizer: PreTrainedTokenizerBase,
    input_ids: np.ndarray,
    labels: np.ndarray,
    marks: tuple[str, str] = ("⟦", "⟧"),
) -> str:
    """Returns the decoded document with what is trained on between `marks`:
    `<|user|>Hi<|end|>⟦Hello<|end|>⟧`.

    A token is trained on when the position before it has a label.
    """
    trained = np.concatenate([[False], labels[:-1] != IGNORE_INDEX])
    edges = np.flatnonzero(np.diff(trained)) + 1
    start_mark, end_mark = marks
    parts = []
    for piece in np.split(np.arange(len(input_ids)), edges):
        text = harmless(str(tokenizer.decode(input_ids[piece].tolist())))
        parts.append(f"{start_mark}{text}{end_mark}" if len(piece) and trained[piece[0]] else text)
    return "".join(parts)
