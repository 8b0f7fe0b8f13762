"""Write a run's model as a Hugging Face folder that plain `from_pretrained` loads; an adapter is merged into its base.

python recipes/export_hf.py runs/mine
python recipes/export_hf.py runs/mine --push me/my-model                   (to the Hugging Face hub, private)
python recipes/export_hf.py runs/mine --checkpoint step_00000500 --to /models/mine_500
python recipes/export_hf.py runs/mine --text-only --to /models/mine_text      (of a vision-language model)
torchrun --nproc-per-node 8 recipes/export_hf.py runs/mine        (sharded: no process holds the whole model)
"""

from __future__ import annotations

from pathlib import Path

from automodel_lite.cli import argument_parser, run_tool
from automodel_lite.config.rules import RepoName, argument
from automodel_lite.errors import ConfigError
from automodel_lite.progress import activity


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; raises ConfigError."""
    parser = argument_parser(__doc__)
    parser.add_argument("run", type=argument(Path), help="a run's folder, runs/<name>")
    parser.add_argument("--checkpoint", help="one of its checkpoints, step_00000500 (default: the newest)")
    parser.add_argument("--to", type=argument(Path), help="the folder to write (default: hf in the run's folder)")
    parser.add_argument("--push", type=argument(str, RepoName()), help="upload it to the hub as owner/name")
    parser.add_argument("--public", action="store_true", help="make the repository that --push creates public")
    parser.add_argument("--text-only", action="store_true", help="only the language model of a vision-language model")
    parser.add_argument("--allow-targets", nargs="+", default=[], help="your own packages that the run may use code of")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code of the model's repository")
    args = parser.parse_args(argv)

    if args.to and args.to.exists():  # before anything is loaded
        raise ConfigError(f"--to {args.to} exists already: choose another folder.")
    with activity("loading the checkpoint"):
        from automodel_lite.parallel.mesh import rank
        from automodel_lite.telemetry.console import Console, quiet_libraries  # --help needs no torch
        from automodel_lite.tools.trained import load_trained, push, write_card

        quiet_libraries()
        trained = load_trained(
            args.run, args.checkpoint, allow_targets=args.allow_targets, trust_remote_code=args.trust_remote_code
        )
    target = args.to or args.run / "hf"
    trained.export(target, args.text_only)
    merged = " (adapter merged)" if trained.was_merged else ""
    if rank() == 0:
        console = Console(is_silent=False)
        write_card(args.run, target, args.push)
        console.say("exported", f"{trained.checkpoint.name} of {args.run} written to {target}{merged}")
        if args.push:
            console.say("uploaded", push(args.run, target, args.push, not args.public))
        console.commands("next", [f"vllm serve {target}"])
    return 0


if __name__ == "__main__":
    run_tool(main)
