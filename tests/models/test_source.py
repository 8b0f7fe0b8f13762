"""Where a model comes from, and what its loader says when that fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, PreTrainedModel

from automodel_lite.errors import ConfigError
from automodel_lite.models.freezing import freeze_named
from automodel_lite.models.source import CausalLM
from automodel_lite.parts.adapters.adapter import load_adapted
from automodel_lite.parts.adapters.lora import Lora
from automodel_lite.tools.load_generator import load_generator
from benchmarks.survey_models import load, run, save, separate, step_of
from benchmarks.tiny_models import random_model, tiny_config, tiny_model
from tests.data.templates import MARKED, byte_tokenizer
from tests.runs import train
from tests.tiers import rarely


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 GiB."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
        ),
        dist.DistBackendError("NCCL error: remote process exited"),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    ],
    ids=["GPU memory", "host memory", "NCCL", "gloo"],
)
def test_no_setting_is_blamed_for_the_machine(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiny_model("llama"), tmp_path / "model")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", fails)
    source = CausalLM(str(tmp_path / "model"))
    with pytest.raises(type(error)) as raised:
        source.build(AutoTokenizer.from_pretrained(tmp_path / "model"))
    assert raised.value is error
    if "memory" in str(error):
        with pytest.raises(type(error)) as raised:
            load_generator(str(tmp_path / "model"))
        assert raised.value is error


def test_memory_that_runs_out_in_a_converter_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tiny_model("qwen3_moe"), tmp_path / "model")
    source = CausalLM(str(tmp_path / "model"))

    def fails(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("transformers.core_model_loading.MergeModulelist.convert", fails)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"while model.layers.0.mlp.experts.*CUDA out of memory"
    ):
        source.build(AutoTokenizer.from_pretrained(tmp_path / "model"))


SCRIPT = """
import sys
from automodel_lite.errors import ConfigError
from automodel_lite.models.source import CausalLM
try:
    for revision in (None, "v2"):
        print(CausalLM(pretrained=sys.argv[1], revision=revision).resolve_model_config({}).num_hidden_layers)
except ConfigError:
    print("refused")
"""


@pytest.mark.system
def test_a_stored_shape_does_not_ask_the_hub(tmp_path: Path) -> None:
    """Without a network every question is retried for 26 seconds. Another revision may have another shape."""
    questions: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            questions.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, "meta-llama/Llama-3.1-8B-Instruct"],
            capture_output=True,
            text=True,
            env=os.environ | hub,
            cwd=Path(__file__).resolve().parents[2],
        )
    finally:
        server.shutdown()
    assert done.stdout.split() == ["32", "32"], done.stderr
    assert {re.search("/resolve/([^/]+)/", path)[1] for path in questions} == {"v2"}  # type: ignore[index]


def test_weights_that_the_model_lacks_are_named(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    save_file(
        load_file(path) | {"v_head.weight": torch.zeros(1, 32)}, path, metadata={"format": "pt"}
    )
    source = CausalLM(str(tmp_path / "model"))
    source.build(AutoTokenizer.from_pretrained(tmp_path / "model"))
    assert source.notes == [
        "1 weights of the checkpoint are not part of the model and not exported: v_head.weight"
    ]


def test_frozen_weights_stay_and_the_others_learn(tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path / "model")
    run(tmp_path, "full", "model.freeze=[embed_tokens,'layers.0.*.down_proj']")
    before, after = (
        load_file(tmp_path / name)
        for name in ("model/model.safetensors", "full/hf/model.safetensors")
    )
    same = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert {name for name in before if "norm" not in name and name in same} == {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.down_proj.weight",
    }


def test_what_to_freeze_must_exist_and_leave_something() -> None:
    model = tiny_model("llama")
    assert freeze_named(model, ["layers.[01].mlp"]) == [
        "frozen layers.[01].mlp: 6 weights, 0.01 M parameters"
    ]
    assert sum(p.requires_grad for p in model.model.layers.parameters()) == 12
    with pytest.raises(
        ConfigError,
        match=r"model.freeze=\['layer.0'\]: no weight is named layer.0; their names are mod",
    ):
        freeze_named(model, ["layer.0"])
    with pytest.raises(ConfigError, match=r"leaves no weight to train"):
        freeze_named(model, ["model", "lm_head"])


def test_a_tied_weight_is_frozen_under_both_names() -> None:
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    model = random_model(config)
    assert freeze_named(model, ["lm_head"])[0].endswith(
        "parameters, which are model.embed_tokens.weight too"
    )
    assert not model.model.embed_tokens.weight.requires_grad


def first_step(folder: Path, name: str, *overrides: str) -> dict[str, float]:
    row = json.loads(run(folder, name, *overrides))
    return {"loss": row["loss"], "grad_norm": row["grad_norm"]}


def test_a_run_goes_on_from_a_run(tmp_path: Path) -> None:
    """Its folder stands for its exported model."""
    save(tiny_model("llama"), tmp_path / "model")
    run(tmp_path, "one")
    again = first_step(tmp_path, "two", f"model.pretrained={tmp_path / 'one'}")
    assert again == first_step(tmp_path, "three", f"model.pretrained={tmp_path / 'one/hf'}")


@pytest.mark.system
@pytest.mark.parametrize("kind", ["dora", *rarely("lora")])
def test_an_adapter_is_continued(kind: str, tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path / "model")
    run(tmp_path, "one", f"peft={kind}", "peft.r=4", "optimizer.lr=0.05")
    adapted = load_adapted(str(tmp_path / "one/adapter"), torch.float32).requires_grad_()
    want = step_of(separate(adapted))
    by_key = first_step(tmp_path, "two", f"peft={kind}", f"peft.adapter={tmp_path / 'one'}")
    assert by_key["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert abs(by_key["loss"] / step_of(separate(load(tmp_path)))["loss"] - 1) > 1e-3
    assert by_key == first_step(
        tmp_path, "three", "peft=lora", f"model.pretrained={tmp_path / 'one'}"
    )
    with pytest.raises(ConfigError, match=r"holds an adapter: peft=lora continues it"):
        run(tmp_path, "four", f"model.pretrained={tmp_path / 'one'}")
    assert by_key["loss"] == pytest.approx(on_two_ranks(tmp_path, kind), rel=1e-5)


def on_two_ranks(folder: Path, kind: str) -> float:
    """Sharded: the adapter is there before the weights of its base."""
    settings = [
        f"model.pretrained={folder}/model",
        f"dataset.path={folder}/documents.jsonl",
        "dataset.labels=aligned",
    ]
    settings += [
        "tokenize.train_on=all",
        "packed_sequence.packed_sequence_size=48",
        "training.max_steps=1",
        "name=x",
    ]
    settings += [
        "training.global_batch_size=1",
        "mesh.cp=2",
        f"peft={kind}",
        f"peft.adapter={folder}/one/adapter",
    ]
    rows = train("finetune", folder / "two_ranks", *settings, "lr_scheduler=constant", world_size=2)
    return float(next(row["loss"] for row in rows if "loss" in row))


def test_tied_weights_trained_as_a_whole_are_not_tied() -> None:
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    saved = (
        Lora(r=2, modules_to_save=["embed_tokens"]).adapt(random_model(config), "base").description
    )
    assert "the embedding and the head are no longer tied" in saved
    assert "tied" not in Lora(r=2).adapt(random_model(config), "base").description


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "apart"])
def test_added_tokens_get_rows_that_are_exported(is_tied: bool, tmp_path: Path) -> None:
    config = tiny_config("llama")
    config.tie_word_embeddings = is_tied
    save(random_model(config), tmp_path / "model")
    added = [
        "tokenizer.added_tokens=['<think>','<act>','<see>','<say>','<end>','<go>','<a>','<b>','<c>']"
    ]
    with pytest.raises(
        ConfigError,
        match=r"has 71 tokens, the model's embedding 70 rows: .*model.resize_embeddings=true",
    ):
        run(tmp_path, "refused", *added)
    grown = first_step(tmp_path, "full", *added, "model.resize_embeddings=true", "optimizer.lr=0")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model", "full/hf")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        if "embed" in name or "lm_head" in name:
            assert after[name].shape == (71, 32)
            torch.testing.assert_close(
                after[name][70].float(), value.float().mean(0), atol=2e-3, rtol=1e-2
            )
        assert torch.equal(after[name][: len(value)], value)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "full/hf")
    assert tokenizer.convert_tokens_to_ids("<c>") == 70
    (tmp_path / "full/model").symlink_to(tmp_path / "full/hf")
    want = step_of(separate(load(tmp_path / "full")))
    assert grown["loss"] == pytest.approx(want["loss"], rel=1e-3)  # of the export, in bf16
    with pytest.raises(ConfigError, match=r"w5 is a token of .* already"):
        run(tmp_path, "known", "tokenizer.added_tokens=[w5]")
    with pytest.raises(ConfigError, match=r"model.resize_embeddings=true with peft"):
        run(tmp_path, "adapter", *added, "model.resize_embeddings=true", "peft=lora")


@pytest.mark.parametrize("family", ["gemma3n_text", "nemotron_h_omni", "xlstm"])
def test_every_table_of_tokens_grows(family: str, tmp_path: Path) -> None:
    """Gemma 3n looks tokens up in a second table, the head of Nemotron Omni is inside a causal LM of its own."""
    save(tiny_model(family), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_tokens([f"<{number}>" for number in range(12)])
    source = CausalLM(str(tmp_path), resize_embeddings=True)
    if family == "xlstm":  # transformers' own fault
        with pytest.raises(ConfigError, match=r"transformers cannot grow xLSTMForCausalLM \("):
            source.build(tokenizer)
        return
    grown = [p for p in source.build(tokenizer).parameters() if p.shape[0] == 74]
    assert len(grown) == 2
    for table in grown:
        torch.testing.assert_close(table[70:], table[:70].mean(0).expand(4, -1))


def test_a_config_does_not_tie_weights_that_differ(tmp_path: Path) -> None:
    """The export's config tied them for every engine that does not compare their values."""
    config = tiny_config("llama")
    config.tie_word_embeddings = False
    save(random_model(config), tmp_path)
    source = CausalLM(str(tmp_path), config={"tie_word_embeddings": True})
    with pytest.raises(ConfigError, match=r"different values for them: set model.config.tie_word"):
        source.build(AutoTokenizer.from_pretrained(tmp_path))


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_weights_that_are_a_program_are_a_sentence(tmp_path: Path) -> None:
    """torch's own error explains how to run it."""
    LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=400,
    ).save_pretrained(tmp_path)
    torch.save({"x": Bomb()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ConfigError,
        match=r"its weights are a pickle that holds more than tensors, .*: use a checkpoint",
    ):
        CausalLM(str(tmp_path)).build(byte_tokenizer(MARKED))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"config": {}}, "teacher.pretrained=null needs teacher.config.model_type"),
        ({"config": {"model_type": "lama"}}, "teacher.config.model_type=lama"),
        ({"config": {"model_type": "llama", "hidden_siz": 3}}, "teacher.config.hidden_siz=3"),
        (
            {"config": {"model_type": "llama", "num_attention_heads": 0}},
            "(teacher.config.model_type=llama teacher.config.num_attention_heads=0)",
        ),
    ],
    ids=["no model", "no such model", "no such setting", "refused by its class"],
)
def test_a_second_model_is_named_by_its_node(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CausalLM(**settings, key="teacher").resolve_model_config({"vocab_size": 64})
    assert named in str(raised.value)
    assert "model.config" not in str(raised.value).replace("teacher.config", "")


def test_a_family_whose_padding_row_is_zeroed_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("youtu", pad_token_id=3).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"zeroes row 3 .*model.config.pad_token_id=null"):
        CausalLM(str(tmp_path)).resolve_model_config({})
    CausalLM(str(tmp_path), {"pad_token_id": None}).resolve_model_config({})


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_config_json_names_no_kernel(key: str, tmp_path: Path) -> None:
    """transformers loads the code of a repository that stands there."""
    save(tiny_model("llama"), tmp_path / "model")
    file = tmp_path / "model/config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {key: "evil-org/evil", "experts_implementation": "x/y"}))
    lm = CausalLM(str(tmp_path / "model")).build(AutoTokenizer.from_pretrained(tmp_path / "model"))
    assert lm.config._attn_implementation == "sdpa"
    model = load_generator(str(tmp_path / "model"), on_cpu=True).model
    assert model.config._attn_implementation == "sdpa"
    parts = {"vision_config": {key: "evil-org/evil"}, "text_config": {key: "evil-org/evil"}}
    file.write_text(json.dumps({"model_type": "qwen2_5_vl", key: "evil-org/evil", **parts}))
    config = CausalLM(str(tmp_path / "model")).resolve_model_config({})
    for part in (config, config.text_config, config.vision_config):
        assert part._attn_implementation is None
