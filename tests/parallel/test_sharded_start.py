"""A model that is sharded before it has weights is the model that one process builds, in a fraction of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from automodel_lite.config.schema import Config
from automodel_lite.models.sharded import RowFile
from automodel_lite.parallel.mesh import Mesh, MeshShape, init_mesh
from automodel_lite.run.export import export
from automodel_lite.seed import seed_all
from automodel_lite.training.build import assemble, build_model, build_parts
from tests.attention.families import FAMILIES, VOCAB
from tests.ranks import run_ranks
from tests.recipes.runs import config_of

ALONE = Mesh(MeshShape(1, 1, 1), torch.device("cpu"), None)


def tokenizer(size: int = VOCAB) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def weights(config: Config, mesh: Mesh, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Whole, by name, with tied ones under both names."""
    strategy = "fsdp" if mesh.root else "none"
    seed_all(3, "model")
    model, _ = assemble(build_parts(config), tokenizer(), mesh, strategy, dtype)
    named = model.loss_model.state_dict()
    assert all(isinstance(p, DTensor) for p in model.parameters()) == (mesh.root is not None)
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in named.items()}


def largest_difference(rank: int, world: int, cases: list[tuple[Config, torch.dtype]]) -> list[float]:
    """Of each case, between this mesh and one process; -1 where names, dtypes or shapes differ."""
    return [_difference(*case) for case in cases]


def _difference(config: Config, dtype: torch.dtype) -> float:
    got, want = (weights(config, mesh, dtype) for mesh in (init_mesh(config.mesh), ALONE))
    if {n: (x.dtype, x.shape) for n, x in got.items()} != {n: (x.dtype, x.shape) for n, x in want.items()}:
        return -1.0
    return max(float((got[name] - x).abs().max()) for name, x in want.items())


FROM_SCRATCH = {
    "tied": ["model.config.tie_word_embeddings=true", "model.config.intermediate_size=100"],  # 100 rows on 3 ranks
    "experts": [
        "model.config.model_type=qwen3_moe",
        "model.config.num_experts=4",
        "model.config.num_experts_per_tok=2",
        "model.config.moe_intermediate_size=24",
    ],
}


def test_random_weights_are_those_of_one_process(tmp_path: Path) -> None:
    cases = [config_of("smoke", tmp_path / name, *overrides) for name, overrides in FROM_SCRATCH.items()]
    for differences in run_ranks(largest_difference, 3, [(config, torch.float32) for config in cases]):
        assert differences == [0.0, 0.0]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dense with tied weights in bf16, and experts, which lie one by one in the files and fused in the model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    for name, dtype in (
        ("llama", torch.bfloat16),
        ("qwen3_moe", torch.float32),
        ("gpt_oss_sinks_window", torch.float32),
    ):
        config = FAMILIES[name]()
        config.tie_word_embeddings = name == "llama"
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder / name, max_shard_size="100KB")
    return folder


def test_loaded_weights_are_those_of_one_process(tmp_path: Path, checkpoints: Path) -> None:
    """Tied, fused, and with adapters in a frozen base: LoRA, DoRA, and a module that is trained whole."""
    plain = {
        name: ["model=pretrained", f"model.pretrained={checkpoints / name}"]
        for name in ("llama", "qwen3_moe", "gpt_oss_sinks_window")
    }
    saved = ["peft.target_modules=[q_proj]", "peft.modules_to_save=[lm_head]"]
    cases = [
        *((overrides, torch.float32) for overrides in plain.values()),
        ([*plain["llama"], "peft=lora"], torch.bfloat16),
        ([*plain["llama"], "peft=dora"], torch.bfloat16),
        ([*plain["qwen3_moe"], "peft=lora", *saved], torch.float32),
    ]
    configs = [(config_of("smoke", tmp_path, *overrides), dtype) for overrides, dtype in cases]
    for differences in run_ranks(largest_difference, 2, configs):
        assert differences == [0.0] * len(cases)


@pytest.mark.slow
def test_experts_fewer_than_ranks_are_those_of_one_process(tmp_path: Path, checkpoints: Path) -> None:
    """Two experts on four ranks lie on two of them each, loaded from fused files and drawn."""
    fused = ["model=pretrained", f"model.pretrained={checkpoints / 'gpt_oss_sinks_window'}"]
    drawn = [value.replace("experts=4", "experts=2") for value in FROM_SCRATCH["experts"]]
    configs = [(config_of("smoke", tmp_path, *overrides), torch.float32) for overrides in (fused, drawn)]
    for differences in run_ranks(largest_difference, 4, configs):
        assert differences == [0.0, 0.0]


INDICES = [..., slice(1, 5), (slice(2, 9),), (slice(3, None), slice(4, 7)), (slice(None), slice(0, 2)), slice(4, 4)]


def test_no_more_is_read_than_the_rows_asked_for(tmp_path: Path) -> None:
    values = {"matrix": torch.randn(64, 1024), "halves": torch.randn(10, 8).bfloat16(), "vector": torch.arange(12)}
    save_file(values | {"scalar": torch.tensor(3.0)}, tmp_path / "weights")
    file, library = RowFile(str(tmp_path / "weights")), safe_open(tmp_path / "weights", framework="pt")
    assert file.keys() == library.keys()
    for name in values:
        ours, theirs = file.get_slice(name), library.get_slice(name)
        assert (ours.get_shape(), ours.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
        for index in INDICES if values[name].ndim == 2 else INDICES[:2]:
            assert torch.equal(ours[index], theirs[index])
            assert ours[index].dtype == values[name].dtype
    assert float(file.get_slice("scalar")[...]) == 3.0
    before = _bytes_read()
    file.get_slice("matrix")[16:32]
    assert _bytes_read() - before < 2 * 16 * 1024 * 4  # of 4 times as many


def _bytes_read() -> int:
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.slow
@pytest.mark.parametrize("is_pretrained", [True, False], ids=["pretrained", "from-scratch"])
def test_a_rank_never_holds_the_model(tmp_path: Path, is_pretrained: bool) -> None:
    """253 M parameters, 0.94 GiB in fp32: peak memory of each rank from the start of a tiny model to its last check, and
    of the export, which reads the files back into shards beside the trained ones.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 8192}
    overrides = [f"{'' if key in TINY else '+'}model.config.{key}={value}" for key, value in sizes.items()]
    if is_pretrained:
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
    if is_pretrained:  # a fourth of the files, which are in bf16, and what is imported late
        assert whole / 8 <= num_read <= 0.17 * whole


TINY = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}


def peaks_of_a_rank(rank: int, world: int, config: Config) -> tuple[float, float, float, float]:
    """GiB above the imports, at the start and in the export, of the whole model in fp32, and read from files."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import recipes.train_ft  # noqa: F401 - before it is measured

    mesh = init_mesh(config.mesh)
    tiny = config_of("smoke", Path(config.output_dir))
    build_model(build_parts(tiny), tokenizer(8), mesh)  # what its code takes is not the model's
    before, num_read = _peak_gib(), _bytes_read()
    built = build_model(build_parts(config), tokenizer(8), mesh)
    start, num_read = _peak_gib() - before, _bytes_read() - num_read
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    export(Path(config.output_dir), built.model, tokenizer(8), built.source_dtype, 1, None)
    return start, _peak_gib() - before, built.num_parameters * 4 / 2**30, num_read / 2**30


def _peak_gib() -> float:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20
