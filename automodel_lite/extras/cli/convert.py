"""`automodel-lite convert axolotl.yml`: a preset from another framework's configuration, and what
could not be said.

What each key of axolotl, LLaMA-Factory, NeMo AutoModel, torchtune and TRL is here stands in
peers.yaml; its answers are tried key by key, so that the list at the end names everything that the
preset does not hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from automodel_lite.cli.line import argument_parser
from automodel_lite.cli.sources import Sources, groups_of
from automodel_lite.config.permissions import needs_the_command_line
from automodel_lite.errors import ConfigError, format_value, one_line

_ANSWERS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("peers.yaml").read_text(encoding="utf-8")
)
"""Framework -> its keys, with `*` for any text, and what each is here."""


def convert(argv: list[str]) -> int:
    """Write a preset from the configuration of axolotl, LLaMA-Factory, NeMo AutoModel, torchtune or
    TRL.

    automodel-lite convert axolotl.yml                       # my_conf/axolotl.yaml
    automodel-lite convert recipe.yaml --from torchtune --to my_conf/mine.yaml
    automodel-lite train --config-dir my_conf --config-name axolotl
    """
    parser = argument_parser(convert.__doc__)
    parser.add_argument("file", type=Path, help="their YAML")
    parser.add_argument(
        "--from", dest="peer", choices=sorted(_ANSWERS), help="default: found by its keys"
    )
    parser.add_argument("--to", type=Path, help="default: my_conf/<name of the file>.yaml")
    args = parser.parse_args(argv)
    target: Path = args.to or Path("my_conf") / f"{args.file.stem}.yaml"
    if target.exists():
        raise ConfigError(f"{target} exists already: choose another file with --to.")
    try:
        theirs = yaml.safe_load(args.file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{args.file} cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(theirs, dict) or not all(isinstance(key, str) for key in theirs):
        raise ConfigError(f"{args.file} is not a configuration: its YAML is no mapping of names.")
    peer = args.peer or peer_of(theirs)
    text, unsaid = preset_of(peer, theirs, target.stem)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    check = f"automodel-lite validate --config-dir {target.parent} --config-name {target.stem}"
    print(f"{target}: from {peer}; check it with {check}")
    for line in unsaid:
        print(f"  {line}")
    return 0


def peer_of(theirs: Mapping[str, Any]) -> str:
    """Returns the framework that knows most of the keys, the first of equals; raises ConfigError
    when none does.
    """
    hits = {
        peer: sum(_own_answer(peer, key) is not None for key, _ in leaves(dict(theirs)))
        for peer in _ANSWERS
    }
    peer = max(hits, key=lambda name: hits[name])
    if not hits[peer]:
        raise ConfigError(
            f"its keys are of none of {', '.join(sorted(hits))}: say whose it is with --from."
        )
    return peer


def answer_to(peer: str, key: str) -> Any:
    """Returns the first answer that fits a key; None for a key that nobody has thought of."""
    found = _own_answer(peer, key)
    # LLaMA-Factory takes HF Trainer's keys too
    return _own_answer("trl", key) if found is None and peer == "llama_factory" else found


def _own_answer(peer: str, key: str) -> Any:
    for pattern, answer in _ANSWERS[peer].items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), key, re.DOTALL):
            return answer
    return None


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key, value) of every leaf; the items of a list of mappings are `key[].name`."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list) and node and all(isinstance(item, dict) for item in node):
        for item in node:
            yield from leaves(item, f"{prefix}[]")
    else:
        yield prefix, node


def preset_of(peer: str, theirs: Mapping[str, Any], name: str) -> tuple[str, list[str]]:
    """Returns the text of a preset, and a line for each key that it does not hold."""
    groups = groups_of(Sources())
    chosen: dict[str, str] = {}  # group -> option
    settings: dict[str, Any] = {"name": name}
    unsaid = []
    for key, value in leaves(dict(theirs)):
        answer = answer_to(peer, key)
        if isinstance(answer, dict):  # by value, or by that of a list's one item
            of_value = value[0] if isinstance(value, list) and len(value) == 1 else value
            answer = answer.get(format_value(of_value), answer.get("*"))
        if answer is None or answer.startswith(("by hand", "none")):
            # where nothing was asked for, nothing is missing
            is_asked = value not in (None, False, [], {}, "")
            unsaid += (
                [f"{key}={format_value(value)}: {answer or 'not known here'}"] if is_asked else []
            )
        elif not answer.startswith("- ") and value not in (None, "", [], {}):
            twice = _set(answer, value, groups, chosen, settings)
            unsaid += [f"{key}={format_value(value)}: {twice}"] if twice else []
    defaults: list[Any] = [
        "finetune",
        *({f"override {group}": option} for group, option in sorted(chosen.items())),
    ]
    tree: dict[str, Any] = {"defaults": [*defaults, "_self_"]}
    for key, value in settings.items():
        *path, last = key.split(".")
        node = tree
        for step in path:
            node = node.setdefault(step, {})
        node[last] = value
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return f"# From a configuration of {peer}.\n{text}", unsaid


def _set(
    answer: str,
    value: Any,
    groups: Mapping[str, Any],
    chosen: dict[str, str],
    settings: dict[str, Any],
) -> str:
    """Adds what an answer sets; returns a sentence when it contradicts what another key has set."""
    for word in answer.split():
        key, is_set, text = word.partition("=")
        if is_set and value is False:
            continue
        if is_set and key in groups:
            chosen[key] = text
            continue
        ours = yaml.safe_load(text) if is_set else value
        if (
            not is_set
            and isinstance(value, str)
            and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value)
        ):
            ours = float(value)  # 1e-5, which YAML reads as text
        if not is_set and isinstance(ours, float) and ours.is_integer():
            ours = int(ours)  # 3.0 epochs
        if needs_the_command_line(key):
            return f"by hand: only the command line may set it, {key}={format_value(ours)}"
        if key in settings and settings[key] != ours and key != "name":
            return f"{key} is {format_value(settings[key])} already, by another key"
        settings[key] = ours
    return ""
