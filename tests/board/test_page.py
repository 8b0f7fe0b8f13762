"""The board in a real browser: what a person sees on a desktop and a phone, and by the keyboard alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.extras.board.chat import Chat
from automodel_lite.extras.board.found import FoundRuns
from automodel_lite.extras.board.jobs import Jobs
from automodel_lite.extras.board.server import Board, BoardServer
from automodel_lite.extras.report import READ, TRAINED, Inspection
from tests.board.chromium import PROGRAM, Chromium
from tests.board.test_jobs import recorded
from tests.tools.test_report import run_folder

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="there is no Chromium: apt-get install chromium"
)
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
# what has the focus, as a person would name it
FOCUSED = """(() => { const e = document.activeElement;
  return (e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent || e.id).trim().split("\\n")[0]; })()"""
OUTLINED = (
    '(() => { const s = getComputedStyle(document.activeElement); return s.outlineStyle !== "none" '
    "&& parseFloat(s.outlineWidth) >= 2; })()"
)


class Echo:
    """A model that says what it was asked."""

    def answers(self, chats: list[Any], *, write: Any, **options: Any) -> list[str]:
        for word in ("You", " said: ", chats[0][-1]["content"]):
            write(word)
        return [""]


def preview(run: Path) -> dict[str, Any]:
    lengths = {"edges": [0, 8, 16], "documents": [3, 1], "pack": [7, 6]}
    samples = [f"  <|user|>{HOSTILE} {TRAINED}Hello{READ}"]
    return Inspection(
        run.name, [("DATA", ["  4 documents"]), ("SAMPLES", samples)], lengths
    ).parts()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    for name, lr in (("first", 0.01), ("second", 0.5)):
        path = run_folder(tmp_path / "runs" / name, lr=lr, **{f"text/{HOSTILE}": HOSTILE})
        checkpoint = path / "checkpoints" / "step_00000004"
        (checkpoint / "tensors").mkdir(parents=True)
        files = {"state.json": {"bytes": 2}, "tensors/index.json": {"bytes": 2}}
        for file in files:
            (checkpoint / file).write_text("{}")
        (checkpoint / "COMPLETE.json").write_text(json.dumps({"version": 1, "files": files}))
    recorded(tmp_path / "runs" / "first", f"rm -rf {HOSTILE}")
    jobs = Jobs()
    chat = Chat(lambda run, checkpoint: Echo())  # type: ignore[arg-type,return-value]
    board = Board(FoundRuns([tmp_path / "runs"], jobs), jobs, chat, preview)
    server = BoardServer(board)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.address
    server.shutdown()
    server.server_close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    with Chromium(tmp_path / "profile") as found:
        yield found


def check_page(browser: Chromium) -> None:
    """Nothing is wider than the screen, no script failed, the policy blocked nothing of ours."""
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.errors == []
    assert browser.run("document.title") not in ("1", "2")
    unnamed = """[...document.querySelectorAll("input, select, textarea, button")].filter((e) => e.offsetParent)
      .filter((e) => !(e.getAttribute("aria-label") || e.labels?.[0]?.textContent.trim() || (e.tagName === "BUTTON" && e.textContent.trim())))
      .map((e) => e.outerHTML)"""
    assert browser.run(unnamed) == []


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_views_on_screens(browser: Chromium, address: str, width: int, dark: bool) -> None:
    browser.open(f"{address}#/report/first", width, 800, dark)
    browser.wait("document.querySelectorAll('#charts figure svg').length > 5")
    assert browser.run("document.querySelector('#charts').innerText").count(HOSTILE) == 2
    check_page(browser)

    browser.run("document.getElementById('tab-data').click()")
    browser.wait("document.querySelector('#samples mark')")
    assert browser.run("document.querySelector('#samples mark').textContent") == "Hello"
    assert HOSTILE in browser.run("document.querySelector('#samples').textContent")
    check_page(browser)

    browser.run("document.getElementById('tab-job').click()")
    browser.wait("document.getElementById('refusal').textContent")
    assert browser.run("document.getElementById('command').textContent").endswith(HOSTILE)
    assert browser.run("document.getElementById('continue').disabled")
    assert browser.run("document.getElementById('stop').disabled")
    check_page(browser)


def test_runs_side_by_side(browser: Chromium, address: str, tmp_path: Path) -> None:
    browser.open(f"{address}#/report/first/second")
    browser.wait("document.querySelectorAll('#charts figure svg').length > 5")
    assert "Settings that differ" in browser.run("document.querySelector('#charts').innerText")
    axes = "[...document.querySelectorAll('#controls option')].map((e) => e.textContent)"
    assert "tokens with a label" in browser.run(axes)
    # it grows, and keeps what a reader has opened and chosen
    browser.run("document.querySelector('#controls select').focus()")
    with (tmp_path / "runs" / "first" / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 70, "loss": 0.1}) + "\n")
    browser.wait("document.querySelector('#charts table').innerText.includes('70')")
    assert browser.run("document.activeElement.tagName") == "SELECT"
    # a choice is kept under a name without the token, which is another one at each start
    browser.run("document.querySelector('#controls input[type=checkbox]').click()")
    assert browser.run("Object.keys(localStorage)") == ["report:board"]
    check_page(browser)


def test_no_axis_goes_beyond_100_percent(browser: Chromium, address: str, tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "full", fill_frac=1.0)
    browser.open(f"{address}#/report/full")
    fill = "document.querySelector('#charts svg[aria-label=\"Fill (%)\"]')"
    browser.wait(fill)
    ticks = f"[...{fill}.querySelectorAll('text[text-anchor=end]')].map((e) => +e.textContent)"
    assert max(browser.run(ticks)[:-1]) == 100  # the last is a step's


def test_a_run_without_a_step_waits_at_any_width(
    browser: Chromium, address: str, tmp_path: Path
) -> None:
    recorded(tmp_path / "runs" / "new", "")
    browser.open(f"{address}#/report/new")
    waits = "document.getElementById('trouble')?.textContent.includes('no step yet')"
    browser.wait(waits)
    # it stays while nothing changes: the answers to later questions carry no text
    asked = "performance.getEntriesByType('resource').filter((e) => e.name.includes('api/report')).length"
    browser.wait(f"{asked} > {browser.run(asked) + 1}")
    assert browser.run(waits)
    browser.resize(390)
    browser.wait("innerWidth === 390")
    check_page(browser)


def test_by_the_keyboard_alone(browser: Chromium, address: str) -> None:
    browser.open(f"{address}#/report/first")
    browser.wait("document.querySelectorAll('#charts figure svg').length > 5")
    names = []
    for _ in range(9):
        browser.press("Tab")
        names.append(browser.run(FOCUSED))
        assert browser.run(OUTLINED), names
    assert names[0] == "Skip to the run"
    assert {"compare first", "compare second"} <= set(names[1:5])
    assert names[5] == "Report"  # the chosen tab alone; the arrows lead to the others
    assert names[6].endswith("horizontal axis")  # behind the names of its options
    assert names[7:9] == ["logarithmic loss", "smoothing"]

    browser.run("document.getElementById('tab-report').focus()")
    browser.press("ArrowRight", 2)
    assert browser.run(FOCUSED) == "Chat"
    browser.wait("document.getElementById('checkpoint').value")
    while browser.run("document.activeElement.id") != "message":
        browser.press("Tab")
        assert browser.run(OUTLINED), browser.run(FOCUSED)
    browser.write(HOSTILE)
    browser.press("Enter")
    browser.wait("document.querySelector('#log .assistant:not(.waits)')")
    assert (
        browser.run("document.querySelector('#log .assistant').textContent")
        == f"You said: {HOSTILE}"
    )
    browser.press("Tab")
    assert browser.run(FOCUSED) == "Send"
    check_page(browser)
