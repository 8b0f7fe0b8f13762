"""Where a model comes from, and what its loader says when that fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedModel

from automodel_lite.models.generate import load_model
from automodel_lite.models.source import CausalLM
from benchmarks.survey_models import save
from benchmarks.tiny_models import tiny_model


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
            load_model(str(tmp_path / "model"), torch.float32)
        assert raised.value is error


def test_memory_that_runs_out_in_a_converter_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiny_model("qwen3_moe"), tmp_path / "model")
    source = CausalLM(str(tmp_path / "model"))

    def fails(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("transformers.core_model_loading.MergeModulelist.convert", fails)
    with pytest.raises(torch.OutOfMemoryError, match=r"while model.layers.0.mlp.experts.*CUDA out of memory"):
        source.build(AutoTokenizer.from_pretrained(tmp_path / "model"))


SCRIPT = """
import sys
from automodel_lite.errors import ConfigError
from automodel_lite.models.source import CausalLM
try:
    print(CausalLM(pretrained=sys.argv[1], revision=sys.argv[2] or None).described({}).num_hidden_layers)
except ConfigError:
    print("refused")
"""


@pytest.mark.parametrize(
    ("revision", "answer", "asks"), [("", "32", False), ("v2", "32", True)], ids=["main", "another revision"]
)
def test_a_stored_shape_does_not_ask_the_hub(tmp_path: Path, revision: str, answer: str, asks: bool) -> None:
    """Without a network every question is retried for 26 seconds. Another revision may have another shape."""
    questions: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            questions.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, "meta-llama/Llama-3.1-8B-Instruct", revision],
            capture_output=True,
            text=True,
            env=os.environ | hub,
            cwd=Path(__file__).resolve().parents[2],
        )
    finally:
        server.shutdown()
    assert done.stdout.strip() == answer, done.stderr
    assert bool(questions) == asks
