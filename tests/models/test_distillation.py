"""Distillation on packs against the textbook: plain transformers, one document at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.parts.losses.distillation import Distill, DistillationLoss, DistillTopK
from automodel_lite.thd import ThdBatch
from tests.attention.families import build, documents, stream
from tests.attention.hybrids import InFloat64
from tests.ranks import run_ranks

pytestmark = pytest.mark.numbers

DOCUMENTS = documents([9, 4, 17])
LOSSES = {
    "forward": Distill(),
    "reverse": Distill(kind="reverse", temperature=2.0),
    "jsd": Distill(kind="jsd", beta=0.3),
    "forward with cross-entropy": Distill(cross_entropy=0.4, temperature=0.5),
}


def teacher_of(family: str) -> Any:
    teacher = build(family).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return teacher.requires_grad_(False)


def exact(lm: Any) -> Any:
    """In fp64, where a difference is none of rounding."""
    lm.set_experts_implementation("eager")  # the grouped product has no fp64
    return lm.double()


def textbook(lm: Any, teacher: Any, loss: Distill) -> Tensor:
    total = torch.zeros(())
    for ids, labels in DOCUMENTS:
        real = labels != -100
        of_student, of_teacher = (
            m(input_ids=ids[None], use_cache=False).logits[0][real].float() for m in (lm, teacher)
        )
        p, q = (F.softmax(x / loss.temperature, -1) for x in (of_teacher, of_student))
        kl = lambda a, b: (a * (a / b).log()).sum()  # noqa: E731
        m = loss.beta * p + (1 - loss.beta) * q
        value = {
            "forward": kl(p, q),
            "reverse": kl(q, p),
            "jsd": loss.beta * kl(p, m) + (1 - loss.beta) * kl(q, m),
        }
        plain = F.cross_entropy(of_student, labels[real], reduction="sum")
        total = total + (1 - loss.cross_entropy) * value[loss.kind] + loss.cross_entropy * plain
    return total


def packed(
    loss: DistillationLoss, family: str = "llama", teacher: Any = None
) -> tuple[LossModel, ThdBatch]:
    lm = build(family)
    install(lm, ReferenceAttention())
    model = LossModel(lm, loss).train()
    if teacher is not None:
        install(teacher, ReferenceAttention())
        model.set_teacher(LossModel(teacher, FusedLinearCrossEntropy()))
    return model, stream(DOCUMENTS)


def gradients(lm: Any) -> list[Tensor]:
    return [p.grad for p in lm.parameters() if p.grad is not None]


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_pack_equals_the_textbook(family: str, loss: Distill) -> None:
    plain = exact(build(family))
    model, batch = packed(loss, family, exact(teacher_of(family)))
    exact(model.lm)
    with InFloat64():
        want = textbook(plain, exact(teacher_of(family)), loss)
        got = model(batch).sum
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    for one, other in zip(gradients(model.lm), gradients(plain), strict=True):
        assert float((one - other).abs().max()) < 1e-7 * max(1.0, float(other.abs().max()))


def stored(teacher: Any, batch: ThdBatch, top_k: int) -> ThdBatch:
    with torch.no_grad():
        found = F.log_softmax(teacher(**batch.model_inputs()).logits[0].float(), -1).topk(top_k, -1)
    return replace(batch, columns={"teacher_ids": found.indices, "teacher_log_probs": found.values})


def test_stored_logits_of_the_whole_vocabulary_are_the_teacher() -> None:
    teacher = teacher_of("llama")
    model, batch = packed(Distill(), teacher=teacher)
    want = model(batch).sum
    want.backward()
    other, batch = packed(DistillTopK("teacher", top_k=96))
    got = other(stored(teacher, batch, build("llama").config.vocab_size)).sum
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for one, another in zip(gradients(other.lm), gradients(model.lm), strict=True):
        torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-5)


def test_the_rest_of_few_stored_tokens_is_one_class() -> None:
    teacher = teacher_of("llama")
    install(teacher, ReferenceAttention())
    model, batch = packed(DistillTopK("teacher", top_k=4))
    batch = stored(teacher, batch, 4)
    with torch.no_grad():
        q = model.lm(**batch.model_inputs()).logits[0].float().softmax(-1)[batch.label_rows]
        ids, p = (
            batch.columns[name][batch.label_rows] for name in ("teacher_ids", "teacher_log_probs")
        )
        p, q = p.exp(), q.gather(1, ids)
        rest_p, rest_q = 1 - p.sum(1), 1 - q.sum(1)
        want = (p * (p / q).log()).sum() + (rest_p * (rest_p / rest_q).log()).sum()
        torch.testing.assert_close(model(batch).sum, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_a_student_taught_by_itself_stays_where_it_is(kind: Any) -> None:
    model, batch = packed(Distill(kind=kind), teacher=build("llama").requires_grad_(False))
    loss = model(batch).sum
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-5)
    assert max(float(grad.abs().max()) for grad in gradients(model.lm)) < 1e-5


def test_a_longer_vocabulary_is_padding() -> None:
    """Sizes that differ are those of one tokenizer, padded: only ids that both have are compared."""
    teacher = teacher_of("llama")
    model, batch = packed(Distill(), teacher=teacher)
    want = model(batch).sum.detach()
    head = teacher.lm_head
    head.weight = torch.nn.Parameter(
        torch.cat([head.weight, torch.randn(8, head.weight.shape[1])]), False
    )
    torch.testing.assert_close(model(batch).sum.detach(), want)


def with_rows(model: Any, num_more: int) -> Any:
    """The head of a padded vocabulary."""
    padding = torch.randn(num_more, model.lm_head.weight.shape[1])
    weight = torch.cat([model.lm_head.weight.detach(), padding])
    model.lm_head.weight = torch.nn.Parameter(weight, model.lm_head.weight.requires_grad)
    return model


@pytest.mark.parametrize(("of_student", "of_teacher"), [(8, 0), (0, 8), (5, 8)])
def test_cross_entropy_is_over_the_whole_vocabulary_of_the_student(
    of_student: int, of_teacher: int
) -> None:
    """Whatever the teacher's is padded to; what both have is compared."""
    teacher = with_rows(teacher_of("llama"), of_teacher)
    model, batch = packed(Distill(cross_entropy=0.5), teacher=teacher)
    with_rows(model.lm, of_student)
    output = model(batch)
    loss = output.sum.detach()
    with torch.no_grad():
        labels = batch.labels[batch.label_rows]
        own, theirs = (
            lm(**batch.model_inputs()).logits[0][batch.label_rows].double()
            for lm in (model.lm, teacher)
        )
    ce = F.cross_entropy(own, labels, reduction="sum")
    num_common = min(own.shape[1], theirs.shape[1])
    p, q = (x[:, :num_common].softmax(-1) for x in (theirs, own))
    divergence = (p * (p / q).log()).sum()
    torch.testing.assert_close(output.parts["ce"].double(), ce, rtol=1e-6, atol=0)
    torch.testing.assert_close(loss.double(), (ce + divergence) / 2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("top_k", [1, 4, 100])
def test_what_is_stored_in_fp16_is_the_teacher(top_k: int) -> None:
    """Of a peaked teacher with a padded vocabulary, of which the tokenizer has 100 ids."""
    teacher = with_rows(teacher_of("llama"), 8)
    teacher.lm_head.weight.data *= 8
    install(teacher, ReferenceAttention())
    loss = DistillTopK("teacher", top_k=top_k)
    model, batch = packed(loss)
    with torch.no_grad():
        theirs = teacher(**batch.model_inputs()).logits[0]
        found = loss.likeliest(100, theirs, batch.labels)
        ids, stored, rest = found.split([top_k, top_k, 1], 1)
        columns = {"teacher_ids": ids.long(), "teacher_log_probs": stored.half().float()}
        # a column of one value per token has one dim in the cache
        columns = {n: x.squeeze(1) if top_k == 1 else x for n, x in columns.items()}
        batch = replace(batch, columns={**columns, "teacher_rest": rest.squeeze(1)})
        q = model.lm(**batch.model_inputs()).logits[0].double().softmax(-1)[batch.label_rows]
        p = theirs[:, :100].double().softmax(-1)[batch.label_rows]
        ids = ids.long()[batch.label_rows]
        p, q = p.gather(1, ids), q.gather(1, ids)
        rest_p, rest_q = (1 - p.sum(1)).clamp(min=0), 1 - q.sum(1)
        want = torch.special.xlogy(p, p / q).sum()
        want += torch.special.xlogy(rest_p, rest_p / rest_q).sum()
        got = model(batch).sum.double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=0)


def spread(
    rank: int, world: int, shape: tuple[int, int, int, int], strategy: str, kind: Any
) -> list[float]:
    """Differences of loss and gradients from one process, which has both documents."""
    mesh = open_mesh(MeshShape(*shape), torch.device("cpu"))
    loss, parts = (
        Distill(kind=kind, cross_entropy=0.2),
        [documents([9, 14]), documents([17, 3], seed=1)],
    )
    alone, _ = packed(loss, teacher=exact(teacher_of("llama")))
    exact(alone.lm)
    with InFloat64():
        want = alone(stream([*parts[0], *parts[1]])).sum / 40
    want.backward()
    student, _ = packed(loss)
    exact(student.lm)
    teacher = exact(teacher_of("llama"))
    install(teacher, ReferenceAttention())
    model = parallelize(student, mesh, strategy, torch.float64)
    frozen = parallelize(
        LossModel(teacher, FusedLinearCrossEntropy()).eval(),
        mesh,
        "none" if strategy == "ddp" else strategy,
        torch.float64,
    )
    student.set_teacher(frozen.loss_model)
    own = parts[mesh.dp_rank] if mesh.shape.dp == 2 else [*parts[0], *parts[1]]
    with InFloat64():
        total = model(cp_shard(stream(own, 2 * mesh.shape.cp), mesh.cp, "all_gather")).sum / 40
    (total * model.mean_ranks).backward()
    wanted = dict(alone.named_parameters())
    differences = []
    for name, parameter in model.loss_model.named_parameters():
        grad = (
            parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        )
        differences.append(float((grad - wanted[name].grad).abs().max()))
    assert all(p.grad is None for p in frozen.parameters())
    return [abs(float(mesh.sum(total) - want)), max(differences)]


LAYOUTS = {"dp 2": ((2, 1, 1, 1), "ddp"), "cp 2": ((1, 1, 2, 1), "fsdp"), "fsdp 2": ((1, 2, 1, 1), "fsdp"), "tp 2": ((1, 1, 1, 2), "fsdp")}  # fmt: skip


@pytest.mark.parametrize("kind", ["forward", "jsd"])
@pytest.mark.parametrize(("shape", "strategy"), LAYOUTS.values(), ids=LAYOUTS)
def test_two_ranks_with_a_teacher_equal_one(
    shape: tuple[int, int, int, int], strategy: str, kind: str
) -> None:
    for of_loss, of_grads in run_ranks(spread, 2, shape, strategy, kind):
        assert of_loss < 1e-9
        assert of_grads < 1e-7  # they are summed over ranks in fp32


@pytest.mark.parametrize("top_k", [1, 4])
def test_a_rank_without_a_label_has_a_loss_of_zero(top_k: int) -> None:
    model, batch = packed(DistillTopK("teacher", top_k=top_k))
    columns = model.loss.example_columns(batch)
    columns = {n: x.squeeze(1) if x.ndim > 1 and top_k == 1 else x for n, x in columns.items()}
    nothing = replace(batch, label_rows=torch.zeros(0, dtype=torch.long), columns=columns)
    model(nothing).sum.backward()
    assert all(float(grad.abs().max()) == 0 for grad in gradients(model.lm))
