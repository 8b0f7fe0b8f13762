"""torch's own FlashAttention for packed sequences: `torch.nn.attention.varlen` (CUDA, fp16 / bf16).

The CUDA default: it needs no further package. Its arguments grow from version to version (2.12:
enable_gqa), so they are looked up once, when the kernel is built. A package of FlashAttention-3 or
-4 goes in its place inside the same operation, so that a compiled layer stays one graph.

From 2.15 on torch prefers cuDNN for causal packs on Hopper and Blackwell. cuDNN aligns queries to
the first key, so torch takes it only where both boundaries are one object, as in plain packs
(`Segments`). It has no deterministic backward there, and torch builds one of its graphs for each
number of documents and longest document, most packs another: it is off unless it is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from automodel_lite.attention.kernel import refuse, require_cuda
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.errors import ConfigError, explained
from automodel_lite.thd import AttentionInputs, AttentionOptions, Segments

LARGEST_HEAD_DIM = 256
# of flash-attn-4, whose function inside gave two values until then: torch before 2.14 unpacks two
NEWEST_OF_TWO_VALUES = Version("4.0.0b18")
CUDNN = "cuDNN"
FASTEST = "fastest"
# the modules of the packages, the fastest first; their gradients of keys and values are those of
# the heads that there are, where FlashAttention-2 makes one for each query head and sums them
PACKAGES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
# major compute capability of the GPUs that they run on
CAPABILITIES = {"FA3": (9,), "FA4": (9, 10), CUDNN: (9, 10)}
OLDEST_OF_CUDNN = 92400  # for causal packs whose longest document has 128 tokens or less
LARGEST_HEAD_DIM_OF_CUDNN = 128


class VarlenAttention:
    """`varlen_attn`.

    implementation  None for the FlashAttention-2 that torch bundles, "FA3" or "FA4" for the package
                    of that name, through torch's `activate_flash_attention_impl` (which switches it
                    for the whole process), "cuDNN" for the attention of that library, but with
                    windows and between context-parallel ranks (for the whole process, too);
                    "fastest" for the first package that is installed for this GPU and has the
                    arguments that torch gives it, else None
    reason          why `attention=auto` takes it
    """

    name = "thd_varlen"
    is_one_operation = True

    def __init__(
        self,
        # null = the FlashAttention-2 inside torch; FA3 or FA4 = that package, fastest = one of them
        # that is installed for this GPU, else null; cuDNN (torch >= 2.15)
        implementation: str | None = None,
        varlen_attn: Callable[..., Any] = varlen_attn,
    ) -> None:
        self.varlen_attn = varlen_attn
        # before 2.12 heads were not compared, and FlashAttention groups them by itself
        self.compares_heads = "enable_gqa" in inspect.signature(varlen_attn).parameters
        self.implementation = implementation
        self.reason = "inside torch, the fastest that needs no package"
        if implementation not in (None, CUDNN, FASTEST):
            _activate(str(implementation))

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError off CUDA, outside fp16 / bf16, with softcap or sinks, for unusual head
        dims.
        """
        require_cuda(self, spec)
        if spec.softcap is not None:
            raise refuse(self, f"the softcap of {spec.model_type}", "use attention=flex")
        if spec.sinks:
            # its backward ignores the gradient of the log-sum-exp, from which sinks could be built
            raise refuse(self, f"the attention sinks of {spec.model_type}", "use attention=flex")
        if (
            spec.head_dim != spec.value_head_dim
            or spec.head_dim % 8
            or spec.head_dim > LARGEST_HEAD_DIM
        ):
            dims = f"head dims {spec.head_dim} / {spec.value_head_dim}"
            raise refuse(
                self,
                dims,
                f"they must be equal, a multiple of 8, at most {LARGEST_HEAD_DIM}: attention=te",
            )
        if torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(spec.device)
            if capability < (8, 0):
                raise refuse(
                    self,
                    "this GPU",
                    "FlashAttention needs compute capability 8.0, use attention=flex",
                )
        if self.implementation == FASTEST:
            self._take_fastest(spec)
        else:
            self._check_implementation(spec)

    def _take_fastest(self, spec: AttentionSpec) -> None:
        """Takes the first package that is installed and supported, or none, and says why."""
        refused = []
        # of neither are the gradients of every head dim the same each time
        deterministic = torch.are_deterministic_algorithms_enabled()
        if torch.cuda.is_available() and not deterministic:
            major, _ = torch.cuda.get_device_capability(spec.device)
            for name, module in PACKAGES.items():
                if major not in CAPABILITIES[name] or not _is_installed(module):
                    continue
                self.implementation = name
                try:
                    self._check_implementation(spec)
                    _activate(name)
                except ConfigError as error:
                    refused.append(str(error))
                else:
                    self.reason = f"{name} of the installed {module}, the fastest on this GPU"
                    return
        self.implementation = None
        self.reason = " ".join([f"{self.reason}." if refused else self.reason, *refused])

    def _check_implementation(self, spec: AttentionSpec) -> None:
        """Raises ConfigError for a GPU or a version that the implementation does not run on."""
        if torch.cuda.is_available():
            capability = torch.cuda.get_device_capability(spec.device)
            majors = CAPABILITIES.get(str(self.implementation), capability)
            if capability[0] not in majors:
                needs = " or ".join(f"{major}.x" for major in majors)
                asked = (
                    f"implementation={self.implementation} on this GPU "
                    f"({capability[0]}.{capability[1]})"
                )
                cure = (
                    f"it needs compute capability {needs}: leave attention.implementation at null"
                )
                raise refuse(self, asked, cure)
        if self.implementation == CUDNN:
            _check_cudnn(self, spec)
        if self.implementation == "FA4" and not self.compares_heads:
            # there its backward refuses every window, and "no window, but causal" is one to it
            cure = "torch>=2.12 can; or leave attention.implementation at null"
            raise refuse(self, f"implementation=FA4 on torch {torch.__version__}", cure)
        if self.implementation == "FA4" and Version(torch.__version__) < Version("2.14"):
            found = next(iter(distributions(name="flash-attn-4")), None)
            if found and Version(found.version) > NEWEST_OF_TWO_VALUES:
                asked = f"implementation=FA4 with flash-attn-4 {found.version}"
                cure = f"torch {torch.__version__} expects another one inside: use attention=flash"
                raise refuse(self, asked, cure)

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """See `AttentionKernel`."""
        if options.softcap is not None or options.sinks is not None:
            raise refuse(self, "softcap or attention sinks", "use attention=flex")
        if not torch.compiler.is_compiling():  # a layer is called uncompiled first
            torch.backends.cuda.enable_cudnn_sdp(self.implementation == CUDNN)
        # (w, 0) sees w keys besides the query's own
        window_size = (-1, 0) if options.window is None else (options.window - 1, 0)
        more: dict[str, Any] = {"scale": options.scale, "window_size": window_size}
        if self.compares_heads:
            more["enable_gqa"] = q_THD.shape[1] != k_THD.shape[1]
        boundaries = _without_decoding(segments)
        return self.varlen_attn(q_THD, k_THD, v_THD, *boundaries, **more)

    def block(self, inputs: AttentionInputs, causal: bool) -> tuple[Tensor, Tensor]:
        """See `BlockKernel`; the operation under `varlen_attn`, whose backward does not take the
        log-sum-exp.
        """
        *qkv, segments, options = inputs
        tensors = (*(x.contiguous() for x in qkv), *_without_decoding(segments))
        out, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            *tensors, 0.0, causal, False, scale=options.scale
        )
        return out, lse_HT.t()

    def block_backward(
        self,
        inputs: AttentionInputs,
        causal: bool,
        grad_THD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockKernel`."""
        *qkv, segments, options = inputs
        tensors = (x.contiguous() for x in (grad_THD, *qkv, out_THD, lse_TH.t()))
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_THD.device)
        unused = torch.empty(0, device=grad_THD.device)
        return torch.ops.aten._flash_attention_backward(
            *tensors,
            *_without_decoding(segments),
            0.0,
            causal,
            no_dropout,
            unused,
            scale=options.scale,
        )


def _is_installed(module: str) -> bool:
    package = module.partition(".")[0]
    return find_spec(package) is not None and find_spec(module) is not None


def _activate(implementation: str) -> None:
    """Puts a package inside torch's operation; raises ConfigError where it is not there, or its
    operations have other arguments than torch gives them.
    """
    with explained(
        f"attention.implementation={implementation} cannot be activated",
        *(ImportError, ValueError, RuntimeError),
        cure="install the package that torch names, or leave attention.implementation at "
        "null for the FlashAttention-2 inside torch",
    ):
        if implementation == "FA3" and _is_installed(PACKAGES["FA3"]):
            _check_operations()
        activate_flash_attention_impl(implementation)  # type: ignore[arg-type]


# of FlashAttention-3, which torch gives by their places: their numbers, and places of some
OPERATIONS: dict[str, tuple[int, dict[int, str]]] = {
    "fwd": (34, {7: "cu_seqlens_q", 12: "max_seqlen_q", 23: "softmax_scale", 33: "sm_margin"}),
    "bwd": (22, {}),
}


def _check_operations() -> None:
    import_module(PACKAGES["FA3"])  # which registers them
    for name in OPERATIONS:
        operation = getattr(torch.ops.flash_attn_3, name).default
        found = [argument.name for argument in operation._schema.arguments]
        if not is_known(name, found):
            raise ImportError(
                f"flash_attn_3::{name} of the installed {PACKAGES['FA3']} has the arguments "
                f"{', '.join(found)}, which are not those that torch gives"
            )


def is_known(operation: str, arguments: list[str]) -> bool:
    """Are these the arguments that torch gives an operation of FlashAttention-3?"""
    number, places = OPERATIONS[operation]
    return len(arguments) == number and all(arguments[at] == want for at, want in places.items())


def _check_cudnn(kernel: VarlenAttention, spec: AttentionSpec) -> None:
    """Where torch would take FlashAttention instead, without a word, or cuDNN other bits."""
    found = torch.backends.cudnn.version()
    cure = "leave attention.implementation at null"
    asked = None
    if Version(torch.__version__) < Version("2.15"):
        asked = f"on torch {torch.__version__}"
        cure = f"torch>=2.15 can, or {cure}"
    elif found is None or found < OLDEST_OF_CUDNN:
        asked = f"with cuDNN {found}"
        cure = f"it needs {OLDEST_OF_CUDNN}, or {cure}"
    elif spec.head_dim > LARGEST_HEAD_DIM_OF_CUDNN:
        asked = f"with head dim {spec.head_dim}"
        cure = f"at most {LARGEST_HEAD_DIM_OF_CUDNN}, or {cure}"
    elif torch.are_deterministic_algorithms_enabled():
        asked = "with training.deterministic"
    if asked is not None:
        raise refuse(kernel, f"implementation={CUDNN} {asked}", cure)


def _without_decoding(segments: Segments) -> Segments:
    """A longest segment of 1 would select the path for decoding."""
    return segments._replace(max_q=max(segments.max_q, 2), max_k=max(segments.max_k, 2))
