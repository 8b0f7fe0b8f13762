"""Draw a run, or compare several, as one self-contained page: report.html.

python recipes/report.py runs/llama_packed                        (written into the run's folder)
python recipes/report.py runs/a runs/b runs/c --to comparison
python recipes/report.py runs                                     (all runs in the folder; written
                                                                  into it)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_lite.cli import argument_parser, run_tool
from automodel_lite.config.rules import argument
from automodel_lite.errors import ConfigError
from automodel_lite.launched import check_alone
from automodel_lite.results import RESULTS

if TYPE_CHECKING:
    from automodel_lite.extras.report import RunRecord


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; raises ConfigError for a folder that is not a run's."""
    parser = argument_parser(__doc__, has_results=True)
    parser.add_argument(
        "runs", nargs="+", type=argument(Path), help="folders of runs, or one that holds them"
    )
    parser.add_argument(
        "--to",
        type=argument(Path),
        help="where to write (default: the run's folder; of several: report)",
    )
    args = parser.parse_args(argv)
    check_alone()

    from automodel_lite.extras.report import read_run, write_report
    from automodel_lite.extras.report.hangs import hangs_of

    target = args.to or (args.runs[0] if len(args.runs) == 1 else Path("report"))
    holds_runs = len(args.runs) == 1 and not (args.runs[0] / "config.yaml").is_file()
    try:
        records = (
            read_runs_in(args.runs[0]) if holds_runs else [read_run(path) for path in args.runs]
        )
        print(write_report(records, target))
        for record in records:
            RESULTS[str(record.path)] = record.last_values()
            for text in hangs_of(record.path / "logs"):
                print(f"{record.name}: {text}")
    except OSError as error:
        raise ConfigError(
            f"{error.filename or target} cannot be read or written ({error.strerror})."
        ) from error
    except ConfigError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        runs = ", ".join(map(str, args.runs))
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"a file of {runs} is damaged ({reason}): packing.json, lengths.json or run.json."
        ) from error
    return 0


def read_runs_in(folder: Path) -> list[RunRecord]:
    """Reads the runs of a folder that can be drawn: some have failed before their first step.
    Raises ConfigError.
    """
    from automodel_lite.extras.report import read_run

    records = []
    for rows in sorted(folder.glob("*/metrics.jsonl")):
        try:
            records.append(read_run(rows.parent))
        except (ConfigError, OSError) as error:
            print(f"left out: {error}", file=sys.stderr)
    return records or [read_run(folder)]


if __name__ == "__main__":
    run_tool(main)
