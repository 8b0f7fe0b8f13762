"""Draw a run, or compare several: report.html and report.png.

python recipes/report.py runs/llama_packed                        (written into the run's folder)
python recipes/report.py runs/a runs/b runs/c --to comparison
"""

from __future__ import annotations

from pathlib import Path

from automodel_lite.cli import argument_parser, run_tool
from automodel_lite.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; raises ConfigError."""
    parser = argument_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--to", type=Path, help="the folder to write to (default: the run's; of several: report)")
    args = parser.parse_args(argv)

    from automodel_lite.tools.report import CAN_DRAW, HOW_TO_DRAW  # --help needs no matplotlib

    if not CAN_DRAW:
        raise ConfigError(HOW_TO_DRAW)
    from automodel_lite.tools.report.page import write_report

    target = args.to or (args.runs[0] if len(args.runs) == 1 else Path("report"))
    for path in write_report(args.runs, target):
        print(path)
    return 0


if __name__ == "__main__":
    run_tool(main)
