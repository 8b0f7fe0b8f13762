"""Write the mean of a run's checkpoints as a Hugging Face folder; often better than the last of
them.

python recipes/average.py runs/mine                          (all checkpoints that it kept)
python recipes/average.py runs/mine --last 3 --to runs/mine/mean
python recipes/average.py runs/mine --checkpoints step_00000400 step_00000500
torchrun --nproc-per-node 8 recipes/average.py runs/mine     (no process holds the whole model)
"""

from __future__ import annotations

from pathlib import Path

from automodel_lite.cli import argument_parser, run_tool
from automodel_lite.config.rules import Range, argument
from automodel_lite.errors import ConfigError, counted


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; raises ConfigError."""
    parser = argument_parser(__doc__)
    parser.add_argument("run", type=argument(Path), help="a run's folder, runs/<name>")
    parser.add_argument(
        "--last",
        type=argument(int, Range(2)),
        help="number of newest checkpoints to average (default: all)",
    )
    parser.add_argument("--checkpoints", nargs="+", help="checkpoints to average, by name")
    parser.add_argument(
        "--to",
        type=argument(Path),
        help="the folder to write (default: averaged in the run's folder)",
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

    from automodel_lite.extras.hub import write_card
    from automodel_lite.extras.load_run import load_trained
    from automodel_lite.parallel.mesh import rank
    from automodel_lite.run.checkpoint_folder import named_checkpoint, survey
    from automodel_lite.run.folder import existing_run
    from automodel_lite.telemetry.console import Console, quiet_libraries  # --help needs no torch
    from automodel_lite.tools.decisions import write_decisions
    from automodel_lite.tools.finish import without_undoing

    quiet_libraries()
    target = args.to or args.run / "averaged"
    if target.exists():
        raise ConfigError(f"{target} exists already: choose another folder with --to.")
    run = existing_run(args.run)
    asked = list(args.checkpoints or ())
    names: list[str] = []
    if len(asked) > 1:
        names = sorted({named_checkpoint(run.path, name).name for name in asked}, reverse=True)
    if asked and len(names) < 2:
        typed = " ".join(asked)
        raise ConfigError(f"--checkpoints {typed}: a mean is of two or more: name another.")
    if not names:
        complete, skipped = survey(run.checkpoints)
        names = [path.name for path in complete]
        if skipped:  # a mean without one of them is another model
            raise ConfigError(
                "\n".join(
                    [*skipped, f"To average the others, choose --checkpoints {' '.join(names)}."]
                )
            )
        names = names[: args.last]
    if len(names) < (args.last or 2):
        raise ConfigError(
            f"{args.run} has {counted(len(names), 'complete checkpoint')} to average: train with a "
            "smaller checkpoint.every_steps and checkpoint.keep_last=5, or keep an average while "
            "training, training.ema_decay=0.999."
        )
    own = {"allow_targets": args.allow_targets, "trust_remote_code": args.trust_remote_code}
    trained = load_trained(args.run, names[0], averaged_with=names[1:], **own)
    trained.export(target)
    if rank() == 0:
        console = Console(is_silent=False)
        with without_undoing("card", console):  # the model is written
            for line in write_decisions(args.run, target, is_mean=True)[:1]:
                console.say("decisions", line)
            write_card(args.run, target)
        print(f"the mean of {', '.join(names)} written to {target}")
    return 0


if __name__ == "__main__":
    run_tool(main)
