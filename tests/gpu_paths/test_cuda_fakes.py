"""Tensors of a GPU that is not there: torch's CUDA wheel gives fake ones, on which every forward, the optimizer and the
exchanges run, so that a tensor left on the host is an error. Backward passes ask the driver: see tests/training.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig

from automodel_lite.attention.interface import install
from automodel_lite.models.layers import from_host, to_host
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.parts.kernels.flex import packed_block_mask
from automodel_lite.parts.kernels.varlen import VarlenAttention
from automodel_lite.parts.optimizers import adamw as optimizers
from automodel_lite.thd import ThdBatch, stream_of
from automodel_lite.training.optimizers import apply_gradients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is None, reason="a torch without CUDA has no fake tensors of a GPU"
    ),
]
GPU = torch.device("cuda", 0)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXCHANGES = ("all_gather", "all_to_all", "ring")


@pytest.fixture
def parts() -> Iterator[dict[str, ThdBatch]]:
    """The tokens of one of two ranks, by exchange, in a group in which nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        host = stream_of(torch.arange(512).view(4, 128), "cpu")
        yield {"none": host} | {how: cp_shard(host, mesh["cp"], how) for how in EXCHANGES}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("exchange", ["none", *EXCHANGES])
def test_losses_and_logits_are_made_on_the_gpu(exchange: str, parts: dict[str, ThdBatch]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        with GPU:
            config = LlamaConfig(vocab_size=512, num_hidden_layers=2, **SIZES)
            lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        install(lm, VarlenAttention())
        model = LossModel(lm, FusedLinearCrossEntropy(32))
        parallel = ParallelModel(model, model, 1, torch.float32)
        batch = parts[exchange].map_tensors(lambda tensor: fake.from_tensor(tensor).to(GPU))
        total = parallel(batch).sum
        assert (total.device, total.dtype) == (GPU, torch.float32)
        logits_TV = parallel.logits(batch, num_last=1)
        assert (logits_TV.device, logits_TV.shape) == (GPU, (1, 512))
        cu = batch.cu_seqlens_padded
        mask = packed_block_mask(cu, cu, 512, 512, window=100)
        assert mask.kv_indices.device == GPU
        kept = to_host(logits_TV)
        assert kept[1].device.type == "cpu"
        assert from_host(kept).device == GPU


@pytest.mark.parametrize("maker", ["fp32", "bf16", "8bit", "muon"])
def test_a_step_of_the_optimizer_stays_on_the_gpu(
    maker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "compiled", lambda function: function)
    from automodel_lite.parts.optimizers import muon

    make: Any = muon.muon if maker == "muon" else partial(optimizers.adamw, moments=maker)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(nn.Linear(64, 128, device=GPU), nn.Linear(128, 64, device=GPU))
        optimizer = make(model, lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        norm = apply_gradients(optimizer, model.parameters(), torch.zeros((), device=GPU), 1.0)
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
    assert len(states) >= 4
    assert {norm.device, *(value.device for value in states)} == {GPU}
