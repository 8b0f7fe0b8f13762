"""LoRA (Hu et al., 2021), DoRA (Liu et al., 2024) and QLoRA through peft.

peft puts its layers into the Hugging Face model in place, so that the model keeps its class:
attention kernels, the loss and sharding see the model that they know, with more and mostly frozen
parameters. Nothing outside this folder imports peft.

Which layers get an adapter stands in targets.py; the adapter that they make, in adapter.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import peft
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import BitsAndBytesConfig, PreTrainedTokenizerBase

from automodel_lite.config.components import missing_package
from automodel_lite.config.model_files import check_model_files
from automodel_lite.config.rules import Count, PathStr, Positive, Range, Size
from automodel_lite.errors import ConfigError, counted, explained, listed
from automodel_lite.models.layers import has_score_head, output_head
from automodel_lite.models.source import CausalLM
from automodel_lite.parts.adapters.adapter import LoraAdapter
from automodel_lite.parts.adapters.targets import has_tied_head, lora_targets, same_targets


@dataclass(frozen=True)
class Lora:
    """The config node `peft`. `is_quantized`: its frozen weights are held in 4 bits."""

    is_quantized: ClassVar[bool] = False
    r: Size = 16  # rank of the matrices
    alpha: Positive = 32  # the update is scaled by alpha / r
    dropout: Annotated[float, Range(0, below=1)] = 0.0  # on the input of the adapter
    # attention, dense MLPs, shared experts; or names, [q_proj, v_proj], also of towers, [qkv]
    target_modules: str | list[str] = "all-linear"
    experts: bool = False  # also adapt the routed experts of a mixture (never its router)
    modules_to_save: list[str] | None = None  # modules to train fully, [embed_tokens, lm_head]
    # tokens whose rows of the embedding and of the head are trained, ["<call>", "<|im_end|>"], or
    # their ids
    trainable_tokens: list[str | Count] | None = None
    # ranks and alphas of layers, by the ends of their names: {q_proj: 8, "0.mlp.up_proj": 32}
    rank_pattern: dict[str, Size] | None = None
    alpha_pattern: dict[str, Positive] | None = None
    # LoRA+: how many times as fast the second matrix of an adapter learns; 16 is usual
    loraplus_lr_ratio: Annotated[float, Range(1, 1000)] = 1.0
    use_dora: bool = False  # train the magnitude of each weight column separately (peft=dora)
    use_rslora: bool = False  # scale by alpha / sqrt(r) instead of alpha / r
    # continue training this adapter's folder; r, alpha and targets are its own
    adapter: PathStr | None = None

    def check(self, device: torch.device, strategy: str, pretrained: str | None) -> None:
        """Raises ConfigError for a model from scratch: its random weights are not
        saved anywhere.
        """
        if not pretrained:
            raise ConfigError(
                "peft adapts an existing model, but model.pretrained=null creates one from "
                "scratch: set model=pretrained model.pretrained=<folder or hub name>, or "
                "peft=none."
            )

    def problems(self, model: CausalLM) -> Iterator[ConfigError]:
        """Yields what an adapter, whose base is frozen and keeps its rows, cannot be combined
        with.
        """
        if model.freeze:
            yield ConfigError(
                f"model.freeze={model.freeze} with peft: an adapter's base is frozen already",
                key="model.freeze",
                cure="remove one of them",
            )
        if model.train_towers:
            yield ConfigError(
                "model.train_towers=true with peft: an adapter's base is frozen",
                key="model.train_towers",
                cure="name an encoder or a projector in peft.modules_to_save, or layers of them in "
                "peft.target_modules",
            )
        if model.resize_embeddings and not self.modules_to_save:
            # a score head has no rows of tokens
            ends = "embed_tokens" if model.head == "score" else "embed_tokens, lm_head"
            yield ConfigError(
                "model.resize_embeddings=true with peft: rows that are added are trained and saved "
                "with all others of their modules",
                key="model.resize_embeddings",
                cure=f"set peft.modules_to_save=[{ends}]",
            )
        if self.adapter and self.trainable_tokens:
            yield ConfigError(
                f"peft.trainable_tokens={self.trainable_tokens} with peft.adapter: an adapter that "
                "is continued trains the tokens of its own",
                key="peft.trainable_tokens",
                cure="remove one of them",
            )

    def load_arguments(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> dict[str, Any]:
        """Returns more arguments of `from_pretrained` (quantization, with products in `dtype`)."""
        return {}

    def unquantized(self) -> Lora:
        """Returns the same adapter for weights that are not held in 4 bits."""
        return self

    def adapt(
        self,
        model: transformers.PreTrainedModel,
        base: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> LoraAdapter:
        """Puts adapters into `model`, in place, and freezes the rest.

        base       where its weights came from
        tokenizer  knows the texts of trainable_tokens; None = what is made is only counted
        Raises ConfigError when no layer has a name of target_modules.
        """
        if self.adapter:
            return self._continue(model, base)
        is_tied = has_tied_head(model)
        modules, weights = lora_targets(model, self.target_modules, self.experts)
        # peft adapts a weight by replacing it (parametrization): there is no input to drop from,
        # and no column norm.
        if weights and (self.dropout or self.use_dora):
            raise ConfigError(
                f"peft adapts {weights[0]} of this mixture of experts as a weight, without "
                "peft.dropout and peft.use_dora: set peft.dropout=0 and peft=lora, or name other "
                "layers in peft.target_modules."
            )
        # a score head is new, and is saved with the adapter
        scores = has_score_head(model)
        beside = [*(self.modules_to_save or []), *(["score"] if scores else [])]
        config = peft.LoraConfig(
            task_type="SEQ_CLS" if scores else "CAUSAL_LM",
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=modules,
            target_parameters=weights or None,
            modules_to_save=list(dict.fromkeys(beside)) or None,
            trainable_token_indices=self._token_rows(model, tokenizer),
            rank_pattern=dict(self.rank_pattern or {}),
            alpha_pattern=dict(self.alpha_pattern or {}),
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
        )
        wrapped = self._wrap(model, config, base)
        self._check_patterns(model)
        _share_configs(model)
        copied = [
            name
            for name, module in model.named_modules()
            if isinstance(module, ModulesToSaveWrapper)
        ]
        missing = []
        for given in self.modules_to_save or ():
            if not any(f".{name}".endswith(f".{given}") for name in copied):
                missing.append(given)
        if missing:
            raise ConfigError(
                f"peft.modules_to_save={self.modules_to_save}: the model has no module "
                f"{missing[0]}."
            )
        # rows of single tokens are those of both ends where these are tied
        unties = is_tied and bool(self.modules_to_save) and not has_tied_head(model)
        how = (
            "; the embedding and the head are no longer tied: each is trained and saved apart"
            if unties
            else ""
        )
        return LoraAdapter(wrapped, self._describe(model) + how)

    def _token_rows(
        self, model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
    ) -> dict[str, list[int]] | None:
        """Returns the ids of trainable_tokens, by the names of the modules that have their rows.

        Raises ConfigError for a text that is no token, and rows that are trained already.
        """
        if not self.trainable_tokens:
            return None
        ids = []
        for place, token in enumerate(self.trainable_tokens):
            known = token
            if isinstance(token, str):
                known = place if tokenizer is None else tokenizer.get_vocab().get(token, -1)
            if not 0 <= int(known) < len(model.get_input_embeddings().weight):
                raise ConfigError(
                    f"peft.trainable_tokens={self.trainable_tokens}: {token} is no token of the "
                    "model: name tokens as tokenizer.json does, or add them, "
                    f'tokenizer.added_tokens=["{token}"].'
                )
            ids.append(int(known))
        names = {module: name for name, module in model.named_modules()}
        ends = [names[model.get_input_embeddings()]]
        # peft keeps the head of a tied model in step with the embedding; a score head has rows of
        # classes
        if not has_tied_head(model) and not has_score_head(model):
            ends.append(names[output_head(model)])
        for end in ends:
            if any(f".{end}".endswith(f".{name}") for name in self.modules_to_save or ()):
                raise ConfigError(
                    f"peft.trainable_tokens={self.trainable_tokens}: peft.modules_to_save="
                    f"{self.modules_to_save} trains all rows of {end}: remove one."
                )
        return {end: sorted({*ids}) for end in ends}

    def _check_patterns(self, model: transformers.PreTrainedModel) -> None:
        """Raises ConfigError for a pattern of no adapted layer, which peft would pass over."""
        adapted = [
            name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
        ]
        for setting in ("rank_pattern", "alpha_pattern"):
            pattern = getattr(self, setting) or {}
            for end in pattern:
                # as peft looks for them: a regular expression of the end of a name
                if not any(re.match(rf"(.*\.)?({end})$", name) for name in adapted):
                    there = listed(sorted({name.rpartition(".")[2] for name in adapted}))
                    raise ConfigError(
                        f"peft.{setting}={pattern}: no layer with an adapter is named {end}; there "
                        f"are {there}."
                    )

    def set_rates(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Gives the second matrices of adapters, in place, groups of `loraplus_lr_ratio` times the
        rate (LoRA+, arXiv:2402.12354), and with them what has one dim, as peft's
        `create_loraplus_optimizer` does; adapters of an embedding keep the rate.
        """
        if self.loraplus_lr_ratio == 1:
            return
        faster = {
            p
            for name, p in model.named_parameters()
            if ".lora_B." in name or (p.ndim == 1 and p.requires_grad)
        }
        for group in [*optimizer.param_groups]:
            chosen = [p for p in group["params"] if p in faster]
            others = [p for p in group["params"] if p not in faster]
            rate = group["lr"] * self.loraplus_lr_ratio
            group["params"] = others
            if chosen:
                optimizer.param_groups.append({**group, "params": chosen, "lr": rate})
        optimizer.param_groups[:] = [x for x in optimizer.param_groups if x["params"]]

    def _continue(self, model: transformers.PreTrainedModel, base: str) -> LoraAdapter:
        """Puts the adapter of a folder into `model`, in place, to be trained further."""
        folder = Path(str(self.adapter)).expanduser()
        if (folder / "adapter").is_dir():  # a run's
            folder /= "adapter"
        check_model_files("peft.adapter", folder)
        with explained(
            f"peft.adapter={self.adapter} cannot be read",
            *(OSError, KeyError, TypeError, ValueError, SafetensorError),
        ):
            config = peft.LoraConfig.from_pretrained(str(folder))
            weights = load_file(folder / "adapter_model.safetensors")
        config.inference_mode = False
        self._check_kind(config)
        # peft puts the name of the model there that it wraps, and warns where it was another
        made_for = config.base_model_name_or_path
        config.base_model_name_or_path = None
        # peft saves a whole embedding beside its adapter
        beside = [name for name in weights if ".base_layer." in name]
        if whole := [*(config.modules_to_save or []), *beside]:
            raise ConfigError(
                f"peft.adapter={self.adapter} holds {', '.join(whole)} as a whole, which is not "
                "continued: merge it into its base, of a run with automodel-lite export, else with "
                "peft's merge_and_unload, and begin a new adapter on that."
            )
        wrapped = self._wrap(model, config, base)
        # Before the base is read or sharded: FSDP then cuts the adapter's weights with all others.
        # the parameters, as files name them
        own = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        shapes = {name: weight.shape for name, weight in own.items()}
        if shapes != {name: weight.shape for name, weight in weights.items()}:
            only = sorted(own.keys() ^ weights.keys()) or ["a shape"]
            named = f", {made_for}" if made_for else ""
            raise ConfigError(
                f"peft.adapter={self.adapter} does not fit model.pretrained={base}: {only[0]} "
                f"differs: take the base that it was made for{named}."
            )
        self._check_own(config)
        if damaged := [name for name, weight in weights.items() if not weight.isfinite().all()]:
            raise ConfigError(
                f"peft.adapter={self.adapter}: {damaged[0]} holds values that are not finite."
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        described = replace(
            self,
            r=config.r,
            alpha=config.lora_alpha,
            use_dora=config.use_dora,
            modules_to_save=None,
        )
        return LoraAdapter(
            wrapped,
            f"{described._describe(model)}, continued from {self.adapter}",
            is_continued=True,
        )

    def _check_kind(self, config: peft.PeftConfig) -> None:
        """Raises ConfigError for an adapter that is none of LoRA's, or whose base is not the model
        in its files.
        """
        if not isinstance(config, peft.LoraConfig):
            kind = getattr(config.peft_type, "value", config.peft_type)
            what = f"is one of {kind}, and only those of LoRA are continued"
        elif isinstance(config.layer_replication, list | tuple):
            raise ConfigError(
                f"peft.adapter={self.adapter} was made with layer_replication="
                f"{config.layer_replication}, which uses layers of the base several times, each "
                "with an adapter of its own: begin a new adapter, without peft.adapter."
            )
        elif str(config.init_lora_weights).lower().partition("_niter_")[0] in _CHANGE_THE_BASE:
            what = (
                f"was made with init_lora_weights={config.init_lora_weights}, for which peft "
                "changes the base when it loads it"
            )
        else:
            return
        raise ConfigError(
            f"peft.adapter={self.adapter} {what}: merge it with peft, "
            "PeftModel.from_pretrained(base, adapter).merge_and_unload()"
            ".save_pretrained(folder), and begin a new adapter with model.pretrained=folder."
        )

    def _check_own(self, config: peft.LoraConfig) -> None:
        """Raises ConfigError for a setting that is not left as it was and that the continued
        adapter has another value of, which counts.
        """
        own: dict[str, Any] = {
            "r": config.r,
            "alpha": config.lora_alpha,
            "dropout": config.lora_dropout,
            "use_dora": config.use_dora,
            "use_rslora": config.use_rslora,
            "experts": bool(config.target_parameters),
            "modules_to_save": None,
            "rank_pattern": config.rank_pattern or None,
            "alpha_pattern": config.alpha_pattern or None,
        }
        targets = config.target_modules or ()
        targets = [targets] if isinstance(targets, str) else sorted(targets)
        if isinstance(self.target_modules, list) and not same_targets(self.target_modules, targets):
            own["target_modules"] = targets
        for name, value in own.items():
            asked = getattr(self, name)
            if asked not in (value, getattr(Lora, name)):
                raise ConfigError(
                    f"peft.{name}={asked}: the adapter that is continued, peft.adapter="
                    f"{self.adapter}, has {value}: leave it out, or begin a new adapter."
                )

    def _wrap(
        self, model: transformers.PreTrainedModel, config: peft.LoraConfig, base: str
    ) -> peft.PeftModel:
        """Puts the adapter's layers into `model`, in place. Raises ConfigError for one of an
        embedding and a head that share a weight: merged, it would change the other, too.
        """
        is_tied = has_tied_head(model)
        cause = f"target_modules={self.target_modules}"
        if self.adapter:
            cause = f"adapter={self.adapter}: adapter_config.json"
        refusals = (ValueError, TypeError, AttributeError, KeyError)
        with explained(f"peft.{cause} cannot be used", *refusals):
            # peft makes its own layers where the base's are, and on the meta device their numbers
            # would be lost: there, one number is expanded, of the right shape and dtype and without
            # memory.
            _replace(
                model, lambda p: p.is_meta, lambda p: p.new_zeros(1, device="cpu").expand(p.shape)
            )
            # a base that is read whole drew numbers before its weights came, a sharded one none
            torch.manual_seed(torch.initial_seed())
            wrapped = peft.get_peft_model(model, config)
        _replace(
            model,
            lambda p: p.untyped_storage().nbytes() < p.numel() * p.element_size(),
            lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"),
        )
        ends = {"embedding": model.get_input_embeddings(), "head": output_head(model)}
        for name, module in ends.items():
            if is_tied and isinstance(module, BaseTunerLayer):
                raise ConfigError(
                    f"peft.adapter={self.adapter} adapts the {name} of model.pretrained={base}, "
                    "whose embedding and head share a weight, so that it could not be merged: "
                    "begin a new adapter with peft.modules_to_save=[lm_head], or take a base whose "
                    "config.json has tie_word_embeddings=false."
                )
        # Without peft's cast of a layer's input to its adapter's fp32, which autocast casts back: a
        # 1B model at 8,192 tokens moves 289 GB per step with both casts and 225 without (counted).
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                vars(module)["cast_input_dtype_enabled"] = False
        # A folder by its absolute path, so that the adapter finds it from anywhere; a hub name as
        # it is.
        folder = Path(base).expanduser()
        wrapped.peft_config["default"].base_model_name_or_path = (
            str(folder.resolve()) if folder.is_dir() else base
        )
        return wrapped  # type: ignore[return-value]

    def _describe(self, model: transformers.PreTrainedModel) -> str:
        adapted = [
            name.split(".lora_A")[0].split(".")
            for name, _ in model.named_parameters()
            if ".lora_A" in name
        ]
        names = {"experts" if {"experts", "base_layer"} & {*name} else name[-1] for name in adapted}
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        whole = f", whole {', '.join(self.modules_to_save)}" if self.modules_to_save else ""
        if has_score_head(model) and "score" not in (self.modules_to_save or ()):
            whole += ", whole score"
        if self.trainable_tokens:
            whole += f", rows of {counted(len(self.trainable_tokens), 'token')}"
        for pattern, number in ((self.rank_pattern, "r"), (self.alpha_pattern, "alpha")):
            for end, value in (pattern or {}).items():
                whole += f", {number} {value} on {end}"
        kind = "dora" if self.use_dora else "lora"
        where = ", ".join(sorted(names)) + whole
        return f"{kind} r {self.r}, alpha {self.alpha} on {where}: {trained / 1e6:,.2f} M trained"


@dataclass(frozen=True)
class QLora(Lora):
    """The config node `peft`: QLoRA (Dettmers et al., 2023), LoRA on frozen weights in 4-bit NF4
    through bitsandbytes, which is slow on a CPU.
    """

    is_quantized: ClassVar[bool] = True
    double_quant: bool = True  # also quantize the scales, saves 0.4 bits per weight

    def __post_init__(self) -> None:
        if find_spec("bitsandbytes") is None:  # transformers imports it late
            raise missing_package("peft=qlora", "bitsandbytes")

    def check(self, device: torch.device, strategy: str, pretrained: str | None) -> None:
        """Raises ConfigError under FSDP, which cannot cut 4-bit blocks."""
        super().check(device, strategy, pretrained)
        if strategy == "fsdp":
            raise ConfigError(
                "peft=qlora keeps the whole 4-bit model on each GPU and cannot be sharded: set "
                "mesh.strategy=ddp, or use peft=lora."
            )

    def load_arguments(
        self, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> dict[str, Any]:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=self.double_quant,
            bnb_4bit_compute_dtype=dtype,
        )
        return {"quantization_config": quantization, "device_map": {"": device}}

    def unquantized(self) -> Lora:
        return Lora(**{setting.name: getattr(self, setting.name) for setting in fields(Lora)})

    def adapt(
        self,
        model: transformers.PreTrainedModel,
        base: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> LoraAdapter:
        """Adapts as `Lora.adapt` does. Never packed for the CPU kernel that `eval()` selects
        (bitsandbytes 0.50, AVX-512): it has no gradient, and the weights would stay packed in
        training.
        """
        for module in model.modules():
            if "support_avx512bf16_for_cpu" in vars(module):
                vars(module)["support_avx512bf16_for_cpu"] = False
        return super().adapt(model, base, tokenizer)


# values of init_lora_weights
_CHANGE_THE_BASE = frozenset({"pissa", "olora", "corda", "loftq", "lora_ga"})


def _share_configs(model: nn.Module) -> None:
    """Gives the copies of modules that are trained whole the config of their originals, by which
    transformers tells encoders of images from the language model.
    """
    for wrapper in model.modules():
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        copy: Any = wrapper.modules_to_save["default"]
        for own, original in zip(copy.modules(), wrapper.original_module.modules()):
            if "config" in vars(original):
                own.config = original.config


def _replace(
    model: nn.Module, which: Callable[[Tensor], bool], make: Callable[[Tensor], Tensor]
) -> None:
    """Parameters that modules share stay shared."""
    made = {p: nn.Parameter(make(p), p.requires_grad) for p in model.parameters() if which(p)}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in made:
                module._parameters[name] = made[parameter]
