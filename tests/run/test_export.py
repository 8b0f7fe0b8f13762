"""What is exported is the trained model: weights, dtypes, ties and logits; what is not is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from automodel_lite.errors import ConfigError
from automodel_lite.extras.load_run import load_trained
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.adapters import lora
from automodel_lite.run import export
from automodel_lite.run.checkpoint_folder import exported_folder
from recipes import average, export_hf
from tests.parallel.test_sharded_start import tokenizer
from tests.ranks import run_ranks
from tests.runs import train

IDS = torch.tensor([[5, 9, 3, 7, 1, 2]])


FEW = [
    "dataset.num_chats=100",
    "training.global_batch_size=2",
    "training.max_steps=3",
    "training.val_every_steps=0",
    "optimizer.lr=1e-2",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to be read; `run` is a copy of it, to be changed."""
    folder = tmp_path_factory.mktemp("base") / "run"
    train("smoke", folder, *FEW)
    return folder


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "run"))


# every two of number of ranks, tie and precision together
@pytest.mark.parametrize(
    ("world_size", "is_tied", "precision"),
    [
        (1, False, "fp32"),
        (1, True, "bf16"),
        (2, True, "fp32"),
        pytest.param(2, False, "bf16", marks=pytest.mark.system),
    ],
)
def test_the_exported_model_is_the_trained_one(
    tmp_path: Path, world_size: int, is_tied: bool, precision: str
):
    options = [f"model.config.tie_word_embeddings={is_tied}", f"training.precision={precision}"]
    train("smoke", tmp_path / "run", *FEW, *options, world_size=world_size)
    weights = load_file(tmp_path / "run/hf/model.safetensors")
    assert ("lm_head.weight" in weights) != is_tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf", dtype="auto").eval()
    assert loaded.dtype == torch.float32
    is_one = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert is_one == is_tied
    trained = load_trained(tmp_path / "run")
    assert trained.checkpoint.name == "step_00000003"
    want = trained.model.lm.state_dict()
    got = loaded.state_dict()
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert value.dtype == got[name].dtype
        assert torch.equal(value, got[name]), name
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, trained.model.lm.eval()(IDS).logits)


@pytest.mark.system
def test_a_tied_model_is_tuned_again_from_its_export(tmp_path: Path):
    train("smoke", tmp_path / "base", *FEW, "model.config.tie_word_embeddings=true")
    base = ["model=pretrained", f"model.pretrained={tmp_path}/base/hf"]
    train("smoke", tmp_path / "again", *FEW, *base, world_size=2)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again/hf")
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    before = load_file(tmp_path / "base/hf/model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(loaded.get_output_embeddings().weight, before)


def test_a_setting_that_changes_on_the_disk_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Equal weights are not the same model: here the base of the rotary embedding changes on the way to the disk."""
    train("smoke", tmp_path / "run", *FEW, "model.config.initializer_range=0.5")
    trained = load_trained(tmp_path / "run")
    save = LlamaConfig.to_dict

    def lossy(config: LlamaConfig) -> dict[str, Any]:
        return {**save(config), "rope_parameters": {"rope_theta": 10.0, "rope_type": "default"}}

    monkeypatch.setattr(LlamaConfig, "to_dict", lossy)
    with pytest.raises(RuntimeError, match="differs from the trained one"):
        export.export_hf(
            tmp_path / "hf",
            trained.model,
            trained.tokenizer,
            trained.dtype,
            trained.model.logits,
            3,
        )
    assert not (tmp_path / "hf").exists()


def test_a_model_trained_in_fp32_is_compared_in_fp32(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The folder is bf16, as its base was: a forward pass in bf16 would differ by its rounding,
    here 0.02 standard deviations, and in 30 layers by more than is allowed.
    """
    trained = load_trained(base)
    with torch.no_grad():
        for weight in trained.model.lm.parameters():
            weight.copy_((weight * 8).bfloat16())
    monkeypatch.setattr(export, "tolerance_std", lambda dtype: 1e-3)
    export.export_hf(
        tmp_path / "hf", trained.model, trained.tokenizer, torch.bfloat16, trained.model.logits, 3
    )
    (dtype,) = {value.dtype for value in load_file(tmp_path / "hf/model.safetensors").values()}
    assert dtype == torch.bfloat16


def test_a_weight_that_changes_on_the_disk_is_noticed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trained = load_trained(base)
    write = export.write_weights

    def damaging(folder: Path, *others: Any, **more: Any) -> None:
        write(folder, *others, **more)
        with open(folder / "model.safetensors", "r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\x7f\x3f")

    monkeypatch.setattr(export, "write_weights", damaging)
    with pytest.raises(RuntimeError, match=r"the exported weight .* differs"):
        export.export_hf(
            tmp_path / "hf",
            trained.model,
            trained.tokenizer,
            trained.dtype,
            trained.model.logits,
            3,
        )
    assert isinstance(trained.model, LossModel)
    assert not (tmp_path / "hf").exists()


LLAMA_2 = {"temperature": 0.9, "top_p": 0.6, "do_sample": False, "pad_token_id": -1}


def test_generation_settings_that_transformers_does_not_save(run: Path, tmp_path: Path):
    """Llama 2's own are mended; what cannot be is found before the training."""
    settings = run / "hf/generation_config.json"
    settings.write_text(json.dumps(LLAMA_2))
    tune = ["model=pretrained", f"model.pretrained={run}/hf"]
    train("smoke", tmp_path / "tuned", *FEW, *tune)
    exported = GenerationConfig.from_pretrained(tmp_path / "tuned/hf")
    assert (exported.temperature, exported.top_p, exported.do_sample) == (0.9, 0.6, True)
    settings.write_text(json.dumps({"output_scores": True}))
    with pytest.raises(
        ConfigError,
        match=r"the export at the end would fail, .*output_scores.*generation_config.json",
    ):
        train("smoke", tmp_path / "again", *FEW, *tune)
    assert not (tmp_path / "again/metrics.jsonl").exists()


def _no_space() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.system
def test_a_run_trained_further_does_not_use_its_old_export(base: Path, tmp_path: Path):
    run = tmp_path / "run"
    lora = [*FEW, "model=pretrained", f"model.pretrained={base}/hf", "peft=lora", "peft.r=2"]
    train("smoke", run, *lora)
    assert export_hf.main([str(run)]) == 0  # the merged model
    assert exported_folder(str(run)) == str(run / "hf")
    more = ["checkpoint.accept_changes=true", "training.max_steps=6"]
    train("smoke", run, *lora, *more, "checkpoint.export_hf=false")
    cure = r"has no hf/ or adapter/ of its newest checkpoint: automodel-lite export .* writes it"
    with pytest.raises(ConfigError, match=cure):
        exported_folder(str(run))
    (run / "STATUS.json").unlink()
    train("smoke", run, *lora, *more)
    assert exported_folder(str(run)) == str(run / "adapter")
    assert export_hf.main([str(run)]) == 0
    assert exported_folder(str(run)) == str(run / "hf")


def test_an_export_deletes_nobodys_own_files(run: Path):
    (run / "hf/notes").mkdir()
    (run / "hf/notes/mine.txt").write_text("mine")
    (run / "hf/model.gguf").write_text("mine")
    (run / "hf/model-00001-of-00002.safetensors").write_text("of an export before")
    mark = run / "hf/automodel_lite.json"
    ours = json.loads(mark.read_text())
    mark.write_text(
        json.dumps(ours | {"files": [*ours["files"], "model-00001-of-00002.safetensors"]})
    )
    assert export_hf.main([str(run)]) == 0
    assert (run / "hf/notes/mine.txt").read_text() == (run / "hf/model.gguf").read_text() == "mine"
    assert not (run / "hf/model-00001-of-00002.safetensors").exists()
    mark.unlink()
    assert export_hf.main([str(run)]) == 0
    assert (run / "hf/notes/mine.txt").read_text() == (run / "hf/model.gguf").read_text() == "mine"


def test_an_export_is_not_written_through_a_link(base: Path, tmp_path: Path):
    """`.tmp-hf` as a link to a folder of the user's own once took the export, and lost its name to hf/."""
    trained = load_trained(base)
    (tmp_path / "own").mkdir()
    (tmp_path / ".tmp-hf").symlink_to(tmp_path / "own")
    export.export_hf(
        tmp_path / "hf", trained.model, trained.tokenizer, trained.dtype, trained.model.logits, 3
    )
    assert list((tmp_path / "own").iterdir()) == []
    assert not (tmp_path / "hf").is_symlink()
    assert (tmp_path / "hf/config.json").is_file()


class FullDisk:
    """An adapter that cannot be written."""

    def save(self, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        folder.mkdir()
        _no_space()


def export_to_a_full_disk(rank: int, world: int, folder: Path) -> str:
    with pytest.raises((OSError, RuntimeError)) as failed:
        export.export_adapter(folder, torch.nn.Linear(2, 2), FullDisk(), tokenizer(), step=1)  # type: ignore[arg-type]
    return str(failed.value)


def test_an_unwritable_adapter_is_an_error_of_all_ranks(tmp_path: Path):
    """Rank 0 alone writes it; the others once waited for it in a barrier."""
    told = run_ranks(export_to_a_full_disk, 2, tmp_path / "adapter")
    assert told == [f"[Errno 28] No space left on device: '{tmp_path}/adapter'"] * 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.system)])
def test_an_adapter_is_merged_shard_by_shard(base: Path, tmp_path: Path, kind: str):
    adapter = ["model=pretrained", f"model.pretrained={base}/hf", f"peft={kind}", "peft.r=4"]
    adapter += ["peft.modules_to_save=[lm_head]", "peft.target_modules=[q_proj,down_proj]"]
    train("smoke", tmp_path / "run", *FEW, *(adapter if kind == "lora" else adapter[:-2]))
    assert export_hf.main([str(tmp_path / "run"), "--to", str(tmp_path / "alone")]) == 0
    run_ranks(merge_on_rank, 2, tmp_path / "run", tmp_path / "sharded")
    alone, sharded = (
        load_file(tmp_path / name / "model.safetensors") for name in ("alone", "sharded")
    )
    before = load_file(base / "hf/model.safetensors")
    assert not torch.equal(
        before["model.layers.0.mlp.down_proj.weight"], alone["model.layers.0.mlp.down_proj.weight"]
    )
    assert alone.keys() == sharded.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(sharded[name], weight, atol=1e-7, rtol=1e-6)


def test_an_adapter_of_4_bit_weights_is_merged_into_those_of_the_files(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was merged into the 4-bit ones, which are no export: it ended with that sentence, always."""
    run = tmp_path / "run"
    adapter = ["model=pretrained", f"model.pretrained={base}/hf", "peft=lora", "peft.r=4"]
    train("smoke", run, *FEW, *adapter)
    assert export_hf.main([str(run), "--to", str(tmp_path / "plain")]) == 0
    settings = (run / "config.yaml").read_text()
    assert "lora.Lora\n" in settings
    (run / "config.yaml").write_text(settings.replace("lora.Lora\n", "lora.QLora\n"))
    monkeypatch.setattr(lora, "find_spec", lambda name: True)  # as where it was trained
    assert export_hf.main([str(run), "--to", str(tmp_path / "quantized")]) == 0
    plain, quantized = (tmp_path / name / "model.safetensors" for name in ("plain", "quantized"))
    assert plain.read_bytes() == quantized.read_bytes()


def merge_on_rank(rank: int, world: int, run: Path, to: Path) -> None:
    assert export_hf.main([str(run), "--to", str(to)]) == 0


@pytest.mark.system
def test_experts_of_tensor_parallel_ranks_are_exported_from_the_checkpoint(tmp_path: Path):
    """Each rank holds a part of the gates and one of the matrices fused to them."""
    experts = "{model_type: qwen3_moe, hidden_size: 32, moe_intermediate_size: 16, num_experts: 4}"
    sizes = ["intermediate_size=64", "num_hidden_layers=2", "num_experts_per_tok=2"]
    heads = ["num_attention_heads=4", "num_key_value_heads=2"]
    more = [f"+model.config.{setting}" for setting in (*sizes, *heads)]
    train(
        "smoke",
        tmp_path / "run",
        *FEW,
        "~model.config",
        f"+model.config={experts}",
        *more,
        "mesh.tp=2",
        world_size=2,
    )
    assert export_hf.main([str(tmp_path / "run"), "--to", str(tmp_path / "again")]) == 0
    again = load_file(tmp_path / "again/model.safetensors")
    for name, weight in load_file(tmp_path / "run/hf/model.safetensors").items():
        assert torch.equal(again[name], weight), name


def test_checkpoints_are_averaged(tmp_path: Path):
    run = tmp_path / "run"
    # of a model from scratch, frozen weights are in no file but the run's
    frozen = "model.freeze=[embed_tokens,layers.0]"
    train("smoke", run, *FEW, "checkpoint.every_steps=1", "checkpoint.keep_last=3", frozen)
    for number in (1, 2, 3):
        assert (
            export_hf.main(
                [
                    str(run),
                    "--checkpoint",
                    f"step_0000000{number}",
                    "--to",
                    str(tmp_path / f"{number}"),
                ]
            )
            == 0
        )
    assert average.main([str(run)]) == 0
    assert average.main([str(run), "--last", "2", "--to", str(tmp_path / "two")]) == 0
    of_step = [load_file(tmp_path / f"{number}/model.safetensors") for number in (1, 2, 3)]
    for name, weight in load_file(run / "hf/model.safetensors").items():
        assert torch.equal(of_step[-1][name], weight), name
    means = {run / "averaged": of_step, tmp_path / "two": of_step[1:]}
    for folder, parts in means.items():
        for name, weight in load_file(folder / "model.safetensors").items():
            torch.testing.assert_close(
                weight, torch.stack([part[name] for part in parts]).mean(0), msg=name
            )
    with pytest.raises(ConfigError, match="averaged exists already"):
        average.main([str(run)])
    with pytest.raises(
        ConfigError, match="--checkpoints step_9: a mean is of two or more: name an"
    ):
        average.main([str(run), "--checkpoints", "step_9", "--to", str(tmp_path / "four")])
    with pytest.raises(
        ConfigError, match=r"has 3 complete .*: train with a smaller checkpoint.every_steps and"
    ):
        average.main([str(run), "--last", "4", "--to", str(tmp_path / "four")])
