"""The boundaries reach the packages' kernels as these want them, and the result is that of separate documents.

The signatures and the checks of their arguments are copied from causal-conv1d 1.7.0, mamba-ssm 2.3.2 and fla-core 0.6.0;
behind them stands transformers' PyTorch code, document by document. transformers' own decorator picks them up, as it does
for installed packages.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations import use_kernel_func_from_hub_with_fallback

from automodel_lite.attention.documents import mixers_of
from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.mixers.functions import (
    Recorded,
    check_gradients,
    running,
    split_at_documents,
    takes_boundaries,
)
from automodel_lite.errors import ConfigError
from tests.attention.families import documents, stream
from tests.attention.hybrids import build_hybrid
from tests.attention.signatures import downloaded, parameters_of, read_member

pytestmark = pytest.mark.numbers

SEEN: list[str] = []


def documents_of(seq_idx: Tensor, num_tokens: int) -> list[slice]:
    """Checks what the CUDA code checks, and cuts."""
    assert seq_idx.dtype == torch.int32
    assert seq_idx.is_contiguous()
    assert seq_idx.shape == (1, num_tokens)
    return slices(torch.bincount(seq_idx[0]).tolist())


def slices(lens: list[int]) -> list[slice]:
    ends = torch.tensor(lens).cumsum(0).tolist()
    return [slice(end - length, end) for length, end in zip(lens, ends)]


def fake_causal_conv1d(torch_fn: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d_fn(
        x,
        weight,
        bias=None,
        seq_idx=None,
        initial_states=None,
        return_final_states=False,
        final_states_out=None,
        activation=None,
    ):
        if seq_idx is None:
            return torch_fn(x, weight, bias, activation)
        SEEN.append("causal_conv1d_fn")
        assert x.stride(1) == 1, "seq_idx is only supported for channel last layout"
        outs = [
            torch_fn(x[:, :, part], weight, bias, activation)
            for part in documents_of(seq_idx, x.shape[2])
        ]
        return torch.cat(outs, 2)

    return causal_conv1d_fn


def fake_chunk_scan(torch_fn: Callable[..., Any]) -> Callable[..., Any]:
    def mamba_chunk_scan_combined(
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        D=None,
        z=None,
        dt_bias=None,
        initial_states=None,
        seq_idx=None,
        cu_seqlens=None,
        dt_softplus=False,
        dt_limit=(0.0, float("inf")),
        return_final_states=False,
        return_varlen_states=False,
    ):
        rest = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        if seq_idx is None:
            return torch_fn(x, dt, A, B, C, chunk_size, **rest)
        SEEN.append("mamba_chunk_scan_combined")
        parts = documents_of(seq_idx, x.shape[1])
        return torch.cat(
            [torch_fn(x[:, i], dt[:, i], A, B[:, i], C[:, i], chunk_size, **rest) for i in parts], 1
        )

    return mamba_chunk_scan_combined


def fake_delta_rule(torch_fn: Callable[..., Any]) -> Callable[..., Any]:
    def chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        state_v_first=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        chunk_indices=None,
        cp_context=None,
        **kwargs,
    ):
        assert not kwargs.keys() - {"head_first"}
        rest = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        if cu_seqlens is None:
            return torch_fn(q, k, v, g=g, beta=beta, **rest)
        SEEN.append("chunk_gated_delta_rule")
        assert q.shape[0] == 1
        assert torch.equal(cu_seqlens, cu_seqlens_cpu)
        parts = slices(cu_seqlens_cpu.diff().tolist())
        outs = [
            torch_fn(q[:, i], k[:, i], v[:, i], g=g[:, i], beta=beta[:, i], **rest)[0]
            for i in parts
        ]
        return torch.cat(outs, 1), None

    return chunk_gated_delta_rule


FAKES = {
    "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d_fn", fake_causal_conv1d),
    "mamba2_chunk_scan": ("mamba_ssm", "mamba_chunk_scan_combined", fake_chunk_scan),
    "torch_chunk_gated_delta_rule": ("fla", "chunk_gated_delta_rule", fake_delta_rule),
    "chunk_kimi_delta_attention": ("fla", "chunk_kda", fake_delta_rule),
}
"""transformers' function -> the package, the name there, and the stand-in."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Reloads the functions of a family's module as transformers would find them with the packages installed."""

    def reload(model_type: str) -> ModuleType:
        module = sys.modules[f"transformers.models.{model_type}.modeling_{model_type}"]
        for name, (package, in_package, fake) in FAKES.items():
            if not hasattr(module, name):
                continue
            plain = getattr(module, name)
            # as it was before the first installation in this process
            plain = getattr(plain, "function", plain)
            torch_fn = inspect.unwrap(plain)
            stand_in = ModuleType(package)
            setattr(stand_in, in_package, fake(torch_fn))
            monkeypatch.setitem(sys.modules, package, stand_in)
            monkeypatch.setattr(
                "transformers.integrations.hub_kernels._KERNELS_INTERNAL_PATH_MAPPINGS",
                {},
                raising=True,
            )
            monkeypatch.setattr(
                module, name, use_kernel_func_from_hub_with_fallback(in_package, package)(torch_fn)
            )
        return module

    SEEN.clear()
    return reload


@pytest.mark.parametrize(
    ("family", "calls"),
    [
        ("qwen3_next", {"causal_conv1d_fn", "chunk_gated_delta_rule"}),
        ("kimi_linear", {"causal_conv1d_fn", "chunk_gated_delta_rule"}),
        ("nemotron_h", {"causal_conv1d_fn", "mamba_chunk_scan_combined"}),
        ("lfm2", {"causal_conv1d_fn"}),
        # its scan has no boundaries: the documents go through as rows
        ("jamba", {"causal_conv1d_fn"}),
    ],
)
def test_kernels_get_the_boundaries(family: str, calls: set[str], installed: Any) -> None:
    model, batch = build_hybrid(family), stream(documents([9, 4, 30, 1]))
    model.eval()
    installed(family)
    install(model, ReferenceAttention())
    mixer = next(mixers_of(model))
    plain = mixer.forward.forward  # type: ignore[attr-defined]
    hidden = torch.randn(1, 44, 32, requires_grad=True)
    parts = slices([9, 4, 30, 1])
    want = torch.cat([first(plain(hidden[:, part])) for part in parts], 1)
    (want_grad,) = torch.autograd.grad(want.square().sum(), hidden)
    with running(split_at_documents(batch.mixers)):
        got = first(plain(hidden))
    assert set(SEEN) == calls
    (grad,) = torch.autograd.grad(got.square().sum(), hidden)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    assert torch.allclose(grad, want_grad, rtol=1e-4, atol=1e-4 * float(want_grad.abs().max()))


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.same_on_every_cpu
def test_without_packages_no_function_takes_boundaries() -> None:
    model = build_hybrid("qwen3_next")
    recorded = Recorded()
    install(model, ReferenceAttention())
    with running(recorded), torch.no_grad():
        next(mixers_of(model)).forward.forward(torch.randn(1, 8, 32))  # type: ignore[attr-defined]
    # transformers 5.17 repeats the heads of queries and keys before the call, to those of values
    assert recorded.heads in ([[64], [4, 2, 2, 4, 4]], [[64], [4, 4, 4, 4, 4]])
    assert recorded.takes_streams == [True, True]
    assert not takes_boundaries(len, "seq_idx")


SDIST = ("--no-binary", ":all:", "--no-build-isolation")


# the package, its archive, the file -> the function, and what stands in for it in test_mixer_functions.py
MIXERS = {
    "causal_conv1d_fn": (
        "causal-conv1d",
        "causal_conv1d-*.tar.gz",
        SDIST,
        "causal_conv1d_interface.py",
    ),
    "mamba_chunk_scan_combined": (
        "mamba-ssm",
        "mamba_ssm-*.tar.gz",
        SDIST,
        "ops/triton/ssd_combined.py",
    ),
    "mamba_split_conv1d_scan_combined": (
        "mamba-ssm",
        "mamba_ssm-*.tar.gz",
        SDIST,
        "ops/triton/ssd_combined.py",
    ),
    "chunk_gated_delta_rule": (
        "fla-core",
        "fla_core-*.whl",
        (),
        "fla/ops/gated_delta_rule/chunk.py",
    ),
    "chunk_kda": ("fla-core", "fla_core-*.whl", (), "fla/ops/kda/chunk.py"),
}


STAND_INS = {
    "causal_conv1d_fn": fake_causal_conv1d,
    "mamba_chunk_scan_combined": fake_chunk_scan,
    "chunk_gated_delta_rule": fake_delta_rule,
}


@pytest.mark.system
@pytest.mark.parametrize("function", MIXERS)
def test_sources_of_the_mixers_kernels(function: str) -> None:
    """The stand-ins have these functions' parameters, in their order; each of the functions takes the boundaries."""
    requirement, pattern, options, file = MIXERS[function]
    source = read_member(downloaded(requirement, pattern, *options), file)
    names = parameters_of(source, function)
    boundaries = {"cu_seqlens", "cu_seqlens_cpu"} if requirement == "fla-core" else {"seq_idx"}
    assert boundaries <= {*names}
    if function in STAND_INS:
        known = inspect.signature(STAND_INS[function](len)).parameters
        assert [name for name in known if name != "kwargs"] == names
    if function == "causal_conv1d_fn":
        assert "seq_idx.contiguous()" in source


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("version", ["3.3.1", "3.4.0", "3.6.0", "3.7.0", "3.7.1"])
def test_a_triton_whose_gradients_are_wrong_on_hopper_is_refused(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = tmp_path / f"triton-{version}.dist-info/METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_gradients.cache_clear()
    rule = "torch_chunk_gated_delta_rule"
    check_gradients(rule, (10, 0))
    check_gradients("causal_conv1d_fn", (9, 0))
    if version in ("3.3.1", "3.7.1"):
        check_gradients(rule, (9, 0))
        return
    with pytest.raises(ConfigError, match=f"Triton {version} compiles its gradients wrongly"):
        check_gradients(rule, (9, 0))
