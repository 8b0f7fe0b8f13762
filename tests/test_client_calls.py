"""What a step divides by and is made of, several targets, losses of one's own, and how answers are drawn: against
plain formulas in fp64, and on two ranks.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from automodel_lite import TrainingClient
from automodel_lite.errors import ConfigError
from automodel_lite.extras.client.sampling import Request
from automodel_lite.extras.client.targets import WeightedTargets
from automodel_lite.models.loss import CrossEntropy
from tests.clients import open_client
from tests.models.test_policy import save_model
from tests.ranks import run_ranks

pytestmark = pytest.mark.numbers

LAYOUTS_OF_TWO = ("mesh.cp=2", "mesh.dp_shard=2", "mesh.strategy=ddp")
# the same ids with other targets, free ones, negative weights, two targets of a position and one
ROWS: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "labels": [6, 7, 9, 3], "loss_weights": [0.5, 0.0, 2.0, -1.5]},
    {"input_ids": [5, 6, 7, 8], "labels": [1, -100, 2, 4], "loss_weights": [1.0, 1.0, 0.25, 3.0]},
    {"input_ids": [9, 10, 11], "labels": [-100, 12, 13], "loss_weights": [1.0, 1.0, 1.0]},
]
MANY: list[dict[str, Any]] = [
    {
        "input_ids": [5, 6, 7],
        "target_ids": [[3, 4], [7, -1], [-1, -1]],
        "target_weights": [[0.25, 0.75], [2.0, 0.0], [0.0, 0.0]],
    },
    {
        "input_ids": [5, 6, 7],
        "target_ids": [[4, 9], [-1, -1], [1, 2]],
        "target_weights": [[-0.5, 1.0], [0.0, 0.0], [0.3, 0.1]],
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def client(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_client(folder, tmp_path_factory.mktemp("run")) as opened:
        yield opened


def fp64(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def log_p(lm: Any, ids: list[int]) -> Tensor:
    return F.log_softmax(lm(input_ids=torch.tensor([ids])).logits[0], -1)


def weighted_sum(lm: Any) -> Tensor:
    found = torch.zeros((), dtype=torch.float64)
    for row in ROWS:
        p = log_p(lm, row["input_ids"])
        for at, (label, weight) in enumerate(zip(row["labels"], row["loss_weights"])):
            if label != -100:
                found = found - weight * p[at, label]
    return found


def sum_of_many(lm: Any) -> Tensor:
    found = torch.zeros((), dtype=torch.float64)
    for row in MANY:
        p = log_p(lm, row["input_ids"])
        for at, (ids, weights) in enumerate(zip(row["target_ids"], row["target_weights"])):
            for target, weight in zip(ids, weights):
                found = found - (weight * p[at, target] if target != -1 else 0)
    return found


def pairwise(found: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Mixes the rows: no row has a gradient of its own."""
    loss = -F.logsigmoid(found[0].sum() - 2 * found[1].sum()) + (found[2] ** 2).mean()
    return loss, {"margin": 3.0}


def plain_pairwise(lm: Any) -> Tensor:
    found = []
    for row in ROWS:
        p = log_p(lm, row["input_ids"])
        labels = torch.tensor(row["labels"])
        own = p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        found.append(torch.where(labels == -100, 0.0, own))
    return pairwise(found)[0]


def bare(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("input_ids", "labels", "target_ids") if name in row}


def norm_of(value: Tensor, lm: Any) -> float:
    value.backward()  # type: ignore[no-untyped-call]
    return float(torch.stack([p.grad.norm() for p in lm.parameters()]).norm())


def gradients_on(rank: int, world: int, folder: str, runs: Path, *overrides: str) -> list[Any]:
    with open_client(folder, runs, *overrides) as client:
        found: list[Any] = []
        for rows, loss in ((ROWS, CrossEntropy()), (MANY, WeightedTargets())):
            out = client.forward_backward(rows, loss)
            same = client.forward([bare(row) for row in rows])
            for one, other in zip(out.log_probs, same.log_probs):
                np.testing.assert_allclose(one, other, atol=2e-6)
            norm = client.optim_step(lr=0.0, max_grad_norm=0, divide_by=1).grad_norm
            found += [out.loss, norm, [x.tolist() for x in out.log_probs]]
        custom = client.forward_backward_custom([bare(row) for row in ROWS], pairwise)
        assert custom.parts == {"margin": 3.0}
        step = client.optim_step(lr=0.0, max_grad_norm=0)
        assert (step.num_items, step.loss) == (1.0, pytest.approx(custom.loss))
        return [*found, custom.loss, step.grad_norm]


def check_gradients(found: list[Any], folder: str) -> None:
    for at, value_of in ((0, weighted_sum), (3, sum_of_many), (6, plain_pairwise)):
        lm = fp64(folder)
        value = value_of(lm)
        assert found[at] == pytest.approx(float(value), rel=1e-5, abs=1e-5)
        assert found[at + 1] == pytest.approx(norm_of(value, lm), rel=2e-5)
    lm = fp64(folder)
    for row, own in zip(ROWS, found[2]):
        p = log_p(lm, row["input_ids"])
        wanted = [float(p[at, x]) if x != -100 else 0.0 for at, x in enumerate(row["labels"])]
        np.testing.assert_allclose(own, wanted, atol=1e-5)
    for row, own in zip(MANY, found[5]):
        p = log_p(lm, row["input_ids"])
        wanted_K = [
            [float(p[at, x]) if x != -1 else 0.0 for x in ids]
            for at, ids in enumerate(row["target_ids"])
        ]
        np.testing.assert_allclose(own, wanted_K, atol=1e-5)


def test_weights_targets_and_custom_losses_are_their_formulas(folder: str, tmp_path: Path) -> None:
    check_gradients(gradients_on(0, 1, folder, tmp_path), folder)


@pytest.mark.parametrize("layout", LAYOUTS_OF_TWO)
def test_weights_targets_and_custom_losses_on_two_ranks(
    layout: str, folder: str, tmp_path: Path
) -> None:
    first, second = run_ranks(gradients_on, 2, folder, tmp_path, layout)
    assert first == second
    check_gradients(first, folder)


def test_a_step_has_settings_of_its_own(folder: str, tmp_path: Path) -> None:
    """Two steps that differ in everything, against torch's AdamW on the same gradients."""
    lm = fp64(folder)
    steps = [
        {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1},
        {"lr": 3e-3, "betas": (0.5, 0.95), "eps": 1e-4, "weight_decay": 0.3},
    ]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in lm.parameters() if p.ndim > 1]},
        {"params": [p for p in lm.parameters() if p.ndim <= 1]},
    ]
    plain = torch.optim.AdamW(groups)
    with open_client(folder, tmp_path, "training.max_grad_norm=0") as client:
        before = [dict(group, params=None) for group in client.engine.optimizer.param_groups]
        for settings in steps:
            plain.zero_grad()
            (weighted_sum(lm) / 4).backward()  # type: ignore[no-untyped-call]
            for group, is_decayed in zip(plain.param_groups, (True, False)):
                group.update(settings)
                group["weight_decay"] = settings["weight_decay"] if is_decayed else 0.0
            plain.step()
            client.forward_backward(ROWS, CrossEntropy())
            done = client.optim_step(**settings, divide_by=4)  # type: ignore[arg-type]
            assert done.num_items == 4
        after = [dict(group, params=None) for group in client.engine.optimizer.param_groups]
        names = ("betas", "eps", "weight_decay")
        assert [[x[name] for name in names] for x in before] == [
            [x[name] for name in names] for x in after
        ]
        wanted = dict(lm.named_parameters())
        for name, weight in client.weights():
            off = (weight.double() - wanted[name]).abs().max()
            assert off.item() < 2e-5, name


@pytest.mark.same_on_every_cpu
def test_wrong_steps_are_sentences(client: TrainingClient) -> None:
    client.forward_backward(ROWS, CrossEntropy())
    for divisor in (0, -1, math.nan):
        with pytest.raises(ValueError, match="must be a finite number above 0"):
            client.optim_step(divide_by=divisor)
    client.zero_grad()
    with pytest.raises(ValueError, match="row 0 brings loss_weights, which a custom loss does not"):
        client.forward_backward_custom(ROWS, pairwise)
    with pytest.raises(TypeError, match="a custom loss returns a scalar tensor"):
        client.forward_backward_custom([bare(row) for row in ROWS], lambda found: found[0])


# ---------------------------------------------- answers
def test_the_likeliest_tokens_are_those_of_the_model(client: TrainingClient, folder: str) -> None:
    row = {"input_ids": [5, 6, 7], "labels": [6, 7, -100]}
    out = client.forward([row], top_k=3)
    top = log_p(fp64(folder), row["input_ids"]).topk(3)
    np.testing.assert_allclose(out.top_log_probs[0][:2], top.values[:2].detach(), atol=1e-5)
    assert out.top_ids[0][:2].tolist() == top.indices[:2].tolist()
    assert out.top_log_probs[0][2].tolist() == [0, 0, 0]


def test_answers_follow_from_their_request_alone(client: TrainingClient) -> None:
    """Whatever is asked beside it, in whichever order, and in batches of whichever size."""
    one = Request([5, 6], num_samples=3, max_new_tokens=4, seed=7)
    others = [
        Request([8, 9], 2, 6, temperature=0.5, seed=1),
        Request([5, 6, 7], 2, 2, top_k=3),
        Request([4, 4], 1, 5, temperature=0.0),
    ]
    alone = client.draw([one])[0]
    beside = client.draw([*others, one], batch_size=3)[-1]
    assert [x.ids for x in alone] == [x.ids for x in beside]
    assert len({tuple(x.ids) for x in alone}) == 3
    other_seed = client.draw([Request([5, 6], 3, 4, seed=8)])[0]
    assert [x.ids for x in other_seed] != [x.ids for x in alone]


def test_answers_have_the_log_probabilities_of_the_model(
    client: TrainingClient, folder: str
) -> None:
    request = Request([5, 6], 2, 3, temperature=0.7, top_k=20, stop=[])
    for answer in client.draw([request])[0]:
        ids = [5, 6, *answer.ids]
        p = log_p(fp64(folder), ids)
        wanted = [float(p[1 + at, token]) for at, token in enumerate(answer.ids)]
        np.testing.assert_allclose(answer.log_probs, wanted, atol=1e-5)
        assert (len(answer.ids), answer.is_ended) == (3, False)


@pytest.mark.parametrize(
    "more",
    [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.3}, {"top_k": 40, "top_p": 0.5}],
    ids=["plain", "temperature", "top_k", "top_p", "both"],
)
def test_tokens_are_drawn_with_their_probabilities(
    more: dict[str, Any], client: TrainingClient, folder: str
) -> None:
    num = 2000
    drawn = client._draw([Request([5, 6], num, 1, stop=[], **more)], batch_size=1000)[0]
    found = np.bincount([ids[0] for ids, _ in drawn], minlength=500) / num
    p = F.softmax(log_p(fp64(folder), [5, 6])[-1].detach() / more.get("temperature", 1.0), -1)
    if "top_k" in more:
        p = torch.where(p >= p.topk(more["top_k"]).values[-1], p, 0)
        p = p / p.sum()
    if "top_p" in more:
        values, order = p.sort(descending=True)
        p[order[(values.cumsum(0) - values) >= more["top_p"]]] = 0
    p = p / p.sum()
    wanted = np.zeros(500)
    wanted[: len(p)] = p.numpy()
    assert (found[wanted == 0] == 0).all()
    # five standard deviations of each frequency
    assert (np.abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / num) + 1e-9).all()


def test_stops_end_an_answer_behind_them(client: TrainingClient) -> None:
    free = client.draw([Request([5, 6], 1, 12, stop=[], seed=3)])[0][0]
    assert len(free.ids) == 12
    token = free.ids[5]
    at = free.ids.index(token)
    by_id = client.draw([Request([5, 6], 1, 12, stop=[token], seed=3)])[0][0]
    assert (by_id.ids, by_id.is_ended) == (free.ids[: at + 1], True)
    text = client.tokenizer.decode(free.ids[4:6])
    for stop in (text, [text], ["never in it at all", text]):
        by_text = client.draw([Request([5, 6], 1, 12, stop=stop, seed=3)])[0][0]
        assert by_text.is_ended
        assert by_text.ids == free.ids[: len(by_text.ids)]
        assert text in client.tokenizer.decode(by_text.ids)
        assert text not in client.tokenizer.decode(by_text.ids[:-1])


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([]), "prompt 0 must be at least one id"),
        (Request([5], num_samples=0), "must be at least 1"),
        (Request([5], max_new_tokens=10**6), "over 257|over 128|over"),
        (Request([5], top_p=0), "top_p=0 must be above 0"),
        (Request([5], stop=[""]), "an empty string would end every answer"),
    ],
    ids=["empty", "samples", "long", "top_p", "stop"],
)
def test_wrong_requests_are_sentences(
    request_: Request, words: str, client: TrainingClient
) -> None:
    with pytest.raises(ValueError, match=words):
        client.draw([request_])


def draw_on(rank: int, world: int, folder: str, runs: Path, *overrides: str) -> list[Any]:
    with open_client(folder, runs, *overrides) as client:
        requests = [Request([5, 6], 3, 4, seed=7), Request([7, 8, 9], 2, 3, top_p=0.9)]
        return [
            [(x.ids, x.log_probs.round(4).tolist()) for x in answers]
            for answers in client.draw(requests, batch_size=2)
        ]


def test_ranks_draw_what_one_process_does(folder: str, tmp_path: Path) -> None:
    alone = draw_on(0, 1, folder, tmp_path / "one")
    first, second = run_ranks(draw_on, 2, folder, tmp_path / "two", "mesh.dp_shard=2")
    assert first == second
    assert [[ids for ids, _ in x] for x in first] == [[ids for ids, _ in x] for x in alone]


# ---------------------------------------------- states with names, snapshots, seats
LORA = ("peft=lora", "peft.r=4")


def change(client: TrainingClient, lr: float = 1e-2) -> None:
    client.forward_backward(ROWS, CrossEntropy())
    client.optim_step(lr=lr, divide_by=1)


def values(client: TrainingClient) -> list[list[float]]:
    return [x.tolist() for x in client.forward([bare(row) for row in ROWS]).log_probs]


def states_on(rank: int, world: int, folder: str, runs: Path, *overrides: str) -> list[Any]:
    """Two states, each loaded again after more steps, and the steps after them repeated."""
    with open_client(folder, runs, *overrides) as client:
        change(client)
        client.save_state({"at": 1}, name="first")
        one = values(client)
        change(client)
        two = values(client)
        client.save_state({"at": 2}, name=runs / "elsewhere")
        change(client)
        for _ in range(2):
            assert client.load_state("first") == {"at": 1}
            assert (client.num_steps, values(client)) == (1, one)
            change(client)
            np.testing.assert_allclose(values(client)[0], two[0], atol=1e-6)
        assert client.load_state(runs / "elsewhere", optimizer=False) == {"at": 2}
        assert (client.num_steps, values(client)) == (0, two)
        with pytest.raises(FileExistsError, match="is there already: a state keeps its name"):
            client.save_state(name="first")
        client.save_state({"at": 3}, name="first", overwrite=True)
        assert client.load_state("first") == {"at": 3}
        assert values(client) == two
        with pytest.raises(ConfigError, match="holds no complete state"):
            client.load_state("third")
        with pytest.raises(ValueError, match="must be letters, digits"):
            client.save_state(name="..")
        return [one, two]


@pytest.mark.parametrize("peft", [(), LORA], ids=["full", "lora"])
def test_states_have_names(peft: tuple[str, ...], folder: str, tmp_path: Path) -> None:
    states_on(0, 1, folder, tmp_path, *peft)


def test_states_have_names_on_two_ranks(folder: str, tmp_path: Path) -> None:
    first, second = run_ranks(states_on, 2, folder, tmp_path, "mesh.dp_shard=2")
    assert first == second


@pytest.mark.same_on_every_cpu
def test_what_a_killed_save_was_to_replace_is_there(folder: str, tmp_path: Path) -> None:
    with open_client(folder, tmp_path) as client:
        client.save_state({"at": 1}, name="mine")
        path = tmp_path / "states" / "mine"
        path.rename(path.with_name(".replaced-mine"))
        assert client.load_state("mine") == {"at": 1}


@pytest.mark.parametrize("peft", [(), LORA], ids=["full", "lora"])
def test_answers_of_a_snapshot_are_those_of_its_weights(
    peft: tuple[str, ...], folder: str, tmp_path: Path
) -> None:
    with open_client(folder, tmp_path, *peft) as client:
        change(client)
        taken = client.snapshot()
        before = values(client)
        client.save_state(name="then", optimizer=False)
        change(client)
        now = values(client)
        assert now != before
        for snapshot in (taken, client.read_snapshot("then")):
            with client.using(snapshot):
                assert values(client) == before
            assert values(client) == now


def test_adapters_take_turns_on_one_model(folder: str, tmp_path: Path) -> None:
    """Each is what it would be alone, with an optimizer and gradients of its own."""
    rates = (1e-2, 3e-3)
    alone = []
    for number, rate in enumerate(rates):
        with open_client(folder, tmp_path / str(number), *LORA) as client:
            for _ in range(3):
                change(client, rate)
            alone.append(values(client))
    with open_client(folder, tmp_path / "both", *LORA) as client:
        seats = [client.leave(), client.leave()]
        for _ in range(3):
            for number in range(2):
                client.take(seats[number])
                client.forward_backward(ROWS, CrossEntropy())
                seats[number] = client.leave()
            for number, rate in enumerate(rates):
                client.take(seats[number])
                client.optim_step(lr=rate, divide_by=1)
                seats[number] = client.leave()
        for seat, wanted in zip(seats, alone):
            client.take(seat)
            assert client.num_steps == 3
            np.testing.assert_allclose(values(client)[0], wanted[0], atol=1e-6)
