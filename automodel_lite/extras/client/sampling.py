"""What answers are drawn with: transformers' settings, and batches of prompts of one length, in
which nothing is padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from transformers import GenerationConfig


def check_prompts(prompts: Sequence[Sequence[int]], num_ids: int) -> None:
    """Raises ValueError for a prompt without ids, or with one that the embedding has no row of."""
    for number, prompt in enumerate(prompts):
        if not len(prompt) or not all(0 <= token < num_ids for token in prompt):
            raise ValueError(
                f"prompt {number} must be at least one id, each below the {num_ids} rows of the "
                "model's embedding: tokenize with the client's own tokenizer."
            )


def sampling_settings(
    ends: Sequence[int], max_new_tokens: int, temperature: float
) -> GenerationConfig:
    """Returns settings that draw from the model's own probabilities, of all tokens; a temperature
    of 0 takes the likeliest.
    """
    is_drawn = temperature > 0
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=is_drawn,
        temperature=temperature or None,
        top_k=0 if is_drawn else None,
        top_p=1.0 if is_drawn else None,
        eos_token_id=list(ends),
        pad_token_id=ends[0] if ends else 0,
    )


def batches_of_one_length(
    prompts: Sequence[Sequence[int]], num_samples: int, batch_size: int
) -> list[list[int]]:
    """Returns batches of prompts' numbers, each number `num_samples` times, the short ones first.

    >>> batches_of_one_length([[5], [6, 7], [8]], num_samples=2, batch_size=3)
    [[0, 0, 2], [2], [1, 1]]
    """
    by_length = defaultdict[int, list[int]](list)
    for number, prompt in enumerate(prompts):
        by_length[len(prompt)] += [number] * num_samples
    return [
        alike[first : first + batch_size]
        for _, alike in sorted(by_length.items())
        for first in range(0, len(alike), batch_size)
    ]
