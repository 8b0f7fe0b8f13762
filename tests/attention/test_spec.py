"""What a config asks of its kernel, which kernels can do it, and which one `auto` takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config

from automodel_lite.attention.interface import KernelByKind, choose_attention, install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.spec import AttentionSpec, attention_specs, layer_window, passes_sinks
from automodel_lite.errors import ConfigError
from automodel_lite.parts.kernels.varlen import VarlenAttention
from tests.attention.families import FAMILIES, documents, stream

ON_GPU = AttentionSpec("llama", torch.device("cuda"), torch.bfloat16, 128, 128)


@pytest.mark.parametrize(
    ("family", "want"),
    [
        ("llama", {"head_dim": 16, "value_head_dim": 16}),
        ("gemma2_softcap_window", {"softcap": 5.0}),
        ("gemma3_window", {"softcap": None}),
        ("gpt_oss_sinks_window", {"sinks": True}),
        ("deepseek_v3_latent", {"head_dim": 24, "value_head_dim": 16}),
    ],
)
def test_spec_of_a_family(family: str, want: dict[str, Any]) -> None:
    spec, *_ = attention_specs(FAMILIES[family](), "cpu", torch.float32)
    assert {key: getattr(spec, key) for key in want} == want


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("llama", (None, None), (None, None)),
        ("mistral_window", (16, None), (16, None)),
        ("gemma2_softcap_window", (16, None), (None, None)),
        ("gpt_oss_sinks_window", (16, None), (None, None)),
        ("llama4_chunks", (None, 16), (None, None)),
        ("qwen2", (None, None), (None, None)),  # its config has a window that it does not use
    ],
)
def test_windows_and_chunks_of_two_layers(family: str, first: Any, second: Any) -> None:
    config = FAMILIES[family]()
    assert (layer_window(config, 0), layer_window(config, 1)) == (first, second)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("deepseek_v4", "compressed_attention.* is not known to keep documents apart"),
    ],
)
def test_layers_that_cannot_be_packed(model_type: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        attention_specs(AutoConfig.for_model(model_type), "cpu", torch.float32)


def test_a_model_without_attention_needs_no_kernel() -> None:
    kernel, why = choose_attention(
        None, attention_specs(AutoConfig.for_model("mamba"), "cuda", torch.bfloat16)
    )
    assert (kernel.name, why) == ("thd_reference", "none: the model has no attention layers")


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "attention_dropout"),
        ("gpt2", "attn_pdrop"),
        ("gpt_bigcode", "attn_pdrop"),
        ("biogpt", "attention_probs_dropout_prob"),
    ],
)
def test_attention_dropout_is_refused_under_the_familys_own_key(family: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"set model\.config\.{key}=0\."):
        attention_specs(AutoConfig.for_model(family, **{key: 0.1}), "cpu", torch.float32)
    attention_specs(AutoConfig.for_model(family, **{key: 0.0}), "cpu", torch.float32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"device": torch.device("cpu")},
            "attention=varlen does not support device=cpu: .* use attention=reference",
        ),
        (
            {"dtype": torch.float32},
            r"does not support dtype=torch.float32: set training\.precision=bf16",
        ),
        ({"softcap": 50.0}, "the softcap of llama: use attention=flex"),
        ({"sinks": True}, "the attention sinks of llama: use attention=flex"),
        ({"head_dim": 192}, "head dims 192 / 128"),
        ({"head_dim": 20, "value_head_dim": 20}, "head dims 20 / 20"),
    ],
    ids=["cpu", "fp32", "softcap", "sinks", "latent", "odd head dim"],
)
def test_what_varlen_refuses(changes: dict[str, Any], words: str) -> None:
    VarlenAttention().check(ON_GPU)
    with pytest.raises(ConfigError, match=words):
        VarlenAttention().check(replace(ON_GPU, **changes))


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({}, "thd_varlen", "inside torch"),
        ({"device": torch.device("cpu")}, "thd_reference", "cpu"),
        ({"softcap": 50.0}, "thd_flex", "the softcap of llama"),
        ({"sinks": True}, "thd_flex", "the attention sinks of llama"),
        ({"dtype": torch.float32}, "thd_flex", "dtype=torch.float32"),
        ({"head_dim": 192}, "thd_flex", "head dims 192 / 128"),
    ],
    ids=["gpu", "cpu", "softcap", "sinks", "fp32", "latent"],
)
def test_auto_takes_the_best_and_says_why(changes: dict[str, Any], name: str, reason: str) -> None:
    kernel, why = choose_attention(None, [replace(ON_GPU, **changes)])
    assert kernel.name == name
    assert reason in why


def test_a_softcap_of_a_config_is_an_option_of_the_spec() -> None:
    specs = attention_specs(Gemma2Config(num_hidden_layers=2), "cuda", torch.bfloat16)
    kernel, why = choose_attention(None, specs)
    assert kernel.name == "thd_flex"
    assert why.startswith("flex: ")


GEMMA4: dict[str, Any] = {
    **{
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
    },
    **{
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    **{
        "sliding_window": 8,
        "num_kv_shared_layers": 0,
        "vocab_size": 128,
        "vocab_size_per_layer_input": 128,
    },
    **{
        "hidden_size_per_layer_input": 8,
        "intermediate_size": 32,
        "num_global_key_value_heads": 2,
        "pad_token_id": 0,
    },
}


def test_layers_of_two_kinds() -> None:
    specs = attention_specs(AutoConfig.for_model("gemma4_text", **GEMMA4), "cpu", torch.float32)
    assert [(kind.num_layers, kind.head_dim) for kind in specs] == [(2, 8), (1, 16)]


def test_auto_takes_a_kernel_for_each_kind_of_layer() -> None:
    wide = replace(ON_GPU, head_dim=512, value_head_dim=512, num_layers=5)
    kernel, why = choose_attention(None, [replace(ON_GPU, num_layers=25), wide])
    assert kernel.name == "thd_by_kind"
    assert "25 layers with head dim 128 on varlen" in why
    assert "5 layers with head dim 512 on flex" in why


class NarrowHeads(ReferenceAttention):
    """Cannot serve head dims over 8, and counts its calls."""

    name = "thd_narrow"

    def __init__(self) -> None:
        self.calls = 0

    def check(self, spec: AttentionSpec) -> None:
        if spec.head_dim > 8:
            raise ConfigError("too wide")

    def __call__(self, *args: Any) -> torch.Tensor:
        self.calls += 1
        assert args[0].shape[2] <= 8
        return super().__call__(*args)


def test_a_model_runs_on_a_kernel_for_each_kind_of_layer() -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma4_text", **GEMMA4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    docs = documents([9, 20])
    want = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids, _ in docs])
    narrow = NarrowHeads()
    install(model, KernelByKind({(8, 8): narrow, (16, 16): ReferenceAttention()}))
    got = model(**stream(docs).model_inputs()).logits[0]
    assert narrow.calls == 2
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "has"),
    [
        ("gpt_oss", True),
        ("granite_swa", True),
        ("mimo_v2_flash", True),
        ("flint", True),
        ("llama", False),
    ],
)
def test_sinks_are_found_in_the_code_of_the_family(family: str, has: bool) -> None:
    assert passes_sinks(AutoConfig.for_model(family)) == has
