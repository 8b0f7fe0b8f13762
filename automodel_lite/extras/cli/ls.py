"""`automodel-lite ls`: presets, groups and options."""

from __future__ import annotations

from automodel_lite.cli.line import argument_parser
from automodel_lite.cli.sources import Sources, first_comment, groups_of, presets_of
from automodel_lite.errors import ConfigError, did_you_mean


def ls(argv: list[str]) -> int:
    """List presets and options: all, those of a group, or one file.

    automodel-lite ls
    automodel-lite ls optimizer
    automodel-lite ls optimizer/adamw
    automodel-lite ls finetune > my_conf/mine.yaml     # train --config-dir my_conf --config-name
    mine
    """
    found = argument_parser(ls.__doc__)
    found.add_argument("name", nargs="?", help="a group, a preset or group/option")
    found.add_argument("--config-dir", "-cd", help="a folder of your own presets and options")
    args = found.parse_args(argv)
    sources = Sources.of(args.config_dir)
    known = groups_of(sources)
    if args.name is None:
        lines = [f"{name:18s} {first_comment(name, sources)}" for name in presets_of(sources)]
        lines += [
            "",
            *(f"{f'{group}/':18s} {', '.join(options)}" for group, options in known.items()),
        ]
    elif (group := args.name.rstrip("/")) in known:
        lines = [
            f"{option:18s} {first_comment(f'{group}/{option}', sources)}" for option in known[group]
        ]
    else:
        path = sources.file(args.name.removesuffix(".yaml"))
        if path is None:
            names = [
                *presets_of(sources),
                *(f"{group}/{option}" for group in known for option in known[group]),
            ]
            raise ConfigError(
                f"{args.name}: no such preset or option{did_you_mean(args.name, names) or '.'}"
            )
        lines = [f"# {path}", path.read_text().rstrip()]
    print("\n".join(lines))
    return 0
