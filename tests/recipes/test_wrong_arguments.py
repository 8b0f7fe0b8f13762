"""generate, export, plan and report answer wrong arguments, missing folders and damaged files in a sentence."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.training.resolve import resolve_auto
from tests.runs import train_quick

TOOLS = ("generate", "export_hf", "plan", "report")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train_quick(folder, "checkpoint.export_hf=true", "training.max_steps=2")[0] == 0
    return folder


def answer(tool: str, *arguments: str) -> str:
    """The sentence with which the tool leaves with code 2; empty when it succeeds."""
    main = importlib.import_module(f"recipes.{tool}").main
    try:
        assert not main([str(argument) for argument in arguments])
    except (ConfigError, DataError) as error:
        return str(error)
    return ""


ARGUMENTS = [
    ("generate", ["{run}", "Hi", "--max-new-tokens", "0"], "argument --max-new-tokens: 0 must be at least 1."),
    ("generate", ["{run}", "Hi", "--max-new-tokens", "many"], "argument --max-new-tokens: 'many' must be a whole number."),
    ("generate", ["{run}", "Hi", "--temperature", "nan"], "argument --temperature: nan must be a finite number."),
    ("generate", ["{run}", "Hi", "--temperature", "-1"], "argument --temperature: -1 must be at least 0 and at most 1,000."),
    ("generate", ["{run}", "Hi", "--seed", "-1"], "argument --seed: -1 must be at least 0"),
    ("generate", ["{run}", "Hi \ud800"], "must be text in UTF-8"),
    ("generate", ["", "Hi"], "must be a path, and it is empty"),
    ("generate", ["./nothing", "Hi"], "model=./nothing: there is no such folder."),
    ("generate", ["{run}", "", "--raw"], "the prompt is empty"),
    ("generate", ["{run}", "Hi " * 100_000], "shorten the prompt"),
    ("generate", ["{run}", "--checkpoint", "bset", "Hi"], "has no complete checkpoint bset: there are step_"),
    ("generate", ["{run}", "--temprature", "1"], "; did you mean --temperature (--help lists the arguments)."),
    ("generate", [], "the following arguments are required: model (--help lists the arguments)."),
    ("plan", ["--config-name", "smoke", "--frob"], "--frob: unknown flag."),
    ("export_hf", ["./nothing"], "nothing is not the folder of a run: there is no such folder."),
    ("export_hf", ["{run}", "--checkpoint", "step_9"], "has no complete checkpoint step_9: there are step_"),
    ("export_hf", ["{run}", "--to", "{run}"], "exists already: choose another folder."),
    ("export_hf", ["{run}", "--to", "/proc/nothing/x"], "/proc/nothing/x cannot be written"),
    ("plan", ["--config-name", "smoke", "--gpus", "0"], "argument --gpus: 0 must be at least 1"),
    ("plan", ["--config-name", "smoke", "--gpu", "h1"], "--gpu h1: not known; did you mean h100-80? Choose one of a100-40"),
    ("plan", ["--config-name", "smoke", "--price-per-gpu-hour", "inf"], "argument --price-per-gpu-hour: inf must be a finite number."),
    ("plan", ["--config-name", "smoke", "--document-tokens", "-5"], "argument --document-tokens: -5 must be at least 1"),
    ("plan", ["--config-name", "smoke", "model.config.num_attention_heads=3"], "a model with these settings does not work"),
    ("plan", ["--config-name", "smoke", "mesh.cp=3"], "must be a multiple of 6 (2 * mesh.cp): use 132."),
    ("plan", ["--config-name", "smoke", "training.max_stepz=3"], "training.max_stepz=3: unknown key"),
    ("plan", ["--config-name", "finetune", "model.pretrained=./nothing", "dataset.path=x"], "./nothing: there is no such folder"),
    ("report", ["./nothing"], "nothing is not the folder of a run: there is no such folder."),
    ("report", ["{run}s"], "is not the folder of a run: there is no such folder; did you mean /"),
    ("average", ["{run}s"], "is not the folder of a run: there is no such folder; did you mean /"),
    ("board", ["{run}/config.yaml"], "config.yaml is a file: name folders of runs."),
    ("report", ["{run}", "--to", "/proc/x"], "/proc/x/report.html cannot be written (No such file or directory): choose another place."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "arguments", "sentence"), ARGUMENTS, ids=lambda value: str(value)[:40]
)
def test_wrong_arguments(run: Path, tool: str, arguments: list[str], sentence: str) -> None:
    assert sentence in answer(tool, *(text.replace("{run}", str(run)) for text in arguments))


def test_every_command_takes_a_run_for_its_model(run: Path) -> None:
    typed = [f"model.pretrained={run}", "dataset.path=x.jsonl", "optimizer.lr=1e-4", "name=a"]
    size = "packed_sequence.packed_sequence_size=64"
    config = check_config(compose_config("finetune", [*typed, size]))
    assert resolve_auto(config).model["pretrained"] == f"{run}/hf"


def test_an_export_without_its_tokenizer(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "hf", tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").unlink()
    told = answer("generate", str(tmp_path / "hf"), "Hi")
    assert "hf: the folder has no tokenizer.json: copy it from the model that was trained." in told


@pytest.mark.parametrize("tool", ["generate", "report", "plan"])
def test_work_of_one_process_is_refused_to_several(
    run: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = {
        "generate": [str(run), "Hi"],
        "report": [str(run)],
        "plan": ["--config-name", "smoke"],
    }
    sentence = "WORLD_SIZE=2 processes would each do all of this work: start it with python, in one process."
    assert answer(tool, *arguments[tool]) == sentence


def _weights_of_nan(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "hf/model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "hf/model.safetensors", metadata={"format": "pt"})


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _cut_checkpoint(folder: Path) -> None:
    for path in (folder / "checkpoints").rglob("tensors/*"):
        path.write_bytes(path.read_bytes()[:9])


DAMAGES: dict[str, tuple[Callable[[Path], object], dict[str, str]]] = {
    "no export": (lambda f: shutil.rmtree(f / "hf"), {"generate": "has no hf/ or adapter/ of its newest checkpoint"}),
    "no checkpoints": (lambda f: shutil.rmtree(f / "checkpoints"), {"export_hf": "has no complete checkpoint"}),
    "a checkpoint cut": (_cut_checkpoint, {"export_hf": "has no complete checkpoint.\nstep_00000002 is skipped: "}),
    "config of nothing": (_write("config.yaml", b""), {"export_hf": "cannot be read", "report": "cannot be read"}),
    "config of garbage": (_write("config.yaml", b"a: [\xff"), {"export_hf": "cannot be read", "report": "cannot be read"}),
    "config of text": (_write("config.yaml", b"hello"), {"export_hf": "cannot be read", "report": "cannot be read"}),
    "metrics of garbage": (_write("metrics.jsonl", b"5\n\xff\n[]\n{\n"), {"report": "has logged no step yet"}),
    "metrics with bad rows": (_write("metrics.jsonl", b'5\n{"step": "x"}\n{"step": 1, "loss": "y", "lr": 1}\n'), {"report": ""}),
    "status of garbage": (_write("STATUS.json", b"{"), {"report": "", "export_hf": ""}),
    "packing of text": (_write("packing.json", b'{"fill_frac": "much"}'), {"report": ""}),
    "packing of garbage": (_write("packing.json", b"[1"), {"report": ""}),
    "weights cut": (_write("hf/model.safetensors", b"12345678"), {"generate": "cannot be loaded as a model"}),
    "weights of nan": (_weights_of_nan, {"generate": "1 weights hold values that are not finite"}),
    "model config of garbage": (_write("hf/config.json", b"{"), {"generate": "config.json is damaged (Expecting property name"}),
    "tokenizer of garbage": (_write("hf/tokenizer.json", b"{"), {"generate": "cannot be loaded as a tokenizer"}),
    "template that raises": (_write("hf/chat_template.jinja", b"{{ 1 / 0 }}"), {"generate": "the chat template refuses the prompt"}),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_runs(run: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    harm, sentences = DAMAGES[damage]
    harm(tmp_path / "run")
    for tool, sentence in sentences.items():
        more = {
            "generate": ["Hi", "--max-new-tokens", "2"],
            "export_hf": ["--to", str(tmp_path / "out")],
        }.get(tool, [])
        told = answer(tool, str(tmp_path / "run"), *more)
        assert sentence in told
        assert bool(sentence) == bool(told), told
