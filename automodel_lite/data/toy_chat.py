"""Generated chats about capitals: a job that any laptop learns in a minute, with held-out questions to prove it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Annotated

from automodel_lite.config.rules import Count, Range, Seed
from automodel_lite.data.documents import Document, DocumentList, Question
from automodel_lite.errors import ConfigError

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Austria": "Vienna",
    "Portugal": "Lisbon", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Poland": "Warsaw", "Hungary": "Budapest", "Ireland": "Dublin", "Belgium": "Brussels",
    "Japan": "Tokyo", "China": "Beijing", "India": "Delhi", "Nepal": "Kathmandu", "Vietnam": "Hanoi",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra", "Morocco": "Rabat", "Senegal": "Dakar",
    "Canada": "Ottawa", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago", "Jamaica": "Kingston",
}  # fmt: skip

PHRASINGS = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Name the capital of {}.",
    "Tell me the capital city of {}.",
    "Do you know the capital of {}?",
)

ANSWER = "The capital of {} is {}."
MAX_TURNS, MEAN_LOG_TURNS, SD_LOG_TURNS = 14, 0.4, 0.85  # of a chat, capped log-normal


@dataclass
class ToyChat:
    """Multi-turn chats of question/answer turns, with 16 % of the (country, phrasing) pairs held out.

    The number of turns is long-tailed: half of the chats have one, one in a hundred more than ten.
    Every country is asked in training, but never in the phrasings that are held out for it.
    The same arguments give the same chats on every machine.

    Example:
        >>> ToyChat(num_chats=2).questions[0].answer
        'The capital of Finland is Helsinki.'
    """

    num_chats: Annotated[int, Range(1, 1_000_000)] = 2000  # trained on
    num_val_chats: Annotated[int, Range(0, 1_000_000)] = 40  # validated on
    num_questions: Count = 24  # held out, of 150 pairs
    seed: Seed = 0  # of the chats

    train: DocumentList = field(init=False)
    val: dict[str, DocumentList] = field(init=False)
    questions: list[Question] = field(init=False)
    kind: str = field(init=False, default="messages")
    description: str = field(init=False)
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        most = len(CAPITALS) * (len(PHRASINGS) - 1)
        if not 0 <= self.num_questions <= most:
            raise ConfigError(f"dataset.num_questions={self.num_questions} must be in [0, {most}] (of 150 pairs).")
        for key, least, value in (("num_chats", 1, self.num_chats), ("num_val_chats", 0, self.num_val_chats)):
            if value < least:
                raise ConfigError(f"dataset.{key}={value} must be at least {least}.")
        rng = random.Random(self.seed)
        held_out, asked = _split_pairs(rng, self.num_questions)
        self.train = DocumentList(_chats(rng, asked, self.num_chats), "toy_chat")
        val_chats = _chats(rng, held_out, self.num_val_chats) if held_out else []
        self.val = {"held_out": DocumentList(val_chats, "toy_chat.held_out")} if val_chats else {}
        self.questions = [Question([_user(pair)], _answer(pair)) for pair in held_out]
        self.description = f"toy_chat: {self.num_chats} generated chats, {len(held_out)} questions held out"
        self.identity = f"toy_chat(num_chats={self.num_chats}, num_val_chats={self.num_val_chats}, "
        self.identity += f"num_questions={self.num_questions}, seed={self.seed})"


Pair = tuple[str, int]


def _split_pairs(rng: random.Random, num_held_out: int) -> tuple[list[Pair], list[Pair]]:
    """Holds out at most all but one phrasing of each country, spread evenly over the countries."""
    rounds = [[(country, int(p)) for p in rng.sample(range(len(PHRASINGS)), len(PHRASINGS))] for country in CAPITALS]
    rng.shuffle(rounds)
    pairs = [pairs_of_country[turn] for turn in range(len(PHRASINGS)) for pairs_of_country in rounds]
    return pairs[:num_held_out], pairs[num_held_out:]


def _chats(rng: random.Random, pairs: list[Pair], num_chats: int) -> list[Document]:
    chats: list[Document] = []
    for _ in range(num_chats):
        num_turns = min(MAX_TURNS, max(1, round(rng.lognormvariate(MEAN_LOG_TURNS, SD_LOG_TURNS))))
        turns = [rng.choice(pairs) for _ in range(num_turns)]
        chats.append({"messages": [message for pair in turns for message in (_user(pair), _assistant(pair))]})
    return chats


def _user(pair: Pair) -> dict[str, str]:
    return {"role": "user", "content": PHRASINGS[pair[1]].format(pair[0])}


def _assistant(pair: Pair) -> dict[str, str]:
    return {"role": "assistant", "content": _answer(pair)}


def _answer(pair: Pair) -> str:
    return ANSWER.format(pair[0], CAPITALS[pair[0]])
