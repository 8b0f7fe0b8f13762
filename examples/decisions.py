"""Writes invented support tickets with six questions about each: records for decisions.

    python examples/decisions.py tickets.jsonl
    python examples/decisions.py tickets.jsonl --records 500 --seed 1

A ticket is a few sentences; its questions have fixed choices. How its writer feels is not certain:
the answers are soft labels, as ten people might have voted.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

TEAMS = {
    "billing": ("the invoice", "my refund", "the price"),
    "technical": ("the login", "an error", "a crash"),
    "shipping": ("my parcel", "the delivery", "the courier"),
}
LEVELS = ("It is a small thing.", "It costs me an hour every day.", "I cannot work at all.")
DATES = ("Take your time with it.", "Please answer today.")
ORDERS = ("I do not have the number here.", "The number of my order is {}.")
# words, and how many of ten people find their writer calm, annoyed or angry
MOODS = {
    "Thank you for your help.": (9, 1, 0),
    "I have asked twice before.": (3, 6, 1),
    "Do you read this at all?": (0, 4, 6),
}
FEELINGS = ("calm", "annoyed", "angry")
QUESTIONS: dict[str, Any] = {
    "team": {"type": "choice", "instructions": "Which team?", "criteria": [*TEAMS]},
    "urgent": {"type": "noul", "instructions": "Needed today?"},
    "severity": {"type": "score", "instructions": "How bad?", "criteria": ["small", "time", "all"]},
    "order": {"type": "noul", "instructions": "Is there a number?"},
    "repeated": {"type": "noul", "instructions": "Asked before?"},
    "mood": {"type": "choice", "instructions": "Which mood?", "criteria": [*FEELINGS]},
}


def ticket(number: int, draw: random.Random) -> dict[str, Any]:
    """Returns a record."""
    team = draw.choice(sorted(TEAMS))
    level = draw.randrange(3)
    is_urgent = draw.random() < 0.5
    has_order = draw.random() < 0.5
    mood = draw.choice(sorted(MOODS))
    said = [
        f"I write about {draw.choice(TEAMS[team])}.",
        LEVELS[level],
        DATES[is_urgent],
        ORDERS[has_order].format(draw.randrange(100, 1000)),
        mood,
    ]
    draw.shuffle(said)
    votes = {name: count / 10 for name, count in zip(FEELINGS, MOODS[mood], strict=True)}
    text = f"A customer has opened ticket {draw.randrange(1000, 10_000)} in our shop and writes"
    return {
        "id": f"ticket-{number}",
        "state": f"{text}: {' '.join(said)} The ticket is open and waits for an answer.",
        "questions": QUESTIONS,
        "answers": {
            "team": team,
            "urgent": is_urgent,
            "severity": level,
            "order": has_order,
            "repeated": mood.startswith("I have asked"),
        },
        "soft_labels": {"mood": votes},
    }


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--records", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    rows = [ticket(number, draw) for number in range(args.records)]
    args.file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{args.records:,} records, {len(QUESTIONS)} questions each: {args.file}")


if __name__ == "__main__":
    main()
