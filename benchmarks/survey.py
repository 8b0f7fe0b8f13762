"""What a survey of families has: a process for each of them, findings that are kept, and its blocks of docs/models.md."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

SECONDS = 240
Blocks = dict[str, list[str]]  # name -> lines of the page


def survey(
    kind: type,
    families: list[str],
    of_family: Callable[[str], Any],
    line: Callable[[Any], str],
    blocks: Callable[[list[Any]], Blocks],
) -> int:
    """Surveys the families that the command line names, and returns its exit code.

    kind       a dataclass with a family, a version and a verdict: what comes out for a family
    of_family  finds it
    line       says it on the screen
    blocks     of the page, from all that was found
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="*", default=families)
    parser.add_argument("--write", type=Path, help="the page whose blocks are replaced")
    parser.add_argument("--json", type=Path, help="findings, one JSON object per line; kept ones")
    parser.add_argument("--jobs", type=int, default=2, help="families at a time")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    known = kept(kind, arguments.json)

    def find(family: str) -> None:
        if family not in known:
            known[family] = of_family(family)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(asdict(known[family])) + "\n")
        print(line(known[family]), flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(find, arguments.families))
    findings = [known[family] for family in arguments.families]
    if arguments.write:
        page = arguments.write.read_text()
        arguments.write.write_text(with_blocks(page, blocks(findings)))
    counts = Counter(finding.verdict for finding in findings)
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(counts.items())))
    return int(any(verdict in counts for verdict in ("WRONG", "BROKEN")))


def kept(kind: type, path: Path | None) -> dict[str, Any]:
    """Returns the findings of a file, of this version of transformers."""
    lines = path.read_text().splitlines() if path and path.is_file() else []
    found = [kind(**json.loads(line)) for line in lines]
    return {x.family: x for x in found if x.version == transformers.__version__}


def with_blocks(page: str, blocks: Blocks) -> str:
    """Returns the page with the lines between `<!-- name -->` and `<!-- end -->` replaced; the rest is written by hand."""
    for name, lines in blocks.items():
        head, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition("\n<!-- end -->")
        assert end, f"the page has no block {name}"
        text = "\n".join(["", *lines, ""]) if lines else ""
        page = head + begin + text + end + tail
    return page


def block(page: str, name: str) -> str:
    return page.split(f"<!-- {name} -->\n")[1].split("\n<!-- end -->")[0]


def forked(work: Callable[[], str], result: Path, max_bytes: int) -> int:
    """The process that runs `work` and writes what it returns: a crash, or a model too large, is its own."""
    pid = os.fork()
    if pid:
        return pid
    try:
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        signal.alarm(SECONDS)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            result.write_text(work())
    finally:
        os._exit(0)
    raise AssertionError


def wait(pid: int, result: Path) -> str:
    status = os.waitpid(pid, 0)[1]
    if result.is_file():
        return result.read_text()
    return f"BROKEN: its process ended with {status} and no word"


def words(error: Exception) -> str:
    """Returns an error on one line, with the place where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {text}"[:240] + f" ({Path(where.filename).name}:{where.lineno})"
    )
