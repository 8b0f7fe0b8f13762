"""Tinker's API in process: its names, its losses and its checkpoints, on tiny models."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.clients import SIZES
from tests.models.test_policy import save_model
from tests.ranks import fork_server, run_ranks
from tests.servers import Sglang, Vllm, serving

tinker = pytest.importorskip(
    "tinker", reason="the package tinker, of automodel-lite[tinker], is not installed"
)

from automodel_lite.tinker import install  # noqa: E402
from automodel_lite.tinker.engines import SETTINGS, Settings, _new_name  # noqa: E402
from automodel_lite.tinker.rest import RestClient  # noqa: E402
from automodel_lite.tinker.rows import LOSSES, rows_of  # noqa: E402
from automodel_lite.tinker.sampling import SamplingClient  # noqa: E402
from automodel_lite.tinker.service import ServiceClient  # noqa: E402
from automodel_lite.tinker.training import TrainingClient  # noqa: E402

pytestmark = pytest.mark.numbers
types = tinker.types
OF_THE_SERVICE = {
    "SamplingClient": {
        "create",
        "from_sampler_handle",
        "get_sampler_handle",
        "on_queue_state_change",
    },
}
OURS = {x.__name__: x for x in (RestClient, SamplingClient, ServiceClient, TrainingClient)}
THEIRS = {name: getattr(tinker.lib.public_interfaces, name) for name in OURS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("model"))


def begin(root: Path, *overrides: str) -> Any:
    """A service of its own, as a new process has."""
    vars(SETTINGS).update(vars(Settings(folder=root, overrides=(*SIZES, *overrides))))
    return ServiceClient()


@pytest.fixture
def service(tmp_path: Path) -> Any:
    return begin(tmp_path)


# ---------------------------------------------- names
@pytest.mark.parametrize("name", THEIRS)
def test_names_and_arguments_are_those_of_the_sdk(name: str) -> None:
    own, theirs = OURS[name], THEIRS[name]
    for method in sorted(x for x in dir(theirs) if not x.startswith("_")):
        if not callable(getattr(theirs, method)) or method in OF_THE_SERVICE.get(name, ()):
            continue
        if name == "RestClient" and method not in dir(own):
            with pytest.raises(tinker.BadRequestError, match="is of the service: here runs and"):
                getattr(RestClient(), method)
            continue
        wanted = inspect.signature(inspect.unwrap(getattr(theirs, method))).parameters.values()
        found = inspect.signature(getattr(own, method)).parameters.values()
        assert [(x.name, x.default, x.kind) for x in found] == [
            (x.name, x.default, x.kind) for x in wanted
        ], method
        if method.endswith("_async"):
            assert inspect.iscoroutinefunction(getattr(own, method)), method


def test_what_only_the_service_knows_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = begin(tmp_path).create_rest_client()
    assert rest.list_training_runs(access_scope="accessible").result().training_runs == []
    asyncio.run(rest.list_training_runs_async(20, 0, "owned", "mine"))
    assert rest.list_training_runs().result().training_runs == []
    ServiceClient(base_url=None, api_key="mine", max_retries=3)
    RestClient(base_url="http://elsewhere")
    assert capsys.readouterr().err.splitlines() == [
        f"tinker     {what}: of the service, and unused here"
        for what in (
            "access_scope of RestClient.list_training_runs",
            "project_id of RestClient.list_training_runs_async",
            "api_key, max_retries of ServiceClient",
            "base_url of RestClient",
        )
    ]


def test_install_takes_the_service_s_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a script has imported a name already."""
    script = ModuleType("script")
    for module in (script, tinker, tinker.lib.public_interfaces):
        for name, client in THEIRS.items():
            monkeypatch.setattr(module, name, client, raising=False)
    monkeypatch.setitem(sys.modules, "script", script)
    install({"some/name": ["model.pretrained=x"]}, tmp_path)
    for module in (script, tinker, tinker.lib.public_interfaces):
        assert {name: vars(module)[name] for name in OURS} == OURS
    assert SETTINGS.given("some/name")[1][0] == "model.pretrained=x"


# ---------------------------------------------- losses
IDS = [[5, 6, 7, 8, 9], [9, 10, 11]]
TARGETS = [[6, 7, 3, 9, 4], [10, 2, 12]]
OLD = [[0.0, 0.0, -6.3, -6.0, -6.4], [0.0, -6.2, -5.9]]
ADVANTAGES = [[0.0, 0.0, 1.0, -0.5, 2.0], [0.0, -1.0, 0.7]]
MASK = [[0.0, 0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]


def data_of(loss_fn: str) -> list[Any]:
    found = []
    for ids, targets, old, advantages, mask in zip(IDS, TARGETS, OLD, ADVANTAGES, MASK):
        inputs: dict[str, Any] = {"target_tokens": targets}
        if loss_fn == "cross_entropy":
            inputs["weights"] = [0.5 * x + 0.25 for x in mask]
        else:
            inputs |= {"logprobs": old, "advantages": advantages}
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = torch.tensor(mask)
        found.append(
            types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)
        )
    return found


def formula(loss_fn: str, config: dict[str, float], new: Tensor, number: int) -> Tensor:
    """The service's documentation, in fp64."""
    old, advantages, mask = (
        torch.tensor(x[number], dtype=torch.float64) for x in (OLD, ADVANTAGES, MASK)
    )
    low = config.get("clip_low_threshold", 0.0 if loss_fn == "cispo" else 0.8)
    high = config.get("clip_high_threshold", 4.0 if loss_fn == "cispo" else 1.2)
    ratio = (new - old).exp()
    if loss_fn == "cross_entropy":
        return -(new * (0.5 * mask + 0.25)).sum()
    if loss_fn == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss_fn == "cispo":
        return -(ratio.clamp(low, high).detach() * new * advantages).sum()
    if loss_fn == "dro":
        beta = config.get("beta", 0.05)
        return -(new * advantages - 0.5 * beta * (new - old) ** 2).sum()
    if loss_fn == "gspo":
        mean = (new.detach() - old)[mask != 0].mean()
        ratio = (mean + new - new.detach()).exp()
        low = config.get("clip_low_threshold", 1 - 3e-4)
        high = config.get("clip_high_threshold", 1 + 4e-4)
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


CASES: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in LOSSES),
    ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}),
    ("cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.01}),
    ("gspo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.01}),
    ("dro", {"beta": 0.4}),
]


def check_losses(client: Any, folder: str, cases: list[tuple[str, dict[str, float]]]) -> None:
    for loss_fn, config in cases:
        lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        total = torch.zeros((), dtype=torch.float64)
        wanted = []
        for number, (ids, targets) in enumerate(zip(IDS, TARGETS)):
            p = F.log_softmax(lm(input_ids=torch.tensor([ids])).logits[0], -1)
            new = p[torch.arange(len(ids)), torch.tensor(targets)]
            wanted.append(new.detach().numpy())
            total = total + formula(loss_fn, config, new, number)
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm().item()
        out = client.forward_backward(data_of(loss_fn), loss_fn, config).result()
        step = client.optim_step(types.AdamParams(learning_rate=0.0)).result()
        assert out.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5), loss_fn
        assert step.metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=2e-5), loss_fn
        # of the log-probabilities that the engine found, the loss is the formula to their last
        # digit, 5e-7 of each
        same = torch.zeros((), dtype=torch.float64)
        for number, (own, truth) in enumerate(zip(out.loss_fn_outputs, wanted)):
            found = own["logprobs"].to_numpy()
            np.testing.assert_allclose(found, truth, atol=2e-5)
            same = same + formula(loss_fn, config, torch.from_numpy(found).double(), number)
        assert out.metrics["loss:sum"] == pytest.approx(same.item(), rel=3e-7, abs=3e-6), loss_fn


def test_losses_are_their_formulas(service: Any, folder: str) -> None:
    client = service.create_lora_training_client(folder, rank=0).result()
    check_losses(client, folder, CASES)


def losses_on(rank: int, world: int, folder: str, root: Path, layout: str) -> str:
    client = begin(root, layout).create_lora_training_client(folder, rank=0).result()
    check_losses(client, folder, CASES[:6])
    return " ".join([client.save_state("mine").result().path, _new_name(), _new_name()])


@pytest.mark.parametrize("layout", ["mesh.cp=2", "mesh.dp_shard=2"])
def test_losses_are_their_formulas_on_two_ranks(layout: str, folder: str, tmp_path: Path) -> None:
    first, second = run_ranks(losses_on, 2, folder, tmp_path, layout)
    assert first == second
    path, *engines = first.split()
    assert path == "tinker://run-000000/weights/mine"
    # another job of the same address may find its folder
    assert engines[0] != engines[1]


def differing_on(rank: int, world: int, folder: str, root: Path) -> str:
    service = begin(root, "mesh.dp_shard=2")
    client = service.create_lora_training_client(folder, rank=4).result()
    data = data_of("ppo")
    with pytest.raises(tinker.BadRequestError, match="rank 1 was called with other losses than"):
        client.forward_backward(data, "ppo", {"clip_high_threshold": 1.2 + rank}).result()
    other = service.create_lora_training_client(folder, rank=4).result()
    with pytest.raises(tinker.BadRequestError, match="rank 1 was called with other rows"):
        other.forward_backward(data[: rank + 1], "ppo").result()
    return "named"


def test_ranks_that_differ_are_named(folder: str, tmp_path: Path) -> None:
    assert run_ranks(differing_on, 2, folder, tmp_path) == ["named"] * 2


def test_several_targets_and_custom_losses(service: Any, folder: str) -> None:
    client = service.create_lora_training_client(folder, rank=0).result()
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    p = F.log_softmax(lm(input_ids=torch.tensor([IDS[1]])).logits[0], -1)
    many = torch.tensor([[10, 11], [2, 3], [12, 1]])
    weights = torch.tensor([[0.25, 0.75], [0.0, 0.0], [1.0, -0.5]])
    one = types.Datum(
        model_input=types.ModelInput.from_ints(IDS[1]),
        loss_fn_inputs={"target_tokens": many, "weights": weights},
    )
    out = client.forward_backward([one, *data_of("cross_entropy")[:1]], "cross_entropy").result()
    found = [x["logprobs"].to_numpy() for x in out.loss_fn_outputs]
    np.testing.assert_allclose(found[0], p.gather(1, many).detach(), atol=2e-5)
    assert found[1].shape == (5,)
    same = client.forward([one, *data_of("cross_entropy")[:1]], "cross_entropy").result()
    assert same.metrics["loss:sum"] == pytest.approx(out.metrics["loss:sum"], rel=1e-5)
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()

    def squares(data: list[Any], found: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        assert len(data) == len(found) == 1
        return (found[0] ** 2).sum(), {"mine": 2.0}

    value = (p.gather(1, many) ** 2).sum()
    value.backward()  # type: ignore[no-untyped-call]
    norm = torch.stack([p.grad.norm() for p in lm.parameters()]).norm().item()
    custom = client.forward_backward_custom([one], squares).result()
    assert custom.metrics == {"mine": 2.0, "loss:sum": pytest.approx(value.item(), rel=1e-5)}
    step = client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    assert step.metrics["unclipped_grad_l2:mean"] == pytest.approx(norm, rel=2e-5)


@pytest.mark.parametrize(
    ("loss_fn", "config", "words"),
    [
        ("stable_reinforce", None, "its objective is not published: use"),
        ("reinforce", None, "is none of cross_entropy, importance_sampling, ppo"),
        ("ppo", {"beta": 1.0}, "loss_fn_config has beta, which ppo does not use"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold is from 0 to 1"),
        ("cross_entropy", None, r"does not use loss_fn_inputs\['advantages'\]"),
        ("gspo", None, r"needs loss_fn_inputs\['sequence_ratio_mask'\]"),
    ],
)
def test_wrong_losses_are_bad_requests(
    loss_fn: str, config: dict[str, float] | None, words: str, service: Any, folder: str
) -> None:
    client = service.create_lora_training_client(folder, rank=0).result()
    future = client.forward_backward(data_of("ppo"), loss_fn, config)
    with pytest.raises(tinker.BadRequestError, match=words):
        future.result()
    # a step would be one of something else
    with pytest.raises(RuntimeError, match="this TrainingClient is poisoned"):
        client.optim_step(types.AdamParams()).result()


def one_datum(ids: list[int], **inputs: Any) -> Any:
    return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)


@pytest.mark.parametrize(
    ("loss_fn", "inputs", "words"),
    [
        (
            "importance_sampling",
            {"logprobs": [0.0, 0.3], "advantages": [0.0, 1.0]},
            r"datum 0: loss_fn_inputs\['logprobs'\] is 0.3 at position 1, and the logarithm",
        ),
        (
            "importance_sampling",
            {"logprobs": [0.0, -1.0], "advantages": [0.0, float("nan")]},
            r"datum 0: loss_fn_inputs\['advantages'\] is not finite at position 1: look at",
        ),
        (
            "cross_entropy",
            {"weights": [float("inf"), 1.0]},
            r"datum 0: loss_fn_inputs\['weights'\] is not finite at position 0",
        ),
    ],
    ids=["probabilities", "advantages", "weights"],
)
def test_wrong_numbers_of_a_datum_are_named(
    loss_fn: str, inputs: dict[str, Any], words: str
) -> None:
    with pytest.raises(tinker.BadRequestError, match=words):
        rows_of([one_datum([5, 6], target_tokens=[6, 7], **inputs)], loss_fn)


def test_log_probabilities_that_do_not_count_may_be_anything() -> None:
    inputs = {"logprobs": [1.0, -1.0], "advantages": [0.0, 1.0]}
    rows, _ = rows_of([one_datum([5, 6], target_tokens=[6, 7], **inputs)], "ppo")
    assert rows[0]["old_log_probs"].tolist() == [1.0, -1.0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": -1e-3}, r"optim_step\(lr=-0.001\) must be a finite number"),
        ({"beta1": 1.5}, r"betas=\(1.5, 0.95\) must each be at least 0 and below 1"),
        ({"weight_decay": float("nan")}, r"optim_step\(weight_decay=nan\) must be"),
        ({"eps": -1.0}, r"optim_step\(eps=-1\) must be"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_step_by_impossible_numbers_is_refused(
    settings: dict[str, float], words: str, service: Any, folder: str
) -> None:
    client = service.create_lora_training_client(folder, rank=0).result()
    client.forward_backward(data_of("cross_entropy"), "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match=words):
        client.optim_step(types.AdamParams(**settings)).result()


def test_wrong_arguments_are_named(service: Any, folder: str) -> None:
    client = service.create_lora_training_client(folder, rank=4).result()
    with pytest.raises(TypeError, match=r"optim_step\(float\): Expected AdamParams, such as"):
        client.optim_step(1e-3)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([5, 6])
    params = types.SamplingParams(max_tokens=2)
    for call, error, words in (
        (("text", 1, params), TypeError, "prompt is of the type str: make it of ids"),
        ((prompt, params, 1), TypeError, r"sample\(prompt, SamplingParams, int\): write"),
        ((prompt, 0, params), tinker.BadRequestError, "num_samples=0 and max_tokens=2 must be"),
    ):
        with pytest.raises(error, match=words):
            sampler.sample(*call).result()
    path = client.save_weights_for_sampler("then").result().path
    with pytest.raises(tinker.BadRequestError, match=f"{path} holds weights alone, and no optim"):
        service.create_training_client_from_state_with_optimizer(path).result()
    with pytest.raises(
        tinker.BadRequestError, match=f"base_model=other, and {path} is of {folder}"
    ):
        service.create_sampling_client(model_path=path, base_model="other").result()
    with pytest.raises(tinker.BadRequestError, match="a model's name is base_model="):
        service.create_sampling_client(folder).result()
    with pytest.raises(TypeError, match=r"returns \(loss, metrics\): a scalar tensor and a dict"):
        client.forward_backward_custom(
            data_of("cross_entropy"), lambda data, found: found[0].sum()
        ).result()


def test_a_size_of_the_service_s_is_the_model(
    service: Any, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    SETTINGS.models["small"] = (f"model.pretrained={folder}",)
    assert SETTINGS.given("small:peft:262144") == SETTINGS.given("small")
    assert capsys.readouterr().err == (
        "tinker     small:peft:262144 is small: set mesh and packs by --model\n"
    )


# ---------------------------------------------- answers
def test_prompts_asked_one_by_one_are_drawn_together(
    service: Any, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = service.create_sampling_client(base_model=folder).result()
    client = sampler.engine.client
    calls = []
    draw = client.draw
    monkeypatch.setattr(
        client, "draw", lambda requests: calls.append(len(requests)) or draw(requests)
    )
    params = types.SamplingParams(max_tokens=3, seed=4, stop=[])
    prompts = [types.ModelInput.from_ints([5, 6]), types.ModelInput.from_ints([7, 8, 9])]
    futures = [sampler.sample(prompt, 2, params) for prompt in prompts]
    found = [future.result() for future in futures]
    assert calls == [2]

    async def together() -> list[Any]:
        async def one(prompt: Any) -> Any:
            return await sampler.sample_async(prompt, 2, params)

        return await asyncio.gather(*map(one, prompts))

    again = asyncio.run(together())
    assert calls == [2, 2]
    for response, other in zip(found, again):
        assert [x.tokens for x in response.sequences] == [x.tokens for x in other.sequences]
        assert {x.stop_reason for x in response.sequences} == {"length"}
        assert len({x.sequence_id for x in [*response.sequences, *other.sequences]}) == 4


def test_what_is_known_of_a_prompt(service: Any, folder: str) -> None:
    sampler = service.create_sampling_client(base_model=folder).result()
    ids = [5, 6, 7, 8]
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    p = F.log_softmax(lm(input_ids=torch.tensor([ids])).logits[0], -1).detach()
    prompt = types.ModelInput.from_ints(ids)
    found = sampler.compute_logprobs(prompt).result()
    assert found[0] is None
    wanted = [p[at, ids[at + 1]].item() for at in range(3)]
    np.testing.assert_allclose(found[1:], wanted, atol=2e-5)
    last = sampler.compute_logprobs(prompt, 1).result()
    assert last[:3] == [None] * 3
    assert last[3] == pytest.approx(found[3])
    targets = torch.tensor([[3, 4], [-1, 5], [6, -1]])
    response = sampler.sample(
        prompt,
        2,
        types.SamplingParams(max_tokens=2, seed=1, stop=[]),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=types.TensorData.from_torch(targets),
    ).result()
    assert response.topk_prompt_logprobs[0] is None
    assert [x[0] for x in response.topk_prompt_logprobs[1]] == p[0].topk(2).indices.tolist()
    of_targets = response.target_prompt_logprobs.to_numpy()
    np.testing.assert_allclose(of_targets[0], p[0, [3, 4]], atol=2e-5)
    assert of_targets[1][0] == of_targets[2][1] == 0
    assert response.sequences[0].tokens != response.sequences[1].tokens
    for answer in response.sequences:
        whole = torch.tensor([[*ids, *answer.tokens]])
        top = lm(input_ids=whole).logits[0, 3:5].topk(3).indices.tolist()
        assert [[token for token, _ in at] for at in answer.topk_logprobs] == top
        assert len(answer.logprobs) == 2
    with pytest.raises(tinker.BadRequestError, match="prompt_logprobs_last_n=9 is from 1 to"):
        sampler.compute_logprobs(prompt, 9).result()
    with pytest.raises(tinker.BadRequestError, match="must be at least one id"):
        sampler.sample(
            types.ModelInput.from_ints([]), 1, types.SamplingParams(max_tokens=1)
        ).result()


def test_a_wrong_prompt_fails_alone(service: Any, folder: str) -> None:
    sampler = service.create_sampling_client(base_model=folder).result()
    params = types.SamplingParams(max_tokens=2, seed=1, stop=[])
    wrong, right = (
        sampler.sample(types.ModelInput.from_ints(ids), 1, params) for ids in ([10**6], [5])
    )
    assert len(right.result().sequences[0].tokens) == 2
    with pytest.raises(tinker.BadRequestError, match="must be at least one id, each below"):
        wrong.result()


def test_a_model_in_memory_serves_its_own_name_alone(service: Any, folder: str) -> None:
    """Overrides of another name may make another model of the same folder."""
    size = "packed_sequence.packed_sequence_size=128"
    SETTINGS.models["small"] = (f"model.pretrained={folder}", size)
    client = service.create_lora_training_client("small", rank=4).result()
    for name, is_same in (("small", True), (folder, False)):
        sampler = service.create_sampling_client(base_model=name).result()
        assert (sampler.engine is client.engine) == is_same


# ---------------------------------------------- adapters and checkpoints
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def train(client: Any, lr: float = 1e-2) -> float:
    future = client.forward_backward(data_of("cross_entropy"), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=lr, **ADAM)).result()
    return float(future.result().metrics["loss:sum"])


def test_adapters_of_one_model_take_turns(service: Any, folder: str, tmp_path: Path) -> None:
    one = service.create_lora_training_client(folder, rank=4).result()
    alone = [train(one) for _ in range(3)]
    service = begin(tmp_path / "both")
    first = service.create_lora_training_client(folder, rank=4).result()
    second = service.create_lora_training_client(folder, rank=4).result()
    assert first.engine is second.engine
    assert (first.get_info().is_lora, first.get_info().lora_rank) == (True, 4)
    both = [(train(first), train(second, 1e-3)) for _ in range(3)]
    np.testing.assert_allclose([x for x, _ in both], alone, rtol=1e-6)
    assert both[2][1] != both[2][0]
    # the base model is what it was
    score = [types.ModelInput.from_ints(IDS[0])]
    base = service.create_sampling_client(base_model=folder).result()
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder)
    p = F.log_softmax(lm(input_ids=torch.tensor([IDS[0]])).logits[0], -1)
    assert base.compute_logprobs(score[0]).result()[1] == pytest.approx(p[0, 6].item(), abs=1e-4)


def test_a_sampler_keeps_its_weights(service: Any, folder: str) -> None:
    client = service.create_lora_training_client(folder, rank=4).result()
    train(client)
    prompt = types.ModelInput.from_ints(IDS[0])
    sampler = client.save_weights_and_get_sampling_client().result()
    before = sampler.compute_logprobs(prompt).result()
    path = client.save_weights_for_sampler("then").result().path
    assert path == f"tinker://{client.model_id}/sampler_weights/then"
    train(client)
    assert sampler.compute_logprobs(prompt).result() == before
    assert service.create_sampling_client(path).result().compute_logprobs(prompt).result() == before
    now = client.save_weights_and_get_sampling_client().compute_logprobs(prompt).result()
    assert now != before


def test_checkpoints_come_and_go(service: Any, folder: str) -> None:
    client = service.create_lora_training_client(folder, rank=4).result()
    train(client)
    path = client.save_state("one", user_metadata={"at": "1"}).result().path
    with pytest.raises(tinker.BadRequestError, match="here it is adamw"):
        service.create_training_client_from_state(
            path, optimizer=types.DimuonOptimizerConfig()
        ).result()
    with pytest.raises(tinker.ConflictError, match="is there already: a state keeps its name"):
        client.save_state("one").result()
    after = [train(client) for _ in range(2)]
    whole = service.create_training_client_from_state_with_optimizer(path).result()
    assert [train(whole) for _ in range(2)] == pytest.approx(after, rel=1e-6)
    weights = service.create_training_client_from_state(path).result()
    assert train(weights) == pytest.approx(after[0], rel=1e-6)
    assert train(weights) != pytest.approx(after[1], rel=1e-6)
    rest = RestClient()
    found = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [(x.tinker_path, x.user_metadata) for x in found] == [(path, {"at": "1"})]
    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.base_model, run.lora_rank) == (folder, 4)
    external = client.save_weights_external("out").result().path
    assert external.endswith("/external_weights/out")
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.BadRequestError, match="holds no complete state"):
        service.create_training_client_from_state(path).result()
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.BadRequestError, match="Invalid tinker path"):
        service.create_training_client_from_state("runs/x").result()


def loop_on(folder: str, root: Path, kill_at: int = 0) -> list[float]:
    """A loop that saves each step under its number and goes on from the newest one."""
    service = begin(root)
    saved = [path for path in root.glob("run-*/weights/*") if path.is_dir()]
    runs = sorted(saved, key=lambda path: path.name)
    losses: list[float] = []
    if runs:
        losses = list(map(float, runs[-1].with_suffix(".txt").read_text().split()))
        path = f"tinker://{runs[-1].parent.parent.name}/weights/{runs[-1].name}"
        client = service.create_training_client_from_state_with_optimizer(path).result()
    else:
        client = service.create_lora_training_client(folder, rank=4).result()
    num_calls = 0

    def call() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(len(losses), 3):
        call()
        future = client.forward_backward(data_of("cross_entropy"), "cross_entropy")
        call()
        client.optim_step(types.AdamParams(learning_rate=1e-2, **ADAM)).result()
        call()
        losses.append(float(future.result().metrics["loss:sum"]))
        place = root / client.model_id / "weights" / f"{step}"
        place.parent.mkdir(exist_ok=True)
        place.with_suffix(".txt").write_text(" ".join(map(str, losses)))
        client.save_state(str(step)).result()
    return losses


@pytest.mark.system
@pytest.mark.parametrize("kill_at", [2, 3, 5])
def test_a_kill_loses_nothing_that_was_saved(kill_at: int, folder: str, tmp_path: Path) -> None:
    process = fork_server().Process(target=loop_on, args=(folder, tmp_path / "killed", kill_at))
    process.start()
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    assert loop_on(folder, tmp_path / "killed") == pytest.approx(
        loop_on(folder, tmp_path / "whole"), rel=1e-6
    )


# ---------------------------------------------- an inference server beside it
@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "an adapter"])
def test_a_server_draws_for_an_unchanged_script(rank: int, folder: str, tmp_path: Path) -> None:
    stand_in = Sglang(folder) if rank else Vllm(folder, torch.bfloat16)
    with serving(stand_in) as url:
        service = begin(tmp_path, *([] if rank else ["peft=none"]))
        SETTINGS.sampler = url
        client = service.create_lora_training_client(folder, rank=rank).result()
        prompt = types.ModelInput.from_ints([5, 6, 7])
        params = types.SamplingParams(max_tokens=4, seed=3, stop=[])
        numbers = []
        for number in range(2):
            sampler = client.save_weights_and_get_sampling_client().result()
            futures = [
                sampler.sample(prompt, 2, params, include_prompt_logprobs=True) for _ in range(2)
            ]
            answer = futures[0].result().sequences[0]
            numbers.append(answer.logprobs[0])
            own = sampler.compute_logprobs(
                prompt.append(types.EncodedTextChunk(tokens=answer.tokens))
            ).result()
            distance = np.abs(np.array(own[3:]) - answer.logprobs).max()
            # of the server, which rounds where it is told to
            assert distance < 1e-4 if rank else 1e-4 < distance < 0.1
            whole = prompt.append(types.EncodedTextChunk(tokens=answer.tokens[:-1]))
            inputs = {
                "target_tokens": [6, 7, *answer.tokens],
                "logprobs": [0.0, 0.0, *answer.logprobs],
                "advantages": [0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
            }
            client.forward_backward(
                [types.Datum(model_input=whole, loss_fn_inputs=inputs)], "cispo"
            )
            metrics = client.optim_step(types.AdamParams(learning_rate=1e-2)).result().metrics
            assert 0 < metrics["sampler_gap:mean"] <= metrics["sampler_gap:max"] < 0.1
            # the sampler of the step before is gone
            assert len(stand_in.adapters) == (1 if rank else 0)
            assert stand_in.version.endswith("default" if rank else f"-{number + 1:06d}")
        # saved weights are drawn from, too, and earlier ones are sent again
        path = client.save_weights_for_sampler("end").result().path
        again = service.create_sampling_client(model_path=path).result()
        assert again.sample(prompt, 1, params).result().sequences[0].logprobs[0] != numbers[-1]
        assert sampler.sample(prompt, 1, params).result().sequences[0].logprobs[0] == pytest.approx(
            numbers[-1]
        )
    with pytest.raises(ConnectionError, match="does not answer"):
        sampler.sample(prompt, 1, params).result()


def test_a_server_that_refuses_the_weights_gets_them_once(folder: str, tmp_path: Path) -> None:
    stand_in = Sglang(folder, takes=False)
    with serving(stand_in) as url:
        service = begin(tmp_path)
        SETTINGS.sampler = url
        client = service.create_lora_training_client(folder, rank=4).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([5, 6, 7])
        futures = [sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2)) for _ in range(3)]
        for future in futures:
            with pytest.raises(tinker.BadRequestError, match="LoRA is not enabled"):
                future.result()
    assert stand_in.paths == ["/load_lora_adapter"]


def test_a_server_that_is_not_there_is_a_sentence(folder: str, tmp_path: Path) -> None:
    service = begin(tmp_path)
    SETTINGS.sampler = "http://127.0.0.1:9"
    with pytest.raises(tinker.BadRequestError, match=r"127.0.0.1:9 does not answer"):
        service.create_lora_training_client(folder, rank=4).result()
