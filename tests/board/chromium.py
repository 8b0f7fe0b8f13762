"""A headless Chromium that is driven over two pipes, by its own protocol: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "ArrowRight": (39, ""),
    "ArrowLeft": (37, ""),
    " ": (32, " "),
}


_MOVE = """
import os, sys
given = [os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2]))]
given = [os.dup2(one, 10 + number) for number, one in enumerate(given)]
os.dup2(10, 3)
os.dup2(11, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """One page of a fresh profile."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM
        # it reads commands from descriptor 3, and writes to 4
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        flags += ["--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MOVE, str(theirs_in), str(theirs_out), PROGRAM, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._pending = b""
        self._number = 0
        self._session = ""
        self.errors: list[str] = []  # of the console: a script that fails, what the policy blocks
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)
        os.close(self._to)
        os.close(self._from)

    def open(self, address: str, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=address)

    def resize(self, width: int, height: int = 800) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page."""
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.1)

    def press(self, key: str, times: int = 1) -> None:
        code, text = KEYS[key]
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                self._call(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=key,
                    code=key,
                    windowsVirtualKeyCode=code,
                    text=text if kind == "keyDown" else "",
                )

    def write(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("method") == "Log.entryAdded":
                entry = answer["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(entry["text"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            part = os.read(self._from, 1 << 20)
            assert part, "Chromium has ended"
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found
