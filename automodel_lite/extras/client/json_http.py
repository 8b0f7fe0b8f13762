"""JSON over HTTP to a server of one's own, with errors that are sentences."""

from __future__ import annotations

import http.client
import json
import math
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from automodel_lite.errors import ConfigError, one_line

_LONGEST = 300  # characters of a server's own message
# a server beside the trainer is reached directly, also where a proxy leads to the internet
_OPENER = build_opener(ProxyHandler({}))


@dataclass(frozen=True)
class Reply:
    status: int
    text: str

    @property
    def is_ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def lacks_route(self) -> bool:
        """Does the server not know the path? What it has not found itself has another body."""
        found = self.value()
        return self.status == 405 or (self.status == 404 and found == {"detail": "Not Found"})

    def value(self) -> Any:
        """Returns the JSON; None where the reply is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    def message(self) -> str:
        """Returns what the server says, in a line, wherever its kind of error has it."""
        found = self.value()
        for name in ("error", "message", "error_message", "detail"):
            if isinstance(found, dict) and found.get(name):
                found = found[name]
        text = found if isinstance(found, str) else self.text
        return one_line(text)[:_LONGEST].rstrip(" .") or f"HTTP {self.status}"


@dataclass(frozen=True)
class Http:
    """url: without a path. key: sent as a bearer token; None = none."""

    url: str
    key: str | None
    timeout_s: float

    @classmethod
    def of(cls, url: str, key: str | None, timeout_s: float) -> Http:
        """Takes an address as people write it, also an OpenAI client's, which ends in /v1."""
        whole = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(whole)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(
                f"sampler={url} is no address of a server",
                key="sampler",
                cure="write it as http://localhost:8000",
            )
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ConfigError(
                f"timeout_s={timeout_s} must be above 0 seconds", key="timeout_s", cure="use 600"
            )
        return cls(whole, key, timeout_s)

    def get(self, path: str) -> Reply:
        return self._send(path, None)

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        return self._send(path, json.dumps(body).encode())

    def _send(self, path: str, body: bytes | None) -> Reply:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = Request(self.url + path, data=body, headers=headers)
        try:
            with _OPENER.open(request, timeout=self.timeout_s) as response:
                reply = Reply(response.status, response.read().decode(errors="replace"))
        except HTTPError as error:
            with error:
                reply = Reply(error.code, error.read().decode(errors="replace"))
        except TimeoutError as error:
            raise self._slow(path) from error
        except (URLError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise self._slow(path) from error
            raise ConnectionError(
                f"sampler={self.url} does not answer ({one_line(str(reason))}): is the server up, "
                f"and has it loaded its model? `curl {self.url}/health` answers then."
            ) from error
        if reply.status in (401, 403):
            raise ConfigError(
                f"sampler={self.url} refuses the key ({reply.message()})",
                key="sampler",
                cure="give api_key=..., or export SAMPLER_API_KEY",
            )
        return reply

    def _slow(self, path: str) -> TimeoutError:
        return TimeoutError(
            f"sampler={self.url}{path} has not answered in {self.timeout_s:g} s: raise timeout_s, "
            "or draw shorter or fewer answers at once."
        )
