"""Runs modules of tinker-cookbook as they are: offline.py LINES, a JSON list of [module, argument, ...]. What it replaces
is the data sets of a hub.
"""

from __future__ import annotations

import json
import runpy
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import datasets

from automodel_lite.tinker.cookbook import own_arguments

SUMS = [(a, b) for a in range(16) for b in range(16)]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"what is {a} plus {b}?"},
            {"role": "assistant", "content": f"it is {a + b}"},
        ]
    }
    for a, b in SUMS
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "HuggingFaceH4/no_robots": CHATS,
    "allenai/tulu-3-sft-mixture": CHATS,
    "openai/gsm8k": [
        {"question": f"what is {a} plus {b}?", "answer": f"so #### {a + b}"} for a, b in SUMS
    ],
    "zwhe99/DeepMath-103K": [
        {"question": f"what is {a} plus {b}?", "final_answer": str(a + b)} for a, b in SUMS
    ],
    "Anthropic/hh-rlhf": [
        {
            "chosen": f"\n\nHuman: say {a}{b}\n\nAssistant: {a}{b}",
            "rejected": f"\n\nHuman: say {a}{b}\n\nAssistant: no",
        }
        for a, b in SUMS
    ],
    "open-thoughts/OpenThoughts3-1.2M": [
        {
            "conversations": [
                {"from": "human", "value": f"what is {a} plus {b}?"},
                {"from": "gpt", "value": f"it is {a + b}"},
            ]
        }
        for a, b in SUMS
    ],
    "hicai-zju/SciKnowEval": [
        {
            "domain": "Chemistry",
            "details": {"level": "L3"},
            "type": "mcq-4-choices",
            "question": f"what is {a} plus {b}?",
            "choices": {"label": ["A", "B"], "text": [str(a + b), "none"]},
            "answerKey": "A",
        }
        for a, b in SUMS
    ],
}


def load_dataset(path: str, *_: Any, split: str | None = None, **more: Any) -> Any:
    rows = datasets.Dataset.from_list(ROWS[path])
    if more.get("streaming"):
        return rows.to_iterable_dataset()
    return rows if split else datasets.DatasetDict(train=rows, test=rows.select(range(8)))


def run_all(lines: list[list[str]]) -> None:
    """One after another, in a process whose imports are most of their cost."""
    datasets.load_dataset = load_dataset
    folder = Path("runs/tinker")
    for module, *arguments in lines:
        sys.argv = [module, *own_arguments(arguments, folder)]
        sys.stdin = StringIO("which?\n\n")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        print(f"ran {module}", flush=True)


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()))
