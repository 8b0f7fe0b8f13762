"""Whether answers have the form that the data's answers have.

    expected   ITEM: 2 x mugs / DUE: 3 May        marks of the form: ITEM: DUE:
               ITEM: 9 x lamps / DUE: 8 June
    given      ITEM: 4 x chairs / DUE: 1 May      has it
               Sure! We will send you ...         has not

Answers of free words share no marks; of those the length says whether they are of the kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

MARK_FRAC = 0.9  # of the expected answers, which share a mark
FEWEST = 4  # expected answers, of which a form can be told
_PLAIN = re.compile(r"[a-z]*|[\W_]|I")  # a word of any sentence, a single sign


def marks_of(expected: Sequence[str]) -> list[str]:
    """Returns the words, with capitals, digits or signs, that nearly all of the answers share."""
    counts = Counter(word for answer in expected for word in {*answer.split()})
    shared = [word for word, count in counts.items() if count >= MARK_FRAC * len(expected)]
    return sorted(word for word in shared if not _PLAIN.fullmatch(word))


def num_in_form(given: Sequence[str], expected: Sequence[str]) -> int | None:
    """Returns how many of the given answers have the form of the expected ones; None of too few to
    tell a form by.
    """
    if len(expected) < FEWEST:
        return None
    marks = marks_of(expected)
    sizes = [len(answer.split()) for answer in expected]
    found = 0
    for answer, wanted in zip(given, expected):
        words = answer.split()
        if answer.strip() == wanted.strip():
            found += 1
        elif marks:
            # of an answer that was cut, the marks that stand so far in the expected one
            reach = {*wanted.split()[: len(words) + 1]}
            looked = [mark for mark in marks if mark in reach]
            found += 2 * len({*looked} & {*words}) >= len(looked) and bool(looked)
        else:
            found += min(sizes) / 3 <= len(words) <= 3 * max(sizes) and bool(words)
    return found
