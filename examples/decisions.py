"""Writes invented support tickets with questions about each: records for decisions.

    python examples/decisions.py tickets.jsonl
    python examples/decisions.py tickets.jsonl --records 500 --seed 1

A ticket is a few sentences; its questions have fixed choices. What a ticket says of the customer's
mood is not certain: its answers are soft labels, as several people would have voted.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

TEAMS = {
    "billing": ("the invoice", "my refund", "the charge on my card", "the price"),
    "technical": ("the login", "an error", "the app", "a crash"),
    "shipping": ("my parcel", "the delivery", "the courier", "the address"),
}
MEANINGS = {
    "billing": "Invoices, refunds and prices",
    "technical": "Logins, errors and crashes",
    "shipping": "Parcels and deliveries",
}
LEVELS = {
    "It is a small thing.": 0,
    "It costs me an hour every day.": 1,
    "I cannot work at all.": 2,
}
DATES = {"Please answer today.": True, "Take your time.": False}
# words, and how many of ten people find the writer calm, annoyed or angry
MOODS = {
    "Thank you for your help.": (9, 1, 0),
    "I have asked before.": (3, 6, 1),
    "This is the third time!": (0, 4, 6),
}
QUESTIONS: dict[str, Any] = {
    "team": {"type": "choice", "instructions": "Which team answers?", "criteria": MEANINGS},
    "urgent": {"type": "noul", "instructions": "Is the answer needed today?"},
    "severity": {
        "type": "score",
        "instructions": "How much does it hinder the customer?",
        "criteria": ["a small thing", "it costs time", "all work stops"],
    },
    "mood": {
        "type": "choice",
        "instructions": "How does the customer feel?",
        "criteria": ["calm", "annoyed", "angry"],
    },
}


def ticket(number: int, draw: random.Random) -> dict[str, Any]:
    """Returns a record."""
    team = draw.choice(sorted(TEAMS))
    level, date, mood = (draw.choice(sorted(words)) for words in (LEVELS, DATES, MOODS))
    said = [f"I write about {draw.choice(TEAMS[team])}.", level, date, mood]
    draw.shuffle(said)
    votes = dict(zip(QUESTIONS["mood"]["criteria"], MOODS[mood], strict=True))
    return {
        "id": f"ticket-{number}",
        "state": f"Ticket of customer {draw.randrange(100, 1000)}. {' '.join(said)}",
        "questions": QUESTIONS,
        "answers": {"team": team, "urgent": DATES[date], "severity": LEVELS[level]},
        "soft_labels": {"mood": {name: count / 10 for name, count in votes.items()}},
    }


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    rows = [ticket(number, draw) for number in range(args.records)]
    args.file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{args.records:,} records, {len(QUESTIONS)} questions each: {args.file}")


if __name__ == "__main__":
    main()
