"""Stand-ins with the signatures of packages that are not there, and their real sources, downloaded with pip and parsed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.thd import AttentionOptions


def words(text: str) -> list[str]:
    return text.split()


CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 9], [0, 8, 14]))


Q_THD, K_THD, V_THD = torch.randn(9, 4, 16), torch.randn(14, 2, 16), torch.randn(14, 2, 16)


PLAIN, WINDOWED = AttentionOptions(0.25), AttentionOptions(0.25, window=7, softcap=5.0)


ON_GPU = AttentionSpec("llama", torch.device("cuda"), torch.bfloat16, 128, 128)


def recorder(
    parameters: list[str], calls: list[dict[str, Any]], result: Callable[..., Any]
) -> Callable[..., Any]:
    """A function with exactly these parameters (all optional), which writes down what it was given."""
    code = (
        f"def recorded({', '.join(f'{p}=None' for p in parameters)}):\n    return answer(locals())"
    )

    def answer(arguments: dict[str, Any]) -> Any:
        calls.append({key: value for key, value in arguments.items() if value is not None})
        return result(arguments)

    scope: dict[str, Any] = {"answer": answer}
    exec(code, scope)
    return scope["recorded"]


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, value in members.items():
        setattr(sys.modules[name], key, value)


CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "automodel_lite", "sources")


def downloaded(requirement: str, pattern: str, *options: str) -> Path:
    """The package's archive, from the cache folder or by pip; skips the test when the index cannot be reached."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not list(CACHE.glob(pattern)):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--retries",
            "1",
            "--timeout",
            "15",
        ]
        command += ["-d", str(CACHE), *options, requirement]
        packages = ("FLASH_ATTENTION", "MAMBA", "CAUSAL_CONV1D")
        # metadata alone
        environment = os.environ | {f"{name}_SKIP_CUDA_BUILD": "TRUE" for name in packages}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(
                f"{requirement} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}"
            )
    return sorted(CACHE.glob(pattern))[-1]


def read_member(archive: Path, suffix: str) -> str:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(suffix))
            return wheel.read(name).decode()
    with tarfile.open(archive) as sdist:
        member = next(m for m in sdist.getmembers() if m.name.endswith(suffix))
        file = sdist.extractfile(member)
        assert file is not None
        return file.read().decode()


def parameters_of(source: str, *path: str) -> list[str]:
    """Parameter names of a function or method, by its path of names."""
    body: list[ast.stmt] = ast.parse(source).body
    for name in path[:-1]:
        body = next(
            node for node in body if isinstance(node, ast.ClassDef) and node.name == name
        ).body
    function = next(
        node for node in body if isinstance(node, ast.FunctionDef) and node.name == path[-1]
    )
    return [
        argument.arg
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    ]
