"""The trained model, or its adapter, as a folder that plain `from_pretrained` loads.

A marker names the step that an exported folder is of, and which of its files are ours:

hf/automodel_lite.json   {"step": 500, "newest_step": 700, "files": ["config.json", ...]}

Every other file in hf/ is the user's own: it stays when the next export takes the old one's place.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from automodel_lite.attention.isolation import drawn_ids, evaluating, tolerance_std
from automodel_lite.errors import system_errors
from automodel_lite.interpreter import trim_malloc
from automodel_lite.models.layers import has_fp8, has_score_head, local
from automodel_lite.models.loss import CrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.source import CausalLM, describe, is_remote_code
from automodel_lite.parallel.control import all_ranks
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import fully_shard_model
from automodel_lite.run.checkpoint_folder import MARK, newest_step
from automodel_lite.run.durable import naming, read_json, write_file
from automodel_lite.run.weight_files import stored_dtypes, take_over, write_weights
from automodel_lite.thd import ThdBatch, stream_of

if TYPE_CHECKING:
    from automodel_lite.parts.adapters.adapter import LoraAdapter

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_WEIGHTS = re.compile(r"(model|adapter_model|pytorch_model).*\.(safetensors|bin|index\.json)")


@contextmanager
def _replace_folder(folder: Path, step: int) -> Iterator[Path]:
    """A temporary folder, which takes the place of `folder` when the block ends well, with the
    user's own files.
    """
    run = folder.parent
    folder = folder.resolve()  # hf/ may be a link to a larger disk
    temporary = folder.with_name(f".tmp-{folder.name}")
    aside = folder.with_name(f".old-{folder.name}")

    def begin() -> None:
        if aside.exists() and not folder.exists():  # a killed process had set it aside
            os.rename(aside, folder)
        for leftover in (aside, temporary):
            if leftover.is_symlink():  # somebody else's: what is behind it stays as it is
                leftover.unlink()
            shutil.rmtree(leftover, ignore_errors=True)

    def end() -> None:
        ours = sorted(path.name for path in temporary.iterdir())
        mark = {"step": step, "newest_step": max(step, newest_step(run)), "files": ours}
        write_file(temporary / MARK, json.dumps(mark))
        if folder.is_dir():
            try:
                before = set(read_json(folder / MARK)["files"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                # without a mark, weights are ours too
                before = {path.name for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name)}
            for path in sorted(folder.iterdir()):
                if path.name in {*before, *ours, MARK}:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.copytree(path, temporary / path.name, symlinks=True)
                else:
                    shutil.copy2(path, temporary / path.name, follow_symlinks=False)
            os.rename(folder, aside)
        try:
            os.rename(temporary, folder)
        except BaseException:
            if aside.exists():  # the old one stays
                os.rename(aside, folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)

    ranks = all_ranks()
    try:
        with naming(folder):
            ranks.on_first(begin)
            with system_errors():
                yield temporary
            ranks.on_first(end)
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


_PROBE_TOKENS = 16
_ROUNDED_STD = 0.5
"""Standard deviations that a model may be off from its own weights where either rounds: in bf16
SmolLM2-135M is off by 0.06 to 0.15, and by 0.21 after 90 steps on texts of one form; in fp8 an
80-step llama_tiny by 0.17. With GELU in place of SiLU it is off by 1.6, without a layer by 8.
"""


def export_adapter(
    folder: Path,
    model: LossModel,
    adapter: LoraAdapter,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    dataset: Mapping[str, Any] | None = None,
) -> None:
    """The adapter's weights, the tokenizer and generation_config.json, complete or not at all;
    every rank calls it, rank 0 writes.

    dataset  of the run, which may name the processor of its images
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    gathered: dict[str, Any] = get_model_state_dict(model, options=options)  # empty on other ranks
    weights = {name.removeprefix("lm."): value for name, value in gathered.items()}
    with _replace_folder(folder, step) as temporary:
        all_ranks().on_first(lambda: adapter.save(temporary, weights))
        all_ranks().on_first(lambda: write_small_files(temporary, model.lm, tokenizer))
        all_ranks().on_first(lambda: write_processor(dataset or {}, temporary))


@trim_malloc()
def export_hf(
    folder: Path,
    model: LossModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    logits: Callable[[ThdBatch], Tensor],
    step: int,
    mesh: Mesh | None = None,
    dataset: Mapping[str, Any] | None = None,
) -> None:
    """Writes config, generation config, tokenizer, chat template and safetensors; every rank calls
    it and writes files.

    The folder appears complete or not at all. Before it appears it is loaded again, as it is
    sharded in training, and compared weight by weight, and by what it answers to a few tokens with
    what the trained model does (`logits`).

    mesh     over which the model is sharded; None = each rank has all of it
    dataset  of the run, which may name the processor of its images
    Raises RuntimeError when what is read back differs.
    """
    device = mesh.device if mesh else next(model.parameters()).device
    expected_TV = probe_logits(model, logits, device)
    lm = model.lm
    dtypes = stored_dtypes(model.lm, dtype)

    def check() -> None:
        # rounding on the way is not the export's
        is_exact = expected_TV.dtype == torch.float32
        loaded = _load_again(temporary, model, tokenizer, dtype, dtypes, mesh, is_exact)
        weights = loaded.lm.state_dict()
        for name, value in lm.state_dict().items():  # this rank's parts, bit for bit
            want = local(value)
            got = local(weights[name])
            kept = dtypes.get(name, want.dtype)
            if not torch.equal(want.to(kept), got.to(want.device, kept)):
                raise RuntimeError(f"the exported weight {name} differs from the trained one.")
        if is_exact and mesh is None:  # shards are widened as they are gathered
            loaded.lm.float()
        got_TV = loaded.plain_logits(drawn_ids(model.lm, _PROBE_TOKENS).to(device)).cpu().float()
        # the median token: in low precision single tokens of a mixture of experts take other
        # experts
        off = float(
            ((got_TV - expected_TV.float()).abs().amax(1) / expected_TV.float().std()).median()
        )
        is_rounded = has_fp8(lm) or not dtype == expected_TV.dtype == torch.float32
        if not off <= (_ROUNDED_STD if is_rounded else tolerance_std(dtype)):
            raise RuntimeError(
                f"the exported model differs from the trained one: its logits are off by {off:.1e} "
                "standard deviations, although its weights are equal. Its config.json does not "
                "describe the trained model."
            )

    with _replace_folder(folder, step) as temporary:
        ranks = all_ranks()
        on_each: Any = ranks.on_all if mesh else ranks.on_first
        ranks.on_first(lambda: _write_settings(temporary, lm, tokenizer, dtype))
        on_each(lambda: write_weights(temporary, lm, dtypes, is_alone=mesh is None))
        ranks.on_first(lambda: take_over(lm, temporary))
        ranks.on_first(lambda: write_processor(dataset or {}, temporary))
        on_each(check)


def write_small_files(
    folder: Path, lm: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Writes the tokenizer, and how the model generates, if it does."""
    if has_score_head(lm):
        with_padding(tokenizer, lm.config).save_pretrained(folder)
        return
    generation_config(lm.config, lm.generation_config, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def with_padding(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer, which fills up rows as the config of a score head has it: the model
    takes the last token that is not this one for the end of a document.
    """
    own = copy.deepcopy(tokenizer)
    own.pad_token = str(own.convert_ids_to_tokens(config.get_text_config().pad_token_id))
    return own


def generation_config(
    config: PretrainedConfig, trained: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """Returns the model's own generation settings; it stops at the tokenizer's end token as well as
    at its own.

    Llama 2 came with a temperature and `do_sample: false`, which transformers refuses to save: it
    samples then, as its authors meant. A negative pad token (Llama 1) is none.
    """
    result = GenerationConfig.from_dict(trained.to_dict())
    if result.pad_token_id is not None and result.pad_token_id < 0:
        result.pad_token_id = None
    own = trained.eos_token_id if isinstance(trained.eos_token_id, list) else [trained.eos_token_id]
    stops = list(
        dict.fromkeys(token for token in [tokenizer.eos_token_id, *own] if token is not None)
    )
    result.eos_token_id = stops if len(stops) > 1 else stops[0] if stops else None
    if result.bos_token_id is None:
        result.bos_token_id = tokenizer.bos_token_id
    if result.pad_token_id is None:
        result.pad_token_id = tokenizer.pad_token_id
    try:
        result.validate(strict=True)
    except ValueError:
        result.do_sample = True
    return result


def _write_settings(
    folder: Path,
    lm: transformers.PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
) -> None:
    """All but the weights: by `save_pretrained` of a model without any."""
    bare = describe(lm.config, dtype)
    bare.set_attn_implementation("eager")
    if has_score_head(lm):
        tokenizer = with_padding(tokenizer, lm.config)
    else:
        bare.generation_config = generation_config(bare.config, lm.generation_config, tokenizer)
    bare.save_pretrained(folder, state_dict={})
    for empty in folder.glob("*.safetensors"):
        empty.unlink()
    tokenizer.save_pretrained(folder)


def _load_again(
    folder: Path,
    model: LossModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    dtypes: dict[str, torch.dtype],
    mesh: Mesh | None,
    is_exact: bool,
) -> LossModel:
    """Returns the model of the folder in the dtypes of its files, without any kernel of ours;
    sharded like `model`.

    is_exact  shards are gathered in fp32: whole in it, they would be a second trained model
    """
    lm = model.lm
    source = CausalLM(
        str(folder),
        trust_remote_code=is_remote_code(type(lm)),
        mtp_loss=model.heads.coefficient if model.heads else 0.0,
        head="score" if model.scores else "lm",
    )
    bare = describe(lm.config, dtype)
    # those that no file holds, too
    dtypes = {name: buffer.dtype for name, buffer in bare.named_buffers()} | dtypes
    made: list[LossModel] = []

    def spread(read: transformers.PreTrainedModel) -> None:
        read.requires_grad_(False)  # FSDP mixes dtypes of frozen parameters only
        rounded: dict[str, Tensor] = dict(read.named_parameters())
        if not is_exact:
            rounded |= read.named_buffers()
        for name, value in rounded.items():
            value.data = value.data.to(dtypes.get(name, value.dtype))
        made.append(LossModel(read, CrossEntropy()))
        if mesh:
            fully_shard_model(made[-1], mesh, torch.float32 if is_exact else None)

    if mesh:
        torch.nn.Module.to(source.build_sharded(tokenizer, spread, mesh.device), mesh.device)
    else:
        spread(source.build(tokenizer))
        made[-1].to(lm.device)
    return made[-1].eval()


@torch.no_grad()
def probe_logits(
    model: LossModel, logits: Callable[[ThdBatch], Tensor], device: torch.device
) -> Tensor:
    """Returns what the model answers to a few tokens: [T, V] on the CPU, without dropout."""
    batch = stream_of([drawn_ids(model.lm, _PROBE_TOKENS)], device)
    with evaluating(model):
        return logits(batch).cpu()


def write_processor(dataset: Mapping[str, Any], folder: Path) -> None:
    """Gives an export the files of `dataset.processor`, in place of the model's own."""
    found = [one.get("dataset", {}).get("processor") for one in dataset.get("sources", {}).values()]
    path = next(filter(None, [dataset.get("processor"), *found]), None)
    if path is None:
        return
    for name in PROCESSOR_FILES:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        (folder / name).unlink(missing_ok=True)
        if file is not None:
            shutil.copy(file, folder / name)
