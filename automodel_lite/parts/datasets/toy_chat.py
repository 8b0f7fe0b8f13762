"""A generated dataset of chats about capitals, for tests, demonstrations and first runs."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from itertools import chain, cycle
from pathlib import Path
from typing import Annotated

from automodel_lite.config.rules import Range, Seed
from automodel_lite.data.document import Document
from automodel_lite.data.reading.documents import DocumentList, Question
from automodel_lite.errors import counted

# capitals, phrasings, answer
TOY = json.loads((Path(__file__).parent / "toy_chat.json").read_text())
MAX_TURNS = 14
MEAN_LOG_TURNS = 0.4
SD_LOG_TURNS = 0.85  # of a chat, capped log-normal


@dataclass
class ToyChat:
    """Multi-turn chats of question/answer turns, with 16 % of the (country, phrasing) pairs held
    out.

    The number of turns is long-tailed: half of the chats have one, one in a hundred more than ten.
    Every country is asked in training, but never in the phrasings that are held out for it.
    The same arguments give the same chats on every machine.

    Example:
        >>> ToyChat(num_chats=2).questions[0].answer
        'The capital of Finland is Helsinki.'
    """

    num_chats: Annotated[int, Range(1, 1_000_000)] = 2000  # training documents
    num_val_chats: Annotated[int, Range(0, 1_000_000)] = 40  # validation documents
    # held out, of 150 pairs: one phrasing of each country stays
    num_questions: Annotated[int, Range(0, 120)] = 24
    seed: Seed = 0  # of the chats

    train: DocumentList = field(init=False)
    val: dict[str, DocumentList] = field(init=False)
    questions: list[Question] = field(init=False)
    kind: str = field(init=False, default="messages")
    description: str = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        phrasings = TOY["phrasings"]
        # At most all but one phrasing of each country are held out, spread evenly over the
        # countries.
        by_country = []
        for country, city in TOY["capitals"].items():
            answer = TOY["answer"].format(country, city)
            asked = [(text.format(country), answer) for text in phrasings]
            by_country.append(rng.sample(asked, len(asked)))
        rng.shuffle(by_country)
        # one phrasing of each country after the other
        turns = list(chain.from_iterable(zip(*by_country)))
        held_out = turns[: self.num_questions]
        asked = turns[self.num_questions :]
        self.train = DocumentList(_chats(rng, asked, self.num_chats), "toy_chat")
        val_chats = _chats(rng, held_out, self.num_val_chats) if held_out else []
        self.val = {"held_out": DocumentList(val_chats, "toy_chat.held_out")} if val_chats else {}
        self.questions = [
            Question([{"role": "user", "content": asks}], answer) for asks, answer in held_out
        ]
        chats = counted(self.num_chats, "generated chat")
        self.description = f"toy_chat: {chats}, {counted(len(held_out), 'question')} held out"
        self.identity = (
            f"toy_chat(num_chats={self.num_chats}, num_val_chats={self.num_val_chats}, "
            f"num_questions={self.num_questions}, seed={self.seed})"
        )


def _chats(rng: random.Random, turns: list[tuple[str, str]], num_chats: int) -> list[Document]:
    chats = []
    for _ in range(num_chats):
        num_turns = min(MAX_TURNS, max(1, round(rng.lognormvariate(MEAN_LOG_TURNS, SD_LOG_TURNS))))
        texts = chain.from_iterable(rng.choice(turns) for _ in range(num_turns))
        roles = cycle(("user", "assistant"))
        chats.append(
            {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts)]}
        )
    return chats
