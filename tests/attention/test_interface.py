"""What the adapter and the probe refuse, with the reason and the cure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
)

from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import check_packing_isolation
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.errors import ConfigError
from benchmarks.tiny_models import tiny_config
from tests.attention.families import BASE, build, documents, stream

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def started(config: PretrainedConfig) -> None:
    """What happens to every model at start-up."""
    model = AutoModelForCausalLM.from_config(config)
    install(model, ReferenceAttention())
    check_packing_isolation(model)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            lambda: tiny_config("cpmant"),
            "is not causal: a token moves the logits of those before it",
        ),
        (lambda: DogeConfig(**SMALL), "brings a mask of shape"),
    ],
    ids=["cpmant", "doge"],
)
def test_families_that_cannot_be_packed(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        started(config())


def test_dropout_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, attention_dropout=0.1)).train()
    install(model, ReferenceAttention())
    with pytest.raises(
        ConfigError, match=r"attention dropout 0.1: set model\.config\.attention_dropout=0"
    ):
        model(**stream(documents([4, 5], vocab=64)).model_inputs())


def test_a_mask_is_refused() -> None:
    model = build("llama")
    install(model, ReferenceAttention())
    with pytest.raises(
        ConfigError, match="packed attention, which takes its documents from ThdBatch"
    ):
        model(attention_mask=torch.ones(1, 1, 9, 9), **stream(documents([4, 5])).model_inputs())


def test_rows_are_refused() -> None:
    model = build("llama")
    install(model, ReferenceAttention())
    inputs = stream(documents([4, 5])).model_inputs()
    inputs |= {
        "input_ids": inputs["input_ids"].view(3, 3),
        "position_ids": inputs["position_ids"].view(3, 3),
    }
    with pytest.raises(ConfigError, match="got 3 rows: packed attention needs one stream"):
        model(**inputs)


def test_without_boundaries_it_is_refused() -> None:
    model = build("llama")
    install(model, ReferenceAttention())
    with pytest.raises(ConfigError, match="got no documents: call the model with ThdBatch"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


class RecordsDtypes(ReferenceAttention):
    """Writes down the dtypes that reach the kernel."""

    name = "thd_records"

    def __init__(self) -> None:
        self.seen: set[torch.dtype] = set()

    def __call__(self, q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
        self.seen |= {q.dtype, k.dtype, v.dtype}
        return super().__call__(q, k, v, *rest)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2_softcap_window", "deepseek_v3_latent"]
)
def test_autocast_reaches_the_kernel_in_one_dtype(family: str) -> None:
    """Rotary embeddings promote queries and keys to fp32 there, which FlashAttention does not take."""
    model, kernel = build(family), RecordsDtypes()
    install(model, kernel)
    with torch.autocast("cpu", torch.bfloat16):
        model(**stream(documents([5, 9])).model_inputs()).logits.sum().backward()
    assert kernel.seen == {torch.bfloat16}


def test_transformers_builds_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 16k tokens a mask would be 256 MiB; the adapter refuses any, and here none was asked to be allocated."""
    model = AutoModelForCausalLM.from_config(MistralConfig(**BASE, sliding_window=16))
    install(model, ReferenceAttention())
    seen: list[int] = []
    tensor_bool = torch.Tensor.bool
    monkeypatch.setattr(
        torch.Tensor, "bool", lambda self: seen.append(self.numel()) or tensor_bool(self)
    )
    model(**stream(documents([30] * 20)).model_inputs())
    assert max(seen, default=0) < 600 * 600


def test_peft_and_recomputation_pass_the_boundaries_on() -> None:
    model = build("llama")
    install(model, ReferenceAttention())
    batch = stream(documents([5, 9]))
    want = model(**batch.model_inputs()).logits
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got = model(**batch.model_inputs()).logits
    assert torch.equal(got, want)
    got.sum().backward()


def test_the_names_of_the_kernels_avoid_transformers_own_checks() -> None:
    from automodel_lite.parts.kernels.flex import FlexAttention
    from automodel_lite.parts.kernels.varlen import VarlenAttention

    for name in (
        ReferenceAttention.name,
        VarlenAttention.name,
        FlexAttention.name,
        "thd_fa2",
        "thd_te",
    ):
        assert not any(word in name for word in ("sdpa", "flash", "flex_attention"))
    assert isinstance(ReferenceAttention().check(_spec()), type(None))


def _spec() -> AttentionSpec:
    return AttentionSpec("llama", torch.device("cpu"), torch.float32, 16, 16)


def test_transformers_is_new_enough() -> None:
    assert int(transformers.__version__.split(".")[0]) >= 5
