"""`automodel-lite convert axolotl.yml`: a preset that trains what another framework would have
trained, and a list of what it cannot hold.

What each key of axolotl, LLaMA-Factory, NeMo AutoModel, torchtune and TRL is here stands in
config/foreign.yaml, with the values that they take where a file has none; these are written out.
peers.py has what several keys are together. The preset is checked as a run checks it, and what a
run would refuse is listed with its sentence.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from automodel_lite.cli import compose_config
from automodel_lite.cli.line import argument_parser
from automodel_lite.cli.sources import Sources, groups_of
from automodel_lite.config import foreign
from automodel_lite.config.check import check_config
from automodel_lite.config.components import option
from automodel_lite.config.permissions import (
    check_references,
    check_yaml,
    needs_the_command_line,
)
from automodel_lite.config.rules import Range, argument
from automodel_lite.data.reading.paths import KINDS, kind_of
from automodel_lite.errors import (
    ConfigError,
    IdleSettingError,
    UserError,
    did_you_mean_path,
    explained,
    format_value,
    printable,
)
from automodel_lite.extras.cli import peers
from automodel_lite.run.durable import write_named

_PEERS: dict[str, dict[str, Any]] = {
    peer: said for peer, said in foreign.table().items() if peer != "others"
}
_ANSWERS = {peer: said["keys"] for peer, said in _PEERS.items()}
"""Framework -> its keys, with `*` for any text, and what each is here."""
_REFERENCE = r"\$\{([\w.]+)\}"
EMPTY: tuple[Any, ...] = (None, "", [], {})
# of keys that exclude each other, a default counts where none of them is set
RIVALS = (
    ("lr_scheduler.warmup_steps", "lr_scheduler.warmup_frac"),
    ("training.max_steps", "training.num_epochs"),
    ("dataset.val_path", "dataset.val_split", "dataset.val_frac"),
)
PAIRS = ("dpo", "orpo", "simpo", "kto", "reward")
SOURCES = {"axolotl": ("datasets",), "torchtune": ("datasets", "dataset"), "trl": ("datasets",)}


def convert(argv: list[str]) -> int:
    """Write a preset from the configuration of axolotl, LLaMA-Factory, NeMo AutoModel, torchtune or
    TRL, or from a command line of TRL's.

    automodel-lite convert axolotl.yml --gpus 8              # my_conf/axolotl.yaml
    automodel-lite convert recipe.yaml --from torchtune --to my_conf/mine.yaml
    automodel-lite convert dpo.yaml --from trl --method dpo
    automodel-lite convert --gpus 8 -- trl dpo --model_name_or_path org/x --dataset_name org/y
    automodel-lite train --config-dir my_conf --config-name axolotl
    """
    parser = argument_parser(convert.__doc__)
    parser.add_argument("file", nargs="+", help="their YAML; or behind --, a command of TRL's")
    parser.add_argument(
        "--from", dest="peer", choices=sorted(_ANSWERS), help="default: found by its keys"
    )
    parser.add_argument(
        "--method", choices=peers.METHODS, help="of a file of TRL's; default: found by its keys"
    )
    parser.add_argument("--to", type=Path, help="default: my_conf/<name of the file>.yaml")
    parser.add_argument(
        "--gpus",
        type=argument(int, Range(1, 10**6)),
        help="that it ran on: the batch of a step follows from them; default: 1",
    )
    # a command that stands there without -- has flags of its own as well
    starts = [
        place
        for place, (before, word) in enumerate(zip(["", *argv], argv, strict=False))
        if word in ("trl", "accelerate", "python") and not before.startswith("--")
    ]
    if starts and "--" not in argv:
        argv = [*argv[: starts[0]], "--", *argv[starts[0] :]]
    args = parser.parse_args(argv)
    theirs: dict[str, Any] = {}
    peer = args.peer
    method = args.method
    file = Path(args.file[0])
    if len(args.file) > 1:
        peer = "trl"
        method, typed = peers.command_of_trl(args.file)
        file = Path(str(typed.pop("config", f"{method}.yaml")))
        if file.is_file():
            theirs = _read(file)
        theirs |= typed
    target: Path = args.to or Path("my_conf") / f"{file.stem}.yaml"
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already: choose another file with --to.")
    if target.suffix != ".yaml":
        raise ConfigError(f"--to {target}: a preset is found by its name, which ends in .yaml.")
    if not theirs:
        theirs = _read(file)
    peer = peer or peer_of(theirs)
    if method and peer != "trl":
        raise ConfigError(
            f"--method {method}: the file is {peer}'s, whose keys name it: leave it out."
        )
    preset = preset_of(peer, theirs, target.stem, args.gpus, file.absolute().parent, method)
    preset.leave_what_is_refused()
    write_named(target, preset.text())
    check = f"automodel-lite validate --config-dir {target.parent} --config-name {target.stem}"
    print(f"{target}: from {peer}; check it with {check}")
    for line in preset.unsaid:
        print(f"  {printable(line)}")
    return 0


def _read(file: Path) -> dict[str, Any]:
    """Returns a configuration of another framework; raises ConfigError for what is none."""
    if not file.exists():
        raise ConfigError(f"{file}: there is no such file{did_you_mean_path(str(file))}")
    with explained(f"{file} cannot be read"):
        content = file.read_bytes()
    check_yaml(file)
    with explained(f"{file} cannot be read as YAML", UnicodeError, yaml.YAMLError, RecursionError):
        theirs = yaml.safe_load(content.decode())
    if not isinstance(theirs, dict) or not all(isinstance(key, str) for key in theirs):
        raise ConfigError(f"{file} is not a configuration: its YAML is no mapping of names.")
    check_references(theirs)
    return theirs


def peer_of(theirs: Mapping[str, Any]) -> str:
    """Returns the framework that knows most of the keys, the first of equals; raises ConfigError
    when none does.
    """
    given = {key for key, _ in leaves(dict(theirs))}
    hits = {
        peer: sum(any(fits(pattern, key) for pattern in answers) for key in given)
        for peer, answers in _ANSWERS.items()
    }
    peer = max(hits, key=lambda name: hits[name])
    if not hits[peer]:
        raise ConfigError(
            f"its keys are of none of {', '.join(sorted(hits))}: say whose it is with --from."
        )
    return peer


def answer_to(peer: str, key: str) -> Any:
    """Returns the first answer that fits a key; None for a key that nobody has thought of."""
    for pattern, answer in _ANSWERS[peer].items():
        if fits(pattern, key):
            return answer
    # LLaMA-Factory takes HF Trainer's keys too
    return answer_to("trl", key) if peer == "llama_factory" else None


def fits(pattern: str, key: str) -> bool:
    """Returns whether a key is named by a pattern, in which `*` is any text and `|` is or."""
    return bool(_compiled(pattern).fullmatch(key))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = (re.escape(part).replace(r"\*", ".*") for part in pattern.split("|"))
    return re.compile("|".join(parts), re.DOTALL)


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


def resolved(node: Any, root: Mapping[str, Any], around: tuple[str, ...] = ()) -> Any:
    """Returns a tree with `${a.b}` replaced by what stands there, which may have references too;
    what is nowhere, or around itself, is left.

    around   the names that are being replaced
    """
    if isinstance(node, dict):
        return {key: resolved(value, root, around) for key, value in node.items()}
    if isinstance(node, list):
        return [resolved(value, root, around) for value in node]
    if not isinstance(node, str):
        return node

    def value_of(found: re.Match[str]) -> Any:
        name = found[1]
        value = None if name in around else peers.value_at(root, name)
        return found[0] if value is None else resolved(value, root, (*around, name))

    whole = re.fullmatch(_REFERENCE, node)
    return value_of(whole) if whole else re.sub(_REFERENCE, lambda one: str(value_of(one)), node)


@dataclass
class Preset:
    """What is set, where it comes from, and what is not held."""

    peer: str
    groups: Mapping[str, Any]
    chosen: dict[str, str] = field(default_factory=dict)  # group -> option
    settings: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)  # setting -> where it comes from
    soft: dict[str, tuple[Any, str]] = field(default_factory=dict)  # where nothing else sets them
    unsaid: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, why: str) -> None:
        """Sets a value that several keys are together."""
        self.settings[key] = plain_number(value)
        self.origin[key] = why

    def answer_all(self, theirs: Any, prefix: str = "") -> None:
        """Sets what the keys of a tree are here, each on its own."""
        for key, value in leaves(theirs, prefix):
            self.answer(key, value)

    def answer(self, key: str, value: Any, is_default: bool = False) -> None:
        """Sets what a key is here, or notes that it is not here."""
        answer = answer_to(self.peer, key)
        is_by_value = isinstance(answer, dict)
        if is_by_value:  # or by that of a list's one item
            of_value = value[0] if isinstance(value, list) and len(value) == 1 else value
            answer = answer.get(format_value(of_value), None if value in EMPTY else answer.get("*"))
            if answer is None and value in EMPTY:
                return
        if answer is None or answer.startswith(("by hand", "none")):
            # where nothing was asked for, nothing is missing
            is_asked = is_by_value or (value is not False and value not in EMPTY)
            if is_asked and not is_default:
                self.unsaid.append(f"{key}={format_value(value)}: {answer or 'not known here'}")
            return
        if answer.startswith(("- ", "= ")):
            return
        if value in EMPTY and not is_by_value:
            return
        for word in answer.split():
            self._set(word, key, value, is_by_value, is_default)

    def _set(self, word: str, key: str, value: Any, is_by_value: bool, is_default: bool) -> None:
        why = f"{self.peer}'s default" if is_default else key.removeprefix("_")
        ours, is_set, text = word.partition("=")
        if is_set and value is False and not is_by_value:
            return
        if is_set and ours in self.groups:
            if not (is_default and ours in self.chosen):
                self.chosen[ours] = text
            return
        new = plain_number(yaml.safe_load(text) if is_set else value)
        if ours.endswith("~"):
            self.soft[ours.removesuffix("~")] = (new, why)
            return
        rivals = next((group for group in RIVALS if ours in group), (ours,))
        is_decided = any(self.settings.get(name) is not None for name in rivals)
        if is_default and (is_decided or ours in self.soft):
            return
        if needs_the_command_line(ours):
            self.unsaid.append(
                f"{key}={format_value(value)}: by hand: only the command line may set it, "
                f"{ours}={format_value(new)}"
            )
            return
        if ours in self.settings and self.settings[ours] != new and ours != "name":
            self.unsaid.append(
                f"{key}={format_value(value)}: {ours} is {format_value(self.settings[ours])} "
                "already, by another key"
            )
            return
        self.settings[ours] = new
        self.origin[ours] = why

    def add_soft(self) -> None:
        """Sets what nothing else has set."""
        for key, (value, why) in self.soft.items():
            if key not in self.settings:
                self.settings[key] = value
                self.origin[key] = why

    def leave_what_is_refused(self) -> None:
        """Takes out each setting that a run would refuse, and lists it with the sentence."""
        patience = "callbacks.early_stopping.patience"
        if patience in self.settings and "training.val_every_steps" not in self.settings:
            value = self.settings.pop(patience)
            self.chosen.pop("callbacks")
            self.unsaid.append(
                f"{patience}={value}: validations are once an epoch there: "
                "callbacks=early_stopping, and training.val_every_steps of an epoch"
            )
        for _ in range(len(self.settings) + 1):
            error = self._problem()
            problem = str(error or "")
            subject = problem.partition("=")[0]
            longest_first = sorted(self.settings, key=len, reverse=True)
            named = [key for key in longest_first if key in problem]
            named += [key for key in longest_first if key.startswith(f"{subject}.")]
            if not problem or not named:
                return
            key = named[0]
            value = self.settings.pop(key)
            if key == "name":
                self.settings = {"name": "mine", **self.settings}
            # nobody asked for a default of theirs, and it would change nothing
            is_idle = isinstance(error, IdleSettingError)
            if not (is_idle and self.origin.get(key, "").endswith("default")):
                self.unsaid.append(f"{key}={format_value(value)}: {problem}")

    def _problem(self) -> UserError | None:
        """Returns the first problem that a run's check finds in the settings, but for what is not
        set yet.
        """
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "mine.yaml").write_text(self.text(), encoding="utf-8")
            missing = []
            # another kind of data set has no path
            if "dataset.path" not in self.settings and "dataset" not in self.chosen:
                missing.append("dataset.path=x")
            if "model.pretrained" not in self.settings:
                missing.append("model.pretrained=x")
            try:
                raw = compose_config("mine", missing, config_dir=folder)
                raw.logger = {}
                check_config(raw)
            except ConfigError as error:
                problems = error.problems or (error,)
                # another setting may have its value from one of these
                own = [each for each in problems if each.key in self.settings]
                return [*own, *problems][0]
        return None

    def text(self) -> str:
        """Returns the preset's YAML, each value with the key that it comes from."""
        defaults: list[Any] = ["finetune"]
        defaults += [{f"override {group}": option} for group, option in sorted(self.chosen.items())]
        lines = [f"# From a configuration of {self.peer}."]
        lines += [f"# Left to you: {line}" for line in self.unsaid]
        lines.append(yaml.safe_dump({"defaults": [*defaults, "_self_"]}, sort_keys=False).rstrip())
        tree: dict[str, Any] = {}  # of the lines of each setting
        for key, value in self.settings.items():
            *path, last = key.split(".")
            node = tree
            for step in path:
                node = node.setdefault(step, {})
            node[last] = self._written(key, last, value)
        return printable("\n".join([*lines, *_indented(tree)]), kept="\n") + "\n"

    def _written(self, key: str, name: str, value: Any) -> list[str]:
        """Returns the lines of one setting; a list is on one line."""
        dump = partial(yaml.safe_dump, sort_keys=False, allow_unicode=True, width=1000)
        if isinstance(value, list):
            lines = [f"{name}: {dump(value, default_flow_style=True).rstrip()}"]
        else:
            lines = dump({name: value}).rstrip().splitlines()
        why = self.origin.get(key, key)
        if why not in ("", key):
            lines[0] += f" # {why}"
        return lines


def _indented(tree: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, node in tree.items():
        if isinstance(node, list):
            yield from (f"{indent}{line}" for line in node)
        else:
            yield f"{indent}{name}:"
            yield from _indented(node, f"{indent}  ")


def plain_number(value: Any) -> Any:
    """Returns 1e-5 for its text, which YAML does not read as a number, and 3 for 3.0."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def preset_of(
    peer: str,
    theirs: Mapping[str, Any],
    name: str,
    num_gpus: int | None = None,
    folder: Path = Path(),
    method: str | None = None,
) -> Preset:
    """Returns what a configuration is here; raises ConfigError for one that trains nothing, or
    what is not trained here.

    folder   of the configuration, where data sets may be listed
    method   of TRL's, which its files do not name; None: found by the keys
    """
    theirs = {**resolved(dict(theirs), theirs)}
    preset = Preset(peer, groups_of(Sources()), settings={"name": name})
    if peer == "trl":
        found = method or peers.method_of(theirs)
        if found is None:
            preset.unsaid.append(
                "method: sft, as no key names it: convert with --method dpo for preference pairs"
            )
        elif found == "reward":
            theirs["_reward"] = True
        elif found != "sft":
            theirs["_method"] = found
    _check_trains(peer, theirs)
    own = dict(theirs)
    sources = _take_sources(preset, own, folder)
    given = dict(leaves(own))
    preset.answer_all(own)
    preset.unsaid += peers.combine(peer, with_defaults(peer, given, theirs), num_gpus, preset.put)
    if sources:
        _mix(preset, sources)
    for key, value in defaults_of(peer, given):
        if key not in given or given[key] in EMPTY:
            preset.answer(key, value, is_default=True)
    preset.add_soft()
    if preset.chosen.get("loss") in PAIRS:
        _pack_pairs(preset)
    _split_files(preset)
    _drop_what_does_not_count(preset)
    return preset


def _take_sources(preset: Preset, own: dict[str, Any], folder: Path) -> list[Preset]:
    """Takes several data sets out of a configuration, each with its own settings; one alone becomes
    settings of the preset.
    """
    peer = preset.peer
    sources = []
    for key in SOURCES.get(peer, ()):
        items = own.get(key)
        if isinstance(items, list) and len(items) > 1:
            for item in items:
                sources.append(Preset(peer, preset.groups))
                sources[-1].answer_all(item, f"{key}[]")
            del own[key]
    if peer == "llama_factory":
        named, unsaid = peers.named_datasets(own, folder)
        preset.unsaid += unsaid
        for settings in named:
            source = preset if len(named) == 1 else Preset(peer, preset.groups)
            for key, value in settings.items():
                source.put(f"dataset.{key}", value, "dataset")
            sources += [source] if len(named) > 1 else []
    return sources


def _split_files(preset: Preset) -> None:
    """Replaces the splits of a local file, which has none: the rest of what is trained on is a
    fraction that is held out.
    """
    settings = preset.settings
    if kind_of(Path(str(settings.get("dataset.path") or ""))) not in KINDS:
        return
    trained = re.fullmatch(r"\w+(\[:(\d+)%\])?", str(settings.get("dataset.split") or "train"))
    held_out = re.fullmatch(r"\w+\[(\d+)%:\]", str(settings.get("dataset.val_split") or ""))
    if trained and trained[2] and held_out and held_out[1] == trained[2]:
        origin = f"{settings.pop('dataset.split')} and {settings.pop('dataset.val_split')}"
        preset.put("dataset.val_frac", (100 - int(trained[2])) / 100, origin)
        return
    for key in ("dataset.split", "dataset.val_split"):
        value = settings.get(key)
        if value is None or (key == "dataset.split" and value == "train"):
            continue
        del settings[key]
        preset.unsaid.append(
            f"{key}={value}: by hand: a file has no splits: dataset.val_frac holds out a part of "
            "it, dataset.val_path another file"
        )


def _drop_what_does_not_count(preset: Preset) -> None:
    """Takes out lengths that another one overrules, and settings of a group that is not chosen."""
    settings = preset.settings
    if (peers.number(settings.get("training.max_steps")) or 0) < 0:
        del settings["training.max_steps"]  # -1: by the epochs
    if preset.peer in ("trl", "llama_factory", "axolotl") and settings.get("training.max_steps"):
        settings.pop("training.num_epochs", None)  # HF Trainer's steps win
    for group in ("peft", "loss"):
        if group in preset.chosen:
            continue
        for key in [key for key in settings if key.startswith(f"{group}.")]:
            value = settings.pop(key)
            if not preset.origin.get(key, "").endswith("default"):
                preset.unsaid.append(f"{key}={format_value(value)}: without {group}")


def _pack_pairs(preset: Preset) -> None:
    """Packs pairs, which stay whole: of twice the length that bounds one answer there, and as many
    of them in a step.
    """
    settings = preset.settings
    if preset.chosen.pop("packed_sequence", "none") == "none":
        # they count pairs: so many packs in a forward pass would be many times its tokens
        settings.pop("training.micro_batch_size", None)
        if pairs := settings.pop("training.global_batch_size", None):
            why = preset.origin["training.global_batch_size"]
            preset.put("training.global_batch_documents", pairs, f"{why}, of pairs")
    if preset.settings.get("packed_sequence.overlong") == "truncate":
        preset.put("packed_sequence.overlong", "drop", "pairs are not cut")
    size = preset.settings.get("packed_sequence.packed_sequence_size")
    if isinstance(size, int):
        preset.put("packed_sequence.packed_sequence_size", 2 * size, f"two answers of {size}")
    preset.settings.pop("tokenize.train_on", None)
    asked = preset.settings.pop("dataset.columns.messages", None)
    if asked:
        preset.put("dataset.columns.prompt", asked, "the messages before the answers")


def _check_trains(peer: str, theirs: Mapping[str, Any]) -> None:
    """Raises ConfigError for a configuration of what is not trained here, by the keys of the peer's
    `refused`: `pattern unless other pattern`.
    """
    given = {key: value for key, value in leaves(dict(theirs)) if value not in EMPTY}
    for pattern, why in (_PEERS[peer].get("refused") or {}).items():
        pattern, _, but = pattern.partition(" unless ")
        if any(fits(but, key) for key in given):
            continue
        for key, value in given.items():
            reason = why.get(format_value(value)) if isinstance(why, dict) else why
            if fits(pattern, key) and value is not False and reason:
                name = key.removeprefix("_")
                raise ConfigError(f"{name}={format_value(value)}: {reason}")


def defaults_of(peer: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields what the other framework takes where a configuration has nothing."""
    asked = [key for key, value in given.items() if value is not False and value not in EMPTY]
    for block in _PEERS[peer].get("defaults") or []:
        needs = block.get("if")
        without = block.get("unless")
        if needs and not any(fits(needs, key) for key in asked):
            continue
        if without and any(fits(without, key) for key in asked):
            continue
        yield from block["keys"].items()


def with_defaults(
    peer: str, given: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns a configuration and the flat defaults of what it leaves out."""
    flat = {
        key: value
        for key, value in defaults_of(peer, given)
        if "." not in key and given.get(key) in EMPTY
    }
    return {**{key: value for key, value in theirs.items() if value not in EMPTY}, **flat}


def _mix(preset: Preset, sources: list[Preset]) -> None:
    """Makes a mixture of several data sets: every document once per epoch, or by weights."""
    kind = "images" if preset.chosen.get("dataset") == "images" else "files"
    preset.chosen["dataset"] = "mixture"
    shared = {
        key: preset.settings.pop(key)
        for key in (
            "dataset.val_frac",
            "dataset.max_documents",
            "dataset.format",
            "dataset.max_image_pixels",
        )
        if key in preset.settings
    }
    for key in [key for key in preset.settings if key.startswith("dataset.")]:
        value = preset.settings.pop(key)
        preset.unsaid.append(f"{key}={format_value(value)}: by dataset.sources.NAME.dataset")
    names: list[str] = []
    for source in sources:
        source.add_soft()
        _split_files(source)
        settings = shared | source.settings
        stem = re.sub(r"\W+", "_", Path(str(settings.get("dataset.path", "data"))).stem) or "data"
        names.append(stem if stem not in names else f"{stem}_{len(names)}")
        weight = settings.pop("dataset.weight", None)
        share = {"repeat": 1} if weight is None else {"weight": weight}
        dataset: dict[str, Any] = {"_target_": option("dataset", kind)["_target_"]}
        preset.put(f"dataset.sources.{names[-1]}", {"dataset": dataset, **share}, "")
        for key, value in settings.items():
            group, _, name = key.partition(".")
            if group == "dataset":
                dataset[name] = value
            elif preset.settings.setdefault(key, value) != value:
                preset.unsaid.append(f"{key}={format_value(value)}: differs between the data sets")
        preset.unsaid += [line for line in source.unsaid if line not in preset.unsaid]
        preset.chosen.update(source.chosen)
