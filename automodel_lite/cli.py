"""The command line of every recipe: compose the configuration, run, and say what went wrong in one sentence.

Hydra composes; what it leaves to the user is done here. An override needs no `+`: every key is checked afterwards
against the schema and the signatures (config.check_config), so a new key is either known or named as a mistake.
Errors that a user can mend are printed by rank 0 alone, without a traceback, and are the last words on the screen
under torchrun too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import NoReturn

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automodel_lite.commands import RECIPES, RECIPES_PACKAGE, as_typed
from automodel_lite.config.check import check_config, with_defaults
from automodel_lite.config.components import CONF_DIR
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, DataError, RunStoppedError, did_you_mean
from automodel_lite.garbage import collecting_seldom
from automodel_lite.redact import ScrubbedStream, scrub
from automodel_lite.run.stopping import PREEMPTED_EXIT, SIGNALS, StoppedEarly
from automodel_lite.sweep import expand, run_sweep

COMMAND_LINE_ONLY = ("security.allow_targets", "model.trust_remote_code")
CONFIG_EXIT = 2  # exit code of a mistake that the user can mend
_SIGPIPE_EXIT = 141  # as a shell reports a command whose reader left
_WAIT_FOR_RANK_0_S = 10.0
EXAMPLES = (
    "torchrun recipes/train_ft.py --config-name llama_packed",
    "torchrun recipes/train_ft.py --config-name llama_packed packed_sequence.packed_sequence_size=512 name=b",
    "torchrun recipes/train_ft.py --config-name finetune name=c model.pretrained=/models/x dataset.path=a.jsonl",
    "torchrun --nproc-per-node 4 recipes/train_ft.py --config-name llama_packed mesh.cp=2",
    "torchrun recipes/train_ft.py --config-name llama_packed name=sweep --multirun optimizer.lr=1e-3,3e-3",
)


def run_recipe(main: str, argv: list[str] | None = None) -> NoReturn:
    """Composes the configuration named on the command line, checks it, calls `main(config)` and exits.

    main   "recipes.train_ft:main", imported only when there is something to run: `--help` and `--cfg` need no torch.

    Exit codes: 0 done, 2 a mistake in the settings or the data, 75 stopped by a signal or the time limit (start it
    again), 1 any other error.
    """
    SIGNALS.install()
    _hide_secrets()
    choose_allocator(os.environ)
    try:
        args = get_args_parser().parse_intermixed_args(argv)
        if args.help:
            _show(help_text(main.split(":")[0].split(".")[-1], args.config_dir))
        if args.multirun:
            _exit(_sweep(main, args.config_name, args.overrides, args.config_dir))
        raw = compose_config(args.config_name, args.overrides, config_dir=args.config_dir)
        if args.cfg:
            _show(OmegaConf.to_yaml(with_defaults(raw), resolve=bool(args.resolve)).rstrip())
        config = check_config(raw)
        code = imported(main)(config)
    except (ConfigError, DataError) as error:
        _leave(str(error), CONFIG_EXIT)
    except RunStoppedError as error:
        _leave(str(error), 1)
    except StoppedEarly as stopped:
        _leave(f"stopped by {stopped} before the first step: nothing to save", PREEMPTED_EXIT)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except Exception as error:
        _fail(error)
    _exit(code or 0)


def choose_allocator(environment: MutableMapping[str, str]) -> None:
    """GPU memory in segments that grow, before torch reads the setting; a choice of the user's stays. Packs of changing
    documents ask for blocks of changing sizes, which fixed segments cut into pieces that nothing fits.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def imported(main: str) -> Callable[[Config], int | None]:
    """The function that "recipes.train_ft:main" names."""
    module, function = main.removeprefix("recipes.").split(":")
    with collecting_seldom():
        loaded = importlib.import_module(f"{RECIPES_PACKAGE}.{module}")
    found: Callable[[Config], int | None] = vars(loaded)[function]
    return found


def _sweep(main: str, preset: str | None, overrides: list[str], config_dir: str | None) -> int:
    """The jobs of `--multirun`; the folder is where the preset alone would run."""
    jobs = expand(overrides)
    first = compose_config(preset, jobs[0].overrides, config_dir=config_dir)
    settings = with_defaults(first)
    if OmegaConf.is_missing(settings, "name"):
        raise ConfigError("name has no value: set name=...")
    chosen = ["--config-name", str(preset), *(["--config-dir", config_dir] if config_dir else [])]
    return run_sweep(main, chosen, overrides, Path(settings.output_dir).resolve())


def run_tool(main: Callable[[list[str]], int | None], argv: list[str] | None = None) -> NoReturn:
    """Runs a recipe that reads its own command line; exit codes and messages as those of `run_recipe`."""
    _hide_secrets()
    try:
        code = main(sys.argv[1:] if argv is None else argv)
    except (ConfigError, DataError) as error:
        _leave(str(error), CONFIG_EXIT)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except SystemExit as leaving:  # argparse's
        _exit(leaving.code if isinstance(leaving.code, int) else 1)
    except Exception as error:
        _fail(error)
    _exit(code or 0)


def compose_config(config_name: str | None, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """The merged configuration of a preset and overrides such as `training.max_steps=10 attention=varlen`.

    `config_dir` is a folder of the user's own presets and group options, searched beside the project's.
    Raises ConfigError: unknown preset or option, unreadable override.
    """
    if config_name is None:
        raise ConfigError(f"--config-name is missing: choose one of {', '.join(presets(config_dir))}.")
    known = presets(config_dir)
    if config_name not in known:
        near = did_you_mean(config_name, known) or "."
        raise ConfigError(f"--config-name {config_name}: no such preset{near} The presets are {', '.join(known)}.")
    GlobalHydra.instance().clear()
    first, *others = _folders(config_dir)
    if others and (others[0] / f"{config_name}.yaml").is_file():  # Hydra takes the preset itself from the first folder
        first, others = others[0], [first]
    try:
        with initialize_config_dir(str(first.resolve()), version_base="1.3"):
            extra = [f"hydra.searchpath=[file://{folder.resolve()}]" for folder in others]
            raw = compose(config_name, [*extra, *(_open(o, groups(config_dir)) for o in overrides)])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(" ".join(str(error).split())) from None
    _check_granted(raw, overrides)
    return raw


def _check_granted(raw: DictConfig, overrides: list[str]) -> None:
    """Raises ConfigError for a permission that a file grants: those are the command line's to give."""
    typed = [override.lstrip("+").partition("=")[0] for override in overrides]
    for key in COMMAND_LINE_ONLY:
        value = OmegaConf.select(raw, key, throw_on_missing=False)
        if value is not None and not any(name == key or name.startswith(f"{key}.") for name in typed):
            raise ConfigError(f"{key} is set in a file: it is taken from the command line only, {key}=... .")


def presets(config_dir: str | None = None) -> list[str]:
    """Names for --config-name."""
    return sorted({p.stem for folder in _folders(config_dir) for p in folder.glob("*.yaml")} - {"base"})


def groups(config_dir: str | None = None) -> dict[str, list[str]]:
    """Group -> its options: {"attention": ["auto", "flash", ...]}."""
    found: dict[str, set[str]] = {}
    for folder in _folders(config_dir):
        for path in folder.glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}


def help_text(recipe: str = "train_ft", config_dir: str | None = None) -> str:
    """What `--help` prints: presets, groups with their options, and examples."""
    start = "torchrun" if recipe == "train_ft" else "python"
    purpose = next(text for module, text in RECIPES.values() if module == recipe)
    lines = [
        f"{purpose[0].upper()}{purpose[1:]}.",
        "",
        f"usage: {start} recipes/{recipe}.py --config-name PRESET [--config-dir FOLDER] [key=value ...]",
    ]
    lines += ["", "presets:", *(f"  {name:16s} {_first_comment(name, config_dir)}" for name in presets(config_dir))]
    lines += ["", "groups (group=option):"]
    lines += [f"  {group:16s} {', '.join(options)}" for group, options in groups(config_dir).items()]
    if recipe == "train_ft":
        lines += ["", "examples:", *(f"  {example}" for example in EXAMPLES)]
    lines += ["", "--cfg job prints the whole configuration and stops."]
    lines += ["dry_run=true checks everything, estimates memory and stops."] if recipe == "train_ft" else []
    return as_typed("\n".join(lines))


def _first_comment(preset: str, config_dir: str | None) -> str:
    """The first sentence of a preset's comment, if it begins with one."""
    path = next(path for folder in _folders(config_dir) if (path := folder / f"{preset}.yaml").is_file())
    line = next(iter(path.read_text().splitlines()), "")
    return re.split(r"[:;] ", line.lstrip("# "))[0].rstrip(".") if line.startswith("#") else ""


def _folders(config_dir: str | None) -> list[Path]:
    return [CONF_DIR, *([Path(config_dir).resolve()] if config_dir else [])]


def _open(override: str, known_groups: dict[str, list[str]]) -> str:
    """`a.b=1` -> `++a.b=1`: set or add, the check comes later; group choices and Hydra's own keys stay as they are."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        reason = " ".join(str(error).splitlines()[0].split())
        raise ConfigError(f"{override}: cannot be read as key=value ({reason}).") from None
    key = parsed.key_or_group
    if key in known_groups and not parsed.is_delete():
        _check_options(key, parsed.value(), known_groups[key])
    is_plain = re.match(r"[A-Za-z_]", override) and key not in known_groups and not key.startswith("hydra")
    return f"++{override}" if is_plain else override


def _check_options(group: str, chosen: object, options: list[str]) -> None:
    for option in chosen if isinstance(chosen, list) else [chosen]:
        if option not in options:
            near = did_you_mean(str(option), options) or "."
            raise ConfigError(f"{group}={option}: no such option{near} The options are {', '.join(options)}.")


def _show(text: str) -> NoReturn:
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)
    os._exit(0)


def _fail(error: Exception) -> NoReturn:
    """An error that nobody has foreseen; a reader that has seen enough (`| head`) is none."""
    if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout.fileno()):
        os._exit(_SIGPIPE_EXIT)
    _leave(traceback.format_exc(), 1)


def _has_no_reader(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _hide_secrets() -> None:
    sys.stdout, sys.stderr = ScrubbedStream(sys.stdout), ScrubbedStream(sys.stderr)


def argument_parser(recipe_doc: str | None) -> argparse.ArgumentParser:
    """Of a recipe that reads its own command line; its docstring is the head of `--help`."""
    return argparse.ArgumentParser(
        description=as_typed(recipe_doc or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _leave(message: str, code: int) -> NoReturn:
    """Ends the process with one message on the screen, from rank 0 alone.

    torchrun prints a summary after every failure; the text it quotes as the root cause is read from the file named by
    TORCHELASTIC_ERROR_FILE. The other ranks wait so that rank 0 is seen to fail first.
    """
    message, rank = as_typed(message).rstrip(), int(os.environ.get("RANK", "0"))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    is_mistake = code == CONFIG_EXIT
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher ends the ranks that wait
    if rank == 0 or not is_mistake:
        prefix = "" if rank == 0 else f"[rank {rank}] "
        print(f"\n{prefix}{message}", file=sys.stderr, flush=True)
        if error_file:
            Path(error_file).write_text(json.dumps({"message": scrub(message), "timestamp": int(time.time())}))
    elif error_file:
        time.sleep(_WAIT_FOR_RANK_0_S)
    _exit(code)


def _exit(code: int) -> NoReturn:
    """Ends at once: gloo's threads abort one process in ten that is left to the interpreter's own clean-up."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
