"""A model whose code comes with it: refused, and when it is trusted it trains, is exported, and answers."""

import json
import shutil
from pathlib import Path

import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.run.checkpoint_folder import exported_folder
from automodel_lite.tools.load_generator import load_generator
from recipes import export_hf
from tests.runs import train_quick

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class MineConfig(LlamaConfig):
    model_type = "mine"


class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its own modeling_mine.py."""
    folder = tmp_path_factory.mktemp("mine")
    train_quick(folder / "run", "checkpoint.export_hf=true", "training.max_steps=1")
    shutil.copytree(folder / "run" / "hf", folder / "mine")
    (folder / "mine" / "modeling_mine.py").write_text(CODE)
    path = folder / "mine" / "config.json"
    classes = {
        "AutoConfig": "modeling_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    config = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": classes}
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder / "mine"


def test_it_is_refused_unless_it_is_trusted(model_folder: Path, tmp_path: Path) -> None:
    chosen = ["model=pretrained", f"model.pretrained={model_folder}"]
    with pytest.raises(
        ConfigError, match=r"runs its own code: review it, and allow it on the command line"
    ):
        train_quick(tmp_path / "run", *chosen)
    with pytest.raises(ConfigError, match=r"allow it with --trust-remote-code"):
        load_generator(str(model_folder))


def test_a_trusted_one_that_fails_is_told_by_its_own_cause(
    model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(model_folder, folder)
    cause = "Pass trust_remote_code=True to the tokenizer too"
    (folder / "modeling_mine.py").write_text(f"raise ValueError({cause!r})\n{CODE}")
    with pytest.raises(ConfigError, match=f"^the model {folder} cannot be loaded: {cause}"):
        train_quick(
            tmp_path / "run",
            "model=pretrained",
            f"model.pretrained={folder}",
            "model.trust_remote_code=true",
        )


def test_a_trusted_one_goes_the_whole_way(model_folder: Path, tmp_path: Path) -> None:
    chosen = [
        "model=pretrained",
        f"model.pretrained={model_folder}",
        "model.trust_remote_code=true",
    ]
    run = tmp_path / "run"
    code, screen = train_quick(
        run, *chosen, "training.max_steps=2", "checkpoint.export_hf=true", "evaluation=exact_match"
    )
    assert code == 0
    assert "exactly right" in screen
    assert (run / "hf" / "modeling_mine.py").read_text() == CODE
    generator = load_generator(exported_folder(str(run)), trust_remote_code=True)
    assert type(generator.model).__name__ == "MineForCausalLM"
    with pytest.raises(
        ConfigError, match=r"config.yaml runs code of its model's repository: if you trust this run"
    ):
        export_hf.main([str(run), "--to", str(tmp_path / "again")])
    assert not (tmp_path / "again").exists()
    assert export_hf.main([str(run), "--to", str(tmp_path / "again"), "--trust-remote-code"]) == 0


def test_a_run_of_a_stranger_allows_itself_nothing(model_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_quick(run, "training.max_steps=1")
    config = (run / "config.yaml").read_text()
    assert "allow_targets: []" in config
    (run / "config.yaml").write_text(config.replace("allow_targets: []", "allow_targets: [os]"))
    with pytest.raises(ConfigError, match=r"config.yaml needs code of os: if you trust this run"):
        export_hf.main([str(run)])
