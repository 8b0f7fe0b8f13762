"""The model card of an export, and its upload to a stand-in of the hub: the endpoints that huggingface_hub calls."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import ModelCard

from automodel_lite.errors import ConfigError
from recipes import export_hf
from tests.recipes.runs import config_of, train

FEW = ["training.max_steps=2", "training.val_every_steps=0"]


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory; every file is a regular one of a commit."""

    repos: dict[str, dict[str, Any]]
    token = "hf_right"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            return self._answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            is_new = name not in self.repos
            self.repos.setdefault(name, {"visibility": asked.get("visibility"), "files": {}, "commits": 0})
            return self._answer(200 if is_new else 409, {"url": f"https://huggingface.co/{name}", "name": name})
        name = "/".join(self.path.split("/")[3:5])
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        assert "/commit/" in self.path, self.path
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                self.repos[name]["files"][item["value"]["path"]] = base64.b64decode(item["value"]["content"])
        self.repos[name]["commits"] += 1
        self._answer(
            200, {"commitUrl": f"https://huggingface.co/{name}/commit/1", "commitOid": "1" * 40, "success": True}
        )

    def do_GET(self) -> None:
        self._answer(200, {"siblings": [], "sha": "0" * 40, "id": "x"})

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, Any]]]:
    handler = type("OwnHub", (Hub,), {"repos": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield handler.repos  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def test_a_run_pushes_its_export_with_a_card(tmp_path: Path, hub: dict[str, Any]):
    run = tmp_path / "run"
    train("smoke", run, *FEW, "hub.push=me/capitals")
    assert json.loads((run / "STATUS.json").read_text())["state"] == "finished"
    pushed = hub["me/capitals"]
    assert pushed["visibility"] == "private"
    assert pushed["files"].keys() == {path.name for path in (run / "hf").iterdir()}
    assert pushed["files"]["model.safetensors"] == (run / "hf/model.safetensors").read_bytes()
    card = ModelCard((run / "hf/README.md").read_text())
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    for part in ('from_pretrained("me/capitals")', "200 generated chats", "| validation (held out) |", "max_steps: 2"):
        assert part in card.text
    assert "hf_right" not in card.content
    assert export_hf.main([str(run), "--push", "me/again", "--public"]) == 0
    assert hub["me/again"]["visibility"] == "public"
    assert export_hf.main([str(run), "--push", "me/again"]) == 0
    assert hub["me/again"]["commits"] == 2


def test_a_hub_that_refuses_or_is_away_costs_a_warning(
    tmp_path: Path, hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    train("smoke", run, *FEW, "hub.push=me/capitals")
    said = " ".join(capsys.readouterr().out.split())
    assert "WARNING: hub.push=me/capitals:" in said
    assert f"then python recipes/export_hf.py {run} --push me/capitals." in said
    assert json.loads((run / "STATUS.json").read_text())["state"] == "finished"
    assert hub == {}
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"hub.push=me/capitals: .* is not uploaded .*log in with `hf auth login`"):
        export_hf.main([str(run), "--push", "me/capitals"])
    with pytest.raises(ConfigError, match=r"hub.push=capitals must be owner/name"):
        config_of("smoke", run, "hub.push=capitals")
    with pytest.raises(ConfigError, match=r"hub.push=me/capitals uploads what checkpoint.export_hf=false does not"):
        train("smoke", tmp_path / "other", *FEW, "hub.push=me/capitals", "checkpoint.export_hf=false")


def test_a_card_of_ones_own_stays(tmp_path: Path):
    run = tmp_path / "run"
    train("smoke", run, *FEW)
    (run / "hf/README.md").write_text("mine")
    assert export_hf.main([str(run)]) == 0
    assert (run / "hf/README.md").read_text() == "mine"
