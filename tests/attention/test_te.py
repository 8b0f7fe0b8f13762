"""The adapter of Transformer Engine against its signature: as recorded here, and as in its sources; needs no GPU."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from automodel_lite.errors import ConfigError
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

# transformer-engine 2.20, transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py
TE_INIT = words("""
    self num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type window_size
    bottom_right_diagonal softcap sequence_parallel tp_size get_rng_state_tracker tp_group layer_number attention_type
    cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit name
""")


TE_FORWARD = words("""
    self query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded
    cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size bottom_right_diagonal softcap
    checkpoint_core_attention core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill
    inference_params pad_between_seqs fp8_output bf16_backward num_splits
""")


TE_MASKS = ("padding_causal", "padding_causal_bottom_right")


@pytest.fixture
def te_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "")
    monkeypatch.delenv("NVTE_UNFUSED_ATTN")  # and so again at the end
    yield fake_te(monkeypatch, TE_INIT, TE_FORWARD)
    sys.modules.pop("automodel_lite.parts.kernels.te", None)


def fake_te(
    monkeypatch: pytest.MonkeyPatch, init: list[str], forward: list[str]
) -> list[tuple[str, dict[str, Any]]]:
    """Transformer Engine with these signatures; (method, what it is given) of each call."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def method(name: str, parameters: list[str], result: Callable[..., Any]) -> Callable[..., Any]:
        seen: list[dict[str, Any]] = []

        def answer(given: dict[str, Any]) -> Any:
            calls.append((name, seen[-1]))
            return result(given)

        return recorder(parameters, seen, answer)

    members = {
        "__init__": method("init", init, lambda given: None),
        "__call__": method("forward", forward, lambda given: given["query_layer"].flatten(1)),
    }
    fake_module(
        monkeypatch,
        "transformer_engine.pytorch.attention",
        DotProductAttention=type("DotProductAttention", (), members),
    )
    monkeypatch.delitem(sys.modules, "automodel_lite.parts.kernels.te", raising=False)
    return calls


def test_what_transformer_engine_is_given(te_calls: list[tuple[str, dict[str, Any]]]) -> None:
    kernel = importlib.import_module("automodel_lite.parts.kernels.te").TransformerEngineAttention()
    out = kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN)
    assert out.shape == (9, 4, 16)
    (_, made), (_, given) = te_calls
    assert (made["num_attention_heads"], made["kv_channels"], made["num_gqa_groups"]) == (
        4,
        (16, 16),
        2,
    )
    assert (made["qkv_format"], made["attn_mask_type"], made["window_size"]) == (
        "thd",
        TE_MASKS[1],
        (-1, 0),
    )
    assert given["cu_seqlens_q_padded"] is given["cu_seqlens_q"]
    assert given["cu_seqlens_kv_padded"] is given["cu_seqlens_kv"]
    # 32 documents: cuDNN makes a graph for each number
    assert given["cu_seqlens_q"].tolist() == [0, 4, *[9] * 31]
    assert given["cu_seqlens_kv"].tolist() == [0, 8, *[14] * 31]
    assert given["pad_between_seqs"] is False
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN)
    assert [name for name, _ in te_calls] == ["init", "forward", "forward"]
    kernel(Q_THD, Q_THD, Q_THD, Segments(CU_Q, CU_Q, 5, 5), WINDOWED)
    assert te_calls[-2][1]["window_size"] == (6, 0)
    assert te_calls[-2][1]["softcap"] == 5.0
    assert te_calls[-1][1]["attn_mask_type"] == TE_MASKS[0]


def test_what_transformer_engine_refuses(
    te_calls: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    te = importlib.import_module("automodel_lite.parts.kernels.te").TransformerEngineAttention
    te().check(ON_GPU)
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(ConfigError, match="softcap of llama without flash-attn"):
            te().check(replace(ON_GPU, softcap=30.0))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        with pytest.raises(ConfigError, match="packed documents on this GPU without flash-attn"):
            te().check(ON_GPU)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match="the attention sinks of llama"):
        te().check(replace(ON_GPU, sinks=True))


def test_transformer_engine_never_holds_all_scores(
    te_calls: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own fallback, [documents, heads, longest, longest] of scores, is off, and refused in a
    sentence: 128 GiB for 32 documents of 8,192 tokens.
    """
    module = importlib.import_module("automodel_lite.parts.kernels.te")
    assert os.environ["NVTE_UNFUSED_ATTN"] == "0"
    kernel = module.TransformerEngineAttention()
    with pytest.raises(ConfigError, match=r"head dims 512 / 512.*use attention=flex"):
        kernel.check(replace(ON_GPU, head_dim=512, value_head_dim=512))

    def none_fits(*args: Any, **options: Any) -> None:
        raise ValueError("No dot product attention backend is available for the provided inputs")

    monkeypatch.setattr(module.DotProductAttention, "__call__", none_fits)
    with pytest.raises(ConfigError, match=r"No dot product attention.*use attention=flex"):
        kernel(Q_THD, Q_THD, Q_THD, Segments(CU_Q, CU_Q, 5, 5), PLAIN)


def test_deterministic_kernels_of_hopper_need_flash_attn(
    te_calls: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's end at documents x heads x longest^2 = 2^30, which some batch of a run reaches."""
    module = importlib.import_module("automodel_lite.parts.kernels.te")
    kernel = module.TransformerEngineAttention()
    kernel.has_flash = False
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    call = Q_THD, Q_THD, Q_THD, Segments(CU_Q, CU_Q, 5, 5), PLAIN
    kernel(*call)  # as the start's probe, which is not deterministic
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ConfigError, match=r"training.deterministic without flash-attn"):
        kernel(*call)
    kernel.has_flash = True
    kernel(*call)


def test_te_without_the_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "automodel_lite.parts.kernels.te", raising=False)
    if "transformer_engine" in sys.modules or importlib.util.find_spec("transformer_engine"):
        pytest.skip("Transformer Engine is installed here")
    with pytest.raises(
        ConfigError, match=r"pip install --no-build-isolation 'automodel-lite\[te\]'"
    ):
        importlib.import_module("automodel_lite.parts.kernels.te")


@pytest.mark.parametrize("version", ["2.8.0", "2.20.2"], ids=["oldest", "newest"])
def test_transformer_engine_sources(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above; and it reads torch's setting of deterministic algorithms, as training.deterministic relies on."""
    archive = downloaded(f"transformer-engine=={version}", f"transformer_engine-{version}-*.whl")
    source = read_member(archive, "dot_product_attention/dot_product_attention.py")
    assert "or torch.are_deterministic_algorithms_enabled()" in source
    real = [
        parameters_of(source, "DotProductAttention", method) for method in ("__init__", "forward")
    ]
    calls = fake_te(monkeypatch, *real)
    kernel = importlib.import_module("automodel_lite.parts.kernels.te").TransformerEngineAttention()
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), AttentionOptions(0.25, window=7))
    kernel(Q_THD, Q_THD, Q_THD, Segments(CU_Q, CU_Q, 5, 5), PLAIN)
    assert [name for name, _ in calls] == ["init", "forward", "init", "forward"]
    if version == "2.20.2":
        for names, known in zip(real, (TE_INIT, TE_FORWARD)):
            assert set(known) <= set(names)
    sys.modules.pop("automodel_lite.parts.kernels.te", None)
    constants = read_member(archive, "transformer_engine/pytorch/constants.py")
    for mask in TE_MASKS:
        assert f'"{mask}"' in constants
