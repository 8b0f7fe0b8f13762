"""The adapters of optional packages against those packages' signatures; needs neither the packages nor a GPU.

Two checks each: a table of the parameters as read from the sources (always), and the sources themselves, downloaded
with pip and parsed (skipped only when the package index cannot be reached).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.attention.varlen import VarlenAttention
from automodel_lite.errors import ConfigError
from automodel_lite.seed import use_deterministic
from automodel_lite.thd import AttentionInputs, AttentionOptions, Segments
from tests.attention.test_mixer_functions import fake_causal_conv1d, fake_chunk_scan, fake_delta_rule


def words(text: str) -> list[str]:
    return text.split()


# flash-attn 2.8.3, flash_attn/flash_attn_interface.py
FLASH_VARLEN = words("""
    q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap
    alibi_slopes deterministic return_attn_probs block_table
""")
# transformer-engine 2.20, transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py
TE_INIT = words("""
    self num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type window_size
    bottom_right_diagonal softcap sequence_parallel tp_size get_rng_state_tracker tp_group layer_number attention_type
    cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit name
""")
TE_FORWARD = words("""
    self query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded
    cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size bottom_right_diagonal softcap
    checkpoint_core_attention core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill
    inference_params pad_between_seqs fp8_output bf16_backward num_splits
""")
TE_MASKS = ("padding_causal", "padding_causal_bottom_right")

CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 9], [0, 8, 14]))
Q_THD, K_THD, V_THD = torch.randn(9, 4, 16), torch.randn(14, 2, 16), torch.randn(14, 2, 16)
PLAIN, WINDOWED = AttentionOptions(0.25), AttentionOptions(0.25, window=7, softcap=5.0)
ON_GPU = AttentionSpec("llama", torch.device("cuda"), torch.bfloat16, 32, 8, 128, 128)


def recorder(parameters: list[str], calls: list[dict[str, Any]], result: Callable[..., Any]) -> Callable[..., Any]:
    """A function with exactly these parameters (all optional), which writes down what it was given."""
    code = f"def recorded({', '.join(f'{p}=None' for p in parameters)}):\n    return answer(locals())"

    def answer(arguments: dict[str, Any]) -> Any:
        calls.append({key: value for key, value in arguments.items() if value is not None})
        return result(arguments)

    scope: dict[str, Any] = {"answer": answer}
    exec(code, scope)
    return scope["recorded"]


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, value in members.items():
        setattr(sys.modules[name], key, value)


# ----------------------------------------------------------------------------------------------------- flash-attn
@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    yield fake_flash(monkeypatch, FLASH_VARLEN)
    sys.modules.pop("automodel_lite.attention.flash", None)


def fake_flash(monkeypatch: pytest.MonkeyPatch, parameters: list[str]) -> list[dict[str, Any]]:
    """flash-attn with this signature; what it is given."""
    calls: list[dict[str, Any]] = []
    fake_module(monkeypatch, "flash_attn", flash_attn_varlen_func=recorder(parameters, calls, lambda given: given["q"]))
    monkeypatch.delitem(sys.modules, "automodel_lite.attention.flash", raising=False)
    return calls


def test_what_flash_attn_is_given(flash_calls: list[dict[str, Any]]) -> None:
    kernel = importlib.import_module("automodel_lite.attention.flash").FlashAttention()
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN)
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 1, 1), WINDOWED)
    plain, windowed = flash_calls
    assert plain["causal"] is True
    assert plain["window_size"] == (-1, -1)
    assert (plain["softmax_scale"], plain["softcap"], plain["max_seqlen_q"], plain["max_seqlen_k"]) == (0.25, 0.0, 5, 8)
    assert (windowed["window_size"], windowed["softcap"], windowed["max_seqlen_q"]) == ((6, 0), 5.0, 2)
    assert plain["cu_seqlens_q"] is CU_Q
    assert plain["cu_seqlens_k"] is CU_K
    kernel.check(ON_GPU)
    assert plain["deterministic"] is False
    use_deterministic(True)
    try:
        kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN)
    finally:
        use_deterministic(False)
    assert flash_calls[-1]["deterministic"] is True


def test_flash_attn_4_alone_is_not_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves a namespace package `flash_attn` without the function."""
    fake_module(monkeypatch, "flash_attn")
    monkeypatch.delitem(sys.modules, "automodel_lite.attention.flash", raising=False)
    with pytest.raises(ConfigError, match=r"pip install --no-build-isolation 'automodel-lite\[flash\]'"):
        importlib.import_module("automodel_lite.attention.flash")


def test_flash_without_the_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "automodel_lite.attention.flash", raising=False)
    if "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn is installed here")
    with pytest.raises(ConfigError, match=r"pip install --no-build-isolation 'automodel-lite\[flash\]'"):
        importlib.import_module("automodel_lite.attention.flash")


# ---------------------------------------------------------------------------------------------- Transformer Engine
@pytest.fixture
def te_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    yield fake_te(monkeypatch, TE_INIT, TE_FORWARD)
    sys.modules.pop("automodel_lite.attention.te", None)


def fake_te(monkeypatch: pytest.MonkeyPatch, init: list[str], forward: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Transformer Engine with these signatures; (method, what it is given) of each call."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def method(name: str, parameters: list[str], result: Callable[..., Any]) -> Callable[..., Any]:
        seen: list[dict[str, Any]] = []

        def answer(given: dict[str, Any]) -> Any:
            calls.append((name, seen[-1]))
            return result(given)

        return recorder(parameters, seen, answer)

    members = {
        "__init__": method("init", init, lambda given: None),
        "__call__": method("forward", forward, lambda given: given["query_layer"].flatten(1)),
    }
    fake_module(
        monkeypatch,
        "transformer_engine.pytorch.attention",
        DotProductAttention=type("DotProductAttention", (), members),
    )
    monkeypatch.delitem(sys.modules, "automodel_lite.attention.te", raising=False)
    return calls


def test_what_transformer_engine_is_given(te_calls: list[tuple[str, dict[str, Any]]]) -> None:
    kernel = importlib.import_module("automodel_lite.attention.te").TransformerEngineAttention()
    out = kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN)
    assert out.shape == (9, 4, 16)
    (_, made), (_, given) = te_calls
    assert (made["num_attention_heads"], made["kv_channels"], made["num_gqa_groups"]) == (4, (16, 16), 2)
    assert (made["qkv_format"], made["attn_mask_type"], made["window_size"]) == ("thd", TE_MASKS[1], (-1, 0))
    assert given["cu_seqlens_q_padded"] is given["cu_seqlens_q"]
    assert given["cu_seqlens_kv_padded"] is given["cu_seqlens_kv"]
    assert given["cu_seqlens_q"].tolist() == [0, 4, *[9] * 31]  # 32 documents: cuDNN makes a graph for each number
    assert given["cu_seqlens_kv"].tolist() == [0, 8, *[14] * 31]
    assert given["pad_between_seqs"] is False
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN)
    assert [name for name, _ in te_calls] == ["init", "forward", "forward"]
    kernel(Q_THD, Q_THD, Q_THD, Segments(CU_Q, CU_Q, 5, 5), WINDOWED)
    assert te_calls[-2][1]["window_size"] == (6, 0)
    assert te_calls[-2][1]["softcap"] == 5.0
    assert te_calls[-1][1]["attn_mask_type"] == TE_MASKS[0]


def test_what_transformer_engine_refuses(
    te_calls: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    te = importlib.import_module("automodel_lite.attention.te").TransformerEngineAttention
    te().check(replace(ON_GPU, window=512))
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(ConfigError, match="softcap of llama without flash-attn"):
            te().check(replace(ON_GPU, softcap=30.0))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        with pytest.raises(ConfigError, match="packed documents on this GPU without flash-attn"):
            te().check(ON_GPU)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match="the attention sinks of llama"):
        te().check(replace(ON_GPU, sinks=True))


def test_te_without_the_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "automodel_lite.attention.te", raising=False)
    if "transformer_engine" in sys.modules or importlib.util.find_spec("transformer_engine"):
        pytest.skip("Transformer Engine is installed here")
    with pytest.raises(ConfigError, match=r"pip install --no-build-isolation 'automodel-lite\[te\]'"):
        importlib.import_module("automodel_lite.attention.te")


# -------------------------------------------------------------------------------------------- torch's varlen_attn
VARLEN = "query key value cu_seq_q cu_seq_k max_q max_k"


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        (f"{VARLEN} return_aux scale window_size", {}),
        (f"{VARLEN} return_aux scale window_size enable_gqa seqused_k block_table", {"enable_gqa": True}),
    ],
    ids=["torch 2.11", "torch 2.12"],
)
def test_what_varlen_attn_is_given(parameters: str, given: dict[str, Any]) -> None:
    calls: list[dict[str, Any]] = []
    kernel = VarlenAttention(varlen_attn=recorder(parameters.split(), calls, lambda a: a["query"]))
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 1, 8), PLAIN)
    options = {key: calls[0][key] for key in calls[0].keys() - {"query", "key", "value", "cu_seq_q", "cu_seq_k"}}
    assert options == {"max_q": 2, "max_k": 8, "window_size": (-1, 0), "scale": 0.25, **given}
    assert calls[0]["key"] is K_THD
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), AttentionOptions(0.25, window=7))
    assert calls[1]["window_size"] == (6, 0)


@pytest.mark.parametrize(
    ("implementation", "parameters", "capability", "sentence"),
    [
        ("FA4", f"{VARLEN} return_aux scale window_size", (9, 0), "implementation=FA4 on torch"),
        ("FA4", f"{VARLEN} scale window_size enable_gqa", (8, 0), r"on this GPU \(8.0\): it needs .* 9.x or 10.x"),
        ("FA3", f"{VARLEN} scale window_size enable_gqa", (10, 0), r"on this GPU \(10.0\): it needs .* 9.x:"),
        (None, f"{VARLEN} scale window_size enable_gqa", (7, 5), "FlashAttention needs compute capability 8.0"),
        ("FA4", f"{VARLEN} scale window_size enable_gqa", (10, 0), None),
    ],
    ids=["FA4 on 2.11", "FA4 on A100", "FA3 on B200", "T4", "FA4 on B200"],
)
def test_an_implementation_is_refused_where_it_fails(
    implementation: str | None,
    parameters: str,
    capability: tuple[int, int],
    sentence: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the first forward they raise RuntimeError; FA4 on torch 2.11 in the first backward."""
    monkeypatch.setattr("automodel_lite.attention.varlen.activate_flash_attention_impl", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    kernel = VarlenAttention(implementation, varlen_attn=recorder(parameters.split(), [], lambda a: a["query"]))
    if sentence is None:
        kernel.check(ON_GPU)
        return
    with pytest.raises(ConfigError, match=sentence):
        kernel.check(ON_GPU)


def test_varlen_of_this_torch_takes_what_it_is_given() -> None:
    """The installed torch's own signature, bound as the kernel binds it."""
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)
    calls: list[dict[str, Any]] = []
    VarlenAttention(varlen_attn=recorder(names, calls, lambda a: a["query"]))(
        Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), PLAIN
    )
    assert len(calls) == 1


def test_an_implementation_that_torch_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"attention\.implementation=FA9 cannot be activated"):
        VarlenAttention(implementation="FA9")


# ------------------------------------------------------------------------------------------------ the real sources
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "automodel_lite", "sources")


def downloaded(requirement: str, pattern: str, *options: str) -> Path:
    """The package's archive, from the cache folder or by pip; skips the test when the index cannot be reached."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not list(CACHE.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", "--timeout", "15"]
        command += ["-d", str(CACHE), *options, requirement]
        packages = ("FLASH_ATTENTION", "MAMBA", "CAUSAL_CONV1D")
        environment = os.environ | {f"{name}_SKIP_CUDA_BUILD": "TRUE" for name in packages}  # metadata alone
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"{requirement} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    return sorted(CACHE.glob(pattern))[-1]


def read_member(archive: Path, suffix: str) -> str:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            name = next(n for n in wheel.namelist() if n.endswith(suffix))
            return wheel.read(name).decode()
    with tarfile.open(archive) as sdist:
        member = next(m for m in sdist.getmembers() if m.name.endswith(suffix))
        file = sdist.extractfile(member)
        assert file is not None
        return file.read().decode()


def parameters_of(source: str, *path: str) -> list[str]:
    """Parameter names of a function or method, by its path of names."""
    body: list[ast.stmt] = ast.parse(source).body
    for name in path[:-1]:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name).body
    function = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == path[-1])
    return [argument.arg for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


@pytest.mark.parametrize("version", ["2.6.1", "2.8.3.post2"], ids=["oldest", "newest"])
def test_flash_attn_sources(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs against the real signature: an argument that it does not have is a TypeError."""
    archive = downloaded(
        f"flash-attn=={version}", f"flash_attn-{version}.tar.gz", "--no-binary", ":all:", "--no-build-isolation"
    )
    names = parameters_of(read_member(archive, "flash_attn/flash_attn_interface.py"), "flash_attn_varlen_func")
    calls = fake_flash(monkeypatch, names)
    importlib.import_module("automodel_lite.attention.flash").FlashAttention()(
        Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), AttentionOptions(0.25, softcap=5.0)
    )
    assert calls[0]["softcap"] == 5.0
    if version == "2.8.3.post2":
        assert set(FLASH_VARLEN) <= set(names)
    sys.modules.pop("automodel_lite.attention.flash", None)


@pytest.mark.parametrize("version", ["2.8.0", "2.20.2"], ids=["oldest", "newest"])
def test_transformer_engine_sources(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above; and it reads torch's setting of deterministic algorithms, as training.deterministic relies on."""
    archive = downloaded(f"transformer-engine=={version}", f"transformer_engine-{version}-*.whl")
    source = read_member(archive, "dot_product_attention/dot_product_attention.py")
    assert "or torch.are_deterministic_algorithms_enabled()" in source
    real = [parameters_of(source, "DotProductAttention", method) for method in ("__init__", "forward")]
    calls = fake_te(monkeypatch, *real)
    kernel = importlib.import_module("automodel_lite.attention.te").TransformerEngineAttention()
    kernel(Q_THD, K_THD, V_THD, Segments(CU_Q, CU_K, 5, 8), AttentionOptions(0.25, window=7))
    kernel(Q_THD, Q_THD, Q_THD, Segments(CU_Q, CU_Q, 5, 5), PLAIN)
    assert [name for name, _ in calls] == ["init", "forward", "init", "forward"]
    if version == "2.20.2":
        for names, known in zip(real, (TE_INIT, TE_FORWARD)):
            assert set(known) <= set(names)
    sys.modules.pop("automodel_lite.attention.te", None)
    constants = read_member(archive, "transformer_engine/pytorch/constants.py")
    for mask in TE_MASKS:
        assert f'"{mask}"' in constants


SDIST = ("--no-binary", ":all:", "--no-build-isolation")
MIXERS = {  # the package, its archive, the file -> the function, and what stands in for it in test_mixer_functions.py
    "causal_conv1d_fn": ("causal-conv1d", "causal_conv1d-*.tar.gz", SDIST, "causal_conv1d_interface.py"),
    "mamba_chunk_scan_combined": ("mamba-ssm", "mamba_ssm-*.tar.gz", SDIST, "ops/triton/ssd_combined.py"),
    "mamba_split_conv1d_scan_combined": ("mamba-ssm", "mamba_ssm-*.tar.gz", SDIST, "ops/triton/ssd_combined.py"),
    "chunk_gated_delta_rule": ("fla-core", "fla_core-*.whl", (), "fla/ops/gated_delta_rule/chunk.py"),
    "chunk_kda": ("fla-core", "fla_core-*.whl", (), "fla/ops/kda/chunk.py"),
}
STAND_INS = {
    "causal_conv1d_fn": fake_causal_conv1d,
    "mamba_chunk_scan_combined": fake_chunk_scan,
    "chunk_gated_delta_rule": fake_delta_rule,
}


@pytest.mark.parametrize("function", MIXERS)
def test_sources_of_the_mixers_kernels(function: str) -> None:
    """The stand-ins have these functions' parameters, in their order; each of the functions takes the boundaries."""
    requirement, pattern, options, file = MIXERS[function]
    source = read_member(downloaded(requirement, pattern, *options), file)
    names = parameters_of(source, function)
    boundaries = {"cu_seqlens", "cu_seqlens_cpu"} if requirement == "fla-core" else {"seq_idx"}
    assert boundaries <= {*names}
    if function in STAND_INS:
        known = inspect.signature(STAND_INS[function](len)).parameters
        assert [name for name in known if name != "kwargs"] == names
    if function == "causal_conv1d_fn":
        assert "seq_idx.contiguous()" in source


@pytest.mark.parametrize("causal", [True, False])
def test_varlen_blocks_fit_the_signature_of_torch(causal: bool) -> None:
    """By fake tensors, shapes alone: the kernel needs a GPU."""
    with FakeTensorMode():
        q, k, v = (torch.empty(24, heads, 16, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        cu = torch.empty(4, dtype=torch.int32, device="cuda")
        inputs = AttentionInputs(q, k, v, Segments(cu, cu, 9, 9), AttentionOptions(0.25))
        out, lse = VarlenAttention().block(inputs, causal)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (24, 4), torch.float32)
        grads = VarlenAttention().block_backward(inputs, causal, out, out, lse)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
