"""Draw a run, or compare several, as one self-contained page: report.html.

python recipes/report.py runs/llama_packed                        (written into the run's folder)
python recipes/report.py runs/a runs/b runs/c --to comparison
"""

from __future__ import annotations

from pathlib import Path

from automodel_lite.cli import argument_parser, run_tool


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; raises ConfigError for a folder that is not a run's."""
    parser = argument_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--to", type=Path, help="the folder to write to (default: the run's; of several: report)")
    args = parser.parse_args(argv)

    from automodel_lite.tools.report import write_report

    target = args.to or (args.runs[0] if len(args.runs) == 1 else Path("report"))
    print(write_report(args.runs, target))
    return 0


if __name__ == "__main__":
    run_tool(main)
