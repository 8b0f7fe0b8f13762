"""The fused loss against plain cross-entropy, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, RecurrentGemmaForCausalLM

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.errors import ConfigError
from automodel_lite.models import fused_head
from automodel_lite.models.fused_head import linear_cross_entropy
from automodel_lite.models.loss import (
    CrossEntropy,
    FusedLinearCrossEntropy,
    Head,
    Loss,
    LossInputs,
    LossOutput,
    checked_loss,
)
from automodel_lite.models.loss_model import LossModel
from benchmarks.survey_models import batch
from benchmarks.tiny_models import random_model, tiny_config
from tests.attention.families import build, documents, stream
from tests.attention.hybrids import InFloat64, build_hybrid

pytestmark = pytest.mark.numbers


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
@pytest.mark.parametrize(("rows", "chunk"), [(97, 16), (64, 64), (1, 50), (5, 512)])
def test_fused_equals_plain(rows: int, chunk: int, softcap: float | None) -> None:
    labels = torch.randint(0, 211, (rows,), generator=torch.Generator().manual_seed(0))
    results = []
    for fused in (True, False):
        hidden, weight = leaf(rows, 16), leaf(211, 16)
        if fused:
            loss = linear_cross_entropy(hidden, weight, labels, chunk, softcap)
        else:
            logits = hidden @ weight.t()
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            loss = F.cross_entropy(logits, labels, reduction="sum")
        (loss * 0.37).backward()
        results.append((loss, hidden.grad, weight.grad))
    for fused_value, plain_value in zip(*results):
        torch.testing.assert_close(fused_value, plain_value, rtol=1e-5, atol=1e-5)


def test_no_labeled_row_gives_zero_loss_and_zero_gradients() -> None:
    hidden, weight = leaf(0, 8), leaf(9, 8)
    loss = FusedLinearCrossEntropy()(
        LossInputs(Head(hidden, weight), torch.zeros(0, dtype=torch.long))
    ).sum
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad.abs().sum() == 0
    no_rows = LossInputs(
        Head(torch.zeros(0, 9, requires_grad=True)), torch.zeros(0, dtype=torch.long)
    )
    assert CrossEntropy()(no_rows).sum.item() == 0.0


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight = leaf(6, 8), leaf(9, 8).detach()
    linear_cross_entropy(hidden, weight, torch.arange(6)).backward()
    plain = leaf(6, 8)
    F.cross_entropy(plain @ weight.t(), torch.arange(6), reduction="sum").backward()
    torch.testing.assert_close(hidden.grad, plain.grad)


def test_bf16_keeps_an_fp32_sum() -> None:
    hidden, weight = leaf(300, 32).to(torch.bfloat16), leaf(64, 32).to(torch.bfloat16)
    labels = torch.randint(0, 64, (300,))
    loss = linear_cross_entropy(hidden, weight, labels, 100)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-3)


def test_under_autocast_the_heads_products_are_bf16() -> None:
    """The last norm leaves fp32 under autocast; a linear layer casts it, and so must the fused loss."""
    torch.manual_seed(0)
    hidden = torch.randn(40, 16, requires_grad=True)
    weight = torch.randn(64, 16, requires_grad=True)
    labels = torch.randint(64, (40,))
    products: list[torch.dtype] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                products.append(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    with Watch(), torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_tokens=16)
    loss.backward()
    assert products
    assert set(products) == {torch.bfloat16}
    fused = [loss.detach(), hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        twin = torch.nn.functional.cross_entropy(
            (hidden @ weight.t()).float(), labels, reduction="sum"
        )
    twin.backward()
    for got, want in zip(fused, [twin.detach(), hidden.grad, weight.grad]):
        assert got is not None
        assert want is not None
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_the_fused_head_under_autocast_is_that_of_a_linear_layer() -> None:
    """fp32 hidden states (the last norm's) and an fp32 master: products in bf16, as F.linear does them."""
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(40, 16), torch.randn(50, 16), torch.randint(0, 50, (40,))

    def run(plain: bool) -> list[torch.Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            if plain:
                loss = torch.nn.functional.cross_entropy(
                    torch.nn.functional.linear(h, w).float(), labels, reduction="sum"
                )
            else:
                loss = FusedLinearCrossEntropy()(LossInputs(Head(h, w), labels)).sum
        loss.backward()
        assert h.grad is not None
        assert w.grad is not None
        return [loss.detach(), h.grad, w.grad]

    for got, want in zip(run(plain=False), run(plain=True), strict=True):
        assert float((got - want).norm() / want.norm()) < 5e-3


@pytest.mark.parametrize(("scale", "is_plain"), [(1.0, True), (1.2, False)])
def test_a_head_is_plain_though_two_products_round_apart(scale: float, is_plain: bool) -> None:
    """Under autocast both round to bf16, and nothing says that two kernels of a GPU add up in one order."""
    lm, batch = build("llama"), stream(documents([37, 5, 23]))
    weight = lm.lm_head.weight

    def in_two_sums(hidden: torch.Tensor) -> torch.Tensor:
        half = hidden.shape[-1] // 2
        return scale * (
            F.linear(hidden[..., :half], weight[:, :half])
            + F.linear(hidden[..., half:], weight[:, half:])
        )

    lm.lm_head.forward = in_two_sums
    install(lm, ReferenceAttention())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        logits_TV, found = LossModel(lm, FusedLinearCrossEntropy()).probe(batch)
        one_sum_TV = F.linear(lm.model(**batch.model_inputs()).last_hidden_state[0], weight)
    assert found == is_plain
    assert not torch.equal(logits_TV, one_sum_TV)


def test_a_bound_hides_in_no_rounding() -> None:
    """Of a name that nobody knows, and so far above the logits that it takes 2 % of the largest."""
    lm = build("llama")
    weight = lm.lm_head.weight
    install(lm, ReferenceAttention())
    batch = stream(documents([37, 5, 23]))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        bound = 4 * lm(**batch.model_inputs()).logits.abs().max()
        lm.lm_head.forward = lambda hidden: bound * torch.tanh(F.linear(hidden, weight) / bound)
        assert not LossModel(lm, FusedLinearCrossEntropy()).probe(batch)[1]


def test_logits_are_bounded_under_whatever_name_the_bound_has() -> None:
    """Where they are small, as in a model from scratch, no product in bf16 tells that they are."""
    config = tiny_config("recurrent_gemma")
    torch.manual_seed(0)
    lm = RecurrentGemmaForCausalLM(config).bfloat16()
    install(lm, ReferenceAttention())
    model = LossModel(lm, FusedLinearCrossEntropy()).eval()
    batch = stream(documents([37, 5, 23], vocab=config.vocab_size))
    with torch.no_grad():
        _, model.has_plain_head = model.probe(batch)
        lm.lm_head.weight *= 100  # later in training
        logits_TV = lm(**batch.model_inputs()).logits[0].float()
        assert logits_TV.abs().max() > 25
        want = F.cross_entropy(logits_TV, batch.labels, reduction="sum", ignore_index=IGNORE_INDEX)
        assert float(model(batch).sum) == pytest.approx(float(want), rel=1e-2)


class Selections(TorchDispatchMode):
    """Notes gradients of `x[0]`: a tensor of zeros as large as x, and a copy into it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.select_backward.default:
            self.noted.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "loss", [FusedLinearCrossEntropy(), CrossEntropy()], ids=["fused", "plain"]
)
@pytest.mark.parametrize(
    "make", [lambda: build("llama"), lambda: build_hybrid("lfm2")], ids=["attention", "mixers"]
)
def test_the_gradient_of_the_stream_is_not_copied(
    make: Callable[[], PreTrainedModel], loss: Loss
) -> None:
    """The stream is the only row of what transformers calls a batch."""
    lm = make()
    install(lm, ReferenceAttention())
    batch = stream(documents([9, 4, 17]))
    total = LossModel(lm, loss)(batch).sum
    with Selections() as copied:
        total.backward()
    assert copied.noted == []


def test_a_copied_gradient_is_noticed() -> None:
    x = torch.randn(1, 3, requires_grad=True)
    with Selections() as copied:
        x[0].sum().backward()
    assert copied.noted == [torch.Size([3])]


def row_values(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probability and log-partition, two values per row."""
    return torch.stack(
        [-F.cross_entropy(logits, labels, reduction="none"), logits.logsumexp(-1)], 1
    )


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
@pytest.mark.parametrize(("rows", "chunk"), [(97, 16), (64, 64), (0, 8)])
def test_chunked_rows_equal_all_rows_at_once(
    rows: int, chunk: int, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_head, "LEAST_CHUNK_TOKENS", chunk)
    labels = torch.randint(0, 211, (rows,), generator=torch.Generator().manual_seed(0))
    results = []
    for chunked in (True, False):
        hidden, weight = leaf(rows, 16), leaf(211, 16)
        if chunked:
            values = LossInputs(Head(hidden, weight, softcap), labels).rows(row_values, labels)
        else:
            logits = hidden @ weight.t()
            values = row_values(
                logits if softcap is None else softcap * torch.tanh(logits / softcap), labels
            )
        torch.sigmoid(values.sum(1)).sum().backward()  # not linear in the values
        results.append((values, hidden.grad, weight.grad))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


class ZLoss(Loss):
    """Cross-entropy and its z-loss (PaLM, arXiv:2204.02311) inside the fused head."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        log_p_R, log_z_R = inputs.rows(row_values, inputs.labels_R).unbind(1)
        cross_entropy, z = -log_p_R.sum(), 1e-2 * log_z_R.square().sum()
        return LossOutput(cross_entropy + z, {"ce": cross_entropy, "z": z})


def test_z_loss_in_the_fused_head_has_parts() -> None:
    batch, results = stream(documents([9, 4, 17])), []
    for loss in (ZLoss(), CrossEntropy()):
        lm = build("llama").double()
        install(lm, ReferenceAttention())
        model = LossModel(lm, loss)
        with InFloat64():
            total, parts = model(batch)
            if isinstance(loss, CrossEntropy):
                out = model.lm(**batch.model_inputs(), logits_to_keep=batch.label_rows)
                total = total + 1e-2 * out.logits[0].logsumexp(-1).square().sum()
            else:
                assert list(parts) == ["ce", "z"]
                assert parts["ce"] + parts["z"] == total.detach()
            total.backward()
        results.append([total.detach(), *(p.grad for p in lm.parameters())])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_outside_training_plain_cross_entropy_is_beside_any_loss() -> None:
    lm, batch = build("llama"), stream(documents([9, 4, 17]))
    install(lm, ReferenceAttention())
    model = LossModel(lm, ZLoss()).eval()
    with torch.no_grad():
        got = model(batch).parts["cross_entropy"]
        want = LossModel(lm, CrossEntropy()).eval()(batch).sum
    torch.testing.assert_close(got, want)


@pytest.mark.same_on_every_cpu
def test_a_loss_of_logits_and_labels_is_told_what_to_write() -> None:
    class Before:
        def __call__(self, logits_RV: torch.Tensor, labels_R: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(logits_RV, labels_R, reduction="sum")

    with pytest.raises(
        ConfigError, match=r"loss=Before must be a subclass of automodel_lite.models.loss.Loss"
    ):
        checked_loss(Before())


def test_logits_that_are_cut_are_the_models_own() -> None:
    """Inkling 2 has rows without a token, as all of its checkpoints have."""
    config = tiny_config("inkling2_text")
    config.unpadded_vocab_size = 64
    model = LossModel(random_model(config), CrossEntropy())
    logits, is_plain = model.probe(batch())
    assert (logits.shape[-1], is_plain) == (64, False)
