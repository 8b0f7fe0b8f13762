"""What a browser may ask the board for, and who may ask.

The address has a random token, without which every answer is 403: other users of this machine, and
pages of other sites in the same browser, do not know it. The Host header must name this machine, so
that no other name leads here. The page loads nothing from elsewhere and runs no script but its own.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from automodel_lite.errors import SENTENCES, ConfigError, one_line
from automodel_lite.extras import report
from automodel_lite.extras.board.chat import Chat, choices
from automodel_lite.extras.board.found import FoundRuns
from automodel_lite.extras.board.jobs import Jobs, working_on
from automodel_lite.redact import scrub
from automodel_lite.run.folder import RunFolder

ADDRESS = "127.0.0.1"
_LOCAL_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")  # any port: it may be forwarded
_MOST_BYTES = 1 << 20  # of a request
_TIMEOUT_S = 60.0  # for a request to arrive
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FILES = {  # name in the address -> package, file, type
    "": (__package__, "page.html", "text/html"),
    "board.js": (__package__, "board.js", "text/javascript"),
    "board.css": (__package__, "board.css", "text/css"),
    "report.js": (report.__name__, "page.js", "text/javascript"),
    "report.css": (report.__name__, "page.css", "text/css"),
}

Preview = Callable[[Path], dict[str, str | Any]]
"""A run's folder -> what it trains on, in the parts of a page: sections and data."""


@dataclass
class Board:
    """Everything that the page shows and does. `preview` is handed down."""

    runs: FoundRuns
    jobs: Jobs
    chat: Chat
    preview: Preview
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    _previews: dict[Path, tuple[int, dict[str, Any]]] = field(default_factory=dict)
    _one: threading.Lock = field(default_factory=threading.Lock)  # preview is made at a time

    def job(self, run: RunFolder) -> dict[str, Any]:
        """Returns where a run stands, who trains it, and what can be done with it."""
        status = run.read_status()
        command = self.jobs.command_of(run)
        holder = working_on(run)
        return {
            "state": self.jobs.state_of(run),
            "reason": str(status.get("reason") or ""),
            "checkpoint": str(status.get("checkpoint") or ""),
            "holder": str(holder or ""),
            "command": command.typed,
            "folder": command.folder,
            "refusal": command.refusal,
            "screen": scrub(self.jobs.screen_of(run)),
            "checkpoints": choices(run),
        }

    def data(self, run: RunFolder) -> dict[str, Any]:
        """Returns what a run trains on; made once for each of its configurations."""
        written_ns = run.config.stat().st_mtime_ns
        with self._one:
            known, parts = self._previews.get(run.path, (-1, {}))
            if known != written_ns:
                parts = self.preview(run.path)
                self._previews[run.path] = (written_ns, parts)
        return parts


class BoardServer(ThreadingHTTPServer):
    """Listens on the loopback address; port 0 is one that is free."""

    daemon_threads = True

    def __init__(self, board: Board, port: int = 0) -> None:
        """Raises ConfigError for a port that is taken."""
        self.board = board
        try:
            super().__init__((ADDRESS, port), Request)
        except OSError as error:
            raise ConfigError(
                f"--port {port} cannot be opened ({error.strerror}): choose another one, or none."
            ) from error

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.board.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints the traceback of an error; a browser that leaves is none."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            traceback.print_exc()


class Request(BaseHTTPRequestHandler):
    """One request, in a thread of its own."""

    server: BoardServer
    query = ""
    timeout = _TIMEOUT_S
    server_version = "automodel-lite"
    sys_version = ""

    def do_GET(self) -> None:
        name = self._name()
        if name is None:
            return
        query = parse_qs(self.query)
        keys = query.get("run", [])
        board = self.server.board
        if name in _FILES:
            package, file, kind = _FILES[name]
            self._send(HTTPStatus.OK, (files(package) / file).read_bytes(), kind)
        elif name == "api/runs":
            self._answer(lambda: {"runs": board.runs.listed()})
        elif name == "api/report":
            seen = "".join(query.get("seen", []))
            self._answer(lambda: board.runs.report(keys, seen))
        elif name == "api/job":
            self._answer(lambda: board.job(board.runs.run("".join(keys))))
        elif name == "api/data":
            self._answer(lambda: board.data(board.runs.run("".join(keys))))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing of this name.")

    def do_POST(self) -> None:
        name = self._name()
        if name is None or (asked := self._body()) is None:
            return
        board = self.server.board
        key = str(asked.get("run"))
        if name == "api/stop":
            self._answer(lambda: board.jobs.stop(board.runs.run(key)))
        elif name == "api/continue":
            command = str(asked.get("command"))
            self._answer(lambda: board.jobs.start_again(board.runs.run(key), command))
        elif name == "api/chat":
            self._stream(key, asked)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing of this name.")

    def _name(self) -> str | None:
        """Returns what is asked for, below the token; answers a request that is not the page's."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _LOCAL_HOST.fullmatch(hosts[0]):
            self._refuse(HTTPStatus.FORBIDDEN, "this address has another name.")
            return None
        path, _, self.query = self.path.partition("?")
        token, slash, name = path.removeprefix("/").partition("/")
        is_known = hmac.compare_digest(token.encode(), self.server.board.token.encode())
        if not is_known or not slash or not self.path.startswith("/"):
            self._refuse(HTTPStatus.FORBIDDEN, "the address has no token, or an old one.")
            return None
        # of a browser that says where the request comes from
        origin = self.headers.get("Origin", f"http://{hosts[0]}")
        site = self.headers.get("Sec-Fetch-Site", "same-origin")
        if origin != f"http://{hosts[0]}" or site not in ("same-origin", "none"):
            self._refuse(HTTPStatus.FORBIDDEN, "the request comes from another site.")
            return None
        return name

    def _body(self) -> dict[str, Any] | None:
        """Returns the JSON object of a request; answers one that has none."""
        length = self.headers.get("Content-Length", "")
        kind = self.headers.get("Content-Type", "")
        if not re.fullmatch(r"\d{1,9}", length, re.ASCII) or int(length) > _MOST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request has no size, or a MiB.")
            return None
        try:
            found = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or kind.partition(";")[0] != "application/json":
            self._refuse(HTTPStatus.BAD_REQUEST, "the request is not a JSON object.")
            return None
        return found

    def _answer(self, make: Callable[[], dict[str, Any] | None]) -> None:
        """Sends what `make` returns, or the sentence of its error."""
        try:
            found = _json(make() or {})
        except SENTENCES as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except OSError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"{error.filename}: {error.strerror}.")
        except Exception as error:
            traceback.print_exc()
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, _named(error))
        else:
            self._send(HTTPStatus.OK, found, "application/json")

    def _stream(self, key: str, asked: dict[str, Any]) -> None:
        """Sends an answer as it is written, a JSON object per line: its pieces as `text`, or an
        `error`. Who leaves ends it.
        """
        self._start(HTTPStatus.OK, "application/x-ndjson")

        def write(name: str, text: str) -> None:
            self.wfile.write(_json({name: text}) + b"\n")
            self.wfile.flush()

        try:
            run = self.server.board.runs.run(key)
            self.server.board.chat.answer(run, asked, lambda text: write("text", text))
        except SENTENCES as error:
            write("error", str(error))
        except (BrokenPipeError, ConnectionResetError):
            pass
        except Exception as error:
            traceback.print_exc()
            write("error", _named(error))

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, _json({"error": scrub(sentence)}), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self._start(status, kind, {"Content-Length": str(len(content))})
        self.wfile.write(content)

    def _start(self, status: HTTPStatus, kind: str, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in {**_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: the address has the token."""


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str).encode(
        errors="replace"
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
