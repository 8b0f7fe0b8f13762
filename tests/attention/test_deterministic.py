"""A step of every hybrid under training.deterministic on a GPU: none of the operations that torch refuses there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from tests.attention.families import documents, stream
from tests.attention.hybrids import HYBRIDS, ONE_OF_EACH_KIND, build_hybrid

REFUSED = frozenset(
    [
        "adaptive_avg_pool2d_backward",
        "adaptive_avg_pool3d_backward",
        "adaptive_max_pool2d_backward",
        "avg_pool3d_backward",
        "_ctc_loss_backward",
        "cumsum",
        "cumsum_",
        "_embedding_bag_per_sample_weights_backward",
        "grid_sampler_2d_backward",
        "histc",
        "kthvalue",
        "_logcumsumexp",
        "logcumsumexp",
        "max_unpool2d",
        "max_unpool3d",
        "median",
        "nll_loss2d_forward",
        "put",
        "put_",
        "reflection_pad1d_backward",
        "upsample_bilinear2d_backward",
        "upsample_linear1d_backward",
        "upsample_trilinear3d_backward",
    ]
)
"""ATen's, of floats on CUDA (`torch.use_deterministic_algorithms` lists them by their functions of torch)."""


class RefuseNondeterministic(TorchDispatchMode):
    """Turns training.deterministic on, and collects what CUDA would refuse then; sums of integers are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.num_calls = 0

    def __enter__(self) -> RefuseNondeterministic:
        torch.use_deterministic_algorithms(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.use_deterministic_algorithms(False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.num_calls += 1
        if (
            name in REFUSED
            and args[0].is_floating_point()
            and torch.are_deterministic_algorithms_enabled()
        ):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=() if f in ONE_OF_EACH_KIND else pytest.mark.slow)
        for f in sorted(HYBRIDS)
    ],
)
def test_a_step_of_a_hybrid_is_deterministic(family: str) -> None:
    model = build_hybrid(family)
    install(model, ReferenceAttention())
    with RefuseNondeterministic() as mode:
        LossModel(model, FusedLinearCrossEntropy())(
            stream(documents([37, 5, 70, 1, 23]))
        ).sum.backward()
    assert mode.num_calls > 100
    assert mode.found == set()


def test_a_sum_of_floats_is_refused_and_of_integers_not() -> None:
    with RefuseNondeterministic() as mode:
        torch.ones(3, dtype=torch.int64).cumsum(0)
        assert mode.found == set()
        torch.ones(3).cumsum(0)
    assert mode.found == {"cumsum"}
