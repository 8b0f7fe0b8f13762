"""Each flag of Hydra does what Hydra's documentation says, or is refused in one sentence; none of them trains."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from automodel_lite.cli import run_recipe
from automodel_lite.cli.hydra_app import choose_allocator, run_command_line
from automodel_lite.errors import ConfigError
from tests.ranks import in_a_process

PRESET = ["--config-name", "smoke"]


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["train_ft.py"])
    monkeypatch.chdir(tmp_path)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with suppress(SystemExit):  # Hydra's own end of --help
        run_command_line("recipes.train_ft:main", argv)
    return capsys.readouterr().out


SHOWN = [
    (["--version"], "automodel_lite 0.1.0 (hydra 1."),
    (["--help"], "usage: torchrun recipes/train_ft.py --config-name PRESET"),
    (["--help"], "--cfg {job,hydra,all}]"),
    ([*PRESET, "--cfg", "job"], "output_dir: runs/${name}"),
    ([*PRESET, "--cfg", "job", "--resolve"], "output_dir: runs/smoke"),
    (
        [*PRESET, "--cfg", "hydra"],
        "subdir: ${hydra.job.num}_${file_name:${hydra.job.override_dirname}}",
    ),
    ([*PRESET, "--cfg", "all"], "hydra:"),
    ([*PRESET, "--cfg", "job", "optimizer.lr=1", "+training.max_steps=7"], "max_steps: 7"),
    (["-sc", "install=bash"], "complete -o nospace"),
    (["-sc", "install=zsh"], "hydra_bash_completion"),
    (["-sc", "install=fish"], "hydra_fish_completion"),
]


@pytest.mark.parametrize(("argv", "text"), SHOWN, ids=[" ".join(argv) for argv, _ in SHOWN])
def test_it_is_shown(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert text in said(capsys, *argv)
    assert not list(tmp_path.iterdir())  # nothing was run


@pytest.mark.parametrize("question", [["--version"], ["--help"], [*PRESET, "--cfg", "job"]])
def test_of_several_ranks_the_first_answers(
    question: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = said(capsys, *question)
    assert said(capsys, "--nproc", "2", *question) == answers  # and no ranks are started for it
    monkeypatch.setenv("RANK", "1")
    assert answers
    assert said(capsys, *question) == ""


LISTS = " (--help lists the arguments)."


REFUSED = [
    (["--conifg-name", "smoke"], f"unrecognized arguments: --conifg-name; did you mean --config-name{LISTS}"),
    ([*PRESET, "--config-dir", "nowhere"], "--config-dir nowhere: there is no such folder."),
    ([*PRESET, "--config-path", "nowhere"], "--config-path nowhere: there is no such folder."),
    ([*PRESET, "--cfg", "job", "--run"], f"argument --run/-r: not allowed with argument --cfg/-c{LISTS}"),
    ([*PRESET, "--resolve"], "--resolve belongs to --cfg job|hydra|all."),
    ([*PRESET, "hydra.run.dir=x"], "hydra.run.dir=x: settings of Hydra are for --multirun; the folder of a run is output_dir."),
    ([*PRESET, "--multirun", "hydra.searchpath=[file:///nix]"], "hydra.searchpath: name the folder with --config-dir."),
    ([*PRESET, "=3"], "=3: cannot be read as key=value (there is no key)."),
    (
        [*PRESET, "seed=0,1"],
        "seed=0,1: several values: add --multirun to sweep over them, or write a list as seed=[0,1], "
        "or one text as 'seed=\"0,1\"'.",
    ),
    ([*PRESET, "~dataset.seed"], "~dataset.seed: no file sets it, so there is nothing to remove."),
    (["--experimental-rerun", "x.pickle"], f"unrecognized arguments: --experimental-rerun{LISTS}"),
    (
        [*PRESET, "hydra/launcher=basik", "-m", "seed=0,1"],
        "hydra/launcher=basik: no such option; did you mean basic? The options are basic, joblib, submitit_local, submitit_slurm. "
        "pip install 'automodel-lite[sweep]' brings others.",
    ),
    (
        [*PRESET, "lr_scheduler=cosin", "seed=[1", "training.max_stepz=3"],
        "lr_scheduler=cosin: no such option; did you mean cosine? The options are constant, cosine, linear, wsd.\n"
        "seed=[1: cannot be read as key=value: close every bracket and quote, or put a text with brackets into "
        "quotes, 'seed=\"...\"'.\ntraining.max_stepz=3: unknown key; did you mean training.max_steps?",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "sentence"), REFUSED, ids=[" ".join(argv) for argv, _ in REFUSED])
def test_it_is_refused_in_a_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_command_line("recipes.train_ft:main", argv)
    assert str(error.value) == sentence


def test_folders_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "more/optimizer").mkdir(parents=True)
    (tmp_path / "more/optimizer/own.yaml").write_text("_target_: torch.optim.SGD\nlr: 0.5\n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/alone.yaml").write_text("name: alone\n")
    chosen = ["--cfg", "job", "optimizer=own"]
    assert "torch.optim.SGD" in said(capsys, *PRESET, *chosen, "--config-dir", "more")
    assert (
        said(
            capsys,
            "--config-path",
            str(tmp_path / "bare"),
            "--config-name",
            "alone",
            "--cfg",
            "job",
        )
        == "name: alone\n"
    )


def test_a_preset_does_not_import_packages_for_its_options(tmp_path: Path) -> None:
    (tmp_path / "strange.yaml").write_text(
        "defaults: [smoke, _self_]\nhydra:\n  searchpath: [pkg://antigravity]\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"hydra.searchpath=.'pkg://antigravity'. is set in a file, but only the command line may",
    ):
        run_command_line("recipes.train_ft:main", ["--config-dir", ".", "--config-name", "strange"])
    assert "antigravity" not in sys.modules


def test_names_beyond_ascii_need_no_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(
        capsys, *PRESET, "--cfg", "job", "dataset.path=/daten/Gespräche 1.jsonl", "name=größe"
    )
    assert "path: /daten/Gespräche 1.jsonl" in text
    assert "name: größe" in text


def test_a_chosen_allocator_stays() -> None:
    plain: dict[str, str] = {}
    choose_allocator(plain)
    rounding = ",pinned_max_round_threshold_mb:16" if torch.__version__ >= "2.13" else ""
    assert plain == {"PYTORCH_ALLOC_CONF": f"expandable_segments:True{rounding}"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        chosen = {name: "max_split_size_mb:64"}
        choose_allocator(chosen)
        assert chosen == {name: "max_split_size_mb:64"}


def test_what_is_missing_hides_nothing_that_is_wrong(tmp_path: Path) -> None:
    options = ["--config-name", "finetune", "model.pretrained=./no", "training.max_stepz=3"]
    options += ["dataset.path=no.jsonl", "optimizer.lr=fast", "training.max_steps=${oc.env:NO}"]
    code, screen = in_a_process(run_recipe, tmp_path, "recipes.train_ft:main", options)
    assert code == 2
    assert [line.split(":")[0].split("=")[0] for line in screen.splitlines() if line] == [
        "training.max_stepz",
        "training.max_steps",
        "name has no value",
        "optimizer.lr",
        "model.pretrained",
        "dataset.path",
    ]


def test_a_preset_that_is_based_on_nothing_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: x\nmodel: {pretrained: y}\n")
    with pytest.raises(ConfigError, match=r"^\S+/mine\.yaml: it is based on no other preset: "):
        run_command_line(
            "recipes.train_ft:main", ["--config-dir", str(tmp_path), "--config-name", "mine"]
        )
    (tmp_path / "plain.yml").touch()
    with pytest.raises(ConfigError, match=r"ends in \.yaml: rename \S+/plain\.yml to plain\.yaml"):
        run_command_line(
            "recipes.train_ft:main", ["--config-dir", str(tmp_path), "--config-name", "plain"]
        )


def test_a_misspelled_preset_hides_nothing_that_is_wrong(tmp_path: Path) -> None:
    """The rest of the line is checked against the preset that was meant."""
    options = ["--config-name", "finetun", "training.max_stepz=3", "optimizer=adamv", "name=x"]
    options += ["model.pretrained=./no", "dataset.path=no.jsonl"]
    code, screen = in_a_process(run_recipe, tmp_path, "recipes.train_ft:main", options)
    assert code == 2
    assert [line.split(":")[0] for line in screen.splitlines() if line] == [
        "--config-name finetun",
        "optimizer=adamv",
        "training.max_stepz=3",
        "model.pretrained=./no",
        f"dataset.path=no.jsonl does not exist (looked in {tmp_path}).",
    ]


def test_a_setting_without_its_value_hides_nothing_that_is_wrong(tmp_path: Path) -> None:
    options = ["./model", "chats.jsonl", "training.max_steps", "optimizer.lrr=1"]
    code, screen = in_a_process(run_recipe, tmp_path, "recipes.train_ft:main", options)
    assert code == 2
    assert [line for line in screen.splitlines() if "optimizer" in line or "`=`" in line] == [
        "training.max_steps: cannot be read as key=value: there is no `=`: write training.max_steps=... .",
        "optimizer.lrr=1: unknown key; did you mean optimizer.lr?",
    ]


@pytest.mark.parametrize("words", [[], ["./model", "chats.jsonl"]], ids=["keys", "words"])
def test_a_preset_that_is_nowhere_is_one_sentence(words: list[str], tmp_path: Path) -> None:
    options = [*words, "--config-name", "zzzz", "training.max_stepz=3"]
    code, screen = in_a_process(run_recipe, tmp_path, "recipes.train_ft:main", options)
    assert (code, len(screen.strip().splitlines())) == (2, 1)
    assert screen.strip().startswith(
        "--config-name zzzz: no such preset. The usual ones are finetune, "
    )


@pytest.mark.parametrize(("file", "typed"), [("own.yaml", "own"), ("own.yml", "own.yml")])
def test_a_preset_beside_the_command_is_named_with_its_folder(
    file: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--config-dir \. --config-name own\.$") as raised:
        run_command_line("recipes.train_ft:main", ["--config-name", typed])
    assert ("rename it to own.yaml" in str(raised.value)) == (file == "own.yml")


def test_rows_that_no_preset_reads_are_told_beside_a_missing_name(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "leads.csv").write_text("prompt,completion\n")
    options = ["--config-name", "finetune", "model.pretrained=./model", "dataset.path=leads.csv"]
    code, screen = in_a_process(run_recipe, tmp_path, "recipes.train_ft:main", options)
    assert code == 2
    assert screen.split("\n")[1:-1] == [
        "name has no value: set name=model-leads",
        "leads.csv: it has a header (prompt, completion) and no rows below it.",
    ]


def test_a_dry_run_needs_no_name(tmp_path: Path) -> None:
    options = ["--config-name", "finetune", "model.pretrained=./no", "dataset.path=no.jsonl"]
    code, screen = in_a_process(
        run_recipe, tmp_path, "recipes.train_ft:main", [*options, "dry_run=true"]
    )
    assert code == 2
    assert "./no: there is no such folder" in screen
    assert "name has no value" not in screen


def test_a_name_is_asked_for_where_a_folder_is_made(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text('{"text": "Hi"}\n')
    options = (
        f"--config-name finetune model.pretrained={tmp_path}/no dataset.path={tmp_path}/data.jsonl"
    )
    for recipe, said in (
        ("train_ft", "name has no value: set name=no-"),
        ("inspect_data", f"{tmp_path}/no"),
    ):
        code, screen = in_a_process(run_recipe, tmp_path, f"recipes.{recipe}:main", options.split())
        assert code == 2
        assert said in screen


MISNAMED = """
import sys
from automodel_lite.cli.hydra_app import run_command_line
from automodel_lite.errors import ConfigError
source = "{dataset: {_target_: automodel_lite.data.reading.files.FilesDataset, path: no.txt}, weight: 1}"
for words in (
    ["model.pretrained=./nothing", "dataset.path=x.jsonl"],
    ["dataset.path=chat.jsonl"],
    ["dataset.path=/sys/x"],
    ["dataset.path=[chats.jsonl,chat.jsonl]"],
    ["dataset.path=chats.jsonl", "dataset.val_path={easy: chats.jsonl, hard: chat.jsonl}"],
    ["dataset=mixture", f"dataset.sources.a={source}"],
    ["dataset.path=chats.jsonl", "output_dir=chats.jsonl"],
    ["dataset.path=chats.jsonl", "output_dir=other"],
):
    command = ["--config-name", "finetune", "name=a", "model.pretrained=.", *words]
    try:
        run_command_line("recipes.train_ft:main", command)
    except ConfigError as error:
        print(error)
assert "torch" not in sys.modules
"""


def test_what_is_not_there_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    done = subprocess.run(
        [sys.executable, "-c", MISNAMED], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    looked = f"does not exist (looked in {tmp_path})"
    meant = f"chat.jsonl {looked}; did you mean chats.jsonl?"
    assert done.stdout.splitlines() == [
        "model.pretrained=./nothing: there is no such folder.",
        f"dataset.path=x.jsonl {looked}; did you mean chats.jsonl?",
        f"dataset.path={meant}",
        f"dataset.path=/sys/x {looked}.",
        f"dataset.path={meant}",
        f"dataset.val_path={meant}",
        f"dataset.sources.a.dataset.path=no.txt {looked}.",
        f"output_dir={tmp_path}/chats.jsonl is a file.",
        f"output_dir={tmp_path}/other is not empty and is not the folder of a run: choose another "
        "name=... .",
    ]
