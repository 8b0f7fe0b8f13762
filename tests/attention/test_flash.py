"""The adapter of flash-attn against its signature: as recorded here, and as in its sources; needs neither it nor a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

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


def test_flash_attn_4_alone_is_not_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves a namespace package `flash_attn` without the function."""
    fake_module(monkeypatch, "flash_attn")
    monkeypatch.delitem(sys.modules, "automodel_lite.parts.kernels.flash", raising=False)
    with pytest.raises(
        ConfigError, match=r"pip install --no-build-isolation 'automodel-lite\[flash\]'"
    ):
        importlib.import_module("automodel_lite.parts.kernels.flash")


def test_flash_without_the_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "automodel_lite.parts.kernels.flash", raising=False)
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn is installed here")
    with pytest.raises(
        ConfigError, match=r"pip install --no-build-isolation 'automodel-lite\[flash\]'"
    ):
        importlib.import_module("automodel_lite.parts.kernels.flash")


@pytest.mark.parametrize("version", ["2.6.1", "2.8.3.post2"], ids=["oldest", "newest"])
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
