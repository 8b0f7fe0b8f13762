"""What a configuration may call, and what a run never writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from automodel_lite.cli import compose_config, run_recipe
from automodel_lite.config.check import check_config
from automodel_lite.data.tokens.tokenizer import load_tokenizer
from automodel_lite.errors import ConfigError, DataError
from tests.data.templates import LLAMA3, byte_tokenizer
from tests.forked import warm_python
from tests.ranks import in_a_process

ROOT = Path(__file__).resolve().parents[1]


def test_the_generator_of_a_strangers_run_is_not_run(tmp_path: Path) -> None:
    from automodel_lite.extras.load_run import load_run_config
    from automodel_lite.run.folder import RunFolder

    raw = OmegaConf.to_yaml(
        compose_config("smoke", ["dataset=streaming", "~dataset.num_chats", "name=x"])
    )
    (tmp_path / "config.yaml").write_text(raw.replace("generator: null", "generator: os:abort"))
    with pytest.raises(ConfigError, match=r"dataset.generator=os:abort names code"):
        load_run_config(RunFolder(tmp_path))


@pytest.mark.parametrize(
    "grant", ["security:\n  allow_targets: [os]\n", "model:\n  trust_remote_code: true\n"]
)
def test_a_preset_cannot_grant_anything(tmp_path: Path, grant: str) -> None:
    (tmp_path / "strange.yaml").write_text(f"defaults:\n  - smoke\n  - _self_\n{grant}")
    with pytest.raises(
        ConfigError, match=r"is set in a file, but only the command line may set it"
    ):
        compose_config("strange", [], config_dir=str(tmp_path))


GRANTS = {
    "model": ("model=pretrained", "model:\n  pretrained: x/y\n  trust_remote_code: true\n"),
    "teacher": ("teacher=pretrained", "teacher:\n  pretrained: x/y\n  trust_remote_code: true\n"),
    "deep": ("seed=1", "dataset:\n  a: {b: {trust_remote_code: true}}\n"),
    "env": ("seed=1", "security:\n  allow_env: [HF_TOKEN]\n"),
    "hub": ("seed=1", "hub:\n  push: evil/x\n"),
    "mlflow": ("logger=mlflow", "logger:\n  mlflow:\n    tracking_uri: https://evil.example\n"),
    "wandb": ("logger=wandb", "logger:\n  wandb:\n    entity: evil\n"),
    "images": ("dataset=images", "dataset:\n  allow_remote: true\n"),
    "a set of a mixture": ("seed=1", "dataset:\n  sources: {a: {dataset: {allow_remote: true}}}\n"),
    "callback": ("seed=1", "callbacks:\n  x:\n    tracking_uri: https://evil.example\n"),
}


@pytest.mark.parametrize(("typed", "block"), GRANTS.values(), ids=GRANTS)
def test_no_file_grants_a_permission_or_names_where_results_go(
    tmp_path: Path, typed: str, block: str
) -> None:
    """Choosing an option of the group beside it is no word for what the file sets there."""
    (tmp_path / "strange.yaml").write_text(f"defaults: [smoke, _self_]\n{block}")
    with pytest.raises(ConfigError, match="is set in a file, but only the command line may"):
        compose_config("strange", [typed], config_dir=str(tmp_path))


def test_an_option_of_a_strangers_folder_grants_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "evil.yaml").write_text("pretrained: x/y\ntrust_remote_code: true\n")
    with pytest.raises(ConfigError, match=r"model.trust_remote_code is set in a file"):
        compose_config("smoke", ["model=evil"], config_dir=str(tmp_path))
    typed = ["model=evil", "model.trust_remote_code=true"]
    assert compose_config("smoke", typed, config_dir=str(tmp_path)).model.trust_remote_code


@pytest.mark.parametrize(
    "key", ["model.trust_remote_code", "+security.allow_targets", "++hub.push"]
)
def test_a_sweep_in_a_file_types_no_permission(tmp_path: Path, key: str) -> None:
    """What a sweep goes over becomes the command line of its jobs."""
    params = f"hydra: {{sweeper: {{params: {{{key}: x}}}}}}"
    (tmp_path / "strange.yaml").write_text(f"defaults: [smoke, _self_]\n{params}\n")
    with pytest.raises(ConfigError, match="is set in a file, but only the command line may"):
        compose_config("strange", [], config_dir=str(tmp_path))


SENT = {
    "address": "dataset: {path: 'https://${oc.env:CANARY}@host/x.jsonl'}",
    "hub": "model: {pretrained: '${oc.env:CANARY}/model'}",
    "chain": "dataset: {path: '/x/${oc.env:CANARY}::https://host/x.zip'}",
    "default": "tokenizer: {path: '${oc.env:${oc.env:CANARY_NAME,CANARY},x}'}",
    "reference": "dataset: {path: 'https://host/${cache_dir}'}\ncache_dir: /${oc.env:CANARY}",
    "group": "logger: {wandb: '${oc.create:{project: ${oc.env:CANARY}}}'}",
    "other-group": "dataset: {val_path: {project: '/${oc.env:CANARY}'}}\nlogger: {wandb: '${dataset.val_path}'}",
    "list": "dataset: {path: [a.jsonl, 's3://${oc.env:CANARY}/b.jsonl']}",
    "tracker": "logger: {wandb: {project: '${oc.env:CANARY}'}}",
    "text": "samples: {prompts: ['${oc.env:CANARY}']}",
    "path-for-a-tracker": "logger: {wandb: {group: '/${oc.env:CANARY}'}}",
    "dotted": "tokenize: {template_kwargs: {a.b: '${oc.env:CANARY}'}}",
}


@pytest.mark.parametrize("block", SENT.values(), ids=SENT)
def test_a_file_sends_nothing_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str
) -> None:
    monkeypatch.setenv("CANARY", "swordfish")
    (tmp_path / "strange.yaml").write_text(f"defaults: [smoke, _self_]\n{block}\n")
    with pytest.raises(ConfigError, match=r"environment's CANARY(, CANARY_NAME)?, which") as error:
        compose_config("strange", ["dataset=files"], config_dir=str(tmp_path))
    assert "swordfish" not in str(error.value)
    word = "security.allow_env=[CANARY,CANARY_NAME]"
    compose_config("strange", ["dataset=files", word], config_dir=str(tmp_path))


def test_numbers_and_local_paths_of_the_environment_are_let_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.setenv("STEPS", "3")
    (tmp_path / "mine.yaml").write_text(
        "defaults: [smoke, _self_]\ndataset: {path: '${oc.env:DATA}/a.jsonl'}\n"
        "training: {max_steps: '${oc.decode:${oc.env:STEPS}}'}\noutput_dir: ${oc.env:DATA}/run\n"
    )
    raw = compose_config("mine", ["dataset=files"], config_dir=str(tmp_path))
    assert (raw.dataset.path, raw.training.max_steps) == ("/data/a.jsonl", 3)
    source = "{dataset: {_target_: automodel_lite.data.reading.files.FilesDataset, path: '${oc.env:DATA}/a'}}"
    (tmp_path / "several.yaml").write_text(
        "defaults: [smoke, override dataset: mixture, _self_]\nremove: [dataset.num_chats]\n"
        f"dataset: {{sources: {{a: {source}}}}}\n"
    )
    several = compose_config("several", [], config_dir=str(tmp_path))
    assert several.dataset.sources.a.dataset.path == "/data/a"
    typed = ["dataset=files", "dataset.path=https://${oc.env:DATA}/x", "name=${oc.env:STEPS}"]
    assert compose_config("smoke", typed).dataset.path == "https:///data/x"
    model = ["model=pretrained", "model.pretrained=me/${oc.env:STEPS}", "tokenizer=pretrained"]
    assert compose_config("smoke", model).tokenizer.path == "me/3"


@pytest.mark.parametrize("place", ["preset", "option", "run"])
def test_a_kilobyte_of_anchors_is_no_file_of_settings(tmp_path: Path, place: str) -> None:
    from automodel_lite.run.folder import saved_config

    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    bomb = "\n".join(lines)
    for text in (bomb, "a: &a [*a]", "a: " + "[" * 100_000):
        (tmp_path / "strange.yaml").write_text(f"{text}\n")
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "evil.yaml").write_text(f"{text}\n")
        began = time.monotonic()
        folder = str(tmp_path)
        read = {
            "preset": partial(compose_config, "strange", [], config_dir=folder),
            "option": partial(compose_config, "smoke", ["model=evil"], config_dir=folder),
            "run": partial(saved_config, tmp_path / "strange.yaml"),
        }
        with pytest.raises(ConfigError):
            read[place]()
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "form", ["${%s}", "${.%s}", "${oc.decode:${%s}}", "${oc.select:%s}", "['${%s}']"]
)
def test_a_kilobyte_of_references_is_no_file_of_settings(tmp_path: Path, form: str) -> None:
    lines = ["defaults: [smoke, _self_]", "a0: xxxxxxxxxx"]
    for n in range(1, 10):
        many = form % f"a{n - 1}" * 10
        is_list = many.startswith("[")
        lines.append(f"a{n}: " + (many.replace("][", ", ") if is_list else f"'{many}'"))
    (tmp_path / "strange.yaml").write_text("\n".join(lines))
    began = time.monotonic()
    with pytest.raises(ConfigError, match="the references in it stand for over 100,000 char"):
        compose_config("strange", [], config_dir=str(tmp_path))
    assert time.monotonic() - began < 20


def test_a_reference_by_a_name_that_is_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "strange.yaml").write_text("defaults: [smoke, _self_]\nb: a\nname: '${${b}}'\n")
    with pytest.raises(ConfigError, match=r"name: \$\{\$\{ makes the name of a reference"):
        compose_config("strange", [], config_dir=str(tmp_path))


def test_text_of_data_and_models_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    from automodel_lite.data.tokens.findings import mark_trained
    from automodel_lite.telemetry.console import Console

    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxt.exe\r<-\n\tふう\u3000é"
    tokenizer = byte_tokenizer(LLAMA3)
    ids = np.array(tokenizer(evil, add_special_tokens=False)["input_ids"])
    Console().validation(1, {}, [(evil, evil)])
    shown = [mark_trained(tokenizer, ids, np.full(len(ids), -100)), capsys.readouterr().out]
    for text in shown:
        assert not set("\x1b\x07\x9b\u202e\r") & set(text)
        assert "\\x1b]0;owned\\x07" in text
    assert "ふう\u3000é" in shown[0]


@pytest.mark.parametrize("key", ["model.pretrained", "teacher.trust_remote_code"])
def test_a_strangers_run_folder_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    from automodel_lite.extras.load_run import load_run_config
    from automodel_lite.run.folder import RunFolder

    monkeypatch.setenv("CANARY", "swordfish")
    raw = compose_config("smoke", ["name=x"])
    OmegaConf.update(raw, "security.allow_env", ["CANARY"])
    OmegaConf.update(
        raw, key, force_add=True, value="${oc.env:CANARY}" if key == "model.pretrained" else True
    )
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(raw))
    with pytest.raises(
        ConfigError, match=r"environment's CANARY|allow it with --trust-remote-code"
    ):
        load_run_config(RunFolder(tmp_path))


def test_a_strangers_run_folder_reads_no_address(tmp_path: Path) -> None:
    """`allow_remote` is a permission of who runs, and export, verify and average load a run."""
    from automodel_lite.extras.load_run import load_run_config
    from automodel_lite.run.folder import RunFolder

    typed = ["dataset=images", "dataset.path=x.jsonl", "dataset.allow_remote=true"]
    raw = compose_config("finetune", ["name=x", "model.pretrained=x", *typed])
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(raw))
    assert load_run_config(RunFolder(tmp_path)).dataset["allow_remote"] is False
    plain: Any = OmegaConf.to_container(raw)
    mixture = "automodel_lite.parts.datasets.mixture.Mixture"
    sources = {"a": {"dataset": plain["dataset"], "weight": 1.0}}
    raw = OmegaConf.create(plain | {"dataset": {"_target_": mixture, "sources": sources}})
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(raw))
    loaded = load_run_config(RunFolder(tmp_path)).dataset["sources"]
    assert loaded["a"]["dataset"]["allow_remote"] is False


@pytest.mark.parametrize("revision", ["null", "main", "v1.0", "abc123"])
def test_remote_code_needs_a_pinned_commit(revision: str) -> None:
    from automodel_lite.config.components import build

    chosen = ["model=pretrained", "model.pretrained=someone/model", "model.trust_remote_code=true"]
    config = check_config(compose_config("smoke", [*chosen, f"model.revision={revision}"]))
    with pytest.raises(
        ConfigError, match=r"pin the commit that you have reviewed, model.revision=<40 hex digits>"
    ):
        build(config.model)


CANARIES = {
    "HF_TOKEN": "hf_canary_one",
    "DB_PWD": 'canary"quoted\\and ümlauts\nand lines',
    "GITHUB_PAT": "ghp_canary_five",
    "WANDB_API_KEY": "canary_two_0123456789",
    "MY_DB_PASSWORD": "canary-three",
    "AWS_SECRET_ACCESS_KEY": "canary/four+5",
}


@pytest.mark.system
@pytest.mark.parametrize("ending", ["finishes", "fails", "is-refused"])
def test_no_canary_in_anything_that_a_run_writes(tmp_path: Path, ending: str) -> None:
    """Secrets in the configuration (by ${oc.env:...}), in the chat template's variables, and in an error's text."""
    more = {
        "finishes": [],
        "fails": ["dataset=files", "~dataset.num_chats", "dataset.path=${oc.env:MY_DB_PASSWORD}"],
        "is-refused": ["optimizer.lr=${oc.env:HF_TOKEN}"],
    }[ending]
    options = ["--config-name", "smoke", f"output_dir={tmp_path}/run"]
    options += [f"cache_dir={tmp_path}/cache", "training.max_steps=2", "training.num_threads=1"]
    options += [
        "+tokenize.template_kwargs.thought=${oc.env:HF_TOKEN}",
        "+tokenize.template_kwargs.call=${oc.env:WANDB_API_KEY}",
    ]
    options += ["+tokenize.template_kwargs.function=x-${oc.env:AWS_SECRET_ACCESS_KEY}-y", *more]
    options += [
        "logger=tensorboard",
        "samples.max_new_tokens=2",
        "tokenize.template_kwargs.content=${oc.env:DB_PWD}",
    ]
    options += [
        "samples.prompts=['${oc.env:HF_TOKEN}','is ${oc.env:DB_PWD}?','${oc.env:GITHUB_PAT}']"
    ]
    start = (
        _in_a_new_interpreter if ending == "fails" else partial(in_a_process, _train_with_canaries)
    )
    code, screen = start(tmp_path, options)
    assert (code == 0) == (ending == "finishes"), screen
    written = {str(p): str(p).encode() + p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert len(written) > 10 or ending != "finishes"
    for place, content in written.items():
        for canary in CANARIES.values():
            in_json = [
                json.dumps(canary, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)
            ]
            for spelling in (canary, *in_json, *(json.dumps(text)[1:-1] for text in in_json)):
                assert spelling.encode() not in content, (place, spelling)
    if ending == "finishes":
        assert b"<HF_TOKEN>" in (tmp_path / "run" / "config.yaml").read_bytes()
        again = in_a_process(_train_with_canaries, tmp_path, options)[1]
        assert "nothing to do" in again  # the scrubbed configuration is the same one


def _in_a_new_interpreter(folder: Path, options: list[str]) -> tuple[int, str]:
    """Logs of libraries that the fork server has imported go to its own screen, past the one that hides secrets."""
    environment = os.environ | CANARIES | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "recipes/train_ft.py"), *options]
    with open(folder / "screen", "w") as screen:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=screen, stderr=screen, timeout=300
        )
    return done.returncode, (folder / "screen").read_text()


def _train_with_canaries(options: list[str]) -> None:
    os.environ |= CANARIES
    run_recipe("recipes.train_ft:main", options)


@pytest.mark.system
def test_no_canary_in_what_a_sweep_writes(tmp_path: Path) -> None:
    """Typed as they are, not as ${oc.env:...}: Hydra keeps the command line in files of its own."""
    command = [
        warm_python(),
        "recipes/train_ft.py",
        "--config-name",
        "smoke",
        f"output_dir={tmp_path}/sweep",
        "-m",
    ]
    options = [
        f"cache_dir={tmp_path}/cache",
        "training.max_steps=1",
        "training.num_threads=1",
        "hydra.output_subdir=.h",
    ]
    options += [
        "checkpoint.export_hf=false",
        "report=false",
        "training.val_every_steps=0",
        "dry_run=true",
    ]
    options += [
        "tokenize.template_kwargs.thought=hf_canary_one,ghp_canary_five",
        "samples.prompts=['canary-three']",
    ]
    environment = os.environ | CANARIES | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    written = {"screen": done.stdout + done.stderr}
    written |= {
        str(p): str(p).encode() + p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()
    }
    names = {Path(place).name for place in written}
    assert {"multirun.yaml", "sweep.json"} <= names
    assert "overrides.yaml" not in names  # Hydra's copies of a job's settings are not written
    for place, content in written.items():
        assert not any(canary.encode() in content for canary in CANARIES.values()), place


def test_a_secret_is_no_part_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary_one")
    monkeypatch.setenv("SORT_KEY", "messages")  # a word, and no secret
    template = "{% for m in messages %}hf_canary_one{{ m.content }}{% endfor %}"
    with pytest.raises(
        ConfigError, match=r"tokenizer.chat_template holds the value of HF_TOKEN, and this part"
    ):
        check_config(
            compose_config(
                "smoke",
                [
                    "tokenizer=pretrained",
                    "tokenizer.path=x",
                    f"tokenizer.chat_template='{template}'",
                ],
            )
        )
    byte_tokenizer(LLAMA3).save_pretrained(tmp_path)
    (tmp_path / "template.jinja").write_text(template)
    with pytest.raises(
        ConfigError,
        match=r"tokenizer.chat_template holds the value of HF_TOKEN, which would be trained on",
    ):
        load_tokenizer(str(tmp_path), chat_template=str(tmp_path / "template.jinja"))
    load_tokenizer(str(tmp_path), chat_template=template.replace("hf_canary_one", ""))


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a/b", ".hidden", "x\0y", ""])
def test_a_name_cannot_lead_out_of_the_runs_folder(name: str) -> None:
    raw = OmegaConf.merge(compose_config("smoke", []), {"name": name})
    with pytest.raises(ConfigError, match=r"name=.* must be a plain folder name"):
        check_config(raw)  # type: ignore[arg-type]


class Bomb:
    """What a pickle would run."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def test_pickled_weights_of_a_strangers_model_run_nothing(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    from automodel_lite.models.source import load_whole

    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    LlamaConfig(num_hidden_layers=1, **size).save_pretrained(tmp_path)
    torch.save({"model.norm.weight": Bomb(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights.only|unpickl|unsupported"):
        load_whole(str(tmp_path), torch.float32)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.mkdir('ran') }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_strangers_chat_template_runs_in_a_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    from automodel_lite.data.tokens.chat import ChatRenderer

    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer(LLAMA3)
    tokenizer.chat_template = LLAMA3.template + attack
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    with pytest.raises((DataError, ConfigError), match="refused by the chat template"):
        ChatRenderer(tokenizer, "assistant").renderings(chat)
    assert not [*tmp_path.iterdir()]


def test_every_line_of_the_security_page_has_its_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    rows = [line for line in lines if not line.startswith("| what |")]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), row
