"""A sampling client beside stand-ins of vLLM and SGLang, which load what they are sent with plain transformers and
draw from it: whose numbers they are, what they differ by, and what is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from automodel_lite import SamplingClient, TrainingClient
from automodel_lite.errors import ConfigError
from automodel_lite.extras.client.sampling import Answer, Request, policy_rows
from automodel_lite.models.loss import CrossEntropy
from automodel_lite.parts.losses.policy import ImportanceSampling
from tests.clients import open_client
from tests.models.test_policy import save_model
from tests.ranks import run_ranks
from tests.servers import Sglang, StandIn, Vllm, serving

pytestmark = pytest.mark.numbers

KINDS: dict[str, type[StandIn]] = {"vllm": Vllm, "sglang": Sglang}
LORA = ("peft=lora", "peft.r=4", "training.precision=fp32")
ALL = ("peft=none", "training.precision=fp32")
REQUESTS = [
    Request([5, 6, 7], 3, 6, seed=1, stop=[]),
    Request([8, 9], 1, 4, temperature=0.0, stop=[]),
]
ROWS = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 9, 3]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingClient]:
    with open_client(folder, tmp_path_factory.mktemp("run"), *ALL) as opened:
        yield opened


@pytest.fixture(scope="module")
def adapter(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingClient]:
    with open_client(folder, tmp_path_factory.mktemp("run"), *LORA) as opened:
        yield opened


def train(client: TrainingClient) -> None:
    client.forward_backward(ROWS, CrossEntropy())
    client.optim_step(lr=3e-2, divide_by=1)


# ---------------------------------------------- weights
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", ["whole", "adapter"])
def test_the_server_has_the_trained_weights(
    kind: str, of: str, folder: str, request: pytest.FixtureRequest
) -> None:
    client = request.getfixturevalue(of)
    stand_in = KINDS[kind](folder)
    with serving(stand_in) as url, SamplingClient(url, client) as sampler:
        before = None
        for number in (1, 2):
            train(client)
            assert sampler.update() == number
            answers = sampler.draw(REQUESTS)
            assert [[len(x.ids) for x in of_one] for of_one in answers] == [[6, 6, 6], [4]]
            assert {x.version for of_one in answers for x in of_one} == {number}
            assert sampler.gap.num_tokens == 22
            assert sampler.gap.max < 1e-4
            assert sampler.metrics()["sampler_version"] == number
            # the likeliest answer is that of the training client itself, and its numbers too
            own = client.draw(REQUESTS[1:])[0][0]
            assert answers[1][0].ids == own.ids
            np.testing.assert_allclose(answers[1][0].log_probs, own.log_probs, atol=1e-5)
            # a step has changed the numbers of one prompt: nothing of it was still cached
            assert before is None or abs(answers[1][0].log_probs[0] - before) > 1e-3
            before = answers[1][0].log_probs[0]
        folders = [path for path in sampler._folder.iterdir()] if sampler._folder else []
        assert len(folders) == 1
        assert len(stand_in.adapters) == (of == "adapter")
    assert not stand_in.adapters
    assert not folders[0].exists()


@pytest.mark.same_on_every_cpu
def test_a_version_of_an_adapter_lasts_as_long_as_somebody_holds_it(
    folder: str, adapter: TrainingClient
) -> None:
    stand_in = Vllm(folder)
    with serving(stand_in) as url, SamplingClient(url, adapter) as sampler:
        first = sampler.publish()
        before = sampler.draw_from(first, REQUESTS)
        train(adapter)
        second = sampler.publish()
        assert [x.ids for x in sampler.draw_from(first, REQUESTS)[0]] == [x.ids for x in before[0]]
        assert sampler.draw_from(second, REQUESTS[1:])[0][0].version == 2
        del first
        sampler.publish()
        assert len(stand_in.adapters) == 2


@pytest.mark.same_on_every_cpu
def test_all_weights_have_one_version(folder: str, whole: TrainingClient) -> None:
    with serving(Sglang(folder)) as url, SamplingClient(url, whole) as sampler:
        first = sampler.publish()
        sampler.publish()
        with pytest.raises(
            RuntimeError, match="other weights by now than those of version 1: draw before"
        ):
            sampler.draw_from(first, REQUESTS)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_somebody_else_are_an_error(
    kind: str, folder: str, whole: TrainingClient
) -> None:
    stand_in = KINDS[kind](folder)
    with serving(stand_in) as url, SamplingClient(url, whole) as sampler:
        sampler.update()
        stand_in.version = "other"
        with pytest.raises(
            RuntimeError, match=r"drawn by the weights other, not client-.*-000001: somebody else"
        ):
            sampler.draw(REQUESTS)


@pytest.mark.same_on_every_cpu
def test_an_update_waits_for_answers_that_are_being_drawn(
    folder: str, whole: TrainingClient
) -> None:
    stand_in = Sglang(folder)
    with serving(stand_in) as url, SamplingClient(url, whole) as sampler:
        version = sampler.publish()
        found: list[list[list[Answer]]] = []
        with stand_in.lock:
            drawing = threading.Thread(
                target=lambda: found.append(sampler.draw_from(version, REQUESTS))
            )
            drawing.start()
            while "/generate" not in stand_in.paths:
                drawing.join(0.01)
            updating = threading.Thread(target=sampler.publish)
            updating.start()
            updating.join(0.2)
            assert updating.is_alive()
        drawing.join()
        updating.join()
        assert found[0][0][0].version == 1
        assert stand_in.paths[-2:] == ["/generate", "/update_weights_from_disk"]


def test_weights_that_have_changed_are_not_measured(folder: str, adapter: TrainingClient) -> None:
    with serving(Vllm(folder)) as url, SamplingClient(url, adapter) as sampler:
        with pytest.raises(RuntimeError, match=r"call update\(\) first"):
            sampler.draw(REQUESTS)
        sampler.update()
        train(adapter)
        with pytest.raises(
            RuntimeError, match=r"weights have changed since update\(\) sent version 1"
        ):
            sampler.draw(REQUESTS)
        answer = sampler.draw(REQUESTS, measure=False)[0][0]
        assert answer.log_probs is answer.sampler_log_probs


@pytest.mark.same_on_every_cpu
def test_no_requests_have_no_answers(folder: str, adapter: TrainingClient) -> None:
    assert adapter.draw([]) == []
    with serving(Vllm(folder)) as url, SamplingClient(url, adapter) as sampler:
        sampler.update()
        sampler.draw(REQUESTS)
        assert sampler.draw([]) == []
        assert sampler.metrics()["sampler_tokens"] == 0


# ---------------------------------------------- answers
@pytest.mark.parametrize("kind", KINDS)
def test_answers_end_and_differ_as_those_of_the_training_client(
    kind: str, folder: str, adapter: TrainingClient
) -> None:
    prompts = [[5, 6], [5, 6], [9, 10, 11]]
    with serving(KINDS[kind](folder)) as url, SamplingClient(url, adapter) as sampler:
        sampler.update()
        found = sampler.sample(prompts, 3, 6, seed=3)
        assert found == sampler.sample(prompts, 3, 6, seed=3)
        assert found != sampler.sample(prompts, 3, 6, seed=4)
        assert found[0] != found[1]
        assert len({tuple(answer) for answer in found[0]}) > 1
        # ids, strings and the model's own end tokens end an answer, which keeps them
        likely = adapter.sample(prompts[:1], 1, 8, temperature=0.0, stop=[])[0][0]
        text = adapter.tokenizer.decode(likely[2:3])
        for stop in (likely[2:3], [text], text):
            want = adapter.draw([Request([5, 6], 1, 8, temperature=0.0, stop=stop)])[0][0]
            got = sampler.draw([Request([5, 6], 1, 8, temperature=0.0, stop=stop)])[0][0]
            assert (got.ids, got.is_ended) == (want.ids, want.is_ended)
            assert got.is_ended
        ends = {*adapter.check_requests([])}
        many = sampler.draw([Request([5, 6], 16, 24, seed=5)])[0]
        assert {answer.is_ended for answer in many} == {True, False}
        assert all((answer.ids[-1] in ends) == answer.is_ended for answer in many)
        assert all(ends.isdisjoint(answer.ids[:-1]) for answer in many)
        few = sampler.sample(prompts, 2, 4, top_k=1, temperature=2.0, stop=[])
        assert few == [
            [answer] * 2 for (answer,) in adapter.sample(prompts, 1, 4, temperature=0.0, stop=[])
        ]


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_after_the_temperature_are_refused(
    kind: str, folder: str, adapter: TrainingClient
) -> None:
    cure = {"vllm": "--logprobs-mode raw_logprobs", "sglang": "SGLANG_RETURN_ORIGINAL_LOGPROB=1"}[
        kind
    ]
    with (
        serving(KINDS[kind](folder, is_changed=True)) as url,
        SamplingClient(url, adapter) as sampler,
    ):
        sampler.update()
        sampler.draw(REQUESTS)  # at 1 and 0 they are the model's own
        with pytest.raises(
            ConfigError, match=rf"after temperature, top_p and top_k.*{cure}, or draw with"
        ):
            sampler.draw([Request([5, 6], temperature=0.7)])


# ---------------------------------------------- numbers
def test_what_a_rounded_server_differs_by_is_measured_and_corrected(
    folder: str, whole: TrainingClient
) -> None:
    request = Request([5, 6, 7], 8, 8, seed=2, stop=[])
    with serving(Sglang(folder, torch.bfloat16)) as url, SamplingClient(url, whole) as sampler:
        sampler.update()
        answers = sampler.draw([request])[0]
    both = [(x.log_probs, x.sampler_log_probs) for x in answers]
    distances = np.concatenate([np.abs(own - theirs) for own, theirs in both])
    assert 1e-4 < sampler.gap.mean < 0.1
    assert (sampler.gap.mean, sampler.gap.max) == pytest.approx((distances.mean(), distances.max()))

    rewards = [float(sum(answer.ids) % 2) for answer in answers]
    assert 0 < sum(rewards) < 8
    truncation = 1.001  # some weights are above it
    weights = np.concatenate([np.minimum(np.exp(own - theirs), truncation) for own, theirs in both])
    assert 0 < (weights == np.float32(truncation)).sum() < len(weights)
    loss = ImportanceSampling(truncation=truncation, advantage="dr_grpo")
    out = whole.forward_backward([policy_rows(request.prompt, answers, rewards)], loss)
    whole.zero_grad()
    assert out.parts["sampler_weight"] == pytest.approx(float(weights.sum()), abs=1e-4)
    # each label: - weight * ratio (1) * advantage
    advantages = np.repeat(np.array(rewards) - np.mean(rewards), 8)
    assert out.loss == pytest.approx(float(-(weights * advantages).sum()), abs=1e-4)
    plain = whole.forward_backward(
        [policy_rows(request.prompt, answers, rewards, corrected=False)], loss
    )
    whole.zero_grad()
    assert "sampler_weight" not in plain.parts
    assert abs(plain.loss - out.loss) > 1e-3


def test_a_gap_that_no_rounding_makes_is_an_error(folder: str, adapter: TrainingClient) -> None:
    stand_in = Vllm(folder)
    with torch.no_grad():  # it serves another base model
        for parameter in stand_in.model.parameters():
            parameter.mul_(3)
    stand_in.load = lambda _: stand_in.model  # type: ignore[method-assign]
    with serving(stand_in) as url, SamplingClient(url, adapter) as sampler:
        sampler.update()
        with pytest.raises(
            ConfigError, match=r"nats from the trainer's on average, more than max_gap=0\.5: check"
        ):
            sampler.draw(REQUESTS)


# ---------------------------------------------- refusals
@pytest.mark.same_on_every_cpu
def test_mistakes_are_sentences(
    folder: str,
    whole: TrainingClient,
    adapter: TrainingClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(stand_in: StandIn, client: TrainingClient, **more: Any) -> str:
        with serving(stand_in) as url, pytest.raises(ConfigError) as caught:
            SamplingClient(url, client, folder=tmp_path / "shared", timeout_s=20, **more).update()
        return str(caught.value)

    assert (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank 8"
        in refused(Vllm(folder, takes=False), adapter)
    )
    assert "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL" in refused(Vllm(folder, takes=False), whole)
    text = refused(Sglang(folder, takes=False), adapter)
    assert "LoRA is not enabled" in text
    assert "--enable-lora --max-lora-rank 4" in text
    for kind, client in ((Vllm, adapter), (Vllm, whole), (Sglang, adapter), (Sglang, whole)):
        stand_in = kind(folder)
        text = refused(stand_in, client, seen_as="/elsewhere/")
        assert "/elsewhere/client-" in text
        assert "it must see that folder (folder=, seen_as=)" in text
        assert stand_in.is_open.is_set()
    assert "does not resume (stuck): its own log says why; restart it" in refused(
        StandInThatStaysPaused(folder), whole
    )
    assert "refuses the key (Unauthorized): give api_key=..., or export SAMPLER_API_KEY" in refused(
        Vllm(folder, key="right"), whole
    )
    with serving(Vllm(folder, key="right")) as url:
        SamplingClient(url, adapter, api_key="right").update()
        monkeypatch.setenv("SAMPLER_API_KEY", "right")
        SamplingClient(url, adapter).update()
    assert "neither vLLM (/version) nor SGLang (/model_info): give the address" in refused(
        StandInOfNothing(folder), whole
    )
    with pytest.raises(
        ConfigError, match="sampler=localhost:8000 is no address of a server: write it as http"
    ):
        SamplingClient("localhost:8000", whole)
    with pytest.raises(
        ConfigError, match=r"127.0.0.1:9 does not answer \(.*refused\): is the server up"
    ):
        SamplingClient("http://127.0.0.1:9/v1", whole)


class StandInThatStaysPaused(Vllm):
    def post(self, path: str, body: Any) -> tuple[int, Any]:
        return (500, {"error": "stuck"}) if path == "/resume" else super().post(path, body)


class StandInOfNothing(StandIn):
    def get(self, path: str) -> tuple[int, Any]:
        return 404, {"detail": "Not Found"}


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vllm", r"The model .* does not exist"),
        ("sglang", "Got LoRA adapter that has never been loaded: "),
    ],
)
def test_an_adapter_that_the_server_has_lost_is_named(
    kind: str, words: str, folder: str, adapter: TrainingClient
) -> None:
    stand_in = KINDS[kind](folder)
    with serving(stand_in) as url, SamplingClient(url, adapter) as sampler:
        sampler.update()
        stand_in.adapters.clear()
        with pytest.raises(
            RuntimeError,
            match=rf"-000001 any more \({words}.*\): was it restarted",
        ):
            sampler.draw(REQUESTS)


# ---------------------------------------------- ranks
def drawn_on(rank: int, world: int, folder: str, runs: Path, url: str) -> list[Any]:
    # nobody but the first rank may reach the server
    address = url if rank == 0 else "http://127.0.0.1:9"
    with (
        open_client(folder, runs, *ALL, "mesh.dp_shard=2") as client,
        SamplingClient(address, client) as sampler,
    ):
        train(client)
        number = sampler.update()
        answers = sampler.draw(REQUESTS)
        assert sampler.gap.max < 1e-4
        return [
            number,
            [[answer.ids for answer in of_one] for of_one in answers],
            sampler.gap.num_tokens,
        ]


def test_the_first_of_two_ranks_asks_the_server(folder: str, tmp_path: Path) -> None:
    with serving(Vllm(folder)) as url:
        first, second = run_ranks(drawn_on, 2, folder, tmp_path, url)
    assert first == second
    assert (first[0], first[2]) == (1, 22)
