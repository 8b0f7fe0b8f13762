"""Recomputed and compiled layers: the same gradients, and no new graph for packs of other documents."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.errors import ConfigError
from automodel_lite.graphs import compiled_graphs
from automodel_lite.models.layers import KEPT_FRAC, compile_layers, decoder_layers, recompute_layers
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.source import describe
from automodel_lite.thd import ThdBatch, to_thd
from benchmarks.tiny_models import tiny_model

pytestmark = pytest.mark.numbers


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def small_model() -> LossModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lm = LlamaForCausalLM(config)
    install(lm, ReferenceAttention())
    return LossModel(lm, FusedLinearCrossEntropy())


def pack_of(*lengths: int) -> ThdBatch:
    """One full pack of random tokens."""
    ids = torch.randint(0, 64, (1, sum(lengths)))
    lens = torch.tensor([lengths])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return to_thd(
        {
            "input_ids": ids,
            "labels": ids,
            "position_ids": positions,
            "seq_lens": lens,
            "seq_lens_padded": lens,
        }
    )


def gradients(model: LossModel, batch: ThdBatch) -> list[torch.Tensor]:
    model.zero_grad()
    model(batch).sum.backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("how", "every_layers", "is_compiled"),
    [
        ("full", 1, False),
        ("full", 2, False),
        ("selective", 1, False),
        ("offload", 1, False),
        pytest.param("none", 1, True, marks=pytest.mark.system),
        ("full", 1, True),
        pytest.param("offload", 1, True, marks=pytest.mark.system),
    ],
    ids=[
        "full",
        "every second",
        "selective",
        "offload",
        "compiled",
        "compiled and full",
        "compiled and offload",
    ],
)
def test_same_gradients(how: str, every_layers: int, is_compiled: bool) -> None:
    batch = pack_of(20, 17, 11)
    expected = gradients(small_model(), batch)
    model = small_model()
    names = [name for name, _ in model.named_parameters()]
    layers = list(model.lm.model.layers)
    if is_compiled:
        compile_layers(layers, backend="aot_eager")
    recompute_layers(layers, how, every_layers)
    torch.testing.assert_close(gradients(model, batch), expected)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize(("how", "num_alive"), [("full", 3), ("offload", 0)])
def test_inputs_of_layers_wait_elsewhere(how: str, num_alive: int) -> None:
    """How many of the three layers' inputs are alive between forward and backward; offloaded ones are copies."""
    model = small_model()
    layers = list(model.lm.model.layers)
    recompute_layers(layers, how, 1)
    inputs = []
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda module, args: inputs.append(weakref.ref(args[0].untyped_storage()))
        )
    loss = model(pack_of(20, 17, 11)).sum
    assert sum(storage() is not None for storage in inputs) == num_alive
    loss.backward()


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("how", [pytest.param("none", marks=pytest.mark.system), "full"])
def test_packs_of_other_documents_need_no_new_graph(how: str) -> None:
    model = small_model()
    layers = list(model.lm.model.layers)
    compile_layers(layers, backend="aot_eager")
    recompute_layers(layers, how, 1)
    gradients(model, pack_of(20, 17, 11))
    after_warm_up = compiled_graphs()
    assert after_warm_up > 0  # a checkpointed layer is compiled too
    for lengths in [(48,), (1, 47), (16, 16, 16), (5, 6, 7, 8, 9, 13), (1,) * 48]:
        gradients(model, pack_of(*lengths))
    assert compiled_graphs() == after_warm_up


@pytest.mark.same_on_every_cpu
def test_recomputing_keeps_less() -> None:
    kept = {how: bytes_kept(how) for how in ("none", "selective", "full")}
    assert kept["full"] < kept["selective"] < kept["none"]
    assert kept["full"] < bytes_kept("full", every_layers=2) < kept["none"]


def bytes_kept(how: str, every_layers: int = 1) -> int:
    """Of tensors that autograd saved, and of what selective checkpointing holds beside it."""
    model = small_model()
    recompute_layers(list(model.lm.model.layers), how, every_layers)
    alive = MemoryOfResults()
    with alive:
        loss = model(pack_of(20, 17, 11)).sum
    kept = alive.bytes()
    del loss
    return kept


class MemoryOfResults(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the storages that are still alive of all that operations returned."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.multiprocessing.reductions.StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                ref = torch.multiprocessing.reductions.StorageWeakRef(storage)
                self.storages[ref.cdata] = (ref, storage.nbytes())
        return out

    def bytes(self) -> int:
        return sum(size for ref, size in self.storages.values() if not ref.expired())


@pytest.mark.system
def test_compiled_layers_keep_a_part_and_have_the_same_gradients() -> None:
    """Selective recomputation of compiled layers: what the partitioner keeps falls, and nothing else changes."""
    batch, kept, found = pack_of(20, 17, 11), [], []
    for kept_frac in (1.0, KEPT_FRAC):
        torch._dynamo.reset()
        model = small_model()
        compile_layers(list(model.lm.model.layers), "aot_eager", kept_frac)
        saved: dict[int, int] = {}

        def count(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(batch).sum
        kept.append(sum(saved.values()))
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    torch._functorch.config.activation_memory_budget = 1.0
    assert kept[1] < 0.9 * kept[0]  # parameters and the head are in both
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1], gradients(small_model(), batch))


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("gemma3", "Gemma3DecoderLayer"),
        ("qwen2_5_vl", "Qwen2_5_VLDecoderLayer"),
        ("gpt2", "GPT2Block"),
        ("llama4_text", "Llama4TextDecoderLayer"),
        ("modernbert-decoder", "ModernBertDecoderLayer"),
    ],
)
def test_layers_are_those_of_the_language_model(family: str, layer: str) -> None:
    config = AutoConfig.for_model(family)
    layers = decoder_layers(describe(config))
    assert {type(found).__name__ for found in layers} == {layer}
    assert len(layers) == config.get_text_config().num_hidden_layers


@pytest.mark.same_on_every_cpu
def test_a_model_of_two_stacks_has_the_layers_of_both() -> None:
    assert len(decoder_layers(describe(AutoConfig.for_model("hrm_text")))) == 16 + 16


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("family", ["falcon", "gemma3n_text"])
def test_products_that_a_layer_changes_in_place_are_not_kept(family: str) -> None:
    """Recomputed from the changed results, gradients were off by half of the largest."""
    for how in ("full", "selective"):
        lm = tiny_model(family).train()
        install(lm, ReferenceAttention())
        recompute_layers(decoder_layers(lm), how, 1)
        total = LossModel(lm, FusedLinearCrossEntropy())(pack_of(9, 5)).sum
        if how == "full":
            total.backward()
            continue
        with pytest.raises(ConfigError, match=r"=selective keeps results .* set full or none"):
            total.backward()
