"""The adapter of flash-attn against its signature: as recorded here, and as in its sources; needs neither it nor a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from automodel_lite.errors import ConfigError
from automodel_lite.seed import use_deterministic
from automodel_lite.thd import AttentionOptions, Segments
from tests.attention.signatures import (
    CU_K,
    CU_Q,
    K_THD,
    ON_GPU,
    PLAIN,
    Q_THD,
    V_THD,
    WINDOWED,
    downloaded,
    fake_module,
    parameters_of,
    read_member,
    recorder,
    words,
)
from tests.tiers import rarely

# flash-attn 2.8.3, flash_attn/flash_attn_interface.py
FLASH_VARLEN = words("""
    q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap
    alibi_slopes deterministic return_attn_probs block_table
""")


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    yield fake_flash(monkeypatch, FLASH_VARLEN)
    sys.modules.pop("automodel_lite.parts.kernels.flash", None)


def fake_flash(monkeypatch: pytest.MonkeyPatch, parameters: list[str]) -> list[dict[str, Any]]:
    """flash-attn with this signature; what it is given."""
    calls: list[dict[str, Any]] = []
    fake_module(
        monkeypatch,
        "flash_attn",
        flash_attn_varlen_func=recorder(parameters, calls, lambda given: given["q"]),
    )
    monkeypatch.delitem(sys.modules, "automodel_lite.parts.kernels.flash", raising=False)
    return calls


def test_what_flash_attn_is_given(flash_calls: list[dict[str, Any]]) -> None:
    kernel = importlib.import_module("automodel_lite.parts.kernels.flash").FlashAttention()
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN)
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 1, 1), WINDOWED)
    plain, windowed = flash_calls
    assert plain["causal"] is True
    assert plain["window_size"] == (-1, -1)
    assert (
        plain["softmax_scale"],
        plain["softcap"],
        plain["max_seqlen_q"],
        plain["max_seqlen_k"],
    ) == (0.25, 0.0, 5, 8)
    assert (windowed["window_size"], windowed["softcap"], windowed["max_seqlen_q"]) == (
        (6, 0),
        5.0,
        2,
    )
    assert plain["cu_seqlens_q"] is CU_Q
    assert plain["cu_seqlens_k"] is CU_K
    kernel.check(ON_GPU)
    assert plain["deterministic"] is False
    use_deterministic(True)
    try:
        kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN)
    finally:
        use_deterministic(False)
    assert flash_calls[-1]["deterministic"] is True


# flash-attn-4 4.0.0b36, flash_attn/cute/interface.py: those that a packed step may want
FLASH_4_VARLEN = words("""
    q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k softmax_scale causal
    window_size learnable_sink softcap num_splits pack_gqa deterministic return_lse
""")


def fake_flash_4(monkeypatch: pytest.MonkeyPatch, parameters: list[str]) -> list[dict[str, Any]]:
    """flash-attn-4 alone, with this signature; what it is given."""
    calls: list[dict[str, Any]] = []
    attend = recorder(parameters, calls, lambda given: (given["q"], None))
    fake_module(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=attend)
    monkeypatch.delitem(sys.modules, "automodel_lite.parts.kernels.flash", raising=False)
    return calls


def test_what_flash_attn_4_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_flash_4(monkeypatch, FLASH_4_VARLEN)
    flash = importlib.import_module("automodel_lite.parts.kernels.flash")
    kernel, sinks = flash.FlashAttention(), torch.zeros(4)
    segments = Segments(CU_Q, CU_K, 1, 8)
    assert kernel(Q_THD, K_THD, V_THD, segments, PLAIN) is Q_THD
    options = AttentionOptions(0.25, window=7, softcap=5.0, sinks=sinks)
    kernel(Q_THD, K_THD, V_THD, segments, options)
    plain, full = calls
    assert (plain["window_size"], plain["causal"], plain["max_seqlen_q"]) == ((None, None), True, 2)
    assert "learnable_sink" not in plain
    assert (full["window_size"], full["softcap"]) == ((6, 0), 5.0)
    assert full["learnable_sink"] is sinks


@pytest.mark.parametrize(
    ("capability", "changes", "sentence"),
    [
        ((9, 0), {"head_dim": 192, "softcap": 30.0, "sinks": True}, None),
        ((9, 0), {"head_dim": 512, "value_head_dim": 512}, "head dims 512 / 512 on this GPU"),
        ((10, 0), {"head_dim": 192}, None),
        ((10, 0), {"head_dim": 256, "value_head_dim": 256, "softcap": 30.0}, "softcap or sinks"),
        ((8, 0), {}, r"compute capability 8.x\): flash-attn-4 trains on 9.x"),
    ],
    ids=["Hopper", "Gemma 4", "latent on B200", "Gemma 2 on B200", "A100"],
)
def test_what_flash_attn_4_has_a_kernel_for(
    capability: tuple[int, int],
    changes: dict[str, Any],
    sentence: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_flash_4(monkeypatch, FLASH_4_VARLEN)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernel = importlib.import_module("automodel_lite.parts.kernels.flash").FlashAttention()
    if sentence is None:
        kernel.check(replace(ON_GPU, **changes))
        return
    with pytest.raises(ConfigError, match=sentence):
        kernel.check(replace(ON_GPU, **changes))


def test_another_signature_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [name for name in FLASH_4_VARLEN if name not in ("softcap", "learnable_sink")]
    fake_flash_4(monkeypatch, names)
    flash = importlib.import_module("automodel_lite.parts.kernels.flash")
    with pytest.raises(ConfigError, match=r"flash-attn-4 has no argument learnable_sink, softcap"):
        flash.FlashAttention()


def test_flash_attn_4_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest release's own signature has what the kernel gives."""
    wheel = downloaded("flash-attn-4", "flash_attn_4-*.whl", "--pre")
    names = parameters_of(read_member(wheel, "cute/interface.py"), "flash_attn_varlen_func")
    fake_flash_4(monkeypatch, names)
    assert importlib.import_module("automodel_lite.parts.kernels.flash").FlashAttention().is_4


def test_an_empty_flash_attn_is_not_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an uninstalled flash-attn-4 leaves behind: a folder."""
    fake_module(monkeypatch, "flash_attn")
    monkeypatch.delitem(sys.modules, "automodel_lite.parts.kernels.flash", raising=False)
    with pytest.raises(
        ConfigError, match=r"pip install --no-build-isolation 'automodel-lite\[flash\]'"
    ):
        importlib.import_module("automodel_lite.parts.kernels.flash").FlashAttention()


def test_flash_without_the_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "automodel_lite.parts.kernels.flash", raising=False)
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn is installed here")
    with pytest.raises(
        ConfigError, match=r"pip install --no-build-isolation 'automodel-lite\[flash\]'"
    ):
        importlib.import_module("automodel_lite.parts.kernels.flash").FlashAttention()


@pytest.mark.system
@pytest.mark.parametrize("version", [*rarely("2.6.1"), "2.8.3.post2"], ids=["oldest", "newest"])
def test_flash_attn_sources(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs against the real signature: an argument that it does not have is a TypeError."""
    archive = downloaded(
        f"flash-attn=={version}",
        f"flash_attn-{version}.tar.gz",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
    )
    names = parameters_of(
        read_member(archive, "flash_attn/flash_attn_interface.py"), "flash_attn_varlen_func"
    )
    calls = fake_flash(monkeypatch, names)
    importlib.import_module("automodel_lite.parts.kernels.flash").FlashAttention()(
        Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), AttentionOptions(0.25, softcap=5.0)
    )
    assert calls[0]["softcap"] == 5.0
    if version == "2.8.3.post2":
        assert set(FLASH_VARLEN) <= set(names)
    sys.modules.pop("automodel_lite.parts.kernels.flash", None)
