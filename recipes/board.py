"""Watch runs on a live page, look at their data, ask their checkpoints, stop and continue them.

python recipes/board.py                          (the runs in the folder runs)
python recipes/board.py runs/a runs/b --port 8080
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_lite.cli import argument_parser, run_tool
from automodel_lite.config.rules import Range, argument
from automodel_lite.errors import ConfigError, did_you_mean_path
from automodel_lite.launched import check_alone
from automodel_lite.progress import activity
from automodel_lite.run.folder import RunFolder

if TYPE_CHECKING:
    from automodel_lite.evaluation.generator import Generator


def main(argv: list[str] | None = None) -> int:
    """Serves the page until Ctrl-C; raises ConfigError for a folder or a port that is not there."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "runs",
        nargs="*",
        type=argument(Path),
        default=[Path("runs")],
        help="folders of runs, or that hold them (default: runs)",
    )
    parser.add_argument(
        "--port",
        type=argument(int, Range(0, 65_535)),
        default=0,
        help="of the loopback address (default: one that is free)",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="chat on the CPU, beside a training that fills the GPU"
    )
    args = parser.parse_args(argv)
    check_alone()
    for folder in args.runs:
        if folder.is_file():
            raise ConfigError(f"{folder} is a file: name folders of runs.")
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder{did_you_mean_path(str(folder))}")

    from automodel_lite.extras.board.chat import Chat
    from automodel_lite.extras.board.found import FoundRuns
    from automodel_lite.extras.board.jobs import Jobs
    from automodel_lite.extras.board.server import Board, BoardServer

    def load(run: Path, checkpoint: str | None) -> Generator:
        with activity("loading the model"):
            from automodel_lite.tools.load_generator import load_checkpoint, load_exported

            if checkpoint is None:
                return load_exported(str(run), on_cpu=args.cpu)
            return load_checkpoint(run, checkpoint, on_cpu=args.cpu)

    jobs = Jobs()
    roots = [folder.absolute() for folder in args.runs]
    server = BoardServer(Board(FoundRuns(roots, jobs), jobs, Chat(load), preview), args.port)
    print(f"open {server.address}   (Ctrl-C ends the board; trainings go on)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.server_close()
    return 0


def preview(run: Path) -> dict[str, Any]:
    """Returns what a run trains on, in the parts of a page."""
    # with torch, for which the page does not wait
    from automodel_lite.extras.inspection import first_documents, inspection_of
    from automodel_lite.extras.load_run import load_run_config
    from automodel_lite.training.resolve import resolve_auto

    config = resolve_auto(load_run_config(RunFolder(run)))
    return inspection_of(first_documents(config)).parts()


if __name__ == "__main__":
    run_tool(main)
