"""The trained model, or its adapter, as a folder that plain `from_pretrained` loads."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from automodel_lite.attention.probe import stream_of, tolerance_std
from automodel_lite.errors import ConfigError
from automodel_lite.models.adapter import Adapter
from automodel_lite.models.layers import has_fp8
from automodel_lite.models.loss import LossModel
from automodel_lite.models.source import describe, embedding_rows, model_class, runs_remote_code, stored_dtypes
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.run.exported import fresh, replace
from automodel_lite.thd import ThdBatch

_PROBE_TOKENS = 16
_FP8_STD = 0.5
"""Standard deviations that a model whose products round to fp8 may be off from its own weights in bf16: an 80-step
llama_tiny is off by 0.17; another model by 3 and more."""


def export(
    folder: Path,
    model: ParallelModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    step: int,
    adapter: Adapter | None = None,
) -> Path:
    """`folder`/hf, or `folder`/adapter when only an adapter was trained; every rank calls it. Returns which."""
    if adapter:
        export_adapter(folder / "adapter", model.loss_model, adapter, tokenizer, step)
        return folder / "adapter"
    export_hf(folder / "hf", model.loss_model, tokenizer, dtype, model.logits, step)
    return folder / "hf"


def check_exportable(lm: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError at the start for what would fail after the training: the small files are written once."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            generation_config(lm.config, lm.generation_config, tokenizer).save_pretrained(folder)
            lm.config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:400]
            raise ConfigError(
                f"checkpoint.export_hf=true: the export at the end would fail, {reason} Mend generation_config.json or "
                "config.json of the model, or set checkpoint.export_hf=false."
            ) from None


def export_adapter(
    folder: Path, model: LossModel, adapter: Adapter, tokenizer: PreTrainedTokenizerBase, step: int
) -> None:
    """The adapter's weights and the tokenizer, complete or not at all; every rank calls it, rank 0 writes."""
    weights = full_weights(model, only_trained=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        with _written(folder, step) as temporary:
            adapter.save(temporary, weights)
            tokenizer.save_pretrained(temporary)
    if dist.is_initialized():
        dist.barrier()


def export_hf(
    folder: Path,
    model: LossModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    logits: Callable[[ThdBatch], Tensor],
    step: int,
) -> None:
    """Writes config, generation config, tokenizer, chat template and safetensors; every rank calls it, rank 0 writes.

    The folder appears complete or not at all. Before it appears it is read back, and compared weight by weight, and
    by what it answers to a few tokens with what the trained model does (`logits`, one forward on every rank).
    Raises RuntimeError when what is read back differs.
    """
    probe = stream_of(_probe_ids(model.lm), next(model.parameters()).device)
    expected_TV = _logits_of(model, logits, probe)
    weights = full_weights(model)
    if not dist.is_initialized() or dist.get_rank() == 0:
        whole = _rebuild(model.lm, weights, dtype)
        whole.generation_config = generation_config(whole.config, model.lm.generation_config, tokenizer)
        with _written(folder, step) as temporary:
            whole.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            loaded = _compare(temporary, whole, runs_remote_code(model.lm))
            _compare_logits(loaded, probe, expected_TV, _FP8_STD if has_fp8(model.lm) else 0.0)
    if dist.is_initialized():
        dist.barrier()


def full_weights(model: LossModel, only_trained: bool = False) -> dict[str, Tensor]:
    """The LM's whole state dict on rank 0's CPU, gathered from all shards; empty on other ranks."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=only_trained)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    return {name.removeprefix("lm."): value for name, value in weights.items()}


def generation_config(
    config: PretrainedConfig, trained: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """The model's own generation settings; it stops at the tokenizer's end token as well as at its own.

    Llama 2 came with a temperature and `do_sample: false`, which transformers refuses to save: it samples then, as its
    authors meant. A negative pad token (Llama 1) is none.
    """
    result = GenerationConfig.from_dict(trained.to_dict())
    if result.pad_token_id is not None and result.pad_token_id < 0:
        result.pad_token_id = None
    own = trained.eos_token_id if isinstance(trained.eos_token_id, list) else [trained.eos_token_id]
    stops = list(dict.fromkeys(token for token in [tokenizer.eos_token_id, *own] if token is not None))
    result.eos_token_id = stops if len(stops) > 1 else stops[0] if stops else None
    result.bos_token_id = tokenizer.bos_token_id if result.bos_token_id is None else result.bos_token_id
    result.pad_token_id = tokenizer.pad_token_id if result.pad_token_id is None else result.pad_token_id
    try:
        result.validate(strict=True)
    except ValueError:
        result.do_sample = True
    return result


def _rebuild(
    lm: transformers.PreTrainedModel, weights: dict[str, Tensor], dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """An unsharded model holding the weights, in `dtype`; made on the meta device, so that nothing is initialised.

    Weights that the family keeps in fp32 (routers' biases, state space decays) stay so.
    """
    whole = describe(lm.config, dtype)
    whole.set_attn_implementation("eager")
    dtypes = stored_dtypes(whole, dtype)
    cast = {name: value.to(dtypes[name]) if value.is_floating_point() else value for name, value in weights.items()}
    whole.load_state_dict(cast, strict=True, assign=True)
    whole.tie_weights()
    return whole


@contextmanager
def _written(folder: Path, step: int) -> Iterator[Path]:
    """A temporary folder that takes the name `folder` when all went well, and is gone when not."""
    temporary = fresh(folder)
    try:
        yield temporary
        replace(temporary, folder, step)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _compare(
    folder: Path, expected: transformers.PreTrainedModel, trust_remote_code: bool
) -> transformers.PreTrainedModel:
    """The model as it is read back."""
    read: Any = model_class(expected.config).from_pretrained(
        folder, dtype="auto", output_loading_info=True, trust_remote_code=trust_remote_code
    )
    loaded, report = read
    if report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]:
        raise RuntimeError(f"the exported model does not load completely: {report}")
    weights = loaded.state_dict()
    for name, value in expected.state_dict().items():
        if value.dtype != weights[name].dtype or not torch.equal(value, weights[name]):
            raise RuntimeError(f"the exported weight {name} differs from the trained one.")
    assert isinstance(loaded, transformers.PreTrainedModel)
    return loaded


def _probe_ids(lm: transformers.PreTrainedModel) -> Tensor:
    """One document, int64 [1, T]."""
    vocab = embedding_rows(lm)
    return torch.randint(min(3, vocab - 1), vocab, (1, _PROBE_TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits_of(model: nn.Module, logits: Callable[[ThdBatch], Tensor], probe: ThdBatch) -> Tensor:
    """[T, V] on the CPU, without dropout."""
    was_training = model.training
    model.eval()
    result = logits(probe).cpu()
    model.train(was_training)
    return result


@torch.no_grad()
def _compare_logits(
    loaded: transformers.PreTrainedModel, probe: ThdBatch, expected_TV: Tensor, least_limit: float
) -> None:
    """Compares the median token: in low precision single tokens of a mixture of experts take other experts."""
    got_TV = loaded.eval()(probe.input_ids[None].cpu(), use_cache=False).logits[0]
    limit = max(tolerance_std(got_TV.dtype), tolerance_std(expected_TV.dtype), least_limit)
    off_T = (got_TV.float() - expected_TV.float()).abs().amax(1) / expected_TV.float().std()
    off = float(off_T.median())
    if not off <= limit:
        raise RuntimeError(
            f"the exported model answers otherwise than the trained one: its logits are off by {off:.1e} standard "
            "deviations, though its weights are equal. Its config.json does not describe the trained model."
        )
