"""The client that draws and scores.

Legend: N positions of a prompt, K tokens of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types
from tinker.types.topk_logprobs import MASK_LOGPROB, TopkLogprobs

from automodel_lite import TrainingClient as Client
from automodel_lite.extras.client.sampling import Answer, Request, rows_of_answers
from automodel_lite.extras.client.targets import IDS, NO_TARGET
from automodel_lite.seed import derive_seed
from automodel_lite.tinker import paths
from automodel_lite.tinker.engines import SETTINGS, Engine, Source, Waiting
from automodel_lite.tinker.futures import Future, done
from automodel_lite.tinker.refusals import bad_request, refusing
from automodel_lite.tinker.rows import token_ids


class SamplingClient:
    """Draws and scores by the weights of one moment. Prompts that are asked one after another, and
    waited for later, are drawn as one batch.
    """

    _numbers = itertools.count()

    def __init__(self, engine: Engine, source: Source, base_model: str) -> None:
        self.engine = engine
        self.source = source
        self.base_model = base_model
        self._number = next(self._numbers)
        self._num_asked = 0

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> Any:
        """Draws answers with their log-probabilities, by the weights as they are."""
        name = f"sampler-{self._number}-{self._num_asked}"
        # alike on all ranks, other in each call, and in each step of a run that goes on
        seed = derive_seed(self._number, self._num_asked, self.engine.client.num_steps)
        self._num_asked += 1
        future: Future[types.SampleResponse] = Future(
            self.engine.draw_waiting, lambda: len(self.engine.waiting)
        )

        def settle(client: Client, answers: list[Answer]) -> None:
            @refusing
            def respond() -> types.SampleResponse:
                ids = list(request.prompt)
                tops = _tops_of_answers(client, ids, answers, topk_sample_logprobs)
                about = _about_prompt(
                    client,
                    ids,
                    include_prompt_logprobs,
                    topk_prompt_logprobs,
                    target_prompt_logprobs,
                    prompt_logprobs_last_n,
                )
                sequences = [
                    types.SampledSequence(
                        stop_reason="stop" if answer.is_ended else "length",
                        sequence_id=f"{name}-{number}",
                        tokens_np=np.asarray(answer.ids, np.int32),
                        logprobs_np=answer.log_probs,
                        topk_logprobs_np=top,
                    )
                    for number, (answer, top) in enumerate(zip(answers, tops))
                ]
                return types.SampleResponse(sequences=sequences, **about)

            future.do(respond)

        def fail(error: BaseException) -> None:
            @refusing
            def again() -> types.SampleResponse:
                raise error

            future.do(again)

        try:
            if prompt_alt_tokens_k:
                raise bad_request("prompt_alt_tokens_k is not done here: leave it 0.")
            request = _request_of(
                prompt, num_samples, sampling_params, self.engine.client.most_tokens, seed
            )
        except Exception as error:
            fail(error)
        else:
            self.engine.waiting.append(Waiting(request, self.source, settle, fail))
        return future

    async def sample_async(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> types.SampleResponse:
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Any:
        """Scores a prompt: None for its first token."""

        @refusing
        def call() -> list[float | None]:
            ids = token_ids(prompt, "the prompt")
            with self.engine.weights_of(self.source) as client:
                about = _about_prompt(client, ids, True, 0, None, prompt_logprobs_last_n)
            found: np.ndarray = about["prompt_logprobs_np"]
            return [None if np.isnan(x) else float(x) for x in found]

        return done(call)

    async def compute_logprobs_async(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        found: list[float | None] = await self.compute_logprobs(prompt, prompt_logprobs_last_n)
        return found

    def get_tokenizer(self) -> Any:
        return self.engine.client.tokenizer

    def get_base_model(self) -> str:
        return self.base_model

    async def get_base_model_async(self) -> str:
        return self.base_model

    def get_telemetry(self) -> None:
        return None


def sampler_of(root: Path, path: str, base_model: str | None = None) -> SamplingClient:
    folder = paths.folder_of(root, path).absolute()
    facts = paths.read_facts(folder.parent.parent)
    paths.check_base_model(base_model, facts, path)
    engine = SETTINGS.engine(facts["base_model"], facts["more"])
    with engine.lock:
        source = Source(engine.client.read_snapshot(folder), None)
    return SamplingClient(engine, source, facts["base_model"])


def _request_of(
    prompt: types.ModelInput,
    num_samples: int,
    params: types.SamplingParams,
    most_tokens: int,
    seed: int,
) -> Request:
    """Returns the client's request. seed: where the parameters have none."""
    if not isinstance(prompt, types.ModelInput):
        raise TypeError(
            f"prompt is of the type {type(prompt).__name__}: make it of ids, "
            "types.ModelInput.from_ints(tokenizer.encode(text))."
        )
    if not isinstance(params, types.SamplingParams) or not isinstance(
        num_samples, int | np.integer
    ):
        raise TypeError(
            f"sample(prompt, {type(num_samples).__name__}, {type(params).__name__}): write "
            "sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=64))."
        )
    if num_samples < 1 or (params.max_tokens is not None and params.max_tokens < 1):
        raise ValueError(
            f"num_samples={num_samples} and max_tokens={params.max_tokens} must be at least 1."
        )
    most_new = most_tokens - prompt.length
    return Request(
        prompt=token_ids(prompt, "the prompt"),
        num_samples=num_samples,
        max_new_tokens=most_new if params.max_tokens is None else params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        stop=params.stop,  # type: ignore[arg-type]
        seed=seed if params.seed is None else params.seed,
    )


def _about_prompt(
    client: Client,
    ids: list[int],
    has_log_probs: bool,
    top_k: int,
    targets: types.TensorData | None,
    last: int | None,
) -> dict[str, Any]:
    """Returns the fields of a response that are the prompt's, from one forward pass."""
    length = len(ids)
    if last is not None and not (has_log_probs and 1 <= last <= length - 1):
        raise ValueError(
            f"prompt_logprobs_last_n={last} is from 1 to len(prompt) - 1 = {length - 1}, with "
            "include_prompt_logprobs=True."
        )
    found: dict[str, Any] = {}
    if not has_log_probs and not top_k and targets is None:
        return found
    if length < 2:
        if has_log_probs:
            found["prompt_logprobs_np"] = np.full(length, np.nan, np.float32)
        return found
    # the tokens themselves are the first target of each position
    targets_NK = np.asarray(ids[1:])[:, None]
    if targets is not None:
        theirs_NK = targets.to_numpy(pad_value=NO_TARGET)
        if theirs_NK.ndim != 2 or len(theirs_NK) != length - 1:
            raise ValueError(
                f"target_prompt_logprobs has the shape {list(theirs_NK.shape)}, and must be "
                f"[len(prompt) - 1, K] = [{length - 1}, K]."
            )
        targets_NK = np.concatenate([targets_NK, theirs_NK], 1)
    out = client.forward([{"input_ids": ids[:-1], IDS: targets_NK}], top_k)
    log_probs_NK = out.log_probs[0]
    first = 1 if last is None else length - last
    if has_log_probs:
        values = np.full(length, np.nan, np.float32)
        values[first:] = log_probs_NK[first - 1 :, 0]
        found["prompt_logprobs_np"] = values
    if top_k:
        found["topk_prompt_logprobs_np"] = _top(out, length, first)
    if targets is not None:
        found["target_prompt_logprobs"] = types.TensorData.from_numpy(log_probs_NK[:, 1:].copy())
    return found


def _tops_of_answers(
    client: Client, prompt: list[int], answers: Sequence[Answer], top_k: int
) -> list[TopkLogprobs | None]:
    """Returns the likeliest tokens at each position of the answers to one prompt."""
    if not top_k:
        return [None] * len(answers)
    out = client.forward([rows_of_answers(prompt, [answer.ids for answer in answers])], top_k)
    first = len(prompt) - 1
    return [
        TopkLogprobs(token_ids=ids[first:].astype(np.int32), logprobs=log_probs[first:])
        for ids, log_probs in zip(out.top_ids, out.top_log_probs)
    ]


def _top(out: Any, length: int, first: int) -> TopkLogprobs:
    """Returns the likeliest tokens of each position; the SDK's marks where there is none."""
    width = out.top_ids[0].shape[1]
    ids_NK = np.zeros((length, width), np.int32)
    log_probs_NK = np.full((length, width), MASK_LOGPROB, np.float32)
    ids_NK[first:] = out.top_ids[0][first - 1 :]
    log_probs_NK[first:] = out.top_log_probs[0][first - 1 :]
    return TopkLogprobs(token_ids=ids_NK, logprobs=log_probs_NK)
