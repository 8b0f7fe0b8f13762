"""Builds the fake GPU for the torch of this environment: `python -m tests.gpu_paths.fake.build FOLDER`."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
SITE = Path(sysconfig.get_paths()["purelib"])
SOURCES = ("runtime.cpp", "libraries.cpp")
# torch's own libraries that call CUDA's
CALLERS = (
    "torch_cuda",
    "c10_cuda",
    "torch_cpu",  # the profiler
    "torch_python",
    "torch_cuda_linalg",
    "caffe2_nvrtc",
)
FOREIGN = re.compile(r"(cuda[A-Z]|cu[A-Z]|cublas|cusolver|cusparse|cudnn[A-Z]|cupti|nccl)")
LEFT_ALONE = re.compile(r"cuFile|cusparseLt")


def main(folder: Path) -> Path:
    """Returns the library, built in `folder` unless it is there for this torch and these sources."""
    text = "".join(
        (HERE / name).read_text()
        for name in ("device.h", *SOURCES, "nvml.cpp", "nvrtc.cpp", "build.py")
    )
    identity = f"{version('torch')} {SITE} {text}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    library = folder / key / "libcuda.so.1"  # the driver's name: Triton opens it by that
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    headers = [SITE / "nvidia/cu13/include", SITE / "triton/backends/nvidia/include"]
    objects = [library.parent / f"{name}.o" for name in SOURCES]
    for name, made in zip(SOURCES, objects):
        include = [f"-I{header}" for header in headers]
        _run("g++", "-O1", "-fPIC", "-w", "-std=c++17", *include, "-c", HERE / name, "-o", made)
    written = {name for made in objects for name in _symbols(made, "--defined-only")}
    wanted = _driver_functions(headers[0] / "cuda.h")
    for caller in CALLERS:
        path = SITE / f"torch/lib/lib{caller}.so"
        wanted |= {name for name in _symbols(path, "-D", "--undefined-only") if FOREIGN.match(name)}
    rest = library.parent / "rest.c"
    names = sorted(name for name in wanted - written if not LEFT_ALONE.match(name))
    rest.write_text("".join(f"long {name}() {{ return 0; }}\n" for name in names))
    _run("gcc", "-O1", "-fPIC", "-w", "-c", rest, "-o", f"{rest}.o")
    # opened by their names, where the loader looks first
    major = re.search(
        r"define CUDART_VERSION\s+(\d+)\d{3}", (headers[0] / "cuda_runtime_api.h").read_text()
    )
    assert major
    beside = {"nvml.cpp": "libnvidia-ml.so.1", "nvrtc.cpp": f"libnvrtc.so.{major[1]}"}
    include = [f"-I{header}" for header in headers]
    for name, made in beside.items():
        options = ["-shared", "-O1", "-fPIC", "-w", f"-Wl,-soname,{made}", *include]
        _run("g++", *options, HERE / name, "-o", library.parent / made)
    made = library.with_suffix(".new")
    _run("g++", "-shared", f"-Wl,-soname,{library.name}", "-o", made, *objects, f"{rest}.o", "-ldl")
    (library.parent / "libcuda.so").unlink(missing_ok=True)
    (library.parent / "libcuda.so").symlink_to(library.name)  # what -lcuda finds
    made.rename(library)
    return library


def _driver_functions(header: Path) -> set[str]:
    """Every function of the driver, under the names of all its versions: Triton links with some."""
    text = header.read_text()
    plain = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(", text))
    return plain | set(re.findall(r"#\s*define\s+cu[A-Z]\w+\s+(cu[A-Z]\w+_v\d+)\b", text))


def _symbols(path: Path, *options: str) -> set[str]:
    lines = _run("nm", *options, path).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.strip()}


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
