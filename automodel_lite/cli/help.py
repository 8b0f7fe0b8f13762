"""What there is to choose: help, completion, and `automodel-lite ls`, `cp`, `schema` and `slurm`.

Hydra prints `--help` only where there is a `hydra/help` of the user's. It installs the completion
(`eval "$(automodel-lite -sc install=bash)"`), and asks here for presets, options of flags, groups and keys: its own
answer takes seconds, because it reads all groups again for each of them.

The JSON schema of the configuration is for editors: keys, types, allowed values, defaults and comments.

    automodel-lite schema > automodel_lite.schema.json      # and in a preset, as its first line:
    # yaml-language-server: $schema=automodel_lite.schema.json
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf

from automodel_lite.cli.line import RECIPES, argument_parser, as_typed, parser
from automodel_lite.cli.sources import Sources, composed, groups_of, presets_of, read
from automodel_lite.config import schema as schema_module
from automodel_lite.config.check import with_defaults
from automodel_lite.config.components import CONF_DIR, IS_INSTALLED, options_of
from automodel_lite.config.rules import OneOf, Range
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, did_you_mean, shown

EXAMPLES = (
    "torchrun recipes/train_ft.py --config-name llama_packed",
    "torchrun recipes/train_ft.py --config-name llama_packed packed_sequence.packed_sequence_size=512 name=b",
    "torchrun recipes/train_ft.py --config-name finetune name=c model.pretrained=/models/x dataset.path=a.jsonl",
    "torchrun --nproc-per-node 4 recipes/train_ft.py --config-name llama_packed mesh.cp=2",
    "automodel-lite train --nproc 4 --config-name llama_packed mesh.cp=2",
    "torchrun recipes/train_ft.py --config-name llama_packed name=sweep --multirun optimizer.lr=1e-3,3e-3",
)


def help_of(recipe: str, sources: Sources) -> str:
    """Presets, groups with their options, and examples."""
    start = "torchrun" if recipe == "train_ft" else "python"
    purpose = next(text for module, text in RECIPES.values() if module == recipe)
    lines = [
        f"{purpose[0].upper()}{purpose[1:]}.",
        "",
        f"usage: {start} recipes/{recipe}.py --config-name PRESET [--config-dir FOLDER] [key=value ...]",
    ]
    lines += ["", "presets:", *(f"  {name:16s} {first_comment(name, sources)}" for name in presets_of(sources))]
    lines += ["", "groups (group=option):"]
    lines += [f"  {group:16s} {', '.join(options)}" for group, options in groups_of(sources).items()]
    if recipe == "train_ft":
        lines += ["", "examples:", *(f"  {example}" for example in EXAMPLES)]
    lines += ["", "--cfg job prints the whole configuration and stops; --hydra-help lists Hydra's flags."]
    lines += [
        "--nproc 8 (or gpu) starts 8 processes (or one per GPU) on this machine; --nnodes 2 --rdzv HOST:PORT joins "
        "machines."
    ]
    lines += ["dry_run=true checks everything, estimates memory and stops."] if recipe == "train_ft" else []
    return as_typed("\n".join(lines))


def first_comment(preset: str, sources: Sources) -> str:
    """The first sentence of the comment of a preset or an option, if it begins with one."""
    path = sources.file(preset)
    assert path is not None
    line = next(iter(path.read_text(errors="replace").splitlines()), "")
    return re.split(r"[:;] ", line.lstrip("# "))[0].rstrip(".") if line.startswith("#") else ""


_PROGRAM = re.compile(r"^\s*(?:[\w./-]*python[\d.]*\s+\S+|\S+)\s*")


def answer_query() -> list[str]:
    """Completions of the line that the shell gives in COMP_LINE, up to the cursor."""
    line = os.environ.get("COMP_LINE", "")
    typed = _PROGRAM.sub("", line, count=1)
    words = typed.split()
    word = "" if not typed or typed[-1].isspace() else words.pop()
    if not _PROGRAM.match(line) or "python" in line.split()[0]:
        return list(complete(words, word))
    if not words:
        return [verb for verb in RECIPES if verb.startswith(word)]
    return list(complete(words[1:] if words[0] in RECIPES else words, word))


def complete(words: list[str], word: str) -> Iterator[str]:
    """Completions of `word` behind the other words of a recipe's command line."""
    flags = {option: action for action in parser()._actions for option in action.option_strings}
    awaits = flags[words[-1]] if words and words[-1] in flags and flags[words[-1]].nargs != 0 else None
    try:
        given, _ = parser().parse_known_intermixed_args(words[:-1] if awaits else words)
        sources = Sources.of(given.config_dir, given.config_path)
    except ConfigError:
        given, sources = parser().parse_args([]), Sources()
    found: Iterator[str] | list[str]
    if awaits and awaits.choices:
        found = list(awaits.choices)
    elif awaits and awaits.dest == "config_name":
        found = presets_of(sources)
    elif awaits and awaits.dest in ("config_dir", "config_path"):
        found = [f"{entry.path}/" for entry in os.scandir(os.path.dirname(word) or ".") if entry.is_dir()]
        found = [name.removeprefix("./") for name in found]
    elif word.startswith("-"):
        found = [option for option in flags if option[:2] == "--"]
    else:
        overrides = [text for text in given.overrides if "=" in text]
        found = _settings(sources, given.config_name, overrides, word)
    yield from sorted(name for name in set(found) if name.startswith(word))


def _settings(sources: Sources, preset: str | None, overrides: list[str], word: str) -> Iterator[str]:
    """`group=`, `group=option`, `group.`, `group.key=` and `group.key=value`."""
    known = groups_of(sources)
    key, is_set, _ = word.partition("=")
    if is_set and key in known:
        yield from (f"{key}={option}" for option in known[key])
        return
    yield from (f"{group}=" for group in known)
    raw: Any
    try:
        raw = with_defaults(composed(sources, preset or "base", overrides)[0])
    except ConfigError:
        raw = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(Config)))
    folder, _, _ = key.rpartition(".")
    node = OmegaConf.select(raw, folder, throw_on_missing=False) if folder else raw
    if isinstance(node, DictConfig):
        yield from _keys(node, f"{folder}." if folder else "", is_set != "")


def _keys(node: DictConfig, prefix: str, with_values: bool) -> Iterator[str]:
    plain: Any = OmegaConf.to_container(node, resolve=False)
    for name, value in plain.items():
        if isinstance(value, dict):
            yield f"{prefix}{name}."
        elif with_values:
            yield f"{prefix}{name}={shown(value).replace(' ', '')}"
        else:
            yield f"{prefix}{name}="


_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_TYPES: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}


def json_schema(sources: Sources) -> dict[str, Any]:
    """Of presets. A key that is not in it is a mistake, but for the arguments of parts."""
    known = groups_of(sources)
    found = _object(schema_module.Config, known, sources)
    found["properties"]["defaults"] = {
        "description": "the preset this one starts from, `override group: option`, and _self_ last",
        "type": "array",
        "items": {"anyOf": [{"type": "string"}, {"type": "object", "properties": _choices(known)}]},
    }
    found["properties"]["hydra"] = {"description": "settings of Hydra: --cfg hydra prints them", "type": "object"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "automodel_lite", **found}


def comments_of(kind: type) -> dict[str, str]:
    """Field -> the comment beside it in the source, or inside its brackets."""
    source = inspect.getsource(schema_module)
    lines = source.splitlines()
    (node,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == kind.__name__]
    found = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = lines[statement.lineno - 1 : statement.end_lineno]
            found[statement.target.id] = " ".join(m[1].strip() for line in text if (m := re.search(r"\s#\s(.*)", line)))
    return found


def _object(kind: type, known: dict[str, list[str]], sources: Sources) -> dict[str, Any]:
    hints, comments = get_type_hints(kind, include_extras=True), comments_of(kind)
    properties: dict[str, Any] = {}
    for item in fields(kind):
        hint = hints[item.name]
        if isinstance(hint, type) and is_dataclass(hint):
            properties[item.name] = _object(hint, known, sources)
        elif hint == schema_module.Part:
            properties[item.name] = _part(item.name, known, sources)
        else:
            properties[item.name] = _value(hint)
            default = item.default if item.default is not NO_DEFAULT else None
            if default is not None and default != MISSING:
                properties[item.name]["default"] = default
        if text := comments.get(item.name):
            properties[item.name]["description"] = text
    found: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**found, "description": kind.__doc__} if kind.__doc__ else found


def _part(group: str, known: dict[str, list[str]], sources: Sources) -> dict[str, Any]:
    """A part takes the arguments of its `_target_`; those of the options in the group are proposed."""
    properties: dict[str, Any] = {"_target_": {"type": "string"}}
    for option in known.get(group, []):
        path = sources.file(f"{group}/{option}")
        content = read(path) if path else {}
        for key in content:
            if key not in ("defaults", "_target_"):
                properties.setdefault(str(key), {})
        for key, argument in options_of(str(content.get("_target_"))).items():
            properties[key] = {"description": argument.comment, "default": argument.default}
    return {"type": ["object", "null"], "properties": properties}


def _choices(known: dict[str, list[str]]) -> dict[str, Any]:
    of_options = {group: {"enum": [*options, None]} for group, options in known.items() if "/" not in group}
    return of_options | {f"override {group}": value for group, value in of_options.items()}


def _value(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Annotated:
        plain, *rules = get_args(hint)
        return _restricted(_value(plain), rules)
    if get_origin(hint) in (Union, UnionType):
        return {"anyOf": [option for part in get_args(hint) for option in _alternatives(_value(part))]}
    if hint in _TYPES:
        own = {"type": _TYPES[hint]}
        return own if hint in (str, type(None)) else {"anyOf": [own, _INTERPOLATION]}
    if (get_origin(hint) or hint) in (list, tuple):
        arguments = get_args(hint)
        return {"type": "array", "items": _value(arguments[0])} if arguments else {"type": "array"}
    return {"type": "object"} if (get_origin(hint) or hint) is dict else {}


def _restricted(value: dict[str, Any], rules: list[Any]) -> dict[str, Any]:
    for rule in rules:
        own = next(iter(_alternatives(value)))
        if isinstance(rule, OneOf):
            in_yaml = [choice == "true" for choice in rule.choices if choice in ("true", "false")]  # booleans there
            value = {"anyOf": [{"enum": [*rule.choices, *in_yaml]}, _INTERPOLATION]}
        elif isinstance(rule, Range):
            bounds = {"minimum": rule.least, "maximum": rule.most}
            bounds |= {"exclusiveMinimum": rule.above, "exclusiveMaximum": rule.below}
            own.update({name: bound for name, bound in bounds.items() if bound is not None})
    return value


def _alternatives(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from value.get("anyOf", [value])


LAUNCH_DIR = CONF_DIR.parent / "launch"


def ls(argv: list[str]) -> int:
    """List presets and options: all, those of a group, or one file.

    automodel-lite ls
    automodel-lite ls optimizer
    automodel-lite ls optimizer/adamw
    """
    parser = argument_parser(ls.__doc__)
    parser.add_argument("name", nargs="?", help="a group, a preset or group/option")
    parser.add_argument("--config-dir", "-cd", help="a folder of your own presets and options")
    args = parser.parse_args(argv)
    sources = Sources.of(args.config_dir)
    known = groups_of(sources)
    if args.name is None:
        names = [*presets_of(sources), "", *(f"{group}/" for group in known)]
        told = {f"{group}/": ", ".join(options) for group, options in known.items()}
        lines = [f"{name:18s} {told.get(name) or first_comment(name, sources)}" if name else "" for name in names]
    elif (group := args.name.rstrip("/")) in known:
        lines = [f"{option:18s} {first_comment(f'{group}/{option}', sources)}" for option in known[group]]
    else:
        lines = [f"# {_found(sources, args.name)}", _found(sources, args.name).read_text().rstrip()]
    print("\n".join(lines))
    return 0


def cp(argv: list[str]) -> int:
    """Copy a preset or an option into a folder of your own, to change it there.

    automodel-lite cp finetune my_conf                            # my_conf/finetune.yaml
    automodel-lite cp finetune my_conf --as mine                  # my_conf/mine.yaml
    automodel-lite cp optimizer/adamw my_conf                     # my_conf/optimizer/adamw.yaml
    automodel-lite train --config-dir my_conf --config-name mine
    """
    parser = argument_parser(cp.__doc__)
    parser.add_argument("name", help="a preset or group/option: automodel-lite ls lists them")
    parser.add_argument("folder", type=Path, help="for --config-dir; made if it is not there")
    parser.add_argument("--as", dest="new_name", help="another name for the copy")
    args = parser.parse_args(argv)
    path = _found(Sources(), args.name)
    group = args.name.rpartition("/")[0]
    target: Path = args.folder / group / f"{(args.new_name or path.stem).removesuffix('.yaml')}.yaml"
    if target.exists():
        raise ConfigError(f"{target} exists already: choose another name with --as.")
    target.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text()
    if not group and args.new_name:  # the run would go to the folder of the preset's
        text = re.sub(r"^name: .*$", f"name: {target.stem}", text, flags=re.MULTILINE)
    target.write_text(text)
    print(target)
    return 0


def schema(argv: list[str]) -> int:
    """Print the JSON schema of presets, for editors.

    automodel-lite schema > automodel_lite.schema.json
    # yaml-language-server: $schema=automodel_lite.schema.json     (the first line of a preset)
    """
    parser = argument_parser(schema.__doc__)
    parser.add_argument("--config-dir", "-cd", help="a folder of your own presets and options")
    print(json.dumps(json_schema(Sources.of(parser.parse_args(argv).config_dir)), indent=1))
    return 0


def slurm(argv: list[str]) -> int:
    """Print an sbatch script for this cluster; what sinfo says of its nodes is filled in.

    automodel-lite slurm > job.sbatch
    sbatch job.sbatch --config-name finetune name=mine model.pretrained=... dataset.path=...
    """
    parser = argument_parser(slurm.__doc__)
    parser.add_argument("--partition", help="default: the cluster's")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--time", help="days-hours:minutes:seconds (default: the partition's limit, a day at most)")
    args = parser.parse_args(argv)
    if args.nodes < 1:
        raise ConfigError(f"--nodes {args.nodes} must be at least 1.")
    print(_script(args.nodes, args.partition, args.time), end="")
    return 0


def _script(nodes: int, partition: str | None, time: str | None) -> str:
    """launch/slurm.sbatch with the numbers of a partition, the Python and the package of this process."""
    name, limit, gpus, cpus, num_nodes = _partition(partition)
    if nodes > num_nodes:
        raise ConfigError(f"--nodes {nodes} must be at most {num_nodes}: the nodes of partition {name}.")
    tasks = gpus or 1
    lines = [f"#SBATCH --partition={name}", f"#SBATCH --nodes={nodes}", f"#SBATCH --ntasks-per-node={tasks}"]
    lines += [f"#SBATCH --gpus-per-node={gpus}"] if gpus else []
    lines += [f"#SBATCH --cpus-per-task={max(1, cpus // tasks)}", f"#SBATCH --time={time or limit}"]
    text = (LAUNCH_DIR / "slurm.sbatch").read_text()
    kept = [line for line in text.splitlines() if not re.match(r"#SBATCH --(nodes|ntasks-per-node|time)=", line)]
    place = next(number for number, line in enumerate(kept) if line.startswith("#SBATCH --job-name"))
    text = "\n".join([*kept[: place + 1], *lines, *kept[place + 1 :]]) + "\n"
    text = re.sub(r"(?m)^# +(DRY_RUN=1 )?(sbatch|bash) .*\n", "", text)
    text = text.replace("; docs/slurm.md explains every line.", f" (partition {name}).")
    text = text.replace("bash launch/rank.sh", f"bash {LAUNCH_DIR / 'rank.sh'}")
    text = text.replace(
        '"${PYTHON:-python}" recipes/train_ft.py', f'"${{PYTHON:-{sys.executable}}}" -m automodel_lite train'
    )
    if not IS_INSTALLED:
        text = text.replace("PYTHONPATH=${PYTHONPATH:-$PWD}", f"PYTHONPATH=${{PYTHONPATH:-{CONF_DIR.parent}}}")
    return text


def _partition(wanted: str | None) -> tuple[str, str, int, int, int]:
    """(name, time limit, GPUs of a node, CPUs of a node, number of nodes); raises ConfigError."""
    try:
        command = ["sinfo", "--noheader", "--format=%P|%l|%G|%c|%D"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise ConfigError("there is no SLURM here (no sinfo): run this on the cluster's login node.") from None
    if told.returncode:
        raise ConfigError(f"sinfo: {' '.join(told.stderr.split())}")
    rows = [line.split("|") for line in told.stdout.splitlines() if line.count("|") == 4]
    names = list(dict.fromkeys(row[0].rstrip("*") for row in rows))
    default = next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), names[0] if names else "")
    name = wanted or default
    mine = [row for row in rows if row[0].rstrip("*") == name]
    if not mine:
        raise ConfigError(
            f"--partition {name}: there is no such partition{did_you_mean(name, names) or '.'} "
            f"The partitions are {', '.join(names)}."
        )
    gpus = min(_gpus(row[2]) for row in mine)
    cpus = min(int(re.sub(r"\D", "", row[3]) or 1) for row in mine)
    return name, _limit(mine[0][1]), gpus, cpus, sum(int(row[4]) for row in mine)


def _gpus(resources: str) -> int:
    """`gpu:h100:8(S:0-1)` -> 8"""
    return sum(int(number) for number in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", resources))


def _limit(told: str) -> str:
    """A day, or the partition's limit where it is shorter."""
    days = re.match(r"(\d+)-", told)
    return "24:00:00" if told in ("infinite", "n/a") or (days and int(days[1]) >= 1) else told


def _found(sources: Sources, name: str) -> Path:
    path = sources.file(name.removesuffix(".yaml"))
    if path is None:
        known = presets_of(sources)
        known += [f"{group}/{option}" for group, options in groups_of(sources).items() for option in options]
        raise ConfigError(
            f"{name}: no such preset or option{did_you_mean(name, known) or '.'} automodel-lite ls lists them."
        )
    return path
