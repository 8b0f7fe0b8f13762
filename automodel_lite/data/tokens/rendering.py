"""What a document is before it is tokenized: its text, and the stretches of it that are trained
on.
"""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True)
class Choices:
    """What a decision may be answered with, in the order of its text.

    ids      of the tokens, one of which ends the text
    weights  what each should have, times the weight of the question
    place    of the question in its document
    number   of the question in the data, from 1 on; 0 until it is known
    """

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    place: int = 0
    number: int = 0


@dataclass(frozen=True)
class Rendering:
    """Text to tokenize as it is (no special tokens are added) and the character spans that are
    trained on.

    answer  of a preference pair: CHOSEN or REJECTED; 0 without
    verdict  of judged answers: DESIRABLE, UNDESIRABLE or MISMATCHED; 0 without
    label   of a document that is scored: what stands for its class; 0 of a number, and in a pair
    target  the number that its score should be
    margin  of a pair that is scored
    weight  of a document that is scored
    cut     character at which the tokenizer begins anew, as if the text behind it were another
            one; 0: the text is one
    choices  of a decision; None without
    """

    text: str
    spans: tuple[Span, ...]
    answer: int = 0
    verdict: int = 0
    cut: int = 0
    choices: Choices | None = None
    label: int | None = None
    target: float | None = None
    margin: float | None = None
    weight: float | None = None

    def pieces(self) -> list[tuple[str, list[Span]]]:
        """Returns the texts that are tokenized, each with the spans of it that are trained on."""
        if not self.cut:
            return [(self.text, [*self.spans])]
        found = []
        for begin, end in ((0, self.cut), (self.cut, len(self.text))):
            spans = [(max(start, begin), min(stop, end)) for start, stop in self.spans]
            own = [(start - begin, stop - begin) for start, stop in spans if start < stop]
            found.append((self.text[begin:end], own))
        return found
