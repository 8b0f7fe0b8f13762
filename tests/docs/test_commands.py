"""Every command of README and docs: each is composed and checked; those that need no GPU and no files of the reader's
are run, page by page (slow).
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from automodel_lite.__main__ import TOOLS
from automodel_lite.cli.job import takes_words
from automodel_lite.cli.line import RECIPES, is_sweep, read_line
from automodel_lite.cli.recipes import Recipe
from automodel_lite.config.check import check_config
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError
from tests.runs import composed

ROOT = Path(__file__).resolve().parent.parent.parent
SKILL = ROOT / "skills/automodel-lite/SKILL.md"
PAGES = [ROOT / "README.md", SKILL, *sorted((ROOT / "docs").glob("*.md"))]
# the pages about images and policies have no file of data: they run in tests/images/test_page.py
# and tests/examples
OTHERS = ("README.md", "images.md", "policies.md", "own_words.md")
IMAGES = ROOT / "docs/cookbook/images.md"
COOKBOOK = [
    page for page in sorted((ROOT / "docs/cookbook").glob("*.md")) if page.name not in OTHERS
]
# blocks that begin with an example's own data and model run as they are printed, in
# tests/examples/test_decisions.py
OF_EXAMPLES = re.compile(
    r"^```bash\n(pip download|python examples/).*?^```", re.MULTILINE | re.DOTALL
)
WITH_CONFIG = ("train_ft", "prepare_data", "inspect_data", "score", "verify", "evaluate")
READERS_OWN = re.compile(
    r"/models/|/data/|\.jsonl|\.csv|\.\.\.|<|meta-llama|Qwen/|--nnodes|--nproc(-per-node)? (8|gpu)|attention=(varlen|flash|te|flex)|"
    r"logger=\S*(wandb|mlflow)|qlora|--config-name (finetune|llama3|qwen3)|te_|runs/(a|b|mine|pictures)\b|automodel-lite (slurm|proof)|--config-dir"
)


@dataclass(frozen=True)
class Command:
    page: str
    text: str

    @property
    def recipe(self) -> str:
        if found := re.search(r"recipes/(\w+)\.py", self.text):
            return found[1]
        return RECIPES[self.text.split()[1]][0] if self.text.split()[1] in RECIPES else ""

    @property
    def arguments(self) -> list[str]:
        words = shlex.split(self.text, comments=True)
        if words[0] == "automodel-lite":
            return words[2:]
        start = next(number for number, word in enumerate(words) if word.endswith(".py")) + 1
        return words[start:]


def commands(pages: list[Path]) -> list[Command]:
    return [command for page in pages for command in commands_of(page.name, page.read_text())]


def commands_of(page: str, text: str) -> list[Command]:
    """Lines of fenced blocks that start a recipe, continued lines joined."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            line = re.sub(r"^(\$ |srun )", "", line.strip())
            if (
                re.match(r"(torchrun|python)\b.*\brecipes/\w+\.py|automodel-lite \w", line)
                and " | " not in line
            ):
                found.append(Command(page, line))
    return found


COMMANDS = commands(PAGES)


def in_ci(found: list[Command]) -> list[ParameterSet]:
    """Commands of which `make test` composes those that a reader meets first, and CI all."""
    first = ("README.md", "first_run.md")
    return [
        pytest.param(
            command,
            marks=() if command.page in first else pytest.mark.system,
            id=f"{command.page}: {command.text}"[:90],
        )
        for command in found
    ]


@pytest.mark.parametrize("command", in_ci([*COMMANDS, *commands([*COOKBOOK, IMAGES])]))
def test_it_composes(command: Command):
    assert command.recipe or command.text.split()[1] in TOOLS
    if command.recipe not in WITH_CONFIG or "--help" in command.arguments or "..." in command.text:
        return
    line = read_line(command.arguments)
    if line.config_dir:
        return
    given = [text for text in line.overrides if not text.startswith("hydra")]
    words = [text for text in given if "=" not in text]
    if command.recipe == "verify" and words:  # of a run, whose settings it reads
        return
    if takes_words(Recipe(f"recipes.{command.recipe}:main"), words, line.config_name):
        # the rows would choose the preset
        line.config_name = line.config_name or "finetune"
        places = dict(zip(("model.pretrained", "dataset.path"), words, strict=True))
        given = [f"{key}={word}" for key, word in places.items()]
        given += [text for text in line.overrides if "=" in text]
    # of a sweep the first job and the last
    jobs = {tuple(one_value(text, which) for text in given) for which in (0, -1)}
    for overrides in jobs:
        found = problems(line.config_name, [*overrides])
        # a name or model is the reader's own, and so are optional packages
        allowed = re.compile("has no value|needs the package")
        assert not [line for line in found if not allowed.search(line)]


def test_a_command_in_a_docstring_is_whole():
    """A line that goes on ends in a backslash: pasted without it, its first part would run alone."""
    paths = [*(ROOT / "recipes").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    for path in paths:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines = re.sub(r"\\\n\s*", "", text).splitlines()
        assert [line for line in lines if re.match(r" {4,}(-|[a-z_.]+=)", line)] == [], path


def one_value(override: str, which: int) -> str:
    key, _, values = override.partition("=")
    if not is_sweep(override):
        return override
    return f"{key}={(re.findall(r'[0-9][0-9.e-]*', values) if '(' in values else values.split(','))[which]}"


def problems(preset: str | None, overrides: list[str]) -> list[str]:
    try:
        check_config(composed(preset, *overrides))
    except ConfigError as error:
        return str(error).splitlines()
    return []


def settings_of_moving() -> list[str]:
    """Code spans in the last column of the page's tables: `key`, or `key=value`."""
    rows = [
        line.split(" | ")
        for line in (ROOT / "docs/moving.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    spans = {span for row in rows if len(row) == 2 for span in re.findall(r"`([^`]+)`", row[1])}
    return sorted(
        span for span in spans if re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)*(=[\w.-]+)?", span)
    )


def test_what_one_moves_to_is_a_setting():
    """A key is known, and takes the value that is written with it; each key stands once in a composition."""
    settings = [
        text
        for text in settings_of_moving()
        if "=" in text or "." in text or text in vars(Config("x"))
    ]
    assert len(settings) > 80
    needed = {
        "name": "x",
        "model.pretrained": "x",
        "dataset.path": "x",
        "peft": "lora",
        "lr_scheduler": "wsd",
        "logger": "wandb",
    }
    rounds = [{text: "null" for text in settings if "=" not in text} | needed]
    for key, _, value in (text.partition("=") for text in settings if "=" in text):
        for given in rounds[1:]:
            if given.get(key) in (None, needed.get(key)):
                given[key] = value
                break
        else:
            rounds.append(needed | {key: value})
    for given in rounds:
        overrides = [f"{key}={value}" for key, value in given.items()]
        wrong = [
            line
            for line in problems("finetune", overrides)
            if re.search(r"unknown|=(?!null)\S* must be one of|no such option", line)
        ]
        assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("page", [page.name for page in PAGES])
def test_it_runs(page: str, tmp_path: Path):
    """In the page's order, in one folder; long runs are cut to two steps."""
    for name in ("recipes", "conf", "automodel_lite"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for command in COMMANDS:
        if command.page != page or READERS_OWN.search(command.text):
            continue
        words = shlex.split(command.text, comments=True)
        if command.recipe == "train_ft" and not {"--cfg", "--help", "--multirun", "-m"} & set(
            words
        ):
            words += ["training.max_steps=2", "evaluation=none", "report=true"]
        written = words[words.index(">") + 1] if ">" in words else "screen"
        (tmp_path / written).parent.mkdir(parents=True, exist_ok=True)
        words = words[: words.index(">")] if ">" in words else words
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, f"{command.text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        (tmp_path / written).write_text(done.stdout)


TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for turn in messages %}<|im_start|>{{ turn.role }}
{% if turn.reasoning_content %}<think>{{ turn.reasoning_content }}</think>{% endif %}{{ turn.content }}\
{% for call in turn.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_small_model(folder: Path) -> None:
    """A Llama that knows bytes, chats, tools and thinking."""
    specials = ["<|im_start|>", "<|im_end|>"]
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(
        BPE({token: number for number, token in enumerate([*specials, *alphabet])}, [])
    )
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=specials[1], pad_token=specials[1]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = TEMPLATE
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=4096, **sizes
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)  # how much an adapter learns depends on the weights below it
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


SMALL = [
    "packed_sequence.packed_sequence_size=1024",
    "training.global_batch_size=1",
    "cache_dir=cache",
]


@pytest.mark.slow
@pytest.mark.parametrize("page", COOKBOOK, ids=lambda page: page.stem)
def test_a_page_of_the_cookbook_runs(page: Path, tmp_path: Path):
    """Its row of data many times over, its Python and its commands in their order, on a small model, which learns."""
    for name in ("recipes", "conf", "automodel_lite"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_small_model(tmp_path / "my-model")
    text = page.read_text()
    blocks = re.findall(
        r"^`([\w.]+)`[^\n]*\n\n```json\n(.*?)\n```", text, flags=re.MULTILINE | re.DOTALL
    )
    assert blocks
    for data, rows in blocks:
        (tmp_path / data).write_text(f"{rows}\n" * max(40, 40_000 // len(rows)))
    scripts = [
        [sys.executable, "-c", code]
        for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for command in commands_of(page.name, re.sub(OF_EXAMPLES, "", text)):
        words = shlex.split(command.text.replace("--nproc 8", "--nproc 2").replace("cp=8", "cp=2"))
        if command.recipe in WITH_CONFIG:
            words += SMALL
        if command.recipe == "train_ft":
            # of a model with 32 dims; pages are for billions of parameters
            words += ["optimizer.lr=5e-3"]
        scripts.append(words)
    screens = ""
    for words in scripts:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        screens += done.stdout
    for metrics in tmp_path.glob("runs/*/metrics.jsonl"):
        losses = [
            row["loss"]
            for row in map(json.loads, metrics.read_text().splitlines())
            if "loss" in row
        ]
        # a student that is its own teacher begins at 0; an adapter of random frozen weights learns less
        least = 0.9 if page.stem == "lora" else 0.7
        assert losses[-1] < max(least * losses[0], 0.01), metrics
    # of step 1, as the page shows it
    for loss in re.findall(r"^ {4,}1 +(\d\.\d{4}) ", text, flags=re.MULTILINE):
        assert re.search(rf"^ +1 +{loss} ", screens, flags=re.MULTILINE)
