"""Token rows made visible: which tokens are trained on."""

from __future__ import annotations

import numpy as np
from transformers import PreTrainedTokenizerBase

from automodel_lite.thd import IGNORE_INDEX


def mark_trained(
    tokenizer: PreTrainedTokenizerBase, input_ids: np.ndarray, labels: np.ndarray, colour: bool = False
) -> str:
    """The decoded document with what is trained on in `⟦ ⟧`, or in green: `<|user|>Hi<|end|>⟦Hello<|end|>⟧`.

    A token is trained on when the position before it has a label.
    """
    trained = np.concatenate([[False], labels[:-1] != IGNORE_INDEX]) if len(labels) else np.zeros(0, bool)
    edges = np.flatnonzero(np.diff(trained)) + 1
    start_mark, end_mark = ("\x1b[32m", "\x1b[0m") if colour else ("⟦", "⟧")
    parts = []
    for piece in np.split(np.arange(len(input_ids)), edges):
        text = str(tokenizer.decode([int(i) for i in input_ids[piece]]))
        parts.append(f"{start_mark}{text}{end_mark}" if len(piece) and trained[piece[0]] else text)
    return "".join(parts)
