import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from automodel_lite.models.flops import model_size, step_flops
from automodel_lite.models.lora import Lora

TOKENS = 48


def llama(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )


def counted(model: LlamaForCausalLM) -> int:
    """What torch counts in a forward and backward pass of one document; eager attention computes all pairs."""
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(TOKENS)[None], use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


def test_full_training_agrees_with_torchs_own_counter():
    config = llama(2)
    flops = step_flops(config, model_size(config), num_adapter_weights=None)
    # torch computes q @ k for all T x T pairs, and the gradient of the weights alone where the input needs none
    assert flops.of(TOKENS, TOKENS, TOKENS * TOKENS) == pytest.approx(counted(LlamaForCausalLM(config)), rel=0.01)


def test_lora_counts_no_gradient_of_frozen_weights():
    config = llama(8)
    model = LlamaForCausalLM(config)
    Lora(r=4).adapt(model, "base")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    flops = step_flops(config, model_size(config), trained)
    assert flops.of(TOKENS, TOKENS, TOKENS * TOKENS) == pytest.approx(counted(model), rel=0.05)
    full = step_flops(config, model_size(config), None)
    assert flops.per_token < 0.9 * full.per_token


def test_pairs_are_those_inside_of_documents():
    config = llama(2)
    flops = step_flops(config, model_size(config), None)
    assert flops.attention.pairs(np.array([3, 2])).tolist() == [6.0, 3.0]
    assert flops.attention.per_pair == 12 * 2 * 4 * 8


@pytest.mark.parametrize(
    ("config", "billions", "visited"),
    [
        pytest.param(
            {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "intermediate_size": 14336},
            8.03,
            6.98,
            id="llama-3.1-8b",
        ),
        pytest.param({"model_type": "mixtral"}, 46.70, 12.62, id="mixtral-8x7b"),
    ],
)
def test_sizes_of_known_models(config: dict, billions: float, visited: float):
    """Mixtral has 46.7 B parameters; a token visits 12.9 B, of which 0.26 B are the embedding and the head."""
    known: PreTrainedConfig = AutoConfig.for_model(**config)
    size = model_size(known)
    assert size.parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert size.layer_weights / 1e9 == pytest.approx(visited, abs=0.01)
