"""Which layers adapters go beside, in mixtures of experts, state spaces and composites."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.errors import ConfigError
from automodel_lite.parts.adapters.adapter import load_adapted
from automodel_lite.parts.adapters.lora import Lora
from automodel_lite.parts.adapters.targets import lora_targets
from benchmarks.tiny_models import tiny_model

pytestmark = pytest.mark.numbers

IDS = torch.tensor([[5, 9, 3, 7, 1, 2]])
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
MLP = ["down_proj", "gate_proj", "up_proj"]
LATENT = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]
JETMOE = [
    f"{block}.{name}_linear.weight" for block in ("experts", "mlp") for name in ("input", "output")
]
FUSED = ["experts.down_proj", "experts.gate_up_proj"]


def weights(*blocks: str) -> list[str]:
    return sorted(f"{block}.{name}.weight" for block in blocks for name in MLP)


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("family", "modules", "parameters", "experts"),
    [
        pytest.param("qwen3_moe", ATTENTION, [], FUSED, id="qwen3_moe: every MLP is routed"),
        pytest.param(
            "qwen2_moe",
            ATTENTION,
            weights("shared_expert"),
            FUSED,
            id="qwen2_moe: shared experts too",
        ),
        pytest.param(
            "deepseek_v3",
            LATENT,
            weights("mlp", "shared_experts"),
            FUSED,
            id="deepseek_v3: dense ones too",
        ),
        pytest.param("gpt_oss", ATTENTION, [], FUSED, id="gpt_oss"),
        pytest.param("jetmoe", ["kv_proj"], [], JETMOE, id="jetmoe: experts of attention too"),
        pytest.param(
            "falcon_h1",
            sorted([*ATTENTION, *MLP, "in_proj"]),
            [],
            [],
            id="falcon_h1: past no kernel",
        ),
        pytest.param("mamba", ["in_proj", "x_proj"], [], [], id="mamba: past no kernel"),
        pytest.param("llama", sorted(ATTENTION + MLP), [], [], id="llama"),
    ],
)
def test_targets(
    family: str, modules: list[str], parameters: list[str], experts: list[str]
) -> None:
    model = tiny_model(family)
    assert lora_targets(model, "all-linear", experts=False) == (modules, parameters)
    if not experts:
        with pytest.raises(ConfigError, match=r"peft.experts=true: .* has no experts"):
            lora_targets(model, "all-linear", experts=True)
        return
    more = lora_targets(model, "all-linear", experts=True)
    assert (more[0], sorted(more[1])) == (modules, sorted(parameters + experts))


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "glm4_moe", "deepseek_v3", "longcat_flash", "granitemoe", "dbrx"]
)
def test_no_router_is_adapted_nor_any_expert_unasked(family: str) -> None:
    model = tiny_model(family)
    Lora(r=2).adapt(model, "base")
    adapted = {name.split(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted
    assert not [
        name for name in adapted if "router" in name or name.endswith(".gate") or ".experts" in name
    ]
    if family in ("glm4_moe", "deepseek_v3"):
        assert "model.layers.1.mlp.shared_experts.gate_proj" in adapted


@pytest.mark.same_on_every_cpu
def test_named_layers_are_those_of_the_language_model() -> None:
    assert lora_targets(tiny_model("llama"), ["q_proj", "lm_head"], experts=False)[0] == [
        "lm_head",
        "q_proj",
    ]
    with pytest.raises(
        ConfigError, match=r"peft\.target_modules=\['gate'\]: no layer .* named gate"
    ):
        lora_targets(tiny_model("glm4_moe"), ["gate"], experts=False)


# ten times what three instruction sets show: the grouped product of experts has no fp64
TEN_TIMES = {"atol": 2e-4, "rtol": 2e-4}


def trained_a_little(model: PreTrainedModel) -> None:
    """A fresh adapter adds nothing: B is zero."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_adapted_experts_learn_are_saved_and_merged(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "base")
    model = tiny_model(family)
    before = model(IDS, use_cache=False).logits
    adapter = Lora(r=2, experts=True).adapt(model, str(tmp_path / "base"))
    assert "experts" in adapter.description
    torch.testing.assert_close(model(IDS, use_cache=False).logits, before)
    trained_a_little(model)
    adapted = model(IDS, use_cache=False).logits
    adapted.sum().backward()
    of_experts = [
        p.grad for name, p in model.named_parameters() if ".experts." in name and p.requires_grad
    ]
    assert len(of_experts) >= 4
    assert all(grad is not None and grad.abs().max() > 0 for grad in of_experts)
    trained = {
        name: value.detach() for name, value in model.named_parameters() if value.requires_grad
    }
    adapter.save(tmp_path / "adapter", trained)
    assert len(load_file(tmp_path / "adapter/adapter_model.safetensors")) == len(trained)
    again = load_adapted(str(tmp_path / "adapter"), torch.float32).eval()
    torch.testing.assert_close(again(IDS, use_cache=False).logits, adapted, **TEN_TIMES)
    adapter.merge()
    torch.testing.assert_close(model(IDS, use_cache=False).logits, adapted, **TEN_TIMES)
    assert model.state_dict().keys() == tiny_model(family).state_dict().keys()


@pytest.mark.same_on_every_cpu
def test_fused_experts_know_no_dropout() -> None:
    with pytest.raises(
        ConfigError, match=r"adapts experts\.down_proj of this mixture of experts as a weight"
    ):
        Lora(experts=True, dropout=0.1).adapt(tiny_model("qwen3_moe"), "base")


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ("all-linear", ["language_model"]),
        (["q_proj"], ["language_model"]),
        (["qkv"], ["visual"]),
        (["q_proj", "visual.*.linear_fc1"], ["language_model", "visual"]),
    ],
    ids=str,
)
def test_towers_are_adapted_where_they_are_named(
    wanted: str | list[str], places: list[str]
) -> None:
    model = tiny_model("qwen3_vl")
    modules, _ = lora_targets(model, wanted, False)
    names = [name for name, _ in model.named_modules()]
    adapted = [name for name in names if any(f".{name}".endswith(f".{end}") for end in modules)]
    parts = {part for name in adapted for part in name.split(".")}
    assert sorted(parts & {"language_model", "visual"}) == places


def test_an_encoder_that_is_trained_whole_keeps_its_own_attention() -> None:
    """Its copy has another config, by which transformers took it for a part of the language model."""
    lm = tiny_model("gemma3")
    Lora(modules_to_save=["vision_tower"]).adapt(lm, "base")
    install(lm, ReferenceAttention())
    used = {
        name: module.config._attn_implementation
        for name, module in lm.named_modules()
        if isinstance(module, PreTrainedModel) and "modules_to_save" in name
    }
    assert used
    assert set(used.values()) == {"eager"}


@pytest.mark.same_on_every_cpu
def test_a_name_that_towers_have_too_is_that_of_the_language_model() -> None:
    model = tiny_model("gemma3")
    modules, _ = lora_targets(model, ["q_proj"], False)
    assert all("vision" not in name for name in modules)
    names = [name for name, _ in model.named_modules() if name.endswith("q_proj")]
    assert any("vision" in name for name in names)
    adapted = [name for name in names if any(f".{name}".endswith(f".{end}") for end in modules)]
    assert all("vision" not in name for name in adapted)


def test_adapters_of_layers_that_share_a_weight_are_not_merged_into_it() -> None:
    lm = tiny_model("zamba")
    adapter = Lora(r=2).adapt(lm, "base")
    with pytest.raises(ConfigError, match=r"^7 weights are shared by several layers"):
        adapter.merge()


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("family", ["mamba", "jamba", "falcon_mamba"])
def test_every_adapter_is_reached(family: str) -> None:
    lm = tiny_model(family)
    Lora(r=2).adapt(lm, "base")
    torch.manual_seed(0)
    trained = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    for weight in trained.values():
        weight.data.normal_(0, 0.1)
    lm(input_ids=IDS, use_cache=False).logits.logsumexp(-1).sum().backward()
    assert [name for name, p in trained.items() if p.grad is None or not p.grad.any()] == []


@pytest.mark.same_on_every_cpu
def test_what_kernels_read_is_not_adapted_in_a_composite() -> None:
    """Nemotron Omni's language model is Nemotron-H, whose kernel multiplies by the plain weight."""
    assert "out_proj" not in lora_targets(tiny_model("nemotron_h_omni"), "all-linear", False)[0]
    with pytest.raises(ConfigError, match=r"the experts of DbrxForCausalLM are one matrix"):
        lora_targets(tiny_model("dbrx"), "all-linear", experts=True)


@pytest.mark.parametrize("drops", [False, True], ids=["whole", "in part"])
def test_an_adapter_is_read_as_a_whole(drops: bool, tmp_path: Path) -> None:
    """Of Laguna peft loses shared experts, with a warning that nobody saw."""
    tiny_model("laguna").save_pretrained(tmp_path / "base")
    model = tiny_model("laguna")
    adapter = Lora(r=2).adapt(model, str(tmp_path / "base"))
    trained_a_little(model)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if drops:
        del trained[min(trained)]
    adapter.save(tmp_path / "adapter", trained)
    if drops:
        with pytest.raises(ConfigError, match=r"is not all read .*: it was made for another model"):
            load_adapted(str(tmp_path / "adapter"), torch.float32)
        return
    again = load_adapted(str(tmp_path / "adapter"), torch.float32)(IDS, use_cache=False).logits
    torch.testing.assert_close(again, model(IDS, use_cache=False).logits)
