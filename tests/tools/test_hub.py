"""The model card of an export, and its upload to a stand-in of the hub: the endpoints that huggingface_hub calls."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
from huggingface_hub import ModelCard
from omegaconf import OmegaConf

from automodel_lite.errors import ConfigError
from automodel_lite.extras.hub import push, write_card
from recipes import export_hf
from tests.runs import config_of, train

FEW = ["training.max_steps=2", "training.val_every_steps=0"]


LARGE = (".safetensors", "tokenizer.json")  # files of these names go to the large file storage


@dataclass
class Storage:
    """What the stand-in holds, and what it was sent."""

    repos: dict[str, dict[str, Any]] = field(default_factory=dict)
    # sha256 -> bytes of the large file storage
    objects: dict[str, bytes] = field(default_factory=dict)
    takes: int = 99  # so many objects, then the storage refuses
    # what the Xet storage was sent: xorbs (the bytes), shards, ...
    xet: list[str] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory: regular files come inside the commit, large ones through Git LFS or Xet before it."""

    storage: Storage
    token = "hf_right"
    read_token = "hf_reads"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if self.path.startswith(("/v2/", "/v1/xorb-grants/")):  # newer than what this storage knows
            return self._answer(404, {})
        if self.path.startswith("/v1/"):
            self.storage.xet.append(self.path.split("/")[2])
            return self._answer(200, {"was_inserted": True, "result": 1})
        if self.headers.get("Authorization") == f"Bearer {self.read_token}":
            return self._answer(403, {"error": "This token reads, it does not write."})
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            return self._answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            return self._create(json.loads(body))
        if self.path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(body)["objects"])
        if "/preupload/" in self.path:
            return self._answer(
                200, {"files": [_mode_of(file["path"]) for file in json.loads(body)["files"]]}
            )
        assert "/commit/" in self.path, self.path
        self._commit([json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.split("/")[-1]
        assert hashlib.sha256(data).hexdigest() == oid
        with self.storage.lock:
            if len(self.storage.objects) >= self.storage.takes:
                return self._answer(403, {"error": "the signature of this address has expired"})
            self.storage.objects[oid] = data
        self._answer(200, {})

    def do_GET(self) -> None:
        if "/xet-write-token/" in self.path:
            return self._answer(
                200, {"casUrl": self._url, "accessToken": "xet", "exp": int(time.time()) + 3600}
            )
        if self.path.startswith("/v1/"):
            return self._answer(404, {})  # no chunk is known yet
        self._answer(200, {"siblings": [], "sha": "0" * 40, "id": "x"})

    def _create(self, asked: dict[str, Any]) -> None:
        name = (
            f"{asked['organization']}/{asked['name']}"
            if asked.get("organization")
            else asked["name"]
        )
        is_new = name not in self.storage.repos
        self.storage.repos.setdefault(
            name, {"visibility": asked.get("visibility"), "files": {}, "commits": 0}
        )
        self._answer(
            200 if is_new else 409, {"url": f"https://huggingface.co/{name}", "name": name}
        )

    def _batch(self, objects: list[dict[str, Any]]) -> None:
        """Where to put the objects that are not here yet."""
        for item in objects:
            if item["oid"] not in self.storage.objects:
                item["actions"] = {"upload": {"href": f"{self._url}/lfs/{item['oid']}"}}
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        repo = self.storage.repos["/".join(self.path.split("/")[3:5])]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repo["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repo["files"][value["path"]] = self.storage.objects.get(value["oid"], value["oid"])
        repo["commits"] += 1
        self._answer(
            200,
            {
                "commitUrl": f"https://huggingface.co/{'/'.join(self.path.split('/')[3:5])}/commit/1",
                "commitOid": "1" * 40,
                "success": True,
            },
        )

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None: ...


def _mode_of(path: str) -> dict[str, Any]:
    return {
        "path": path,
        "uploadMode": "lfs" if path.endswith(LARGE) else "regular",
        "shouldIgnore": False,
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    handler = type("OwnHub", (Hub,), {"storage": Storage()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(
        huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}"
    )
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield handler.storage  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained all weights; its folder is only read."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train("smoke", run, *FEW)
    return run


def test_a_run_pushes_its_export_with_a_card(
    tmp_path: Path, hub: Storage, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "run"
    train("smoke", run, *FEW, "hub.push=me/capitals")
    assert json.loads((run / "STATUS.json").read_text())["state"] == "finished"
    pushed, written = (
        hub.repos["me/capitals"],
        {path.name: path.read_bytes() for path in (run / "hf").iterdir()},
    )
    assert pushed["visibility"] == "private"
    large = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in written.items()
        if name.endswith(LARGE)
    }
    assert pushed["files"] == written | large
    assert hub.xet[:2] == ["xorbs", "shards"]
    card = ModelCard((run / "hf/README.md").read_text())
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    for part in (
        'from_pretrained("me/capitals")',
        "200 generated chats",
        "| validation (held out) |",
        "max_steps: 2",
    ):
        assert part in card.text
    assert "hf_right" not in card.content
    assert str(tmp_path) not in card.content
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    assert export_hf.main([str(run), "--push", "me/again", "--public"]) == 0
    again = hub.repos["me/again"]
    assert again["visibility"] == "public"
    assert again["files"] == {path.name: path.read_bytes() for path in (run / "hf").iterdir()}
    assert export_hf.main([str(run), "--push", "me/again"]) == 0
    assert again["commits"] == 2


def test_an_adapter_goes_through_lfs_and_goes_on_where_the_storage_refused(
    tmp_path: Path,
    finished: Path,
    hub: Storage,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    run, hub.takes = tmp_path / "run", 1
    base = ["model=pretrained", f"model.pretrained={finished}/hf", "peft=lora", "peft.r=2"]
    train("smoke", run, *FEW, *base, "hub.push=me/adapter")
    said = capfd.readouterr()
    assert "WARNING: hub.push=me/adapter:" in " ".join(said.out.split())
    assert "0%|" not in said.err  # a log has no bars
    assert (len(hub.objects), hub.repos["me/adapter"]["commits"]) == (1, 0)
    sent, hub.takes = dict(hub.objects), 99
    monkeypatch.setattr(Hub, "do_PUT", refusing(sent, Hub.do_PUT))
    push(run, run / "adapter", "me/adapter", is_private=True)
    written = {path.name: path.read_bytes() for path in (run / "adapter").iterdir()}
    assert hub.repos["me/adapter"]["files"] == written
    assert {name for name in written if name.endswith(LARGE)} == {
        "adapter_model.safetensors",
        "tokenizer.json",
    }
    card = ModelCard((run / "adapter/README.md").read_text())
    assert card.data.library_name == "peft"
    assert "More Information Needed" not in card.content  # peft's own
    assert "AutoPeftModelForCausalLM" in card.content
    assert str(finished) not in card.content


def refusing(sent: dict[str, bytes], put: Callable[[Hub], None]) -> Callable[[Hub], None]:
    """do_PUT that takes no object for the second time."""

    def do_put(hub: Hub) -> None:
        assert hub.path.split("/")[-1] not in sent
        put(hub)

    return do_put


@pytest.mark.parametrize(
    ("token", "reason"),
    [("hf_wrong", "Invalid username or password"), ("hf_reads", "This token reads")],
)
def test_a_token_that_is_refused_is_a_sentence(
    finished: Path, hub: Storage, monkeypatch: pytest.MonkeyPatch, token: str, reason: str
):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(
        ConfigError,
        match=rf"hub.push=me/x: .* is not uploaded \(.*{reason}.*\): log in with `hf auth",
    ) as told:
        push(finished, finished / "hf", "me/x", is_private=True)
    assert token not in str(told.value)
    assert hub.repos == {}


def test_a_hub_that_refuses_or_is_away_costs_a_warning(
    tmp_path: Path,
    hub: Storage,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run = tmp_path / "run"
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    train("smoke", run, *FEW, "hub.push=me/capitals")
    said = " ".join(capsys.readouterr().out.split())
    assert "WARNING: hub.push=me/capitals:" in said
    assert f"then automodel-lite export {run} --push me/capitals." in said
    assert json.loads((run / "STATUS.json").read_text())["state"] == "finished"
    assert hub.repos == {}
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    # between its tries
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda s: None))
    with pytest.raises(
        ConfigError, match=r"hub.push=me/capitals: .* is not uploaded .*log in with `hf auth login`"
    ):
        push(run, run / "hf", "me/capitals", is_private=True)
    with pytest.raises(ConfigError, match=r"hub.push=capitals must be owner/name"):
        config_of("smoke", run, "hub.push=capitals")
    with pytest.raises(
        ConfigError,
        match=r"hub.push takes the exported model, which checkpoint.export_hf=false does not",
    ):
        train(
            "smoke", tmp_path / "other", *FEW, "hub.push=me/capitals", "checkpoint.export_hf=false"
        )


def test_a_card_of_ones_own_stays(tmp_path: Path, finished: Path):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "hf/README.md").write_text("mine")
    write_card(run, run / "hf")
    assert (run / "hf/README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("loss", "method"),
    [
        ("automodel_lite.parts.losses.policy.Gspo", "gspo"),
        ("automodel_lite.parts.losses.preference.SimPo", "simpo"),
        ("automodel_lite.parts.losses.distillation.Distill", "distillation"),
        ("automodel_lite.models.loss.FusedLinearCrossEntropy", "sft"),
    ],
)
def test_the_card_names_the_method(loss: str, method: str, tmp_path: Path, finished: Path):
    run = shutil.copytree(finished, tmp_path / "run")
    raw = OmegaConf.load(run / "config.yaml")
    OmegaConf.update(raw, "loss._target_", loss, force_add=True)
    OmegaConf.save(raw, run / "config.yaml")
    write_card(run, run / "hf")
    assert f"| method | {method} |" in (run / "hf/README.md").read_text()
