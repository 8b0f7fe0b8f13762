"""The adapter of torch's varlen_attn against its signature in several versions, and by fake tensors; needs no GPU."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from automodel_lite.attention.interface import choose_attention
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.errors import ConfigError
from automodel_lite.parts.kernels.varlen import VarlenAttention, is_known
from automodel_lite.thd import AttentionInputs, AttentionOptions, Segments
from tests.attention.signatures import (
    CU_K,
    CU_Q,
    K_THD,
    ON_GPU,
    PLAIN,
    Q_THD,
    V_THD,
    recorder,
    words,
)

VARLEN = "query key value cu_seq_q cu_seq_k max_q max_k"
VARLEN_OF_2_12 = f"{VARLEN} return_aux scale window_size enable_gqa seqused_k block_table"


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        (f"{VARLEN} return_aux scale window_size", {}),
        (
            f"{VARLEN} return_aux scale window_size enable_gqa seqused_k block_table",
            {"enable_gqa": True},
        ),
    ],
    ids=["torch 2.11", "torch 2.12"],
)
def test_what_varlen_attn_is_given(parameters: str, given: dict[str, Any]) -> None:
    calls: list[dict[str, Any]] = []
    kernel = VarlenAttention(varlen_attn=recorder(parameters.split(), calls, lambda a: a["query"]))
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 1, 8), PLAIN)
    options = {
        key: calls[0][key]
        for key in calls[0].keys() - {"query", "key", "value", "cu_seq_q", "cu_seq_k"}
    }
    assert options == {"max_q": 2, "max_k": 8, "window_size": (-1, 0), "scale": 0.25, **given}
    assert calls[0]["key"] is K_THD
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), AttentionOptions(0.25, window=7))
    assert calls[1]["window_size"] == (6, 0)


@pytest.mark.parametrize(
    ("implementation", "parameters", "capability", "sentence"),
    [
        ("FA4", f"{VARLEN} return_aux scale window_size", (9, 0), "implementation=FA4 on torch"),
        (
            "FA4",
            f"{VARLEN} scale window_size enable_gqa",
            (8, 0),
            r"on this GPU \(8.0\): it needs .* 9.x or 10.x",
        ),
        (
            "FA3",
            f"{VARLEN} scale window_size enable_gqa",
            (10, 0),
            r"on this GPU \(10.0\): it needs .* 9.x:",
        ),
        (
            None,
            f"{VARLEN} scale window_size enable_gqa",
            (7, 5),
            "FlashAttention needs compute capability 8.0",
        ),
        ("FA4", f"{VARLEN} scale window_size enable_gqa", (10, 0), None),
        (
            "cuDNN",
            f"{VARLEN} scale window_size enable_gqa",
            (8, 0),
            r"on this GPU \(8.0\): it needs .* 9.x or 10.x",
        ),
    ],
    ids=["FA4 on 2.11", "FA4 on A100", "FA3 on B200", "T4", "FA4 on B200", "cuDNN on A100"],
)
def test_an_implementation_is_refused_where_it_fails(
    implementation: str | None,
    parameters: str,
    capability: tuple[int, int],
    sentence: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the first forward they raise RuntimeError; FA4 on torch 2.11 in the first backward."""
    monkeypatch.setattr(
        "automodel_lite.parts.kernels.varlen.activate_flash_attention_impl", lambda name: None
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernel = VarlenAttention(
        implementation, varlen_attn=recorder(parameters.split(), [], lambda a: a["query"])
    )
    if sentence is None:
        kernel.check(ON_GPU)
        return
    with pytest.raises(ConfigError, match=sentence):
        kernel.check(ON_GPU)


@pytest.mark.parametrize(
    ("installed", "torch_version"),
    [("4.0.0b36", "2.13.0+cu130"), ("4.0.0b18", "2.13.0"), ("4.0.0b36", "2.14.1")],
)
def test_an_fa4_that_this_torch_cannot_unpack_is_refused(
    installed: str, torch_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "automodel_lite.parts.kernels.varlen"
    monkeypatch.setattr(f"{module}.activate_flash_attention_impl", lambda name: None)
    monkeypatch.setattr(
        f"{module}.distributions", lambda name: [SimpleNamespace(version=installed)]
    )
    monkeypatch.setattr(torch, "__version__", torch_version)
    kernel = VarlenAttention(
        "FA4", varlen_attn=recorder([*VARLEN.split(), "enable_gqa"], [], lambda a: a)
    )
    if (installed, torch_version) == ("4.0.0b36", "2.13.0+cu130"):
        with pytest.raises(ConfigError, match=r"flash-attn-4 4.0.0b36: .* use attention=flash"):
            kernel.check(ON_GPU)
    else:
        kernel.check(ON_GPU)


@pytest.mark.parametrize(
    ("changes", "torch_version", "cudnn", "is_deterministic", "sentence"),
    [
        ({}, "2.15.0+cu132", 92600, False, None),
        ({}, "2.14.1", 92600, False, r"implementation=cuDNN on torch 2.14.1: torch>=2.15 can"),
        ({}, "2.15.0", 91900, False, "with cuDNN 91900: it needs 92400"),
        ({}, "2.15.0", None, False, "with cuDNN None: it needs 92400"),
        (
            {"head_dim": 256, "value_head_dim": 256},
            "2.15.0",
            92600,
            False,
            "with head dim 256: at most 128",
        ),
        ({}, "2.15.0", 92600, True, "with training.deterministic: leave attention.implementation"),
    ],
    ids=["all is there", "torch 2.14", "old cuDNN", "no cuDNN", "Gemma", "deterministic"],
)
def test_cudnn_is_refused_where_torch_would_take_another(
    changes: dict[str, int],
    torch_version: str,
    cudnn: int | None,
    is_deterministic: bool,
    sentence: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    kernel = VarlenAttention("cuDNN")
    if sentence is None:
        kernel.check(replace(ON_GPU, **changes))
        return
    with pytest.raises(ConfigError, match=sentence):
        kernel.check(replace(ON_GPU, **changes))


def test_cudnn_is_off_where_nobody_asks_for_it() -> None:
    """torch 2.15 would take it for plain packs, another of its graphs for most of them."""
    given = (Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN)
    kernels = [
        VarlenAttention(
            name, varlen_attn=recorder(VARLEN_OF_2_12.split(), [], lambda a: a["query"])
        )
        for name in ("cuDNN", None)
    ]
    for kernel, is_on in zip(kernels, (True, False)):
        kernel(*given)
        assert torch.backends.cuda.cudnn_sdp_enabled() == is_on


def test_varlen_of_this_torch_takes_what_it_is_given() -> None:
    """The installed torch's own signature, bound as the kernel binds it."""
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)
    calls: list[dict[str, Any]] = []
    VarlenAttention(varlen_attn=recorder(names, calls, lambda a: a["query"]))(
        Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN
    )
    assert len(calls) == 1


def test_an_implementation_that_torch_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"attention\.implementation=FA9 cannot be activated"):
        VarlenAttention(implementation="FA9")


@pytest.mark.parametrize("causal", [True, False])
def test_varlen_blocks_fit_the_signature_of_torch(causal: bool) -> None:
    """By fake tensors, shapes alone: the kernel needs a GPU."""
    with FakeTensorMode():
        q, k, v = (
            torch.empty(24, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2)
        )
        cu = torch.empty(4, dtype=torch.int32, device="cuda")
        inputs = AttentionInputs(q, k, v, Segments(cu, cu, 9, 9), AttentionOptions(0.25))
        out, lse = VarlenAttention().block(inputs, causal)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (24, 4), torch.float32)
        grads = VarlenAttention().block_backward(inputs, causal, out, out, lse)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


FA3_FWD = words(
    "q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
    "max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin "
    "seqlens_rotary q_descale k_descale v_descale softmax_scale is_causal window_size_left "
    "window_size_right attention_chunk softcap is_rotary_interleaved scheduler_metadata num_splits "
    "pack_gqa sm_margin"
)
FA3_BWD = words(
    "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k seqused_q seqused_k "
    "max_seqlen_q max_seqlen_k softmax_scale is_causal window_size_left window_size_right softcap "
    "deterministic sm_margin"
)


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A package that registers FlashAttention-3's operations, with its arguments, on a Hopper."""
    define = "\n".join(
        f"library.define('{name}({', '.join(f'int {x} = 0' for x in names)}) -> int')"
        for name, names in (("fwd", FA3_FWD), ("bwd", FA3_BWD))
    )
    (tmp_path / "flash_attn_interface.py").write_text(
        f"import torch\nlibrary = torch.library.Library('flash_attn_3', 'FRAGMENT')\n{define}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        "automodel_lite.parts.kernels.varlen.activate_flash_attention_impl", lambda name: None
    )
    yield
    sys.modules.pop("flash_attn_interface", None)


def fastest(spec: AttentionSpec = ON_GPU) -> VarlenAttention:
    kernel = VarlenAttention(
        "fastest", varlen_attn=recorder(VARLEN_OF_2_12.split(), [], lambda a: a["query"])
    )
    kernel.check(spec)
    return kernel


def test_auto_takes_fa3_where_it_is_installed(fa3: None) -> None:
    kernel, why = choose_attention(None, [ON_GPU])
    assert isinstance(kernel, VarlenAttention)
    assert kernel.implementation == "FA3"
    assert why == "varlen: FA3 of the installed flash_attn_interface, the fastest on this GPU"
    # what it has no kernel for goes on to the next one, and activates nothing
    kernel, why = choose_attention(None, [replace(ON_GPU, softcap=50.0)])
    assert kernel.name == "thd_flex"


def test_auto_leaves_fa3_on_other_gpus_and_with_deterministic_gradients(
    fa3: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as inside:
        inside.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert fastest().implementation is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    kernel = fastest()
    assert kernel.implementation is None
    assert kernel.reason == "inside torch, the fastest that needs no package"


def test_auto_says_why_a_package_that_is_there_is_not_taken(
    fa3: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("import no_such_library\n")
    kernel = fastest()
    assert kernel.implementation is None
    assert kernel.reason.startswith("inside torch, the fastest that needs no package. attention.")
    assert "FA3 cannot be activated (No module named 'no_such_library')" in kernel.reason


def test_operations_of_fa3_are_known_by_the_places_of_their_arguments() -> None:
    assert is_known("fwd", FA3_FWD)
    assert is_known("bwd", FA3_BWD)
    assert not is_known("fwd", [x for x in FA3_FWD if x != "q_v"])  # an older release
    assert not is_known("fwd", ["seqused_q", *FA3_FWD[:-1]])
    assert not is_known("bwd", [*FA3_BWD, "sinks"])
