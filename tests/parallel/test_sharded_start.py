"""A model that is sharded before it has weights is the model that one process builds, in a fraction of the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from automodel_lite.config.schema import Config
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
        "+model.config.num_local_experts=4",
        "+model.config.moe_intermediate_size=24",
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
@pytest.mark.parametrize("is_pretrained", [True, False], ids=["pretrained", "from-scratch"])
def test_a_rank_never_holds_the_model(tmp_path: Path, is_pretrained: bool) -> None:
    """253 M parameters, 0.94 GiB in fp32: peak memory of each rank from its imports to its last check, and of the export,
    which reads the files back into shards beside the trained ones.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 8192}
    overrides = [f"{'' if key in TINY else '+'}model.config.{key}={value}" for key, value in sizes.items()]
    if is_pretrained:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / "base", max_shard_size="100MB")
        overrides = ["model=pretrained", f"model.pretrained={tmp_path / 'base'}"]
    config = config_of("smoke", tmp_path / "run", *overrides)
    (start, export, whole), (start_of_two, *_) = (
        map(max, zip(*run_ranks(peaks_of_a_rank, world, config))) for world in (4, 2)
    )
    assert whole > 0.9
    assert start <= 0.45 * whole
    assert start < 0.75 * start_of_two
    assert export <= 0.7 * whole


TINY = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}


def peaks_of_a_rank(rank: int, world: int, config: Config) -> tuple[float, float, float]:
    """GiB above the imports, at the start and in the export, and of the whole model in fp32."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    import recipes.train_ft  # noqa: F401 - before it is measured

    mesh, before = init_mesh(config.mesh), _peak_gib()
    built = build_model(build_parts(config), tokenizer(8), mesh)
    start = _peak_gib() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    export(Path(config.output_dir), built.model, tokenizer(8), built.source_dtype, 1, None)
    return start, _peak_gib() - before, built.num_parameters * 4 / 2**30


def _peak_gib() -> float:
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20
