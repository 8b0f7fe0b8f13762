"""FlashAttention's packages (CUDA, fp16 / bf16): `flash_attn_varlen_func` of flash-attn-4 where it
is installed, else of flash-attn.

On a torch that bundles FlashAttention-2, flash-attn 2 brings no speed over the varlen kernel; it is
there for softcap, and for people who have it anyway. flash-attn-4 has kernels of its own for
Hopper and Blackwell, with windows, softcap, sinks and latent attention's heads. It is called by its
public function: what torch's `activate_flash_attention_impl` calls inside it changes between
releases.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from automodel_lite.attention.kernel import refuse, require_cuda
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.errors import ConfigError
from automodel_lite.thd import AttentionOptions, Segments

LARGEST_HEAD_DIM = 256
ARGUMENTS = {
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "deterministic",
}
SINKS = "learnable_sink"  # an argument of flash-attn-4
# flash-attn-4: major compute capability -> its (head dims of queries and keys, of values) over 128;
# on Hopper all up to 256
WIDE_HEADS: dict[int, tuple[tuple[int, int], ...]] = {
    9: (),
    10: ((192, 128), (256, 256)),
    11: ((192, 128), (256, 256)),
}


def installed() -> tuple[Callable[..., Any], bool]:
    """Returns the function, and whether it is flash-attn-4's; raises ConfigError where neither
    package is there, or one has another signature than this module knows.
    """
    is_4 = find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None
    try:
        if is_4:
            from flash_attn.cute import flash_attn_varlen_func
        else:
            from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        if is_4:
            cure = "pip install --pre --upgrade flash-attn-4, or pip uninstall flash-attn-4"
            text = (
                f"attention=flash finds flash-attn-4, which cannot be imported ({error}): {cure}."
            )
            raise ConfigError(text) from error
        raise ConfigError(
            "attention=flash needs flash-attn: pip install --no-build-isolation "
            "'automodel-lite[flash]', or, on Hopper and Blackwell, pip install --pre flash-attn-4."
        ) from None
    needed = ARGUMENTS | ({SINKS} if is_4 else set())
    if missing := sorted(needed - set(inspect.signature(flash_attn_varlen_func).parameters)):
        package = "flash-attn-4" if is_4 else "flash-attn"
        raise ConfigError(
            f"attention=flash: flash_attn_varlen_func of the installed {package} has no argument "
            f"{', '.join(missing)}: install another release, or use attention=varlen."
        )
    return flash_attn_varlen_func, is_4


class FlashAttention:
    """`flash_attn_varlen_func`; with training.deterministic its slower backward,
    without atomics.
    """

    name = "thd_fa2"  # "flash" inside a name makes transformers run checks of its own

    def __init__(self) -> None:
        self.attend, self.is_4 = installed()

    def check(self, spec: AttentionSpec) -> None:
        """Raises ConfigError off CUDA, outside fp16 / bf16, and for heads, sinks or a GPU that the
        installed package has no kernel for.
        """
        require_cuda(self, spec)
        dims = f"head dims {spec.head_dim} / {spec.value_head_dim}"
        if self.is_4:
            self._check_4(spec, dims)
            return
        if spec.sinks:
            cure = "use attention=flex, or pip install --pre flash-attn-4"
            raise refuse(self, f"the attention sinks of {spec.model_type}", cure)
        if spec.head_dim != spec.value_head_dim or spec.head_dim > LARGEST_HEAD_DIM:
            cure = f"they must be equal and at most {LARGEST_HEAD_DIM}, use attention=te"
            raise refuse(self, dims, cure)

    def _check_4(self, spec: AttentionSpec, dims: str) -> None:
        major = 9
        if torch.cuda.is_available():
            major = torch.cuda.get_device_capability(spec.device)[0]
        if major not in WIDE_HEADS:
            cure = "flash-attn-4 trains on 9.x, 10.x and 11.x, use attention=varlen"
            raise refuse(self, f"this GPU (compute capability {major}.x)", cure)
        keys = spec.head_dim
        values = spec.value_head_dim
        largest = LARGEST_HEAD_DIM if major == 9 else 128
        has_kernel = max(keys, values) <= largest or (keys, values) in WIDE_HEADS[major]
        if keys % 8 or values % 8 or not has_kernel:
            raise refuse(self, f"{dims} on this GPU", "use attention=flex")
        if major > 9 and keys == LARGEST_HEAD_DIM and (spec.softcap is not None or spec.sinks):
            raise refuse(self, f"softcap or sinks with {dims} on this GPU", "use attention=flex")

    def __call__(
        self,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        segments: Segments,
        options: AttentionOptions,
    ) -> Tensor:
        """See `AttentionKernel`."""
        more: dict[str, Any] = {}
        if options.sinks is not None:
            if not self.is_4:
                raise refuse(self, "attention sinks", "use attention=flex")
            more[SINKS] = options.sinks
        every = (None, None) if self.is_4 else (-1, -1)
        window = options.window
        found = self.attend(
            q_THD,
            k_THD,
            v_THD,
            cu_seqlens_q=segments.cu_q,
            cu_seqlens_k=segments.cu_k,
            max_seqlen_q=max(segments.max_q, 2),  # 1 would select the decode path
            max_seqlen_k=max(segments.max_k, 2),
            softmax_scale=options.scale,
            causal=True,  # bottom right since flash-attn 2.1
            # (w, 0) sees w keys besides the query's own
            window_size=every if window is None else (window - 1, 0),
            softcap=0.0 if options.softcap is None else options.softcap,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **more,
        )
        return found[0] if self.is_4 else found  # type: ignore[no-any-return]
