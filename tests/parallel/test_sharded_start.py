"""A model that is sharded before it has weights is the model that one process builds, in a fraction of the memory."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import decoder_layers
from automodel_lite.models.sharded import ShardReader
from automodel_lite.parallel import mesh as parallel_mesh
from automodel_lite.parallel.mesh import Mesh, MeshShape, init_mesh, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.run.export import export_hf
from automodel_lite.seed import seed_all
from automodel_lite.training.build import assemble, build_model
from automodel_lite.training.checks import check_model
from automodel_lite.training.decide import decide
from automodel_lite.training.settings import build_parts
from benchmarks.survey_models import save
from benchmarks.tiny_models import random_model, tiny_config
from tests.attention.families import FAMILIES, VOCAB, documents, stream
from tests.attention.hybrids import HYBRIDS
from tests.models.test_policy import save_model
from tests.parallel.test_sharding import loss_model
from tests.ranks import run_ranks
from tests.runs import QUICK, config_of, losses, train

ALONE = Mesh(MeshShape(1, 1, 1), torch.device("cpu"), None)


def tokenizer(size: int = VOCAB) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def weights(config: Config, mesh: Mesh, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Whole, by name, with tied ones under both names."""
    strategy = "fsdp" if mesh.shape.world_size > 1 else "none"
    seed_all(3, "model")
    model, _ = assemble(build_parts(config), tokenizer(), mesh, strategy, dtype)
    named = model.loss_model.state_dict()
    assert all(isinstance(p, DTensor) for p in model.parameters()) == (strategy == "fsdp")
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in named.items()}


def largest_difference(
    rank: int, world: int, cases: list[tuple[Config, torch.dtype]]
) -> list[float]:
    """Of each case, between this mesh and one process; -1 where names, dtypes or shapes differ. The first is read by
    one rank after the other, as by many hosts: no collective is inside. All ranks are given the gathered weights, and
    rank 0 compares them.
    """
    parallel_mesh.HOSTS_AT_ONCE = 1
    return [_difference(rank, *case) for case in cases]


def _difference(rank: int, config: Config, dtype: torch.dtype) -> float:
    got = weights(config, init_mesh(config.mesh), dtype)
    if rank:
        return 0.0
    want = weights(config, ALONE, dtype)
    if {n: (x.dtype, x.shape) for n, x in got.items()} != {
        n: (x.dtype, x.shape) for n, x in want.items()
    }:
        return -1.0
    return max(float((got[name] - x).abs().max()) for name, x in want.items())


FROM_SCRATCH = {
    # 100 rows on 3 ranks
    "tied": ["model.config.tie_word_embeddings=true", "model.config.intermediate_size=100"],
    "experts": [
        "model.config.model_type=qwen3_moe",
        "model.config.num_experts=4",
        "model.config.num_experts_per_tok=2",
        "model.config.moe_intermediate_size=24",
    ],
}


def test_random_weights_are_those_of_one_process(tmp_path: Path) -> None:
    cases = [
        config_of("smoke", tmp_path / name, *overrides) for name, overrides in FROM_SCRATCH.items()
    ]
    for differences in run_ranks(
        largest_difference, 3, [(config, torch.float32) for config in cases]
    ):
        assert differences == [0.0] * 2


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense with tied weights in bf16, and experts, which lie one by one in the files and fused in the model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    for name, dtype in (
        ("llama", torch.bfloat16),
        ("qwen3_moe", torch.float32),
        ("gpt_oss_sinks_window", torch.float32),
        ("gemma3_window", torch.float32),
    ):
        config = FAMILIES[name]()
        config.tie_word_embeddings = name == "llama"
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(
            folder / name, max_shard_size="100KB"
        )
    return folder


def test_loaded_weights_are_those_of_one_process(tmp_path: Path, checkpoints: Path) -> None:
    """Tied, fused, and with adapters in a frozen base: LoRA, DoRA, and a module that is trained whole. DoRA took the
    norms of the rows, and not of the columns, of weights that lie the other way round: square ones without a word.
    """
    plain = {
        name: ["model=pretrained", f"model.pretrained={checkpoints / name}"]
        for name in ("llama", "qwen3_moe", "gpt_oss_sinks_window", "gemma3_window")
    }
    plain["qwen3_5_text"] = [
        "model=pretrained",
        f"model.pretrained={save_model('qwen3_5_text', tmp_path / 'hybrid')}",
    ]
    gpt2 = tiny_config("gpt2")
    gpt2.vocab_size = VOCAB
    random_model(gpt2, seed=0).save_pretrained(tmp_path / "gpt2")
    conv1d = ["model=pretrained", f"model.pretrained={tmp_path}/gpt2"]
    saved = ["peft.target_modules=[q_proj]", "peft.modules_to_save=[lm_head]"]
    cases = [
        *((overrides, torch.float32) for overrides in plain.values()),
        ([*plain["llama"], "peft=lora"], torch.bfloat16),
        ([*plain["llama"], "peft=dora"], torch.bfloat16),
        # of a checkpoint in fp32: magnitudes are those of the weights that are used
        ([*plain["gemma3_window"], "peft=dora"], torch.bfloat16),
        ([*conv1d, "peft=dora", "peft.target_modules=[attn.c_proj]"], torch.float32),
        ([*plain["qwen3_moe"], "peft=dora", "peft.target_modules=[embed_tokens]"], torch.float32),
        ([*plain["qwen3_moe"], "peft=lora", *saved], torch.float32),
        # whose embedding has a buffer, by which it is scaled
        (
            [*plain["gemma3_window"], "peft=lora", "peft.modules_to_save=[embed_tokens]"],
            torch.float32,
        ),
        # whose modules draw numbers before their weights come, of which the adapters' are not made
        ([*plain["qwen3_5_text"], "peft=lora"], torch.float32),
    ]
    configs = [(config_of("smoke", tmp_path, *overrides), dtype) for overrides, dtype in cases]
    # one process of a group reads as shards are read, without FSDP
    found = [run_ranks(largest_difference, world, configs) for world in (2, 1)]
    for differences in chain.from_iterable(found):
        assert differences == [0.0] * len(cases)


def probes_of_a_rank(
    rank: int, world: int, families: list[str]
) -> dict[str, tuple[float, bool, str]]:
    """Of each family: how far the probe's logits are from those of gathered weights, whether it gives one process's
    answer about the head, and the error of the start-up checks; at last of a model whose documents see each other.
    """
    mesh = open_mesh(MeshShape(1, world, 1), torch.device("cpu"))
    return {family: _probe(family, mesh) for family in families} | {
        "leaky": _probe("llama", mesh, leaks=True)
    }


AXES = ("dp_replicate", "dp_shard", "cp")


def _probe(family: str, mesh: Mesh, leaks: bool = False) -> tuple[float, bool, str]:
    batch = stream(documents([37, 5, 23]))
    want_TV, is_plain = loss_model(family).probe(batch)
    model = parallelize(loss_model(family), mesh, "fsdp", torch.float32)
    before = dict(model.loss_model.named_parameters())
    got_TV, found_plain = model.probe(batch)
    assert all(before[name] is p for name, p in model.loss_model.named_parameters())
    error = max(
        float((x - want_TV).abs().max() / want_TV.std()) for x in (got_TV, model.logits(batch))
    )
    if leaks:
        decoder_layers(model.loss_model.lm)[0].register_forward_hook(_see_the_document_before)
    try:
        check_model("all_gather", model, mesh)
    except ConfigError as refused:
        return error, found_plain == is_plain, str(refused)
    return error, found_plain == is_plain, ""


def _see_the_document_before(layer: torch.nn.Module, inputs: object, output: Any) -> Any:
    hidden = output[0] if isinstance(output, tuple) else output
    seen = hidden + 0.5 * hidden.roll(16, 1)
    return (seen, *output[1:]) if isinstance(output, tuple) else seen


def test_the_probe_of_shards_is_that_of_one_process() -> None:
    """Tied, with a softcap, read outside their layer (DeepSeek's router), fused experts."""
    families = ["llama", "gemma2_softcap_window", "deepseek_v3_latent", "gpt_oss_sinks_window"]
    for answers in run_ranks(probes_of_a_rank, 3, families):
        assert "documents of a pack see each other" in answers.pop("leaky")[2]
        for family, (error, is_alike, refused) in answers.items():
            assert error < 1e-4, (family, error)
            assert is_alike, family
            assert not refused


@pytest.mark.slow
def test_the_probe_of_shards_for_every_family() -> None:
    for answers in run_ranks(probes_of_a_rank, 3, [*sorted(FAMILIES), *sorted(HYBRIDS)]):
        wrong = {
            family: answer
            for family, answer in answers.items()
            if answer[0] > 1e-3 or not answer[1]
        }
        assert not wrong


@pytest.mark.slow
def test_experts_fewer_than_ranks_are_those_of_one_process(
    tmp_path: Path, checkpoints: Path
) -> None:
    """Two experts on four ranks lie on two of them each, loaded from fused files and drawn."""
    fused = ["model=pretrained", f"model.pretrained={checkpoints / 'gpt_oss_sinks_window'}"]
    drawn = [value.replace("experts=4", "experts=2") for value in FROM_SCRATCH["experts"]]
    configs = [
        (config_of("smoke", tmp_path, *overrides), torch.float32) for overrides in (fused, drawn)
    ]
    for differences in run_ranks(largest_difference, 4, configs):
        assert differences == [0.0, 0.0]


@pytest.mark.system
def test_a_rank_without_an_expert(tmp_path: Path) -> None:
    """Chunks of two: loaded from files with one weight an expert, trained, saved, resumed and exported."""
    config = FAMILIES["qwen3_moe"]()
    config.num_experts = 6
    torch.manual_seed(0)
    save(random_model(config), tmp_path / "model")
    rows = (tmp_path / "documents.jsonl").read_text()
    (tmp_path / "documents.jsonl").write_text(rows * 8)
    settings = [
        "name=six",
        f"model.pretrained={tmp_path}/model",
        f"dataset.path={tmp_path}/documents.jsonl",
        "packed_sequence.packed_sequence_size=48",
    ]
    configs = [(config_of("finetune", tmp_path / "load", *settings), torch.float32)]
    assert run_ranks(largest_difference, 4, configs) == [[0.0]] * 4
    settings += [
        "dataset.labels=aligned",
        "tokenize.train_on=all",
        *QUICK,
    ]
    settings += [
        "training.num_epochs=null",
        "training.max_steps=3",
        "optimizer.lr=1e-4",
        "checkpoint.export_hf=true",
        "lr_scheduler=constant",
    ]
    found = {
        world: train("finetune", tmp_path / f"{world}", *settings, world_size=world)
        for world in (1, 4)
    }
    for one, four in zip(*map(losses, found.values()), strict=True):
        assert four == pytest.approx(one, rel=1e-4)
    whole, shards = (load_file(tmp_path / f"{world}/hf/model.safetensors") for world in (1, 4))
    assert whole.keys() == shards.keys()
    assert sum("experts." in name for name in whole) == 2 * 6 * 3
    for name, value in whole.items():
        torch.testing.assert_close(shards[name].float(), value.float(), atol=2e-3, rtol=1e-2)


INDICES = [
    ...,
    slice(1, 5),
    (slice(2, 9),),
    (slice(3, None), slice(4, 7)),
    (slice(None), slice(0, 2)),
    slice(4, 4),
]


def test_no_more_is_read_than_the_rows_asked_for(tmp_path: Path) -> None:
    values = {
        "matrix": torch.randn(64, 1024),
        "halves": torch.randn(10, 8).bfloat16(),
        "vector": torch.arange(12),
    }
    save_file(values | {"scalar": torch.tensor(3.0)}, tmp_path / "weights")
    file, library = (
        ShardReader(str(tmp_path / "weights")),
        safe_open(tmp_path / "weights", framework="pt"),
    )
    assert file.keys() == library.keys()
    for name in values:
        ours, theirs = file.get_slice(name), library.get_slice(name)
        assert (ours.get_shape(), ours.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
        for index in INDICES if values[name].ndim == 2 else INDICES[:2]:
            assert torch.equal(ours[index], theirs[index])
            assert ours[index].dtype == values[name].dtype
    assert float(file.get_slice("scalar")[...]) == 3.0
    before = bytes_read()
    file.get_slice("matrix")[16:32]
    assert bytes_read() - before < 2 * 16 * 1024 * 4  # of 4 times as many


def bytes_read() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.slow
def test_a_rank_never_holds_the_model(tmp_path: Path) -> None:
    """253 M parameters, 0.94 GiB in fp32: peak memory of each rank from the start of a tiny model to its last check, and
    of the export, which reads the files back into shards beside the trained ones.
    """
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
    }
    sizes |= {"num_key_value_heads": 8, "vocab_size": 8192}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="100MB")
    overrides = ["model=pretrained", f"model.pretrained={tmp_path / 'base'}"]
    config = config_of("smoke", tmp_path / "run", *overrides)
    (start, export, whole, num_read), (start_of_two, *_) = (
        map(max, zip(*run_ranks(peaks_of_a_rank, world, config))) for world in (4, 2)
    )
    assert whole > 0.9
    assert start <= 0.45 * whole
    assert start < 0.75 * start_of_two
    assert export <= 0.7 * whole
    # A fourth of the files, which are in bf16, and what is imported late.
    assert whole / 8 <= num_read <= 0.17 * whole


def peaks_of_a_rank(rank: int, world: int, config: Config) -> tuple[float, float, float, float]:
    """GiB above the imports, at the start and in the export, of the whole model in fp32, and read from files."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import recipes.train_ft  # noqa: F401 - before it is measured

    mesh = init_mesh(config.mesh)
    tiny = config_of("smoke", Path(config.output_dir))
    build_model(
        decide(build_parts(tiny), tokenizer(8), mesh.shape, mesh.device), tokenizer(8), mesh
    )  # what its code takes is not the model's
    before, num_read = _peak_gib(), bytes_read()
    built = build_model(
        decide(build_parts(config), tokenizer(8), mesh.shape, mesh.device), tokenizer(8), mesh
    )
    start, num_read = _peak_gib() - before, bytes_read() - num_read
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    model, dtype = built.model, built.decided.model.dtype
    export_hf(
        Path(config.output_dir) / "hf",
        model.loss_model,
        tokenizer(8),
        dtype,
        model.logits,
        1,
        model.sharded_over,
    )
    return start, _peak_gib() - before, built.decided.size.parameters * 4 / 2**30, num_read / 2**30


def _peak_gib() -> float:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20
