"""The board's server, asked over HTTP as a browser and as a stranger would."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.extras.board.chat import Chat
from automodel_lite.extras.board.found import FoundRuns
from automodel_lite.extras.board.growth import GrowingRows
from automodel_lite.extras.board.jobs import Jobs
from automodel_lite.extras.board.server import Board, BoardServer
from tests.tools.test_report import run_folder

HOSTILE = '<img src=x onerror="document.title=1">'


def no_model(run: Path, checkpoint: str | None) -> Any:
    raise ConfigError("there is no model here.")


def no_data(run: Path) -> dict[str, Any]:
    raise ConfigError(f"{run.name} has no data here.")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BoardServer]:
    jobs = Jobs()
    runs = FoundRuns([tmp_path / "runs"], jobs)
    found = BoardServer(Board(runs, jobs, Chat(no_model), no_data))
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def ask(
    server: BoardServer, name: str, body: Any = None, token: str | None = None, **headers: str
) -> tuple[int, str, dict[str, str]]:
    """(status, text, headers) of an answer. A body makes it a POST."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    path = f"/{server.board.token if token is None else token}/{name}"
    sent = {"Content-Type": "application/json"} if body is not None else {}
    text = None if body is None else body if isinstance(body, str) else json.dumps(body)
    sent |= {key.replace("_", "-"): value for key, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, text, sent)
    answer = connection.getresponse()
    found = (answer.status, answer.read().decode(), dict(answer.getheaders()))
    connection.close()
    return found


def of_report(server: BoardServer, query: str) -> dict[str, Any]:
    status, text, _ = ask(server, f"api/report?{query}")
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("name", ["", "board.js", "api/runs", "api/stop", "nothing"])
@pytest.mark.parametrize("token", ["", "wrong", "..", "%00"])
def test_nothing_is_answered_without_the_token(server: BoardServer, name: str, token: str) -> None:
    assert ask(server, name, token=token)[0] == 403
    assert ask(server, name, {}, token=token)[0] == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8888"}, 200),  # a port that is forwarded
        ({"Host": "attacker.example"}, 403),
        ({"Host": "127.0.0.1.attacker.example"}, 403),
        ({"Host": "127.0.0.1@attacker.example"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "http://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
    ids=str,
)
def test_the_address_must_be_of_this_machine(
    server: BoardServer, headers: dict[str, str], status: int
) -> None:
    assert ask(server, "", **headers)[0] == status


def test_only_this_machine_is_listened_to(server: BoardServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"--port .* cannot be opened .*: choose another one"):
        BoardServer(server.board, server.server_port)


def test_the_page_may_load_nothing_from_elsewhere(server: BoardServer) -> None:
    _, page, headers = ask(server, "")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    for text in (page, *(ask(server, name)[1] for name in ("board.js", "board.css", "report.js"))):
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
    # the policy would block an attribute with code or style
    assert re.findall(r"\s(on\w+|style)=", page) == []


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ("{", {}, 400),
        ("[]", {}, 400),
        ("{}", {"Content_Type": "text/plain"}, 400),
        ("{}", {"Content_Length": "99999999"}, 413),
        ("{}", {"Content_Length": "-1"}, 413),
        ("[" * 100_000, {}, 400),
        ({"run": "../../etc"}, {}, 400),
        ({"run": {"a": 1}}, {}, 400),
    ],
    ids=str,
)
def test_requests_that_are_none(
    server: BoardServer, body: Any, headers: dict[str, str], status: int
) -> None:
    answered, text, _ = ask(server, "api/stop", body, **headers)
    assert answered == status
    assert json.loads(text)["error"]


def test_rows_and_names_of_a_stranger_are_text(server: BoardServer, tmp_path: Path) -> None:
    name = "a<b onload=x>"
    run_folder(tmp_path / "runs" / name, **{f"text/{HOSTILE}": HOSTILE, "warning": HOSTILE})
    assert [line["key"] for line in json.loads(ask(server, "api/runs")[1])["runs"]] == [name]
    found = of_report(server, "run=a%3Cb%20onload%3Dx%3E")
    html = found["head"] + found["sections"]
    assert "<img" not in html
    assert "<b onload" not in html
    assert "&lt;img src=x onerror=" in html
    assert "a&lt;b onload=x&gt;" in html


def test_numbers_that_json_does_not_have(server: BoardServer, tmp_path: Path) -> None:
    path = run_folder(tmp_path / "runs" / "a")
    with (path / "metrics.jsonl").open("w") as file:
        file.write('{"step": 1, "loss": NaN, "time_s/forward": Infinity, "step_s": 1e999}\n')
    (path / "lengths.json").write_text('{"edges": [0, NaN], "documents": [Infinity], "pack": []}')
    (run,) = of_report(server, "run=a")["data"]["runs"]
    assert run["phases"] == {}
    assert run["lengths"] == {"edges": [0, None], "documents": [None], "pack": []}


def test_a_report_grows(server: BoardServer, tmp_path: Path) -> None:
    path = run_folder(tmp_path / "runs" / "a")
    first = of_report(server, "run=a")
    assert first["data"]["runs"][0]["curves"]["loss"][0] == [1, 2, 3, 4]
    assert of_report(server, f"run=a&seen={first['version']}") == {"version": first["version"]}
    with (path / "metrics.jsonl").open("a") as file:
        file.write('ss": 0.25}\n')  # the rest of the line that was cut
    second = of_report(server, f"run=a&seen={first['version']}")
    assert second["data"]["runs"][0]["curves"]["loss"][0] == [1, 2, 3, 4, 5]
    assert "step <b>5</b>" in second["head"]


def test_runs_side_by_side(server: BoardServer, tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "a")
    run_folder(tmp_path / "runs" / "sweep" / "a", lr=0.5)
    (tmp_path / "runs" / "new").mkdir()
    (tmp_path / "runs" / "new" / "config.yaml").write_text("name: new\n")
    keys = {line["key"] for line in json.loads(ask(server, "api/runs")[1])["runs"]}
    assert keys == {"a", "sweep/a", "new"}
    found = of_report(server, "run=a&run=sweep/a&run=new")
    assert [run["name"] for run in found["data"]["runs"]] == ["a", "sweep/a"]
    assert found["data"]["runs"][0]["axes"]["labels"] == [[0, 1, 2, 3, 4], [0, 100, 200, 300, 400]]
    assert "optimizer.lr" in found["sections"]
    assert "<td>0.5</td>" in found["sections"]
    assert found["waiting"] == [f"{tmp_path}/runs/new has logged no step yet."]


def test_no_link_leads_out_of_the_folder(server: BoardServer, tmp_path: Path) -> None:
    run_folder(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    assert json.loads(ask(server, "api/runs")[1]) == {"runs": []}
    assert ask(server, "api/report?run=link")[0] == 400


def test_a_file_that_grows_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    growing = GrowingRows(path)
    assert growing.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert growing.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\nnot a row\n{"step": 3}\n')
    assert growing.read() == [{"step": 1}, {"step": 2}, {"step": 3}]
    with path.open("a") as file:
        file.write("x" * 300 + '\n{"step": 4}\n')
    assert [row["step"] for row in growing.read()] == [1, 2, 3, 4]
    # what was read is not read again: a byte far before the end that changes is not seen
    with path.open("r+") as file:
        file.write('{"step": 9}')
    with path.open("a") as file:
        file.write('{"step": 5}\n')
    assert [row["step"] for row in growing.read()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "again",
    ['{"step": 1}\n', '{"step": 1}\n{"step": 2, "b": 1}\n{"step": 3}\n', ""],
    ids=["shorter", "longer", "empty"],
)
def test_a_file_that_is_written_anew_is_read_from_its_start(tmp_path: Path, again: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "a": 1}\n')
    growing = GrowingRows(path)
    assert len(growing.read()) == 2
    path.write_text(again)
    assert growing.read() == [json.loads(line) for line in again.splitlines()]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"messages": []}, "the last is a user's"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the last is a user's"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "the last is a user's"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a number, at least 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be a number"),
        ({"max_new_tokens": True}, "max_new_tokens=True must be a number"),
        ({"temperature": "hot"}, "temperature=hot must be a number"),
        ({"temperature": -1}, "temperature=-1 must be a number"),
        ({"checkpoint": "../x"}, "has no ../x any more"),
        ({"run": "gone"}, "there is no such run any more"),
    ],
    ids=str,
)
def test_a_question_that_is_none(
    server: BoardServer, tmp_path: Path, asked: dict[str, Any], sentence: str
) -> None:
    run_folder(tmp_path / "runs" / "a")
    body = {"run": "a", "messages": [{"role": "user", "content": "hi"}], **asked}
    status, text, _ = ask(server, "api/chat", body)
    assert status == 200
    assert sentence in json.loads(text)["error"]


def test_data_that_cannot_be_read_is_a_sentence(server: BoardServer, tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "a")
    status, text, _ = ask(server, "api/data?run=a")
    assert (status, json.loads(text)) == (400, {"error": "a has no data here."})
