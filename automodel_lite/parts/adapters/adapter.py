"""A LoRA adapter inside a model: its weights beside those of the base, saved, merged and loaded."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from automodel_lite.config.model_files import base_of
from automodel_lite.errors import ConfigError, explained
from automodel_lite.models.layers import local, output_head, whole, with_head
from automodel_lite.models.sharded import keep_part
from automodel_lite.models.source import embedding_rows, load_whole
from automodel_lite.parts.adapters.frozen_rows import frozen_rows_note

_PREFIX = "base_model.model."  # peft's names of the weights of the model that it wraps
_LAYERS = (BaseTunerLayer, ModulesToSaveWrapper, TrainableTokensWrapper)


@dataclass(frozen=True)
class LoraAdapter:
    """The adapter inside a model."""

    wrapped: peft.PeftModel
    description: str
    is_continued: bool = False  # its weights are there before those of the base

    def frozen_rows(
        self,
        lm: transformers.PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        known: Collection[str],
    ) -> str:
        """Returns what `frozen_rows_note` does."""
        return frozen_rows_note(lm, tokenizer, known)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Removes the adapter's layers while a sharded model's weights are loaded. Without its
        layers they have their names in checkpoints; back in their places, the layers take what they
        need from the loaded weights: copies of whole modules, and DoRA's magnitudes.
        """
        model: Any = self.wrapped.base_model.model
        # Outermost layers only: an adapter inside another one's base moves with it.
        places = [
            (parent, name, child)
            for parent in model.modules()
            if not isinstance(parent, _LAYERS)
            for name, child in parent.named_children()
            if isinstance(child, _LAYERS)
        ]
        for parent, name, layer in places:
            if isinstance(layer, BaseTunerLayer):
                base = layer.get_base_layer()
            else:
                base = layer.original_module
            setattr(parent, name, base)
        yield
        for parent, name, layer in places:
            setattr(parent, name, layer)
            if not self.is_continued:
                _take_from_base(layer)

    def follow_base(self) -> None:
        """Takes DoRA's magnitudes and the rows of tokens from the base as it is held by now, in the
        compute dtype, as `hidden` does for one that is sharded: every layout begins alike.
        """
        if self.is_continued:
            return
        for layer in self.wrapped.base_model.modules():
            if not isinstance(layer, (LoraLayer, TrainableTokensWrapper)):
                continue
            # 4 bits are read by peft itself
            if all(weight.is_floating_point() for weight in layer.parameters()):
                _take_from_base(layer)

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Writes adapter_config.json and adapter_model.safetensors, as `PeftModel.from_pretrained`
        reads them; `weights` are the trained ones, by their names in the model. Raises RuntimeError
        when what is read back differs.
        """
        named = {_PREFIX + name: value for name, value in weights.items()}
        self.wrapped.save_pretrained(str(folder), state_dict=named, save_embedding_layers=False)
        written = load_file(folder / "adapter_model.safetensors")
        own = peft.get_peft_model_state_dict(self.wrapped, named, save_embedding_layers=False)
        for name, want in own.items():
            if name not in written or not torch.equal(written[name], want.cpu()):
                raise RuntimeError(f"the exported weight {name} differs from the trained one.")

    def merge(self) -> None:
        """Merges layer by layer, each whole meanwhile. Raises ValueError when merged weights are
        not finite, ConfigError where layers with adapters of their own share a weight (Zamba).
        """
        layers: list[Any] = [
            x for x in self.wrapped.base_model.modules() if isinstance(x, BaseTunerLayer)
        ]
        # rows of single tokens are the same ones in a tied head
        apart = [layer for layer in layers if not vars(layer).get("_tied_adapter")]
        weights = [layer.get_base_layer()._parameters.get("weight") for layer in apart]
        uses = Counter(id(weight) for weight in weights if weight is not None)
        if num_shared := sum(count > 1 for count in uses.values()):
            raise ConfigError(
                f"{num_shared} weights are shared by several layers, each with an adapter of its "
                "own, which cannot be merged into them: use the run's adapter/ with peft."
            )
        if any(_adds_bias(layer) for layer in layers):
            raise ConfigError(
                "the adapter has biases (lora_bias=true) beside layers without any, so that it "
                "cannot be merged into them: use the run's adapter/ with peft."
            )
        for layer in layers:
            with _whole(layer):
                layer.merge(safe_merge=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all adapters are merged already
            self.wrapped.merge_and_unload()


def _adds_bias(layer: Any) -> bool:
    """Returns whether an adapter's bias has none in the base to be merged into."""
    return layer.get_base_layer()._parameters.get("bias") is None and any(
        vars(layer).get("lora_bias", {}).values()
    )


@torch.no_grad()
def _take_from_base(layer: Any) -> None:
    """Makes a shard of the copy, or of DoRA's magnitudes, from the same shard of the weight."""
    if isinstance(layer, ModulesToSaveWrapper):
        copy = layer.modules_to_save["default"]
        for name, original in layer.original_module.named_parameters():
            module, _, weight = name.rpartition(".")
            setattr(copy.get_submodule(module), weight, nn.Parameter(original.detach().clone()))
        for name, buffer in layer.original_module.named_buffers():  # Gemma scales its embeddings
            module, _, own = name.rpartition(".")
            setattr(copy.get_submodule(module), own, buffer.clone())
        return
    if isinstance(layer, TrainableTokensWrapper):
        rows = layer.token_adapter
        if rows.tied_adapter is None:
            weight = whole(rows.get_base_layer().weight)
            keep_part(rows.trainable_tokens_delta["default"], weight[rows.token_indices["default"]])
        return
    for magnitude in layer.lora_magnitude_vector.values():
        weight = layer.get_base_layer().weight
        if magnitude.fan_in_fan_out:  # [in, out] of GPT-2 and embeddings: cut across the columns
            columns = torch.linalg.norm(whole(weight).float().T, dim=1)
            keep_part(magnitude.weight, columns)
        else:
            local(magnitude.weight).copy_(torch.linalg.norm(local(weight).float(), dim=1))


@contextlib.contextmanager
def _whole(layer: nn.Module) -> Iterator[None]:
    """Makes the layer's sharded parameters whole inside (a collective); then each rank keeps its
    part of them.
    """
    shards: list[Any] = [
        (m, n, p)
        for m in layer.modules()
        for n, p in m._parameters.items()
        if isinstance(p, DTensor)
    ]
    for module, name, shard in shards:
        module._parameters[name] = nn.Parameter(shard.full_tensor().detach(), requires_grad=False)
    yield
    for module, name, shard in shards:
        whole = module._parameters[name]
        keep_part(shard, whole.detach())
        module._parameters[name] = shard


def load_adapted(
    folder: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> transformers.PreTrainedModel:
    """Loads the base that an adapter's folder names, with the adapter in it.

    Through peft: AutoModelForCausalLM.from_pretrained of transformers 5.23 resets DoRA's
    magnitudes.
    """
    base = base_of(Path(folder))
    model = load_whole(base, dtype, trust_remote_code)
    # one that was trained with added rows saves the whole embedding, to which the base grows
    num_rows = max(map(len, _whole_ends(model, Path(folder))), default=0)
    if num_rows > embedding_rows(model):
        with_head(model).resize_token_embeddings(num_rows, mean_resizing=False)
    cure = f"it was made for another model than {base}, or peft misreads its names"
    with warnings.catch_warnings(), explained(f"{folder} is not all read", UserWarning, cure=cure):
        warnings.filterwarnings("error", "Found missing adapter keys")
        peft.PeftModel.from_pretrained(model, folder)  # puts the adapter's layers into `model`
    return model


def _whole_ends(model: transformers.PreTrainedModel, folder: Path) -> list[Tensor]:
    """Returns the embedding and the head that an adapter's folder holds as a whole."""
    names = {module: name for name, module in model.named_modules()}
    ends = [names[model.get_input_embeddings()], names[output_head(model)]]
    weights = load_file(folder / "adapter_model.safetensors")
    wanted = [f"{_PREFIX}{end}.weight" for end in ends]
    return [weights[name] for name in wanted if name in weights]
