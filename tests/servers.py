"""Stand-ins for inference servers: the HTTP interfaces of vLLM 0.32 and SGLang 0.5.23 that the sampling client uses,
in a thread, over a model of plain transformers that is loaded from the folder the server is told to load.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

NO_ROUTE = (404, {"detail": "Not Found"})
SGLANG_SETTINGS = {
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "sampling_seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "no_stop_trim",
    "skip_special_tokens",
}
Reply = tuple[int, Any]


class StandIn:
    """dtype       of the weights and their arithmetic
    takes       False = the server was started without what lets weights change while it runs
    is_changed  its log-probabilities are those after the temperature
    key         that requests must bring
    """

    def __init__(
        self,
        folder: str,
        dtype: torch.dtype = torch.float32,
        takes: bool = True,
        is_changed: bool = False,
        key: str = "",
    ) -> None:
        self.folder = folder
        self.dtype = dtype
        self.takes = takes
        self.is_changed = is_changed
        self.key = key
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = self.load(folder)
        self.adapters: dict[str, Any] = {}
        self.version = "default"
        self.cached: dict[
            tuple[int, ...], Tensor
        ] = {}  # of prompts, until it is told to forget them
        self.paths: list[str] = []
        self.lock = threading.RLock()
        self.is_open = threading.Event()
        self.is_open.set()

    def load(self, folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).eval()

    def add(self, name: str, folder: str) -> None:
        self.adapters[name] = (
            PeftModel.from_pretrained(self.load(self.folder), folder).to(self.dtype).eval()
        )

    @torch.no_grad()
    def scores(self, model: Any, ids: list[int], is_prompt: bool) -> Tensor:
        """Logits of the next token; those behind a prompt are remembered, as cached prefixes are."""
        place = tuple(ids)
        if is_prompt and model is self.model and place in self.cached:
            return self.cached[place]
        found = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        if is_prompt and model is self.model:
            self.cached[place] = found
        return found

    def answer(
        self, model: Any, prompt: list[int], asked: dict[str, Any], seed: int
    ) -> dict[str, Any]:
        """Draws one answer token by token."""
        draws = torch.Generator().manual_seed(seed % 2**63)
        ids: list[int] = []
        log_probs: list[float] = []
        for _ in range(asked["most"]):
            logits = self.scores(model, [*prompt, *ids], not ids)
            scaled = logits / (asked["temperature"] or 1.0)
            log_p = torch.log_softmax(scaled if self.is_changed else logits, -1)
            if asked["temperature"] == 0 or asked["top_k"] == 1:
                token = int(logits.argmax())
            else:
                probs = torch.softmax(scaled, -1)
                if asked["top_k"] > 0:
                    probs[probs < probs.topk(asked["top_k"]).values[-1]] = 0
                values, order = probs.sort(descending=True)
                probs[order[values.cumsum(0) - values >= asked["top_p"]]] = 0
                token = int(torch.multinomial(probs / probs.sum(), 1, generator=draws))
            ids.append(token)
            log_probs.append(float(log_p[token]))
            text = self.tokenizer.decode(ids)
            if token in asked["ends"] or any(stop in text for stop in asked["strings"]):
                return {"ids": ids, "log_probs": log_probs, "reason": "stop"}
        return {"ids": ids, "log_probs": log_probs, "reason": "length"}

    def get(self, path: str) -> Reply:
        raise NotImplementedError

    def post(self, path: str, body: Any) -> Reply:
        raise NotImplementedError


class Vllm(StandIn):
    def get(self, path: str) -> Reply:
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/weight_info" and self.takes:
            return 200, {"weight_version": self.version}
        if path == "/v1/models":
            cards = [{"id": self.folder, "parent": None}]
            cards += [{"id": name, "parent": self.folder} for name in self.adapters]
            return 200, {"object": "list", "data": cards}
        return NO_ROUTE

    def post(self, path: str, body: Any) -> Reply:
        if path == "/v1/completions":
            self.is_open.wait()
            return self.complete(body)
        if not self.takes:
            return NO_ROUTE
        if path == "/v1/load_lora_adapter":
            if not Path(body["lora_path"], "adapter_config.json").is_file():
                message = f"The lora adapter '{body['lora_name']}' cannot be found."
                return 404, {"error": {"message": message, "type": "NotFoundError", "code": 404}}
            if body["lora_name"] in self.adapters:
                return 400, {"error": {"message": "has already been loaded", "code": 400}}
            self.add(body["lora_name"], body["lora_path"])
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            is_there = self.adapters.pop(body["lora_name"], None) is not None
            return (
                (200, "Success") if is_there else (404, {"error": {"message": "cannot be found"}})
            )
        if path == "/pause":
            self.is_open.clear()
            with self.lock:  # of what is being drawn
                return 200, {"status": "paused"}
        if path == "/resume":
            self.is_open.set()
            return 200, {"status": "resumed"}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            assert not self.is_open.is_set()
            try:
                self.model = self.load(body["kwargs"]["weights_path"])
            except OSError:
                return 500, {"error": {"message": "EngineCore encountered an issue", "code": 500}}
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            self.cached.clear()
            return 200, {"success": True}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return 200, {"success": True, "new_version": self.version}
        return NO_ROUTE

    def complete(self, body: Any) -> Reply:
        if body["model"] != self.folder and body["model"] not in self.adapters:
            message = f"The model `{body['model']}` does not exist."
            return 404, {"error": {"message": message, "type": "NotFoundError", "code": 404}}
        if body["temperature"] == 0 and body["n"] != 1:
            return 400, {
                "error": {"message": "n must be 1 when using greedy sampling", "code": 400}
            }
        assert body["ignore_eos"]
        assert not body["skip_special_tokens"]
        asked = {
            "most": body["max_tokens"],
            "temperature": body["temperature"],
            "top_p": body["top_p"],
            "top_k": body["top_k"],
            "ends": body["stop_token_ids"],
            "strings": body["stop"],
        }
        with self.lock:
            model = self.adapters.get(body["model"], self.model)
            found = [
                self.answer(model, body["prompt"], asked, body["seed"] + i)
                for i in range(body["n"])
            ]
        choices = [
            {
                "index": number,
                "text": self.tokenizer.decode(one["ids"]),
                "finish_reason": one["reason"],
                "token_ids": one["ids"] if body["return_token_ids"] else None,
                "logprobs": {"token_logprobs": one["log_probs"]},
            }
            for number, one in enumerate(found)
        ]
        return 200, {"object": "text_completion", "choices": choices[::-1]}


class Sglang(StandIn):
    def get(self, path: str) -> Reply:
        if path == "/model_info":
            return 200, {
                "model_path": self.folder,
                "served_model_name": self.folder,
                "is_generation": True,
                "weight_version": self.version,
            }
        return NO_ROUTE

    def post(self, path: str, body: Any) -> Reply:
        if path == "/generate":
            with self.lock:
                return self.generate(body)
        if path == "/update_weights_from_disk":
            with self.lock:
                try:
                    self.model = self.load(body["model_path"])
                except OSError as error:
                    return 400, {
                        "success": False,
                        "message": f"Failed to get weights iterator: {error}",
                        "num_paused_requests": 0,
                    }
                if body.get("flush_cache", True):
                    self.cached.clear()
                self.version = body["weight_version"]
                message = (
                    f"Succeeded to update model weights. Weight version updated to {self.version}."
                )
                return 200, {"success": True, "message": message, "num_paused_requests": 0}
        if path == "/load_lora_adapter":
            if not self.takes:
                message = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
                return 400, self.update_of_adapters(message)
            if not Path(body["lora_path"], "adapter_config.json").is_file():
                message = f"Failed to load LoRA adapter {body['lora_name']}: no such file."
                return 400, self.update_of_adapters(message)
            self.add(body["lora_name"], body["lora_path"])
            return 200, self.update_of_adapters(None)
        if path == "/unload_lora_adapter":
            if body["lora_name"] not in self.adapters:
                message = f"LoRA with name {body['lora_name']} does not exist."
                return 400, self.update_of_adapters(message)
            del self.adapters[body["lora_name"]]
            return 200, self.update_of_adapters(None)
        return NO_ROUTE

    def update_of_adapters(self, error: str | None) -> dict[str, Any]:
        loaded = {name: name for name in self.adapters}
        return {"success": error is None, "error_message": error, "loaded_adapters": loaded}

    def generate(self, body: Any) -> Reply:
        answers = []
        names = body.get("lora_path") or [None] * len(body["input_ids"])
        for prompt, own, name in zip(body["input_ids"], body["sampling_params"], names):
            if name is not None and name not in self.adapters:
                message = (
                    f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: "
                    f"{self.adapters.keys()}."
                )
                return 400, {"error": {"message": message}}
            assert own.keys() <= SGLANG_SETTINGS
            assert own["top_k"] == -1 or own["top_k"] > 0
            asked = {
                "most": own["max_new_tokens"],
                "temperature": own["temperature"],
                "top_p": own["top_p"],
                "top_k": own["top_k"],
                "ends": []
                if own["ignore_eos"]
                else [*own["stop_token_ids"], self.tokenizer.eos_token_id],
                "strings": own["stop"],
            }
            model = self.model if name is None else self.adapters[name]
            one = self.answer(model, prompt, asked, own["sampling_seed"])
            pairs = [
                [log_prob, token, None] for token, log_prob in zip(one["ids"], one["log_probs"])
            ]
            matched = one["ids"][-1] if one["reason"] == "stop" else None
            about = {
                "id": "",
                "prompt_tokens": len(prompt),
                "completion_tokens": len(one["ids"]),
                "finish_reason": {"type": "stop", "matched": matched}
                if one["reason"] == "stop"
                else {"type": "length", "length": own["max_new_tokens"]},
                "weight_version": self.version,
                "output_token_logprobs": pairs if body["return_logprob"] else None,
            }
            answers.append({"text": "", "output_ids": one["ids"], "meta_info": about})
        return 200, answers


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """Gives the address of a stand-in that answers until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(*stand_in.get(self.path))

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(size))
            path = urlsplit(self.path).path
            stand_in.paths.append(self.path)
            if stand_in.key and self.headers["Authorization"] != f"Bearer {stand_in.key}":
                self.reply(401, {"error": "Unauthorized"})
                return
            self.reply(*stand_in.post(path, body))

        def reply(self, status: int, value: Any) -> None:
            data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
