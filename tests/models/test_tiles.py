"""MLPs and norms a tile of tokens at a time: the numbers of the whole, and less that is held."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.config.schema import TrainingConfig
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import choose_tile, decoder_layers, recompute_layers, tile_layers, tokenwise_modules
from tests.attention.families import FAMILIES, build, documents, gradients, stream
from tests.attention.hybrids import ONE_OF_EACH_KIND, build_hybrid

BATCH = stream(documents([37, 5, 64, 1]))


def step(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    install(model, ReferenceAttention())
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(**BATCH.model_inputs()).logits[0].float()
    torch.nn.functional.cross_entropy(logits, BATCH.labels).backward()
    return gradients(model)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_has_the_gradients_of_whole_modules(family: str) -> None:
    """Tiles of 16 tokens, the last of them smaller; recomputed too, as they will be."""
    want = step(build(family))
    model = build(family)
    layers = decoder_layers(model)
    assert tile_layers(layers, 16) >= 2 * len(layers)  # norms, and an MLP unless it is a mixture
    recompute_layers(layers, "full", 2)
    got = step(model)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-5, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
def test_layers_that_mix_tokens_are_left_whole(family: str) -> None:
    model = build_hybrid(family)
    want = step(build_hybrid(family))
    tile_layers(decoder_layers(model), 16)
    got = step(model)
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}")


def test_an_mlp_is_one_tile_at_a_time() -> None:
    mlp = decoder_layers(build("llama"))[0].mlp
    seen: list[int] = []
    mlp.act_fn.register_forward_hook(lambda module, inputs, out: seen.append(out.shape[1]))
    tile_layers([torch.nn.ModuleList([mlp])], 16)
    mlp(torch.randn(1, 40, mlp.hidden_size, requires_grad=True)).sum().backward()
    assert seen == [16, 16, 8, 16, 16, 8]


def test_adapters_are_tiled_but_not_their_dropout() -> None:
    found = {}
    for dropout in (0.0, 0.1):
        adapter = LoraConfig(target_modules=["up_proj", "down_proj"], lora_dropout=dropout, init_lora_weights=False)
        torch.manual_seed(0)
        models = [get_peft_model(build("llama"), adapter).base_model.model for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        layer = decoder_layers(models[1])[0]
        found[dropout] = sum("MLP" in type(module).__name__ for module in tokenwise_modules(layer))
        if not dropout:
            tile_layers(decoder_layers(models[1]), 16)
            torch.testing.assert_close(step(models[1]), step(models[0]), rtol=1e-5, atol=1e-6)
    assert found == {0.0: 1, 0.1: 0}


def test_under_autocast_weights_get_fp32_sums() -> None:
    want, model = step(build("llama"), torch.bfloat16), build("llama")
    tile_layers(decoder_layers(model), 16)
    for name, grad in step(model, torch.bfloat16).items():
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, want[name], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("settings", "num_tokens", "tile"),
    [
        ({"activation_checkpointing": "none"}, 10**6, 0),
        ({"activation_checkpointing": "full"}, 32768, 0),
        ({"activation_checkpointing": "full"}, 10**6, 8192),
        ({"activation_checkpointing": "full", "fp8": "rowwise"}, 10**6, 0),
        ({"tile_tokens": 0, "activation_checkpointing": "full"}, 10**6, 0),
        ({"tile_tokens": 100}, 200, 100),
    ],
    ids=str,
)
def test_the_size_of_a_tile(settings: dict[str, object], num_tokens: int, tile: int) -> None:
    assert choose_tile(TrainingConfig(**settings), num_tokens) == tile


def test_tiles_and_fp8_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"training\.tile_tokens=64 would give each tile scales of its own"):
        choose_tile(TrainingConfig(tile_tokens=64, fp8="rowwise"), 10**6)
