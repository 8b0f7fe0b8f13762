import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from automodel_lite.config.schema import AdvancedConfig, Config, MeshConfig, TrainingConfig
from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.models.flops import model_size
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.parallel.peers import Peers
from automodel_lite.run.failures import record_failures
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.lock import RunLock
from automodel_lite.run.watchdog import Watchdog
from automodel_lite.training.decide import decide_reduction
from automodel_lite.training.memory import (
    check_weights_fit,
    estimate_memory,
    gib,
    optimizer_bytes,
    out_of_memory_text,
    remedies,
)
from automodel_lite.training.settings import Decided, build_parts
from benchmarks.tiny_models import tiny_config
from recipes.train_ft import main
from tests.data.templates import LLAMA3, byte_tokenizer
from tests.runs import config_of, train

TOKENS = 64
FUSED = {"_target_": "automodel_lite.models.loss.FusedLinearCrossEntropy", "chunk_tokens": 16}
LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def config_with(**training: object) -> Config:
    """Changes of `mesh` and `training` reach the parts that are built from it."""
    return Config(
        name="x",
        packed_sequence={
            "_target_": "automodel_lite.data.packing.packs.Packer",
            "packed_sequence_size": TOKENS,
        },
        model={
            "_target_": "automodel_lite.models.source.CausalLM",
            "config": {"model_type": "llama"},
        },
        loss=FUSED,
        optimizer={"_target_": "automodel_lite.parts.optimizers.adamw.adamw", "lr": 1e-3},
        training=TrainingConfig(**{"activation_checkpointing": "none", **training}),  # type: ignore[arg-type]
    )


def plan_of(
    config: Config, *axes: int, model: PretrainedConfig = LLAMA, dtype: torch.dtype = torch.bfloat16
) -> Decided:
    """On dp_replicate x dp_shard x cp ranks under FSDP; without axes on one rank without it."""
    shape, strategy = MeshShape(*axes or (1, 1, 1)), "fsdp" if axes else "none"
    return Decided.of(
        build_parts(config),
        config=model,
        size=model_size(model),
        shape=shape,
        strategy=strategy,
        dtype=dtype,
    )


def test_sharding_an_8b_model():
    """fp32 masters and moments of 8.03 B parameters are 89.7 GiB: 11.2 on each of 8 ranks."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    one, eight = plan_of(config_with(), model=config), plan_of(config_with(), 1, 8, 1, model=config)
    alone, sharded = estimate_memory(one, None), estimate_memory(eight, None)
    lora = estimate_memory(eight, 40_000_000)
    states = [(e.weights + e.optimizer) / 2**30 for e in (alone, sharded, lora)]
    assert states == pytest.approx([89.74, 11.22, 1.92], abs=0.01)
    assert alone.gradients / 2**30 == pytest.approx(29.91, abs=0.01)


def test_a_frozen_model_in_4_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers take 0.52 bytes a weight, measured of bitsandbytes; nothing is cast, as of a LoRA."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    vars(sys.modules["bitsandbytes"])["__spec__"] = ModuleSpec("bitsandbytes", None)
    config = config_with()
    estimates = []
    for kind in ("Lora", "QLora"):
        config.peft = {"_target_": f"automodel_lite.parts.adapters.lora.{kind}"}
        estimates.append(estimate_memory(plan_of(config), 1000))
    lora, quantized = estimates
    size = model_size(LLAMA)
    in_layers = size.parameters - 2 * 64 * 64 - 64  # without the embedding, the head and their norm
    assert lora.weights == 2 * size.parameters + 4 * 1000
    assert quantized.weights == pytest.approx(lora.weights - 1.48 * in_layers)
    of_adapter = 2 * 1000  # in the compute dtype
    assert lora.working_copy == of_adapter
    assert quantized.working_copy == of_adapter + 2 * size.largest_layer


@pytest.mark.parametrize(("stored", "bytes_each"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_frozen_towers_are_held_as_they_are_stored(stored: torch.dtype, bytes_each: int) -> None:
    """Under an adapter they are held as the rest of the frozen model."""
    config = tiny_config("gemma3")
    config.dtype = stored
    plan = plan_of(config_with(), model=config)
    plan.model.pretrained = "any"
    trained = plan.size.parameters - plan.size.towers
    assert estimate_memory(plan, None).weights == 4 * trained + bytes_each * plan.size.towers
    assert estimate_memory(plan, 0).weights == 2 * plan.size.parameters


def test_a_teacher_lies_beside_the_model() -> None:
    """Frozen, in the compute dtype, over the same ranks; in host memory with the rest."""
    plan = plan_of(config_with(), 1, 2, 1)
    taught = replace(plan, of_teacher=plan)
    alone, both = (estimate_memory(of, None) for of in (plan, taught))
    assert both == replace(alone, weights=alone.weights + 2 * plan.size.parameters / 2)
    config = config_with()
    config.mesh = MeshConfig(cpu_offload=True)
    plan = plan_of(config, 1, 2, 1)
    assert estimate_memory(replace(plan, of_teacher=plan), None).weights == 0


def test_no_rank_sums_the_gradients_of_experts_of_others() -> None:
    """ep=2: the sum that waits for the last micro-batch has half of the experts."""
    config = config_with(global_batch_size=8)
    mixture = tiny_config("qwen3_moe")
    whole, dealt = (plan_of(config, 1, 2, 1, 1, ep, model=mixture) for ep in (1, 2))
    experts = whole.size.all_experts
    found = [estimate_memory(plan, None).gradients for plan in (whole, dealt)]
    assert found == [4 * whole.size.parameters, 4 * (whole.size.parameters - experts / 2)]
    assert is_reduced(whole, 4 * int(found[0]) - 4)[0] is True
    assert is_reduced(dealt, 4 * int(found[0]) - 4)[0] is False


def test_frozen_masters_have_no_gradients_and_moments():
    plan = plan_of(config_with())
    whole, half = (estimate_memory(plan, None, count) for count in (None, 1000))
    assert half == replace(whole, gradients=4 * 1000, optimizer=8 * 1000)


def test_shards_that_wait_in_fp8_take_a_byte_per_weight():
    plain, rounded = (
        plan_of(config_with(fp8=recipe), 1, 2, 1) for recipe in ("none", "tensorwise")
    )
    in_layers = 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 160)
    assert (
        estimate_memory(rounded, None).total - estimate_memory(plain, None).total == in_layers / 2
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_text_config_without_a_word_on_its_tied_head(is_tied: bool):
    """Qwen2-VL: a tied head and its table are gathered, and their gradients reduced, as one."""
    config = tiny_config("qwen2_vl")
    config.tie_word_embeddings = is_tied
    assert not hasattr(config.get_text_config(), "tie_word_embeddings")
    size = model_size(config)
    assert (size.embedding < 2 * size.head_weights) == is_tied
    two = estimate_memory(plan_of(config_with(), 1, 2, 1, model=config), None)
    assert two.total > two.weights > 0


def test_gradients_are_reduced_where_their_sum_does_not_fit():
    """LLAMA has 0.14 M weights: the sum that is not sharded takes 4 bytes of each."""

    def planned(wish: object, batch: int | None = 4) -> Decided:
        config = config_with(global_batch_size=batch)
        config.mesh, config.advanced = (
            MeshConfig(strategy="fsdp"),
            AdvancedConfig(reduce_every_micro_batch=wish),
        )  # type: ignore[arg-type]
        return plan_of(config, 1, 2, 1)

    summed, reduced = (estimate_memory(planned(wish), None).total for wish in ("auto", True))
    whole = 4 * model_size(LLAMA).parameters
    assert summed - reduced == whole / 2
    fits, just_not = 4 * whole, 4 * whole - 4
    assert is_reduced(planned("auto"), None) == is_reduced(planned("auto"), fits) == (False, "")
    on = (True, f"gradients are reduced after every micro-batch: their sum would take {gib(whole)}")
    assert is_reduced(planned("auto"), just_not) == on
    assert is_reduced(planned(False), just_not) == (False, "")
    remedy = "advanced.reduce_every_micro_batch=true (no unsharded sum of gradients)"
    assert list(remedies(planned(False)))[2] == remedy
    assert is_reduced(planned(True), None) == on
    assert is_reduced(planned(True, batch=None), None)[1] == ""  # one micro-batch: there is no sum


def is_reduced(plan: Decided, available: int | None) -> tuple[object, str]:
    decided = decide_reduction(plan, None, available)
    return decided.advanced.reduce_every_micro_batch, decided.reduction_text


def test_what_waits_in_host_memory_is_not_counted():
    config = config_with(activation_checkpointing="offload")
    offloaded = estimate_memory(plan_of(config, 1, 2, 1), None).activations
    config.training.activation_checkpointing = "full"
    # in bf16
    assert (
        estimate_memory(plan_of(config, 1, 2, 1), None).activations - offloaded
        == 3 * TOKENS * 64 * 2
    )
    config.mesh.cpu_offload = True
    at_home = estimate_memory(plan_of(config, 1, 2, 1), None)
    assert (at_home.weights, at_home.optimizer) == (0, 0)
    assert at_home.gradients < 4 * model_size(LLAMA).parameters / 2  # of the layer at work alone


@pytest.mark.parametrize(
    ("optimizer", "num_bytes"),
    [
        ({"_target_": "automodel_lite.parts.optimizers.adamw.adamw", "moments": "bf16"}, 2 + 2 + 4),
        (
            {"_target_": "automodel_lite.parts.optimizers.adamw.adamw", "moments": "8bit"},
            2 + 2 + 2 + 2 * 4 / 256,
        ),
    ],
    ids=["bf16", "8bit"],
)
def test_a_full_model_of_8b_in_bf16(optimizer: dict[str, object], num_bytes: float) -> None:
    """Weights, gradients and states of 8.03 B parameters: 60, 75 and 45 GiB, where fp32 masters take 120."""
    # gradients are there all the time
    config = config_with(master_weights="bf16", global_batch_size=1)
    config.optimizer = {"lr": 1e-5, **optimizer}
    plan = plan_of(config)
    e = estimate_memory(plan, None)
    assert e.weights + e.gradients + e.optimizer == num_bytes * plan.size.parameters
    # of several micro-batches they are summed in fp32
    config.training.global_batch_size = 2
    assert estimate_memory(plan_of(config), None).gradients == 2 * e.gradients
    assert "adamw_8bit" not in " ".join(remedies(plan))


def test_an_optimizer_of_ones_own_is_measured():
    assert optimizer_bytes(momentum) == 4


def test_tables_that_muon_leaves_to_adamw_have_two_moments() -> None:
    config = config_with(global_batch_size=2)
    config.optimizer = {"_target_": "automodel_lite.parts.optimizers.muon.muon", "lr": 1e-3}
    plan = plan_of(config)
    matrices = plan.size.parameters - plan.size.embedding
    assert estimate_memory(plan, None).optimizer == 4 * matrices + 8 * plan.size.embedding


def test_states_are_counted_without_opening_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank counts before it has taken its own card: torch would open the first one."""

    def opened() -> None:
        raise AssertionError("a card was opened")

    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: cuda)
    monkeypatch.setattr(torch.accelerator, "current_stream", opened)
    assert optimizer_bytes(build_parts(config_with()).optimizer) == 8


def momentum(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_the_estimate_draws_no_random_numbers():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    optimizer_bytes(build_parts(config_with()).optimizer)
    assert torch.equal(torch.get_rng_state(), before)


def test_remedies_come_in_order_and_fit_the_settings():
    assert [
        text.split(" (")[0]
        for text in islice(remedies(build_parts(config_with(micro_batch_size=4))), 3)
    ] == [
        "training.micro_batch_size=2",
        "training.activation_checkpointing=full",
        "optimizer=adamw_8bit",
    ]
    config = config_with(activation_checkpointing="full")
    config.loss, config.mesh = (
        {"_target_": "automodel_lite.models.loss.CrossEntropy"},
        MeshConfig(strategy="ddp"),
    )
    assert [text.split(" (")[0] for text in islice(remedies(build_parts(config)), 3)] == [
        "loss=fused_linear_cross_entropy",
        "mesh.strategy=fsdp",
        "optimizer=adamw_8bit",
    ]


def test_remedies_are_not_refused_beside_experts_of_other_ranks():
    config = config_with(activation_checkpointing="full", global_batch_size=8)
    config.model = {"_target_": config.model["_target_"], "pretrained": "x"}
    keys = {
        is_in_turns: [
            text.partition("=")[0]
            for text in remedies(
                build_parts(
                    replace(config, mesh=MeshConfig(strategy="fsdp", ep=2, ep_overlap=is_in_turns))
                )
            )
        ]
        for is_in_turns in (False, True)
    }
    assert "peft" not in keys[False]
    refused = {"advanced.reduce_every_micro_batch", "mesh.cp"}
    assert refused < set(keys[False])
    assert keys[True] == ["mesh.ep_overlap", *(key for key in keys[False] if key not in refused)]


def test_the_end_of_a_run_that_ran_out_of_memory(tmp_path: Path):
    text = out_of_memory_text(build_parts(config_with()))
    run = RunFolder(tmp_path)
    watchdog = Watchdog(run.path, 0, after_s=0)
    watchdog.enter("in step 3")
    with (
        pytest.raises(RunStoppedError) as stopped,
        record_failures(run, watchdog, RunLock(run.lock), Peers(None), lambda: text),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    sentence = str(stopped.value)
    assert sentence.startswith("out of memory on rank 0")
    assert "in step 3: CUDA out of memory. Tried to allocate 2.00 GiB." in sentence
    assert sentence.endswith(
        "Try, in this order:\n"
        "  1. training.activation_checkpointing=full (about a third slower)\n"
        "  2. optimizer=adamw_8bit (moments of 2 bytes per weight instead of 8)\n"
        "  3. mesh.cp=2 on more processes (each holds half of a pack's tokens)"
    )


def test_dry_run_says_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    assert main(config_of("smoke", run, "dry_run=true", "mesh.dp_shard=2", "mesh.cp=2")) == 0
    said = capsys.readouterr().out
    assert "cpu: 4 processes (dp_replicate 1 x dp_shard 2 x cp 2, fsdp)" in said
    assert "simulated: at most" in said
    assert said.endswith(
        "the settings, the data and the model fit together; nothing was trained or written\n"
    )
    assert not run.exists()
    for wrong, sentence in (
        ("attention=varlen", "attention=reference"),
        ("model.config.max_position_embeddings=64", "the model max_position_embeddings=64"),
        ("mesh.cpu_offload=true mesh.strategy=none", "mesh.cpu_offload=true needs FSDP"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            main(config_of("smoke", run, "dry_run=true", *wrong.split()))


def test_weights_that_no_memory_holds_are_named_at_once() -> None:
    huge = LlamaConfig(hidden_size=10**6, intermediate_size=64, num_hidden_layers=2, vocab_size=64)
    plan = plan_of(config_with(), 1, 2, 1, model=huge)
    with pytest.raises(
        ConfigError,
        match=r"its weights alone are 7,\d{3}\.\d GiB on each machine, which has .* GiB: use",
    ):
        check_weights_fit(plan, torch.device("cpu"))
    check_weights_fit(replace(plan, size=replace(plan.size, parameters=10**6)), torch.device("cpu"))


def test_a_memory_that_is_full_before_a_model_is_loaded(tmp_path: Path):
    """Other optimizers and layouts of the model would not help."""
    tokenizer = byte_tokenizer(LLAMA3)
    tokenizer.chat_template = LLAMA3.template + "{{ 'a' * 10**15 }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hi", "completion": "Hello!"}\n' * 8)
    data = ["dataset=files", "~dataset.num_chats", f"dataset.path={tmp_path / 'a.jsonl'}"]
    reader = ["tokenizer=pretrained", f"tokenizer.path={tmp_path / 'tokenizer'}"]
    with pytest.raises(RunStoppedError, match=r"MemoryError\nNo model is loaded yet") as stopped:
        train("smoke", tmp_path / "run", *data, *reader)
    assert "optimizer=" not in str(stopped.value)
