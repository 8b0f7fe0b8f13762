"""Starts a program on the fake GPU: `python -m tests.gpu_paths.fake.run SCRIPT ARGUMENTS`; see this folder's page."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from automodel_lite.cli.hydra_app import choose_allocator
from tests.gpu_paths.fake.build import main as build

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(
    os.environ.get("FAKE_GPU_FOLDER") or Path(tempfile.gettempdir(), f"fake_gpu_{os.getuid()}")
)


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a process that finds the fake GPU; the compilers' caches stay in its folder."""
    library = build(FOLDER)
    # inductor's pool of processes and its measured choices ask more of a card than this one has
    settings = {
        "LD_PRELOAD": " ".join(map(str, [library, *library.parent.glob("libnvrtc.so.*")])),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(library.parent / "inductor"),
        "TRITON_CACHE_DIR": str(library.parent / "triton"),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # there is no cuDNN whose graphs could be built
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    choose_allocator(settings)
    always = {name: settings[name] for name in ("LD_PRELOAD", "PYTHONPATH")}
    return {**settings, **os.environ, **always, **more}


if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
