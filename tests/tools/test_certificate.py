"""What `verify --card` writes beside an export, and what the model card shows of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from automodel_lite import extras
from automodel_lite.errors import ConfigError
from automodel_lite.extras.verify import LARGEST_PARAMETERS
from recipes import export_hf, verify
from tests.images.families import write_model
from tests.ranks import run_ranks
from tests.runs import config_of, quick_config, train, train_quick


def test_a_certificate_holds_hashes_and_comparisons(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"--card .*run is not the folder of a run"):
        verify.main(quick_config(run), run)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"--card .*other: it has no hf/: automodel-lite export"):
        verify.main(quick_config(run), other)
    assert train_quick(run, "checkpoint.export_hf=true", "training.max_steps=2")[0] == 0
    assert verify.main(quick_config(run), run) == 0
    found = json.loads((run / "hf" / "certificate.json").read_text())
    export = (run / "hf" / "model.safetensors").read_bytes()
    assert found["trained"]["export_sha256"] == {
        "model.safetensors": hashlib.sha256(export).hexdigest()
    }
    assert found["trained"]["steps"] == 2
    names = [row["what"] for row in found["compared"]]
    assert names[0].startswith("packed = each document alone")
    assert names[-1] == "the export in transformers = checkpoint of step 2"
    assert all(row["passed"] for row in found["compared"])
    card = (run / "hf" / "README.md").read_text()
    assert "| packed = each document alone" in card
    assert "certificate.json" in card


def test_an_export_of_other_weights_fails(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run = tmp_path / "run"
    assert train_quick(run, "checkpoint.export_hf=true", "training.max_steps=2")[0] == 0
    path = run / "hf" / "model.safetensors"
    weights = {name: tensor * 1.05 for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    assert verify.main(quick_config(run), run) == 1
    last = json.loads((run / "hf" / "certificate.json").read_text())["compared"][-1]
    assert last["passed"] is False


def test_an_older_export_is_compared_with_its_own_checkpoint(tmp_path: Path) -> None:
    """It was compared with the newest one, as which the certificate named it."""
    run = tmp_path / "run"
    assert train_quick(run, "training.max_steps=4")[0] == 0
    export_hf.main([str(run), "--checkpoint", "step_00000002"])
    assert verify.main(quick_config(run), run) == 0
    last = json.loads((run / "hf" / "certificate.json").read_text())["compared"][-1]
    assert last["what"].endswith("checkpoint of step 2")


@pytest.mark.system
def test_a_composite_is_compared_under_its_own_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """AutoModelForCausalLM knows no such class, or leaves its towers out; and the number of layers
    was looked for outside of its language model.
    """
    monkeypatch.setitem(LARGEST_PARAMETERS, "cpu", 1000)
    monkeypatch.setattr(extras.verify, "LEAST_LAYERS", 1)
    model = write_model("qwen3_vl", tmp_path / "model")
    rows = [{"prompt": "abc" * (1 + n % 3), "completion": "de" * (1 + n % 5)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = tmp_path / "run"
    given = [f"model.pretrained={model}", f"dataset.path={tmp_path}/rows.jsonl", "name=x"]
    given += ["packed_sequence.packed_sequence_size=128", "training.num_threads=1"]
    train("finetune", run, *given, "training.max_steps=2")
    assert verify.main(config_of("finetune", run, *given), run) == 0
    assert "qwen3_vl, the first 1 of 2 layers" in capsys.readouterr().out
    last = json.loads((run / "hf" / "certificate.json").read_text())["compared"][-1]
    assert last["passed"]


def _verify_on_rank(rank: int, world_size: int, folder: Path, run: Path) -> int:
    return verify.main(quick_config(folder, "mesh.cp=2"), run)


@pytest.mark.system
def test_ranks_certify_together(tmp_path: Path) -> None:
    """The first one alone reads the checkpoint; the others were waited for without end."""
    run = tmp_path / "run"
    assert train_quick(run, "training.max_steps=2", "checkpoint.export_hf=true")[0] == 0
    assert run_ranks(_verify_on_rank, 2, tmp_path / "verified", run) == [0, 0]
    assert (run / "hf/certificate.json").is_file()
