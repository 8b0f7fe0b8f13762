"""KTO on packs against its formula: plain transformers, one row at a time, in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import DESIRABLE, MISMATCHED, UNDESIRABLE
from automodel_lite.config.check import check_config
from automodel_lite.data.packing.packs import PackedDataset, join_packs
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.errors import ConfigError
from automodel_lite.extras.client.rows import check_rows
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import Mesh, MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.parts.losses.unpaired import Kto
from automodel_lite.thd import ThdBatch, to_thd
from automodel_lite.training.engine import Engine
from automodel_lite.training.rules import checked_parts
from tests.attention.families import VOCAB, build
from tests.attention.hybrids import InFloat64
from tests.ranks import run_ranks
from tests.runs import composed

Row = dict[str, Any]
Judged = tuple[Row, Row]  # a row's own answer, and the mismatched one
VERDICTS = (DESIRABLE, UNDESIRABLE, UNDESIRABLE, DESIRABLE)
LOSS = Kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
LOSSES = {"kto": LOSS, "apo zero": Kto(beta=0.3, undesirable_weight=2.0, kind="apo_zero")}


def make_rows(shift: float = 0.0) -> list[Judged]:
    """Rows of four prompts, each with its own answer and the one before it; the reference's
    log-probabilities are drawn about `shift`."""
    generator = torch.Generator().manual_seed(3)

    def drawn(length: int) -> list[int]:
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    def row(prompt: list[int], answer: list[int], verdict: int) -> Row:
        ids = [*prompt, *answer]
        labels = [-100] * (len(prompt) - 1) + answer + [-100]
        reference = torch.randn(len(ids), generator=generator) + shift
        return {
            "input_ids": ids,
            "labels": labels,
            "verdicts": [0 if label == -100 else verdict for label in labels],
            "reference_log_probs": reference.tolist(),
        }

    prompts = [drawn(length) for length in (5, 12, 3, 7)]
    answers = [drawn(length) for length in (4, 1, 8, 6)]
    return [
        (row(prompt, answers[i], VERDICTS[i]), row(prompt, answers[i - 1], MISMATCHED))
        for i, prompt in enumerate(prompts)
    ]


def batch_of(rows: list[Judged], loss: Kto, slot_multiple: int = 1) -> ThdBatch:
    flat = flatten([row for judged in rows for row in judged])
    plan = plan_packs(flat.lengths, 160, strategy="next_fit", slot_multiple=slot_multiple)
    packs = PackedDataset(flat, plan)
    return loss.prepare(to_thd(join_packs([packs[i] for i in range(len(packs))])))


def log_ratio(lm: Any, row: Row) -> Tensor:
    logits = lm(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
    labels = torch.tensor(row["labels"])
    real = labels != -100
    log_probs = F.log_softmax(logits, -1)[real].gather(1, labels[real][:, None])[:, 0]
    return (log_probs - torch.tensor(row["reference_log_probs"]).double()[real]).sum()


def textbook(lm: Any, rows: list[Judged], loss: Kto) -> tuple[Tensor, float]:
    """The mean loss of equation 7 of the paper, and its reference point."""
    with torch.no_grad():
        point = sum(log_ratio(lm, mismatched) for _, mismatched in rows) / len(rows)
    point = point.clamp(min=0) if loss.kind == "kto" else torch.zeros(())
    losses = []
    for (own, _), verdict in zip(rows, VERDICTS):
        if verdict == DESIRABLE:
            value = 1 - torch.sigmoid(loss.beta * (log_ratio(lm, own) - point))
            losses.append(loss.desirable_weight * value)
        else:
            value = 1 - torch.sigmoid(loss.beta * (point - log_ratio(lm, own)))
            losses.append(loss.undesirable_weight * value)
    return sum(losses) / len(rows), float(point)


@dataclass(frozen=True)
class Found:
    loss: float
    parts: dict[str, float]
    gradients: dict[str, Tensor]


def by_engine(
    rows: list[Judged], loss: Kto, shape: tuple[int, int, int], strategy: str, num_batches: int
) -> Found:
    """A step of `num_batches` micro-batches over all ranks."""
    device = torch.device("cpu")
    is_alone = shape == (1, 1, 1)
    mesh = (
        Mesh(MeshShape(*shape), device, None) if is_alone else open_mesh(MeshShape(*shape), device)
    )
    lm = build("llama").double()
    install(lm, ReferenceAttention())
    model = parallelize(LossModel(lm, loss).train(), mesh, strategy, torch.float64)
    engine = Engine(mesh, model, None)  # type: ignore[arg-type]
    groups = [rows[i::num_batches] for i in range(num_batches)]
    whole = [batch_of(group, loss, 2 * mesh.shape.cp) for group in groups]
    own = whole[mesh.dp_rank :: mesh.shape.dp]
    num_rows = sum(loss.num_items(batch) for batch in whole)
    assert num_rows == len(rows)
    with InFloat64():
        sums = engine.forward_backward(
            [cp_shard(batch, mesh.cp, "all_gather") for batch in own], divisor=num_rows
        )
    sums = {name: float(mesh.sum(value.double())) / num_rows for name, value in sums.items()}
    gradients = {}
    for name, parameter in model.loss_model.named_parameters():
        grad = parameter.grad
        assert grad is not None
        gradients[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return Found(sums.pop("loss"), sums, gradients)


def check(found: Found, rows: list[Judged], loss: Kto, error: float, grad_error: float) -> float:
    """Gradients of several micro-batches, and over ranks, are summed in fp32."""
    lm = build("llama").double()
    with InFloat64():
        want, point = textbook(lm, rows, loss)
    want.backward()
    wanted = [parameter.grad for parameter in lm.parameters()]
    largest = max(float(grad.abs().max()) for grad in wanted)
    assert largest > 1e-3
    assert found.loss == pytest.approx(float(want), abs=error)
    assert found.parts["reference_point"] == pytest.approx(point, abs=1e-9)
    for got, grad in zip(found.gradients.values(), wanted, strict=True):
        assert float((got - grad).abs().max()) < grad_error * largest
    return point


@pytest.mark.parametrize("num_batches", [1, 2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_equals_the_formula(name: str, num_batches: int) -> None:
    """The reference point is of the step, whatever its micro-batches."""
    rows = make_rows(shift=-5.5)
    found = by_engine(rows, LOSSES[name], (1, 1, 1), "none", num_batches)
    point = check(found, rows, LOSSES[name], 1e-12, 1e-9 if num_batches == 1 else 1e-6)
    assert (point > 0.5) == (name == "kto")


def test_the_reference_point_is_at_least_0() -> None:
    rows = make_rows(shift=0.0)  # the model finds everything less likely
    found = by_engine(rows, LOSS, (1, 1, 1), "none", 2)
    assert check(found, rows, LOSS, 1e-12, 1e-6) == 0.0


def spread(rank: int, world: int, shape: tuple[int, int, int], strategy: str) -> Found:
    return by_engine(make_rows(shift=-5.5), LOSS, shape, strategy, 4)


OVER_RANKS = {
    "dp 2": ((2, 1, 1), "ddp"),
    "cp 2": ((1, 1, 2), "fsdp"),
    "fsdp 2": ((1, 2, 1), "fsdp"),
}


@pytest.mark.parametrize(("shape", "strategy"), OVER_RANKS.values(), ids=OVER_RANKS)
def test_two_ranks_equal_the_formula(shape: tuple[int, int, int], strategy: str) -> None:
    for found in run_ranks(spread, 2, shape, strategy):
        check(found, make_rows(shift=-5.5), LOSS, 1e-9, 1e-6)


@pytest.mark.parametrize("cut", ["packed_sequence.overlong=split", "packed_sequence=wrapped"])
def test_an_answer_is_not_cut_into_several(cut: str) -> None:
    """Each piece would be judged as an answer of its own."""
    raw = composed("kto", "name=x", "dataset.path=judged.jsonl", "model.pretrained=x",
                   "packed_sequence.packed_sequence_size=64", cut)  # fmt: skip
    with pytest.raises(ConfigError, match=r"rows of loss=Kto stay whole, .* use"):
        checked_parts(check_config(raw))


def test_a_training_client_has_no_whole_step() -> None:
    rows = [[make_rows()[0][0]]]
    with pytest.raises(ConfigError, match=r"reference_point of a whole step.*kind=apo_zero"):
        check_rows(rows, LOSS, 100, VOCAB, 100)
    assert len(check_rows(rows, LOSSES["apo zero"], 100, VOCAB, 100)) == 1
