"""The GPU check's smoke plan, on the CPU: every part runs, resumes and ends in the table."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import venv
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from transformers import AutoModelForCausalLM

from automodel_lite.extras.plan.planner import GPUS
from benchmarks import gpu_check
from benchmarks.gpu import workers
from benchmarks.gpu.documents import TREE, batches_of, lengths, padded_batches
from benchmarks.gpu.plan import Part, full_plan, groups, smoke_plan
from benchmarks.gpu.recipe import hollow_checkpoint, idle_frac, kernel_spans, save_and_resume
from benchmarks.gpu.steps import Trainer, build, inputs_of, loss_of, measure
from benchmarks.gpu.table import last_words, table
from benchmarks.gpu.variant import Variant
from recipes.plan import calibrated
from tests.forked import warm_python


@pytest.fixture
def _warm_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they import is not what is tested."""
    monkeypatch.setattr(sys, "executable", warm_python())


STEPS = [part for part in smoke_plan() if part.call == "steps.measure"]


@pytest.mark.parametrize("part", STEPS, ids=lambda part: part.name)
def test_every_way_to_step_sees_the_same_loss(part: Part) -> None:
    torch.set_num_threads(1)
    result = measure(part.arguments["settings"], "cpu", None, 100.0)
    assert result["tokens_per_s"] > 0
    assert 0 < result["mean_document"] <= result["longest_document"]
    assert result["mean_loss"] == pytest.approx(math.log(512), abs=0.15)
    # which loss, not what it came to
    assert result["loss"] == part.arguments["settings"].get("loss", "fused")


def test_all_steps_are_variants_and_all_calls_exist() -> None:
    for part in full_plan() + smoke_plan():
        if part.call == "steps.measure":
            assert Variant(**part.arguments["settings"]).steps > 0
        module, name = part.call.split(".")
        assert name in dir(__import__(f"benchmarks.gpu.{module}", fromlist=[name]))


def test_sorted_batches_waste_less() -> None:
    def waste(attention: str) -> float:
        batches = padded_batches(Variant("tiny", 8192, attention=attention), lengths("chat", 8192))
        taken = [next(batches) for _ in range(64)]
        return 1 - sum(map(sum, taken)) / sum(len(batch) * max(batch) for batch in taken)

    assert waste("sorted") < 0.15 < 0.5 < waste("padded")


def test_the_clock_starts_when_all_batches_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    trainer, order = Trainer(Variant("tiny", 256), "cpu"), []
    real_step, source = trainer.step, trainer.batches

    def drawing() -> Any:
        for batch in source:
            order.append("draw")
            yield batch

    trainer.batches = drawing()
    monkeypatch.setattr(
        trainer, "step", lambda micro_batches: (order.append("step"), real_step(micro_batches))
    )
    work, seconds = trainer.timed(3)
    assert order == ["draw"] * 3 + ["step"] * 3
    assert (work.tokens, seconds > 0) == (3 * 256, True)


@pytest.mark.slow
def test_the_peer_with_flex_attention_computes_our_loss() -> None:
    """transformers' own packed mask, by positions; flex has no backward on a CPU."""
    losses = []
    for attention in ("flex", "packed"):
        variant = Variant("tiny", 256, attention=attention)
        batch, _ = next(batches_of(variant, 512))
        with torch.no_grad():
            losses.append(
                float(
                    loss_of(variant, build(variant, "cpu"), inputs_of(variant, batch, False), "cpu")
                )
            )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_trees_count_the_tokens_of_their_rows() -> None:
    shared, num_rows, own = TREE
    (tree, of_tree), (rows, of_rows) = (
        next(batches_of(Variant("tiny", 1024, documents=kind), 512))
        for kind in ("trees", "rows of trees")
    )
    assert of_tree == [shared + own] * num_rows
    assert of_rows == [shared + own]
    assert tree["input_ids"].numel() == shared - 1 + num_rows * (own + 1)
    assert rows["input_ids"].numel() == shared + own
    assert int((tree["labels"] == -100).sum()) == num_rows  # the last token of each row


def test_idle_time_is_what_no_span_covers() -> None:
    assert idle_frac([(0, 4), (2, 5), (6, 10)]) == pytest.approx(0.1)
    assert idle_frac([(0, 10), (2, 3)]) == 0


def test_launches_and_annotations_are_no_kernels() -> None:
    """A host that launches all the time would hide a GPU that stands idle."""

    def event(
        start: int, end: int, device: DeviceType, is_annotation: bool = False
    ) -> FunctionEvent:
        options: Any = {"device_type": device, "is_user_annotation": is_annotation}
        return FunctionEvent(0, "any", 0, start, end, **options)

    gpu, cpu = DeviceType.CUDA, DeviceType.CPU
    events = [
        event(6, 10, gpu),
        event(0, 9, cpu),
        event(0, 4, gpu),
        event(0, 10, gpu, is_annotation=True),
    ]
    assert kernel_spans(events) == [(0, 4), (6, 10)]


@pytest.mark.system
@pytest.mark.usefixtures("_warm_workers")
def test_a_call_goes_on_where_the_last_one_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.jsonl"
    shared = ["--plan", "smoke", "--device", "cpu", "--out", str(out)]
    assert gpu_check.main([*shared, "--only", "step-packed"]) == 0
    assert "- step-sorted: not asked for" in capsys.readouterr().out
    assert gpu_check.main([*shared, "--minutes", "0"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["verdict"] for row in rows if row["part"] == "step-packed"] == ["pass"]  # not again
    assert {row["verdict"] for row in rows if row["part"] != "step-packed"} <= {
        "no time",
        "missing",
    }
    screen = capsys.readouterr().out
    assert "| step-packed |" in screen
    assert "- step-sorted: no time was left" in screen


def test_the_wheels_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list-wheels"]) == 0
    assert "hydra-core==1.3.8\n" in capsys.readouterr().out


def test_what_it_cannot_do_without_is_asked_for_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        gpu_check, "find_spec", lambda name: None if name in ("hydra", "xxhash", "trl") else name
    )
    assert gpu_check.main(["--plan", "smoke", "--device", "cpu"]) == 2
    assert (
        capsys.readouterr().out
        == "Nothing was checked; first: pip install hydra-core==1.3.8 xxhash\n"
    )


@pytest.mark.system
def test_a_missing_package_costs_only_the_parts_that_need_it() -> None:
    """Every module of the check is imported where none of the optional packages is installed."""
    script = """
import sys
from benchmarks.gpu_check import OPTIONAL
absent = {name.split("==")[0].replace("-", "_") for name in OPTIONAL}
sys.modules |= dict.fromkeys(absent)
from benchmarks.gpu import curves, documents, kernels, machine, recipe, rivals, steps
print(sorted(absent))
"""
    root = Path(gpu_check.__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert "'peft'" in done.stdout, done.stderr[-2000:]


def results_of(parts: list[Part], folder: Path, seconds: float = 300) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    arguments = argparse.Namespace(out=folder / "results.jsonl", device="cpu", plan="smoke")
    workers.run_group(
        parts,
        arguments,
        time.monotonic() + seconds,
        lambda part, row: found.update({part.name: row}),
    )
    return found


@pytest.mark.system
@pytest.mark.usefixtures("_warm_workers")
def test_a_part_that_fails_costs_itself_alone(tmp_path: Path) -> None:
    """The second of three takes too long, so its process ends, and the third gets another one."""
    plan = {part.name: part for part in smoke_plan()}
    slow = replace(plan["step-packed"], limit_s=0.001)
    found = results_of([plan["ceilings"], slow, plan["step-sorted"]], tmp_path)
    assert [row["verdict"] for row in found.values()] == ["pass", "timeout", "pass"]
    found = results_of([Part("no such part", "machine.header", 60)], tmp_path)
    assert found["no such part"]["verdict"] == "FAIL"
    assert last_words(found["no such part"]["why"]).endswith("KeyError: 'no such part'")


def test_what_the_call_has_no_time_for_is_no_timeout(tmp_path: Path) -> None:
    found = results_of(smoke_plan()[:2], tmp_path, seconds=20)
    assert {row["verdict"] for row in found.values()} == {"no time"}


def test_each_result_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder that $OUT names; what the checkout's own file has is not measured again, and is copied."""
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    machine = {"device": "cpu", "torch": torch.__version__, "plan": "smoke"}
    before = {"part": "step-packed", **machine, "verdict": "pass", "tokens_per_s": 1.0}
    (tmp_path / "gpu_check.jsonl").write_text(json.dumps(before) + "\n")
    seen: list[int] = []

    def run_group(parts: list[Part], arguments: Any, deadline: float, record: Any) -> None:
        for part in parts:
            record(part, {"verdict": "no time"})
            seen.append(len(arguments.out.read_text().splitlines()))

    monkeypatch.setattr(gpu_check, "run_group", run_group)
    gpu_check.main(["--plan", "smoke", "--device", "cpu", "--minutes", "9"])
    assert seen == list(range(seen[0], seen[0] + len(seen)))  # a line more with each
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "gpu_check.jsonl").read_text().splitlines()
    ]
    assert before in rows
    assert [row["verdict"] for row in rows if row["part"] == "step-packed"] == ["pass"]


@pytest.mark.system
@pytest.mark.usefixtures("_warm_workers")
def test_the_card_is_described_for_the_planner(tmp_path: Path) -> None:
    gpu_check.main(
        [
            "--plan",
            "smoke",
            "--device",
            "cpu",
            "--only",
            "ceilings",
            "rates",
            "--out",
            str(tmp_path / "r.jsonl"),
        ]
    )
    sheet = GPUS["h100-80"]
    gpu = calibrated(sheet, tmp_path / "gpu_calibration.json")
    assert 1e9 < gpu.flops < sheet.flops
    assert 1e8 < gpu.bytes_per_s < sheet.bytes_per_s
    assert gpu.node_bytes_per_s == sheet.node_bytes_per_s  # one card has no links to measure
    assert gpu.measured is not None
    assert 1e9 < gpu.measured.product_flops < sheet.flops
    assert 1e8 < gpu.measured.bytes_per_s < sheet.bytes_per_s
    assert 1e6 < gpu.measured.attention(32) < sheet.flops


def test_the_plan_is_in_the_order_of_what_convinces() -> None:
    names = [part.name for part in full_plan()]
    assert len(names) == len({*names})
    wanted = ["strict-step", "step-8b-lora-compiled", "step-packed-131k", "step-moe", "curves"]
    assert sorted(wanted, key=names.index) == wanted
    assert len([*groups(full_plan())]) < 30  # processes


@pytest.mark.parametrize("gib", [79.1, 139.8], ids=["H100", "H200"])
def test_a_full_8b_is_measured_on_cards_of_both_sizes(gib: float) -> None:
    """By a bare step and by the recipe; nothing writes more than a lent machine's disk holds."""
    here = argparse.Namespace(device="cuda")
    found = [
        part.name
        for part in full_plan()
        if gpu_check.skipped(replace(part, needs=()), here, gib) is None
    ]
    wanted = (
        {"step-8b-bf16", "recipe-8b-bf16", "step-8b"}
        if gib > 100
        else {"step-8b-bf16-8bit", "recipe-8b-bf16-8bit"}
    )
    assert wanted <= {*found}
    assert {"save-1b", "step-8b-lora-compiled", "step-qwen3-8b-lora-2k"} <= {*found}
    assert ("step-8b-bf16-8bit" in found) == (gib < 100)


@pytest.mark.system
def test_the_seconds_of_each_save_are_told() -> None:
    found = save_and_resume("cpu", "tiny")
    assert found["verdict"] == "pass"
    assert len(found["saving_s"]) == 2
    assert all(0 <= seconds < found["first_s"] for seconds in found["saving_s"])


def test_a_model_to_adapt_is_a_hole_in_a_file(tmp_path: Path) -> None:
    """An adapter needs a checkpoint: 16 GB of an 8B model would take longer to write than what is measured."""
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    folder = hollow_checkpoint(tmp_path / "model", sizes | heads)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert float(lm.model.embed_tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.01)
    assert not lm.model.layers[3].mlp.up_proj.weight.any()
    assert torch.equal(lm.model.norm.weight, torch.ones(256, dtype=torch.bfloat16))
    stat = (folder / "model.safetensors").stat()
    assert 512 * stat.st_blocks < stat.st_size / 2


def test_a_damaged_cache_is_left_alone(tmp_path: Path) -> None:
    archive = tmp_path / "caches.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("1b", b"no artifacts")
    workers.load_caches([archive, tmp_path / "missing.zip"])
    archive.write_bytes(b"cut short")
    workers.load_caches([archive])
    assert workers.members(archive) == {}


def test_all_caches_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back from a lent machine is some few files."""
    made = b"of a group"
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (made, None))
    archive = tmp_path / "out" / "caches.zip"
    for group in ("1b", "8b"):
        workers.save_caches(archive, group)
    assert workers.members(archive) == {"1b": made, "8b": made}
    assert [path.name for path in archive.parent.iterdir()] == ["caches.zip"]
    made = b"x" * workers.CACHE_BYTES
    workers.save_caches(archive, "large")
    assert [*workers.members(archive)] == ["1b", "8b"]


def test_a_part_that_is_misspelled_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--device", "cpu", "--only", "step-pakced", "ceilings"]) == 2
    assert capsys.readouterr().out.startswith(
        "Nothing was checked: no part is called step-pakced, but step-packed"
    )


def test_thirteen_minutes_hold_what_decides_most(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--list"]) == 0
    lines = [line.rsplit(maxsplit=4) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_, minutes, _ in lines if float(minutes) <= 13] == [
        "header",
        "ceilings",
        "rates",
        "kernel-varlen: grouped heads",
        "kernel-varlen: head dim 128",
        "kernel-varlen: speed",
        "step-compiled",
        "recipe-1b-compiled",
        "step-8b-bf16",
        "recipe-8b-bf16",
        "step-qwen3-8b-lora-2k",
        "step-qwen3-8b-lora-8k",
        "recipe-8b-fp8",
        "recipe-qwen3-8b-lora",
        "step-transformers-flex",
        "trl-liger",
        "step-moe-compiled",
        "strict-step",
    ]


def test_published_rates_stand_beside_ours() -> None:
    """With the batch that theirs had: 32 packs of 2,048 and 8 of 8,192 a step."""
    parts = {part.name: part for part in full_plan() if part.published}
    packs = {}
    for name in ("step-qwen3-8b-lora-2k", "step-qwen3-8b-lora-8k"):
        variant = Variant(**parts[name].arguments["settings"])
        packs[name] = (variant.micro * variant.micro_steps, variant.pack)
    assert [*packs.values()] == [(32, 2048), (8, 8192)]
    row = {"verdict": "pass", "tokens_per_s": 16858.0, "published": "8,429, Megatron-Bridge, 32"}
    assert "| a | 16,858 | 8,429 | 2.00 | Megatron-Bridge, 32 |" in table(
        ["a"], {"a": row}, {"device": "any", "torch": "2"}
    )
    for part in parts.values():
        assert float(part.published.split(", ")[0].replace(",", "")) > 2000


def test_workers_end_with_the_check() -> None:
    """However it ends: a worker and its children end when nobody can write to it any more."""
    script = """
import subprocess
from benchmarks.gpu.workers import names_of_parts
for name in names_of_parts():
    child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    print(name, child.pid, flush=True)
"""
    worker = subprocess.Popen(
        [warm_python(), "-c", script],
        cwd=Path(gpu_check.__file__).resolve().parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("ceilings\n")
    worker.stdin.flush()
    name, pid = worker.stdout.readline().split()
    assert name == "ceilings"
    worker.stdin.close()  # as the kernel does for a check that is killed
    assert worker.wait(60) == -9
    for _ in range(100):
        stat = Path("/proc", pid, "stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("its child is left")


def test_a_part_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    """The one behind it is shorter, but not short enough for what is left with a start."""
    parts = [replace(part, seconds=seconds) for part, seconds in zip(smoke_plan(), (600, 11))]
    found = results_of(parts, tmp_path, seconds=20)
    assert [row["verdict"] for row in found.values()] == ["no time", "no time"]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu_check.main([]) == 0
    assert "SKIPPED: no CUDA device here" in capsys.readouterr().out


@pytest.mark.slow
def test_the_smoke_plan_where_the_package_is_not_installed(tmp_path: Path) -> None:
    """As on a machine that was given the wheels: an interpreter that finds them, and nothing of this checkout."""
    venv.create(tmp_path / "bare", with_pip=False)
    wheels = os.pathsep.join(
        path for path in sys.path if path.endswith("site-packages")
    )  # whose .pth files are not read
    command = [str(tmp_path / "bare" / "bin" / "python"), str(Path(gpu_check.__file__).resolve())]
    command += ["--plan", "smoke", "--device", "cpu", "--minutes", "20"]
    environment = os.environ | {"PYTHONPATH": wheels, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recipe-1b reaches" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert {row["verdict"] for row in rows} <= {"pass", "missing"}
    assert sum(row.get("seconds", 0) for row in rows) < 900  # some 60 where nothing else runs
