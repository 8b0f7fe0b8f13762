"""Scripts of Tinker's API, run in place of its service."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.test_policy import save_model

pytest.importorskip(
    "tinker", reason="the package tinker, of automodel-lite[tinker], is not installed"
)

SCRIPT = """
import asyncio, json, sys
import tinker
from tinker import types

async def main():
    service = tinker.ServiceClient()
    client = await service.create_lora_training_client_async("some/base", rank=4)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]},
    )
    losses = []
    for _ in range(4):
        future = await client.forward_backward_async([datum], "cross_entropy")
        await (await client.optim_step_async(types.AdamParams(learning_rate=1e-2)))
        losses.append((await future).metrics["loss:sum"])
    sampler = await client.save_weights_and_get_sampling_client_async()
    params = types.SamplingParams(max_tokens=2, seed=1)
    answer = await sampler.sample_async(types.ModelInput.from_ints([5, 6]), 1, params)
    path = (await (await client.save_state_async("end"))).path
    print(json.dumps([sys.argv[1:], losses, len(answer.sequences[0].tokens), path]))

asyncio.run(main())
"""


def run_script(folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "automodel_lite.tinker", *line]
    env = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=1200
    )


@pytest.mark.system
def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = run_script(
        tmp_path,
        f"--model=some/base=model.pretrained={model} training.num_threads=1",
        "--set=packed_sequence.packed_sequence_size=256",
        "--folder=out",
        "mine.py",
        "--of=mine",
    )
    assert done.returncode == 0, done.stderr
    arguments, losses, num_tokens, path = json.loads(done.stdout.splitlines()[-1])
    assert (arguments, path) == (["--of=mine"], "tinker://run-000000/weights/end")
    assert losses[-1] < losses[0]
    assert 1 <= num_tokens <= 2
    assert (tmp_path / "out" / "run-000000" / "weights" / "end" / "COMPLETE.json").is_file()


@pytest.mark.system
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["none.py"], "none.py is no file: name a script, or -m and a module."),
        (["-m", "no.such"], "there is no module no.such: is its package installed?"),
        (["--model", "x", "none.py"], "--model x: write NAME='OVERRIDES'."),
        (["mine.py"], "mine.py:8: the model some/base cannot be loaded: "),
    ],
    ids=["script", "module", "model", "base model"],
)
def test_what_is_not_there_is_a_sentence(line: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    done = run_script(tmp_path, *line)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_loop_of_the_page_learns(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "cookbook" / "tinker.md"
    found = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    command = re.search(r"--model (toy/base)='(.*?)'[\s\\]+loop.py", page.read_text(), re.DOTALL)
    assert found
    assert command
    (tmp_path / "loop.py").write_text(found[1])
    overrides = f"{command[2]} training.num_threads=1"
    done = run_script(tmp_path, f"--model={command[1]}={overrides}", "loop.py")
    assert done.returncode == 0, done.stderr
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 20
    assert rewards[0] < 0.6
    assert rewards[-1] > rewards[0] + 0.2
