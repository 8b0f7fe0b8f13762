"""Every kind of job on one GPU, fake or not, from its data to its export."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_paths.fake.jobs import COMPILED, EAGER, only_on_gpu, rows_of, train

pytestmark = only_on_gpu
BF16 = ("training.master_weights=bf16", "training.precision=bf16")
# of sizes that fp8 products, 4-bit blocks and 8-bit moments divide
WIDE = ("model.config.hidden_size=256", "model.config.intermediate_size=512")


@pytest.mark.parametrize("how", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_a_step_never_waits_for_the_device(how: str, tmp_path: Path) -> None:
    screen = train(
        tmp_path / "run",
        how,
        "training.val_every_steps=0",
        "training.log_every_steps=100",
        strict_from=4,
    )
    assert "attention  varlen" in screen
    assert (tmp_path / "run/hf/model.safetensors").is_file()


OPTIMIZERS = [
    ("adamw", "fp32"),
    ("muon", "fp32"),
]  # others lose small steps of bf16 weights, and are refused
OPTIMIZERS += [
    (name, weights) for name in ("adamw_bf16", "adamw_8bit") for weights in ("fp32", "bf16")
]


@pytest.mark.parametrize(("optimizer", "weights"), OPTIMIZERS)
def test_every_optimizer_steps_over_fp32_and_bf16_weights(
    optimizer: str, weights: str, tmp_path: Path
) -> None:
    more = BF16 if weights == "bf16" else ()
    options = (f"optimizer={optimizer}", "training.val_every_steps=0", *WIDE, *more)
    train(tmp_path / "run", EAGER, *options, strict_from=4)
    assert rows_of(tmp_path / "run")[-2]["step"] == 6


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_every_precision(precision: str, tmp_path: Path) -> None:
    train(tmp_path / "run", EAGER, f"training.precision={precision}", *WIDE)


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("how", [EAGER, COMPILED], ids=["eager", "compiled"])
def test_fp8(kind: str, how: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    train(tmp_path / "run", how, f"training.fp8={kind}", *WIDE)


RECOMPUTED = ["none", "selective", "full"]


@pytest.mark.parametrize("kind", RECOMPUTED)
def test_recomputation(kind: str, tmp_path: Path) -> None:
    how = COMPILED if kind == "selective" else EAGER
    train(tmp_path / "run", how, f"training.activation_checkpointing={kind}")


def test_saves_beside_the_steps_profiles_and_averages(tmp_path: Path) -> None:
    options = (
        "checkpoint.mode=async",
        "checkpoint.every_steps=2",
        "training.profile_steps=[3,4]",
        "training.ema_decay=0.9",
    )
    train(tmp_path / "run", EAGER, *options, "training.max_steps=8")
    assert len(list((tmp_path / "run/checkpoints").glob("step_*"))) >= 2
    assert list((tmp_path / "run").glob("profile*"))


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "run", EAGER)
    screen = train(
        tmp_path / "run", EAGER, "training.max_steps=8", "checkpoint.accept_changes=true"
    )
    assert "continues from step_00000006" in screen


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a model of this machine, in a folder."""
    folder = tmp_path_factory.mktemp("base")
    train(folder / "run", EAGER, *WIDE)
    where = folder / "run/hf"
    return [
        "tokenizer=pretrained",
        f"tokenizer.path={where}",
        "~model.config",
        f"model.pretrained={where}",
    ]


@pytest.mark.parametrize("how", [EAGER, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("peft", ["lora", "dora", "qlora"])
def test_adapters(peft: str, how: str, base: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    if peft == "qlora":
        pytest.importorskip("bitsandbytes")
    quiet = ("training.val_every_steps=0", "training.log_every_steps=100")
    train(tmp_path / "run", how, f"peft={peft}", *base, *quiet, strict_from=4)
    assert list((tmp_path / "run").rglob("adapter_model.safetensors"))


def test_offloaded_weights(base: list[str], tmp_path: Path) -> None:
    train(tmp_path / "run", EAGER, "mesh.cpu_offload=true", "checkpoint.mode=async", *base)


def test_weights_larger_than_the_card_are_refused(tmp_path: Path) -> None:
    from automodel_lite.errors import ConfigError

    settings = (
        "model.config.hidden_size=8192",
        "model.config.intermediate_size=65536",
        "model.config.num_hidden_layers=40",
    )
    with pytest.raises(ConfigError, match=r"weights alone are .* GiB on each GPU"):
        train(tmp_path / "run", EAGER, *settings)


def test_doctor_tries_the_kernels_of_the_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from automodel_lite.extras.cli.doctor import doctor

    assert doctor(["--output-dir", str(tmp_path)]) == 0
    screen = capsys.readouterr().out
    assert "VarlenAttention: ok" in screen
    assert "FlexAttention: ok" in screen
