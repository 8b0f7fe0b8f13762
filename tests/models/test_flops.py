import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from automodel_lite.attention.spec import layer_shapes
from automodel_lite.models.flops import cost_model, model_size, size_of, step_flops, visited_weights
from automodel_lite.models.freezing import freeze_named
from automodel_lite.parts.adapters.lora import Lora
from benchmarks.tiny_models import tiny_model

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
    assert flops.of(TOKENS, TOKENS, TOKENS * TOKENS) == pytest.approx(
        counted(LlamaForCausalLM(config)), rel=0.01
    )


@pytest.mark.parametrize("family", ["diffllama", "ernie4_5_vl_moe", "hrm_text"])
def test_families_that_compute_more_or_less_than_their_weights(family: str) -> None:
    """Attention twice in each layer, experts that text does not meet, layers that are passed several times."""
    model = tiny_model(family)
    model.config.get_text_config()._experts_implementation = "eager"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(3, 10)[None], use_cache=False)
    forward = step_flops(model.config, model_size(model.config), None).of(7, 7, 7 * 7) / 3
    assert forward == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_lora_counts_no_gradient_of_frozen_weights():
    config = llama(8)
    model = LlamaForCausalLM(config)
    Lora(r=4).adapt(model, "base")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    flops = step_flops(config, model_size(config), trained)
    assert flops.of(TOKENS, TOKENS, TOKENS * TOKENS) == pytest.approx(counted(model), rel=0.05)
    full = step_flops(config, model_size(config), None)
    assert flops.per_token < 0.9 * full.per_token


def test_a_teacher_costs_its_forward_pass():
    config, wide = llama(2), llama(4)
    flops = step_flops(config, model_size(config), None)
    with_teacher = flops.with_teacher(step_flops(wide, model_size(wide), None))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        LlamaForCausalLM(wide)(torch.arange(TOKENS)[None], use_cache=False)
    more = with_teacher.of(TOKENS, TOKENS, TOKENS * TOKENS) - flops.of(TOKENS, TOKENS, TOKENS**2)
    # some versions count the table of rotations as a product
    assert more == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert with_teacher.attention.per_token > flops.attention.per_token


def test_pairs_are_those_inside_of_documents():
    config = llama(2)
    flops = step_flops(config, model_size(config), None)
    assert flops.attention.pairs(np.array([3, 2])).tolist() == [6.0, 3.0]
    assert flops.attention.per_pair == 12 * 2 * 4 * 8


@pytest.mark.parametrize(
    ("config", "billions", "visited"),
    [
        pytest.param(
            {
                "model_type": "llama",
                "vocab_size": 128256,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
            },
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


@pytest.mark.parametrize(
    ("config", "billions", "per_pair"),
    [
        pytest.param(
            {"model_type": "gemma3"},
            2.02,
            26 * 12 * 8 * 256,
            id="the layers of Gemma 3's language model",
        ),
        pytest.param(
            {"model_type": "gemma4_text"},
            2.44,
            12 * 8 * (25 * 256 + 5 * 512),
            id="two head dims in Gemma 4",
        ),
        pytest.param(
            {"model_type": "gemma3n_text"},
            3.90,
            35 * 12 * 8 * 256,
            id="a list of MLP widths in Gemma 3n",
        ),
        pytest.param(
            {"model_type": "deepseek_v3"},
            35.70,
            61 * 6 * 128 * (192 + 128),
            id="wide keys, 8 of 256 experts",
        ),
        pytest.param(
            {"model_type": "qwen3_5"}, 6.92, 8 * 12 * 16 * 256, id="one layer of four attends"
        ),
        pytest.param({"model_type": "mamba"}, 0.12, 0, id="no layer attends"),
    ],
)
def test_costs_of_layers_that_differ(config: dict, billions: float, per_pair: float):
    known: PreTrainedConfig = AutoConfig.for_model(**config)
    assert model_size(known).layer_weights / 1e9 == pytest.approx(billions, abs=0.01)
    assert cost_model(known).per_pair == per_pair


def test_towers_of_a_composite_are_counted_apart():
    size = model_size(AutoConfig.for_model("gemma3"))
    of_text = model_size(AutoConfig.for_model("gemma3").get_text_config())
    assert size.towers > 0.05e9
    assert (size.layer_weights, size.num_layers) == (of_text.layer_weights, 26)
    assert size.parameters - size.towers == of_text.parameters


@pytest.mark.parametrize(
    ("family", "state"),
    [
        ("qwen3_next", 32 * 128 * 128),
        ("bamba", 128 * 64 * 256),
        ("jamba", 2 * 4096 * 16),
        ("lfm2", 0),
        ("llama", 0),
    ],
)
def test_mixers_cost_their_state_for_every_token(family: str, state: int):
    config = AutoConfig.for_model(family)
    num_mixers = sum(not layer.num_heads for layer in layer_shapes(config))
    size = model_size(config)
    assert (
        cost_model(config).per_token
        == 6.0 * (size.layer_weights + size.head_weights) + 18.0 * state * num_mixers
    )


@pytest.mark.parametrize("family", ["dbrx", "jetmoe", "qwen3_moe"])
def test_experts_of_any_name_and_shape_count_as_they_are_visited(family: str):
    lm = tiny_model(family)
    lm.set_experts_implementation("eager")  # computes no expert that no token is sent to
    flops = step_flops(lm.config, size_of(lm), None)
    assert flops.of(TOKENS, TOKENS, TOKENS * TOKENS) == pytest.approx(counted(lm), rel=0.01)


def test_frozen_experts_and_their_adapters_count_as_they_are_visited():
    lm = tiny_model("qwen3_moe")  # 2 of 6 experts
    experts = 2 * 3 * 32 * 24 * 2  # visited, in two layers
    full = step_flops(lm.config, size_of(lm), None)
    freeze_named(lm, ["experts"])
    frozen = full.without_frozen(lm)
    assert full.per_token - frozen.per_token == pytest.approx(2 * experts)
    lm = tiny_model("qwen3_moe")
    Lora(r=2, target_modules=["q_proj"], experts=True).adapt(lm, "base")
    of_experts = 2 * 2 * 2 * ((32 + 48) + (24 + 32))
    assert visited_weights(lm, only_trained=True) == 2 * 2 * (32 + 32) + of_experts
