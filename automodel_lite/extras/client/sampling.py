"""What answers are drawn with: a request of its own for each prompt, and batches of prompts of one
length, in which nothing is padded.

Every answer has a random generator of its own, so it depends on its request alone, and not on what
else is in the batch, or on how many ranks draw.

Legend: B answers of a batch, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.seed import derive_seed

Stop = str | Sequence[str] | Sequence[int] | None
_MOST_BYTES_BEHIND = 8  # tokens behind a stop string in a window: a token may be a part of a letter


@dataclass(frozen=True)
class Request:
    """A prompt, and how its answers are drawn.

    temperature  0 = the likeliest token
    top_p        draws from the fewest tokens that have this much of the probability
    top_k        draws from so many of the likeliest tokens; 0 = from all
    stop         None: the model's own end tokens. Strings, or ids: these end an answer, too. An
                 empty list: nothing does, and answers have `max_new_tokens`
    seed         another one gives other answers
    """

    prompt: Sequence[int]
    num_samples: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: Stop = None
    seed: int = 0

    def check(self, number: int, num_ids: int, most_tokens: int) -> None:
        """Raises ValueError for what nothing can be drawn from.

        num_ids      rows of the embedding
        most_tokens  of a prompt and its answer
        """
        if not len(self.prompt) or not all(0 <= token < num_ids for token in self.prompt):
            raise ValueError(
                f"prompt {number} must be at least one id, each below the {num_ids} rows of the "
                "model's embedding: tokenize with the client's own tokenizer."
            )
        if self.num_samples < 1 or self.max_new_tokens < 1:
            raise ValueError(
                f"prompt {number}: num_samples={self.num_samples} and "
                f"max_new_tokens={self.max_new_tokens} must be at least 1."
            )
        if len(self.prompt) + self.max_new_tokens > most_tokens:
            raise ValueError(
                f"prompt {number} has {len(self.prompt):,} tokens, and max_new_tokens="
                f"{self.max_new_tokens:,} more would be over {most_tokens:,}, which a pack and the "
                "model's positions hold: shorten either, or raise "
                "packed_sequence.packed_sequence_size."
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0 or self.temperature < 0:
            raise ValueError(
                f"prompt {number}: top_p={self.top_p} must be above 0 and at most 1, "
                f"top_k={self.top_k} at least 0 (0 = all tokens), and temperature="
                f"{self.temperature} at least 0."
            )

    def stop_parts(self, ends: Sequence[int]) -> tuple[list[str], frozenset[int]]:
        """Returns the strings and the ids that end an answer.

        ends  of the model's own
        """
        if self.stop is None:
            return [], frozenset(ends)
        parts: list[str | int] = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        if not parts:
            return [], frozenset()
        strings = [part for part in parts if isinstance(part, str)]
        if any(not part for part in strings):
            raise ValueError("stop: an empty string would end every answer: leave it out.")
        ids = {int(part) for part in parts if not isinstance(part, str)}
        return strings, frozenset(ends) | ids


@dataclass(frozen=True)
class Answer:
    """ids        with what has ended it
    log_probs  of the ids, fp32, by the weights as they are, whatever temperature, top_p and top_k
               they were drawn with
    is_ended   by an end token or a stop, not by its length
    sampler_log_probs  the same by the arithmetic of a server that has drawn them; None where the
               training client has
    version    number of the weights that a server has drawn them by; None likewise
    """

    ids: list[int]
    log_probs: np.ndarray
    is_ended: bool
    sampler_log_probs: np.ndarray | None = None
    version: int | None = None


def rows_of_answers(
    prompt: Sequence[int], answers: Sequence[Sequence[int]]
) -> list[dict[str, list[int]]]:
    """Returns one group of rows, whose labels are the answers.

    >>> rows_of_answers([5, 6], [[7, 8]])
    [{'input_ids': [5, 6, 7], 'labels': [-100, 7, 8]}]
    """
    silent = [IGNORE_INDEX] * (len(prompt) - 1)
    return [
        {"input_ids": [*prompt, *answer][:-1], "labels": [*silent, *answer]} for answer in answers
    ]


def policy_rows(
    prompt: Sequence[int],
    answers: Sequence[Answer],
    rewards: Sequence[float],
    corrected: bool = True,
) -> list[dict[str, Any]]:
    """Returns one group of rows for a policy's loss: each answer with its reward, and with
    `old_log_probs`, from which the ratio is taken.

    corrected  also with `sampler_log_probs`, where a server has drawn: each label weighs
               min(exp(old - sampler), truncation of the loss)

    >>> answer = Answer([7], np.float32([-0.5]), False, np.float32([-0.25]), 1)
    >>> policy_rows([5, 6], [answer], [1.0])[0]["sampler_log_probs"]
    [0.0, -0.25]
    """
    if len(answers) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards were given for {len(answers)} answers.")
    silent = [0.0] * (len(prompt) - 1)
    rows: list[dict[str, Any]] = []
    plain = rows_of_answers(prompt, [answer.ids for answer in answers])
    for row, answer, reward in zip(plain, answers, rewards):
        own = {**row, "reward": float(reward)}
        own["old_log_probs"] = silent + answer.log_probs.tolist()
        if corrected and answer.sampler_log_probs is not None:
            own["sampler_log_probs"] = silent + answer.sampler_log_probs.tolist()
        rows.append(own)
    return rows


def requests_of(
    prompts: Sequence[Sequence[int]],
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    top_p: float,
    top_k: int,
    stop: Stop,
) -> list[Request]:
    """Returns requests that differ in their prompts, and in their seeds: equal prompts of one call
    have answers of their own.
    """
    if any(isinstance(prompt, str) for prompt in prompts):
        raise TypeError("prompts are lists of ids: client.tokenizer.encode(text).")
    return [
        Request(
            prompt=list(map(int, prompt)),
            num_samples=num_samples,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop=stop,
            seed=derive_seed(seed, number),
        )
        for number, prompt in enumerate(prompts)
    ]


def plain_settings(max_new_tokens: int, padding: int) -> GenerationConfig:
    """Returns settings that take the highest score: `Draws` has put the chance into it, and
    `Endings` ends answers.
    """
    return GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=None, pad_token_id=padding
    )


class Draws(LogitsProcessor):
    """Makes scores of which the highest is a draw of each row's request.

    The highest of `log p - log E`, E exponential of each token, is distributed as p (Gumbel-max).
    """

    def __init__(self, rows: Sequence[tuple[Request, int]], seed: int, device: torch.device):
        self.rows = rows
        self.generators = []
        for request, number in rows:
            own = torch.Generator(device)
            own.manual_seed(derive_seed(seed, "sample", request.seed, number))
            self.generators.append(own)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        drawn = torch.empty_like(scores, dtype=torch.float32)
        for row, ((request, _), own) in enumerate(zip(self.rows, self.generators)):
            drawn[row] = _drawn(scores[row].float(), request, own)
        return drawn


def _drawn(logits_V: Tensor, request: Request, own: torch.Generator) -> Tensor:
    if not request.temperature:
        return logits_V
    log_p_V = torch.log_softmax(logits_V / request.temperature, -1)
    if 0 < request.top_k < len(log_p_V):
        least = log_p_V.topk(request.top_k).values[-1]
        log_p_V = torch.where(log_p_V < least, -torch.inf, log_p_V).log_softmax(-1)
    if request.top_p < 1:
        sorted_V, order_V = log_p_V.sort(descending=True)
        # a token is kept while those before it have less than top_p
        before_V = sorted_V.exp().cumsum(0) - sorted_V.exp()
        log_p_V = log_p_V.index_fill(0, order_V[before_V >= request.top_p], -torch.inf)
    noise_V = torch.empty_like(log_p_V).exponential_(generator=own)
    return log_p_V - noise_V.log()


@dataclass
class Endings(StoppingCriteria):
    """Ends each row by its own request, and remembers how long its answer is.

    lengths  of the answers that have ended; 0 of others
    """

    requests: Sequence[Request]
    ends: Sequence[int]
    prompt_length: int
    tokenizer: PreTrainedTokenizerBase
    lengths: list[int] = field(init=False)
    is_ended: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = [0] * len(self.requests)
        self.is_ended = [False] * len(self.requests)
        self._parts = [request.stop_parts(self.ends) for request in self.requests]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        answers = input_ids[:, self.prompt_length :].tolist()
        for row, (answer, request) in enumerate(zip(answers, self.requests)):
            if self.lengths[row]:
                continue
            strings, ids = self._parts[row]
            is_ended = answer[-1] in ids or any(self._has(answer, text) for text in strings)
            if is_ended or len(answer) >= request.max_new_tokens:
                self.lengths[row] = len(answer)
                self.is_ended[row] = is_ended
        return torch.tensor([bool(x) for x in self.lengths], device=input_ids.device)

    def _has(self, answer: list[int], text: str) -> bool:
        """Does the text end with the answer's last token?"""
        window = answer[-(len(text.encode()) + _MOST_BYTES_BEHIND) :]
        return text in self.tokenizer.decode(window, skip_special_tokens=False)


def batches_of_one_length(
    requests: Sequence[Request], batch_size: int
) -> list[list[tuple[int, int]]]:
    """Returns batches of (the request's number, the answer's number), the short prompts first.

    >>> requests = [Request([5], 2), Request([6, 7], 2), Request([8], 2)]
    >>> batches_of_one_length(requests, batch_size=3)
    [[(0, 0), (0, 1), (2, 0)], [(2, 1)], [(1, 0), (1, 1)]]
    """
    by_length = defaultdict[int, list[tuple[int, int]]](list)
    for number, request in enumerate(requests):
        by_length[len(request.prompt)] += [
            (number, answer) for answer in range(request.num_samples)
        ]
    return [
        alike[first : first + batch_size]
        for _, alike in sorted(by_length.items())
        for first in range(0, len(alike), batch_size)
    ]
