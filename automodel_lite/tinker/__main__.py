"""Runs a script of Tinker's API: python -m automodel_lite.tinker [options] SCRIPT [arguments]."""

from __future__ import annotations

import argparse
import runpy
import shlex
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

from automodel_lite.errors import ConfigError
from automodel_lite.tinker import install


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m automodel_lite.tinker",
        description="Run a script of Tinker's API in this process, without its service. Under "
        "torchrun, every rank runs the script.",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME='OVERRIDES'",
        help="what a base model's name stands for, such as "
        "toy/base='model.pretrained=/models/x mesh.cp=2'; a preset may come first",
    )
    parser.add_argument("--folder", help="of the runs and their checkpoints; default runs/tinker")
    parser.add_argument(
        "--set",
        default="",
        metavar="'OVERRIDES'",
        help="for all models, such as 'training.precision=fp32'",
    )
    parser.add_argument(
        "--sampler",
        metavar="URL",
        help="of a vLLM or SGLang server that draws, such as http://localhost:8000; its key, if it "
        "has one, in SAMPLER_API_KEY",
    )
    parser.add_argument(
        "--sampler-folder",
        metavar="FOLDER",
        help="that the server sees, too, for the weights; default inside --folder",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    models = {}
    for text in given.model:
        name, is_given, overrides = text.partition("=")
        if not is_given:
            parser.error(f"--model {text}: write NAME='OVERRIDES'.")
        models[name] = shlex.split(overrides)
    if not given.module and not Path(given.script).is_file():
        parser.error(f"{given.script} is no file: name a script, or -m and a module.")
    try:
        install(
            models,
            given.folder,
            shlex.split(given.set),
            given.sampler,
            given.sampler_folder,
        )
        # after it, as a mistake in what was typed is found before torch is there
        from automodel_lite.tinker.cookbook import own_arguments
        from automodel_lite.tinker.engines import SETTINGS

        sys.argv = [given.script, *own_arguments(given.arguments, SETTINGS.folder)]
        if given.module and not _is_module(given.script):
            parser.error(f"there is no module {given.script}: is its package installed?")
        if given.module:
            runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(given.script).resolve().parent))
            runpy.run_path(given.script, run_name="__main__")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:
        # the service's errors, behind which is a mistake in what a name or an option stands for
        if not isinstance(error.__cause__, ConfigError):
            raise
        print(f"{_line_of(error, given.script)}{error}", file=sys.stderr)
        return 2
    return 0


def _line_of(error: Exception, script: str) -> str:
    """Returns where in the script an error was raised: `mine.py:12: `."""
    lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == script]
    return f"{script}:{lines[-1]}: " if lines else ""


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package on the way
        return False


if __name__ == "__main__":
    sys.exit(main())
