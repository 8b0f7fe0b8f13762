import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import check_packing_isolation
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import cast_weights
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.adapters import lora
from automodel_lite.parts.adapters.adapter import load_adapted
from automodel_lite.parts.adapters.frozen_rows import frozen_rows_note
from automodel_lite.parts.adapters.lora import Lora
from automodel_lite.parts.optimizers.adamw import adamw
from automodel_lite.thd import stream_of
from recipes import export_hf
from tests.data.templates import MARKED, byte_tokenizer
from tests.models.test_policy import save_model
from tests.runs import losses, train

pytestmark = pytest.mark.numbers

IDS = torch.tensor([[5, 9, 3, 7, 1, 2]])


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def give_the_adapter_weight(model: PreTrainedModel) -> None:
    """A fresh adapter adds nothing: B is zero."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)


@pytest.mark.same_on_every_cpu
def test_an_adapter_that_is_not_finite_is_named(tmp_path: Path) -> None:
    wrapped = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"]))
    next(p for p in wrapped.parameters() if p.requires_grad).data[0, 0] = float("nan")
    wrapped.save_pretrained(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"peft.adapter=.*: .*lora_A.weight holds values that are not finite"
    ):
        Lora(adapter=str(tmp_path)).adapt(tiny_llama(), "base")


@pytest.mark.same_on_every_cpu
def test_an_adapter_of_another_base_names_its_own(tmp_path: Path) -> None:
    """It named the model that it was given, which peft had written into the settings."""
    first = tiny_llama()
    first.name_or_path = "models/first"
    wrapped = peft.get_peft_model(first, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    wrapped.save_pretrained(str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)  # peft's, of a base under another name
        second = tiny_llama()
        second.name_or_path = "/abs/models/first"
        Lora(adapter=str(tmp_path)).adapt(second, "/abs/models/first")
    wider = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    )
    with pytest.raises(
        ConfigError, match=r"a shape differs: take the base that it was made for, models/first\.$"
    ):
        Lora(adapter=str(tmp_path)).adapt(wider, "models/wider")


def _of_another_kind(folder: Path) -> None:
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "IA3"}))


def _with(key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return change


DAMAGES = {
    "no settings": (lambda f: (f / "adapter_config.json").unlink(), r"cannot be read \(Can't find"),
    "a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "config.json is damaged"),
    "no weights": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        r"cannot be read \(No such",
    ),
    "cut weights": (
        lambda f: os.truncate(f / "adapter_model.safetensors", 100),
        r"cannot be read \(Error while deserializing header",
    ),
    "settings without a base": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "does not fit model.pretrained=base",
    ),
    "another kind": (
        _of_another_kind,
        "is one of IA3, and only those of LoRA are continued: merge",
    ),
    "a wrong type": (
        _with("rank_pattern", ""),
        "adapter_config.json cannot be used .* no attribute 'keys'",
    ),
    "layers twice": (
        _with("layer_replication", [[0, 1], [0, 2]]),
        "with layer_replication=.* begin a new adapter, without peft.adapter",
    ),
    "a number for layers": (
        _with("layer_replication", True),
        r"adapter_config.json cannot be used \('bool' object",
    ),
}


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("case", DAMAGES)
def test_an_adapter_that_is_not_whole_is_told(case: str, tmp_path: Path) -> None:
    damage, sentence = DAMAGES[case]
    wrapped = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"]))
    wrapped.save_pretrained(str(tmp_path))
    damage(tmp_path)
    with pytest.raises(ConfigError, match=rf"^peft.adapter={tmp_path}.*{sentence}"):
        Lora(adapter=str(tmp_path)).adapt(tiny_llama(), "base")


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("setting", "own"),
    [({"dropout": 0.1}, "0.0"), ({"r": 3}, "8"), ({"use_dora": True}, "False")],
    ids=["dropout", "r", "dora"],
)
def test_settings_that_a_continued_adapter_has_otherwise_are_refused(
    setting: dict[str, Any], own: str, tmp_path: Path
) -> None:
    """They were not looked at, and the adapter's own counted without a word."""
    kept = peft.LoraConfig(r=8, lora_alpha=8, target_modules=["q_proj"])
    peft.get_peft_model(tiny_llama(), kept).save_pretrained(str(tmp_path))
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError, match=rf"^peft.{name}={value}: the adapter .* has {own}"):
        Lora(adapter=str(tmp_path), **setting).adapt(tiny_llama(), "base")
    Lora(adapter=str(tmp_path), r=8).adapt(tiny_llama(), "base")


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_merging_keeps_the_adapters_logits(use_dora: bool):
    model = tiny_llama()
    before = model(IDS, use_cache=False).logits
    adapter = Lora(r=4, use_dora=use_dora).adapt(model, "base")
    torch.testing.assert_close(model(IDS, use_cache=False).logits, before)
    give_the_adapter_weight(model)
    adapted = model(IDS, use_cache=False).logits
    assert (adapted - before).abs().max() > 0.01
    adapter.merge()
    torch.testing.assert_close(model(IDS, use_cache=False).logits, adapted, atol=1e-5, rtol=1e-5)
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in tiny_llama().named_parameters()
    }


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_inputs_of_adapters_are_not_cast_to_fp32(use_dora: bool):
    """bf16 inputs stay as they are, and gradients are those of peft's own casts."""
    gradients = []
    for is_peft in (False, True):
        model = tiny_llama()
        Lora(r=4, use_dora=use_dora).adapt(model, "base")
        torch.manual_seed(1)
        give_the_adapter_weight(model)
        cast_weights(model, torch.bfloat16, are_trained=False)
        dtypes: set[torch.dtype] = set()
        for name, module in model.named_modules():
            if name.endswith("o_proj.lora_A.default"):
                module.register_forward_pre_hook(
                    lambda _, args, dtypes=dtypes: dtypes.add(args[0].dtype)
                )
            if isinstance(module, BaseTunerLayer):
                module.cast_input_dtype_enabled = is_peft or module.cast_input_dtype_enabled
        with torch.autocast("cpu", torch.bfloat16):
            model(IDS, use_cache=False).logits.float().square().sum().backward()
        assert (torch.bfloat16 in dtypes) == (not is_peft)
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    ours, pefts = gradients
    assert (ours - pefts).norm() < 0.02 * pefts.norm()  # bf16 rounds either way


@pytest.mark.same_on_every_cpu
def test_an_adapter_of_the_embedding_is_trained_and_one_of_tied_weights_refused():
    """The first ended in a traceback of the isolation probe, the second in one when it was merged."""
    model = tiny_llama()
    install(model, ReferenceAttention())
    Lora(r=4, target_modules=["embed_tokens", "lm_head"]).adapt(model, "base")
    give_the_adapter_weight(model)
    check_packing_isolation(model)
    for end in ("embed_tokens", "lm_head"):
        tied = tiny_llama()
        tied.lm_head.weight = tied.model.embed_tokens.weight
        with pytest.raises(ConfigError, match=f"named {end} .embedding and head share a weight"):
            Lora(r=4, target_modules=["q_proj", end]).adapt(tied, "base")


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_a_saved_adapter_of_tied_weights_is_not_continued(end: str, tmp_path: Path):
    """Trained and saved it was itself; merged it changed the other end, too."""
    wrapped = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj", end]))
    wrapped.save_pretrained(str(tmp_path), save_embedding_layers=False)
    Lora(adapter=str(tmp_path)).adapt(tiny_llama(), "base")
    tied = tiny_llama()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    with pytest.raises(ConfigError, match="embedding and head share a weight"):
        Lora(adapter=str(tmp_path)).adapt(tied, "base")
    wrapped.save_pretrained(str(tmp_path))  # with what it adapts, as peft saves it without a word
    with pytest.raises(ConfigError, match=rf"holds \S+{end}.base_layer.weight as a whole"):
        Lora(adapter=str(tmp_path)).adapt(tiny_llama(), "base")


def test_saved_adapter_loads_in_plain_peft(tmp_path: Path):
    tiny_llama().save_pretrained(tmp_path / "base")
    model = tiny_llama()
    adapter = Lora(r=4, modules_to_save=["embed_tokens"]).adapt(model, str(tmp_path / "base"))
    give_the_adapter_weight(model)
    weights = {name: value for name, value in model.state_dict().items()}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapter.save(tmp_path / "adapter", {name: weights[name] for name in trained})
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(tmp_path / "base")


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_a_saved_adapter_answers_as_it_was_trained(use_dora: bool, tmp_path: Path):
    tiny_llama().save_pretrained(tmp_path / "base")
    model = tiny_llama()
    adapter = Lora(r=4, use_dora=use_dora).adapt(model, str(tmp_path / "base"))
    give_the_adapter_weight(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.5)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapter.save(
        tmp_path / "adapter",
        {name: value for name, value in model.state_dict().items() if name in trained},
    )
    loaded = load_adapted(str(tmp_path / "adapter"), torch.float32)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.same_on_every_cpu
def test_an_adapter_that_does_not_read_back_is_no_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A disk that takes bytes and gives others, or fewer, without an error."""
    model = tiny_llama()
    adapter = Lora(r=4).adapt(model, "base")
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def flips(weights: dict[str, torch.Tensor], path: str, **more: Any) -> None:
        changed = {name: value.clone() for name, value in weights.items()}
        next(iter(changed.values())).view(torch.int32)[0, 0] ^= 1
        save_file(changed, path, **more)

    monkeypatch.setattr("peft.peft_model.safe_save_file", flips)
    with pytest.raises(RuntimeError, match=r"exported weight \S+lora_\S+ differs from the trained"):
        adapter.save(tmp_path, trained)


def test_adapters_train_and_frozen_weights_are_cast():
    model = tiny_llama()
    Lora(r=4, target_modules=["q_proj", "v_proj"]).adapt(model, "base")
    cast_weights(model, torch.bfloat16, are_trained=False)
    assert all(
        "lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad
    )
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * (
        4 * 16 + 16 * 4 + 4 * 16 + 8 * 4
    )


def test_a_fresh_adapter_on_the_head_takes_the_plain_loss():
    model = tiny_llama()
    install(model, ReferenceAttention())
    assert LossModel(model, FusedLinearCrossEntropy()).probe(stream_of(IDS, "cpu"))[1]
    Lora(r=4, target_modules=["lm_head"]).adapt(model, "base")
    assert not LossModel(model, FusedLinearCrossEntropy()).probe(stream_of(IDS, "cpu"))[1]


@pytest.mark.same_on_every_cpu
def test_a_module_is_named_by_its_path():
    model = tiny_llama()
    Lora(r=4, modules_to_save=["model.embed_tokens"]).adapt(model, "base")
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("embed_tokens.modules_to_save" in name for name in trained)
    with pytest.raises(ConfigError, match="the model has no module tokens"):
        Lora(modules_to_save=["tokens"]).adapt(tiny_llama(), "base")


@pytest.mark.parametrize(
    "init",
    ["pissa", "olora", "pissa_niter_4"],
)
def test_an_adapter_that_changes_its_base_is_refused(init: str, tmp_path: Path):
    """They ended in a traceback; merged by peft, they are trained further."""
    tiny_llama().save_pretrained(tmp_path / "base")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wrapped = peft.get_peft_model(
        made,
        peft.LoraConfig(
            r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=init
        ),
    )
    give_the_adapter_weight(wrapped)
    wrapped.save_pretrained(str(tmp_path / "adapter"))
    cure = r"PeftModel\.from_pretrained\(base, adapter\)\.merge_and_unload\(\)\.save_pretrained"
    with pytest.raises(ConfigError, match=f"made with init_lora_weights={init}, for .*: .*{cure}"):
        Lora(adapter=str(tmp_path / "adapter")).adapt(tiny_llama(), "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    want = loaded(IDS, use_cache=False).logits
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    Lora(r=4).adapt(merged, str(tmp_path / "merged"))
    torch.testing.assert_close(merged(IDS, use_cache=False).logits, want, atol=1e-5, rtol=1e-5)


@pytest.mark.same_on_every_cpu
def test_biases_of_an_adapter_are_not_merged_into_layers_without(tmp_path: Path):
    """It was trained, and its export ended in a traceback."""
    wrapped = peft.get_peft_model(
        tiny_llama(), peft.LoraConfig(target_modules=["q_proj"], lora_bias=True)
    )
    wrapped.save_pretrained(str(tmp_path))
    adapter = Lora(adapter=str(tmp_path)).adapt(tiny_llama(), "base")
    with pytest.raises(
        ConfigError, match=r"has biases \(lora_bias=true\) .* use the run's adapter/"
    ):
        adapter.merge()


@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
def test_rows_of_single_tokens_are_trained(is_tied: bool):
    """Of the embedding and of the head; merged, no other row differs."""
    model = tiny_llama()
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
        model.config.tie_word_embeddings = True
    before = model.lm_head.weight.detach().clone(), model.model.embed_tokens.weight.detach().clone()
    adapter = Lora(r=4, trainable_tokens=[5, 7]).adapt(model, "base", byte_tokenizer(MARKED))
    assert ", rows of 2 tokens: " in adapter.description
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens" in name:
                assert parameter.requires_grad
                assert parameter.shape == (2, 16)
                parameter += 1.0
    adapted = model(IDS, use_cache=False).logits
    adapter.merge()
    torch.testing.assert_close(model(IDS, use_cache=False).logits, adapted)
    for end, own in zip((model.lm_head, model.model.embed_tokens), before):
        assert (end.weight - own).abs().sum(1).nonzero().flatten().tolist() == [5, 7]


@pytest.mark.same_on_every_cpu
def test_frozen_rows_that_nobody_has_trained_are_noted():
    """New tokens could hardly be said, and a base model never stopped, without a word."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(MARKED)
    known = tokenizer.get_vocab()
    tokenizer.add_tokens(["<call>"])
    settings = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4}

    def noted(**options: Any) -> str:
        lm = LlamaForCausalLM(LlamaConfig(**settings, **layers))
        lm.lm_head.weight.data[tokenizer.get_vocab()["<|end|>"]] = 0
        Lora(r=4, **options).adapt(lm, "base", tokenizer)
        return frozen_rows_note(lm, tokenizer, known)

    note = noted()
    assert note.startswith(
        "NOTE: nobody has trained the rows of <call>, <|end|> in the embedding and "
    )
    assert "embedding and the head, which are frozen" in note
    # both cures, as they are typed
    tokens, modules = re.findall(r"='(\[.*?\])'", note)
    assert noted(trainable_tokens=json.loads(tokens)) == ""
    assert modules == "[embed_tokens, lm_head]"
    assert noted(modules_to_save=["embed_tokens", "lm_head"]) == ""
    assert "of <|end|> in the head, which" in noted(trainable_tokens=["<call>"])


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_rates_of_lora_plus_are_those_of_peft(use_dora: bool):
    model = tiny_llama()
    adapter = Lora(r=4, loraplus_lr_ratio=16.0, use_dora=use_dora)
    wrapped = adapter.adapt(model, "base").wrapped
    optimizer = adamw(model, lr=1e-3)
    adapter.set_rates(optimizer, model)
    wanted = create_loraplus_optimizer(wrapped, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)
    found, theirs = (
        {p: group["lr"] for group in one.param_groups for p in group["params"]}
        for one in (optimizer, wanted)
    )
    assert found == theirs
    assert set(found.values()) == {1e-3, 1.6e-2}


@pytest.mark.same_on_every_cpu
def test_ranks_and_alphas_of_single_layers():
    model = tiny_llama()
    adapter = Lora(
        r=4,
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"layers.0.self_attn.q_proj": 2},
        alpha_pattern={"v_proj": 8},
    ).adapt(model, "base")
    assert (
        "r 4, alpha 32 on q_proj, v_proj, r 2 on layers.0.self_attn.q_proj" in adapter.description
    )
    first, second = (layer.self_attn for layer in model.model.layers)
    assert [x.r["default"] for x in (first.q_proj, second.q_proj, first.v_proj)] == [2, 4, 4]
    assert [x.scaling["default"] for x in (first.q_proj, first.v_proj)] == [16.0, 2.0]
    with pytest.raises(
        ConfigError, match=r"rank_pattern={'k_proj': 2}: no layer .* named k_proj; "
    ):
        Lora(target_modules=["q_proj"], rank_pattern={"k_proj": 2}).adapt(tiny_llama(), "base")


@pytest.mark.system
def test_lora_plus_resumes_at_its_rates(tmp_path: Path):
    """Stopped and continued, the second matrices learn as fast as before."""
    folder = save_model("llama", tmp_path / "model")
    rows = [
        {"input_ids": [7, 8, 5, 6, 9, 5 + i], "labels": [-100] * 4 + [5 + i, -100]}
        for i in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = [f"model.pretrained={folder}", f"dataset.path={tmp_path}/rows.jsonl", "peft=lora"]
    chosen += ["training.num_epochs=null", "training.global_batch_size=1", "optimizer.lr=1e-3"]
    chosen += ["packed_sequence.packed_sequence_size=128", "training.num_threads=1", "name=x"]
    chosen += [
        "peft.loraplus_lr_ratio=16",
        "checkpoint.accept_changes=true",
        "lr_scheduler=constant",
    ]
    whole = losses(train("finetune", tmp_path / "whole", *chosen, "training.max_steps=6"))
    train("finetune", tmp_path / "parts", *chosen, "training.max_steps=3")
    parts = losses(train("finetune", tmp_path / "parts", *chosen, "training.max_steps=6"))
    assert parts[-1] == whole[-1]
    slow = [x for x in chosen if "loraplus" not in x]
    assert (
        losses(train("finetune", tmp_path / "slow", *slow, "training.max_steps=6"))[-1] != whole[-1]
    )


@pytest.mark.same_on_every_cpu
def test_wrong_tokens_are_named():
    tokenizer = byte_tokenizer(MARKED)
    lm = tiny_llama()
    with pytest.raises(ConfigError, match=r'<x> is no token .* tokenizer.added_tokens=\["<x>"\]'):
        Lora(trainable_tokens=["<x>"]).adapt(lm, "base", tokenizer)
    with pytest.raises(
        ConfigError, match=r"modules_to_save=\['lm_head'\] trains all rows of lm_head"
    ):
        Lora(trainable_tokens=[5], modules_to_save=["lm_head"]).adapt(lm, "base", tokenizer)


@pytest.mark.parametrize(
    "cure",
    [
        ["peft.trainable_tokens=[w5,w9]"],
        [
            "tokenizer.added_tokens=['<a>','<b>']",
            "model.resize_embeddings=true",
            "peft.modules_to_save=[embed_tokens,lm_head]",
        ],
    ],
    ids=["tokens", "grown"],
)
@pytest.mark.system
def test_new_tokens_train_on_two_ranks(cure: list[str], tmp_path: Path):
    """Two ranks as one; the export, plain peft and the generator agree."""
    folder = save_model("llama", tmp_path / "model")
    last = 128 if len(cure) > 1 else 9  # the first token that is added
    rows = [
        {"input_ids": [7, 8, 5, 6, 5 + i % 9, last], "labels": [-100] * 4 + [last, -100]}
        for i in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = [f"model.pretrained={folder}", f"dataset.path={tmp_path}/rows.jsonl", "peft=lora"]
    chosen += ["training.max_steps=2", "training.num_epochs=null", "training.global_batch_size=2"]
    chosen += ["packed_sequence.packed_sequence_size=128", "training.num_threads=1", *cure]
    one, two = (
        losses(train("finetune", tmp_path / f"run{size}", *chosen, "name=x", world_size=size))
        for size in (1, 2)
    )
    assert [x for pair in two for x in pair] == pytest.approx([x for p in one for x in p], rel=1e-5)
    run = tmp_path / "run2"
    assert export_hf.main([str(run)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(run / "hf")
    base = AutoModelForCausalLM.from_pretrained(folder)
    base.resize_token_embeddings(merged.config.vocab_size)
    loaded = peft.PeftModel.from_pretrained(base, run / "adapter")
    generated = load_adapted(str(run / "adapter"), torch.float32)
    for other in (loaded, generated):
        torch.testing.assert_close(other(IDS).logits, merged(IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.same_on_every_cpu
def test_mistakes_are_named():
    with pytest.raises(
        ConfigError,
        match=r"peft.target_modules=\['qproj'\]: .* is named qproj; there are down_proj, .*, q_proj",
    ):
        Lora(target_modules=["qproj"]).adapt(tiny_llama(), "base")
    with pytest.raises(ConfigError, match="the model has no module embeddings"):
        Lora(modules_to_save=["embeddings"]).adapt(tiny_llama(), "base")
    with pytest.raises(ConfigError, match="set model=pretrained"):
        Lora().check(torch.device("cpu"), "none", None)


@pytest.mark.system
def test_fsdp_with_cp_resumes_and_agrees_with_one_process(tmp_path: Path):
    """Base run -> LoRA on one process -> the same on 2 x 1 and 1 x 2 ranks, stopped at step 3 and continued."""
    train("smoke", tmp_path / "base", "training.max_steps=1")
    lora = [
        "model=pretrained",
        f"model.pretrained={tmp_path}/base/hf",
        "peft=lora",
        "peft.r=4",
        "optimizer.lr=1e-2",
    ]
    lora += ["packed_sequence.slot_multiple=4", "lr_scheduler=constant"]
    want = losses(train("smoke", tmp_path / "one", *lora))
    cp = [*lora, "checkpoint.accept_changes=true", "mesh.cp=2"]
    train("smoke", tmp_path / "two", *cp, "training.max_steps=3", world_size=2)
    got = losses(train("smoke", tmp_path / "two", *cp, world_size=2))
    assert want[5][0] < want[0][0] - 0.02
    assert [loss for loss, _ in got] == pytest.approx([loss for loss, _ in want], abs=2e-5)
    adapters = [
        load_file(tmp_path / run / "adapter/adapter_model.safetensors") for run in ("one", "two")
    ]
    for name, value in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], value, atol=2e-3, rtol=0.05)
    assert not (tmp_path / "one/hf").exists()
    assert export_hf.main([str(tmp_path / "two")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "two/hf")
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "two/adapter")
    torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.same_on_every_cpu
def test_qlora_without_its_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"peft=qlora needs the package bitsandbytes: pip install 'automodel-lite\[qlora\]'",
    ):
        lora.QLora()
