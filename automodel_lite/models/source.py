"""Causal LMs from a folder, a hub name or a config.

Here and elsewhere the models' code is named as `transformers.PreTrainedModel`, because transformers
imports it at its first use: 2 CPU-s that an error in the settings or the data need not wait for.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from automodel_lite.attention.spec import FAMILIES, config_value
from automodel_lite.classes import ONE_SCORE, Classes
from automodel_lite.config.rules import OneOf, PathStr, Range
from automodel_lite.errors import (
    ConfigError,
    did_you_mean,
    explained,
    format_value,
    listed,
)
from automodel_lite.models.balance import Balance, balance_of
from automodel_lite.models.freezing import freeze_named
from automodel_lite.models.layers import freeze_towers, with_head
from automodel_lite.models.mtp import add_heads
from automodel_lite.models.reading import (
    check_finite,
    check_source,
    drop_kernels,
    load_config,
    loading_errors,
)
from automodel_lite.models.score_head import (
    SCORE_WEIGHT,
    draw_score_head,
    give_score_head,
    is_scorer,
)
from automodel_lite.models.settings import (
    apply_settings,
    check_described,
    check_settings,
    describe_with,
)

if TYPE_CHECKING:
    from automodel_lite.models.sharded import Spread

DEQUANTIZED = frozenset({"fp8", "mxfp4"})
"""Checkpoints of these kinds are loaded as plain weights; their exports are in the
config's dtype.
"""

_OFFERED = ("auto", "sorted_mm", "grouped_mm", "batched_mm", "sonicmoe", "eager")
"""Of transformers', those that have a backward pass."""
Experts = Annotated[str, OneOf(_OFFERED)]


class CausalLM:
    """The config node `model`: where the model comes from.

    `config` overrides keys of the loaded config. Without `pretrained` it is the whole config of a
    model from scratch: it needs `model_type` (llama, qwen3 ...); the vocabulary size and special
    tokens are the tokenizer's. `experts` is sorted_mm (models/experts.py) or transformers'
    `experts_implementation`: grouped_mm (one product of groups), batched_mm, eager (one by one) or
    sonicmoe (a kernel for Hopper that the package `kernels` downloads).

    key  of this node, by which errors name a setting: `teacher` for a frozen second model
    """

    def __init__(
        self,
        pretrained: PathStr | None = None,  # a folder or a hub name; null = from scratch, by config
        config: dict[str, Any] | None = None,
        revision: str | None = None,  # of a hub repository: a branch, a tag or a commit
        # run the repository's own code; command line only, with a commit
        trust_remote_code: bool = False,
        # how experts are computed; auto = sorted_mm on a GPU, else what transformers takes
        experts: Experts = "auto",
        # weight of the load-balancing loss of experts; 0 = none
        router_aux_loss: Annotated[float, Range(0)] = 0.0,
        # weight of the loss of heads that predict further tokens; 0 = they are kept as they are
        mtp_loss: Annotated[float, Range(0)] = 0.0,
        # add rows for tokens that the tokenizer has and the model lacks
        resize_embeddings: bool = False,
        # weights that are not trained, by name: [embed_tokens, "layers.[0-7]"]
        freeze: list[str] | None = None,
        # train encoders of images, and projections, too; model.freeze leaves some of them out
        train_towers: bool = False,
        # lm: the likelihood of tokens; score: numbers of a whole document, by
        # AutoModelForSequenceClassification (loss=classify, loss=reward)
        head: Annotated[str, OneOf(("lm", "score"))] = "lm",
        *,
        key: str = "model",
    ) -> None:
        self.key = key
        self.train_towers = train_towers
        self.resize_embeddings = resize_embeddings
        self.freeze = list(freeze or ())
        self._described: list[tuple[dict[str, Any], PretrainedConfig]] = []
        self.notes: list[str] = []  # what the start block says about the model that was built
        self.router_aux_loss = router_aux_loss
        self.mtp_loss = mtp_loss
        self.head = head
        # of a score head, once the data are known: its classes, and the token that ends no document
        self.classes: Classes | None = None
        self.padding_id: int | None = None
        self.experts = experts
        self.pretrained = pretrained
        self.source = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
        # a branch can be moved onto other code
        is_pinned = re.fullmatch(r"[0-9a-f]{40}", revision or "")
        if trust_remote_code and not is_pinned and not (pretrained and Path(pretrained).is_dir()):
            raise ConfigError(
                f"{key}.trust_remote_code=true runs code of the model's repository: pin the commit "
                f"that you have reviewed, {key}.revision=<40 hex digits>, not {revision}."
            )
        if revision and (not pretrained or Path(pretrained).expanduser().is_dir()):
            place = "is a folder" if pretrained else "is from scratch"
            raise ConfigError(
                f"{key}.revision={revision} is of a hub repository, and "
                f"{key}.pretrained={format_value(pretrained)} {place}: leave it out."
            )
        self.overrides = dict(config or {})
        if pretrained and "model_type" in self.overrides:
            raise ConfigError(
                f"{key}.pretrained={pretrained} loads a model while {key}.config describes one "
                f"from scratch: choose {key}=pretrained as well."
            )
        if not pretrained and "model_type" not in self.overrides:
            raise ConfigError(
                f"{key}.pretrained=null needs {key}.config.model_type (llama, qwen3 ...), or a "
                "folder to load."
            )
        if pretrained:
            check_source(f"{key}.pretrained", pretrained)

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the overrides as they are typed: `model.config.hidden_size` -> value."""
        return {f"{self.key}.config.{name}": value for name, value in self.overrides.items()}

    def config(self, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
        """Returns the model's config; a model from scratch gets the tokenizer's vocabulary and
        special tokens.
        """
        config = self._config_as_stored(tokenizer)
        if self._grows(config, tokenizer):
            config.get_text_config().vocab_size = len(tokenizer)
        return config

    def _config_as_stored(self, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
        special = ("bos_token_id", "eos_token_id", "pad_token_id")
        defaults = {
            "vocab_size": len(tokenizer),
            **{key: getattr(tokenizer, key) for key in special},
        }
        # a copy of a source may have other overrides
        asked = {"defaults": defaults, "overrides": self.overrides}
        asked |= {"head": self.head_facts()}
        if asked not in [known for known, _ in self._described]:
            # Described once per start; each caller gets a copy, as models write into theirs.
            self._described = [(asked, self.resolve_model_config(defaults))]
        return copy.deepcopy(self._described[0][1])

    def _grows(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
        return self.resize_embeddings and config.get_text_config().vocab_size < len(tokenizer)

    def resolve_model_config(self, defaults: dict[str, Any]) -> PretrainedConfig:
        """Returns the loaded config with the overrides; of a model from scratch, the overrides over
        `defaults`.

        Raises ConfigError for a setting that the model does not have, or not with this value.
        """
        if self.pretrained:
            config = load_config(self.pretrained, self.source, self.key)
            check_settings(self.overrides, config, self.key, is_loaded=True)
            describe_with(self.settings, partial(apply_settings, config, self.overrides))
            check_described(config, self.settings)
            quantization = quantization_of(config)
            method = quantization and str(quantization["quant_method"])
            # weights that cannot be turned back into what is trained
            if method and method not in DEQUANTIZED:
                raise ConfigError(
                    f"{self.key}.pretrained={self.pretrained} is quantized ({method}), and only "
                    f"{' and '.join(sorted(DEQUANTIZED))} weights are dequantized here: use the "
                    "original checkpoint (peft=qlora holds one in 4 bits)."
                )
            is_zeroed = config.model_type in FAMILIES["zeroes_padding"]
            if is_zeroed and config.pad_token_id is not None:
                raise ConfigError(
                    f"{self.key}.pretrained={self.pretrained}: transformers zeroes row "
                    f"{config.pad_token_id} of this family's embedding when it loads it: set "
                    f"{self.key}.config.pad_token_id=null."
                )
            self._choose_head(config)
            return config
        settings = {**defaults, **self.overrides}
        kind = settings.pop("model_type")
        # with the names of all families
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            near = did_you_mean(str(kind), CONFIG_MAPPING)
            raise ConfigError(
                f"{self.key}.config.model_type={kind}: transformers has no such model{near}"
            )
        usual = describe_with({}, lambda: transformers.AutoConfig.for_model(kind))
        check_settings(settings, usual, self.key)
        # in one call: other values follow from these, such as head_dim
        made: PretrainedConfig = describe_with(
            self.settings, lambda: transformers.AutoConfig.for_model(kind, **settings)
        )
        check_described(made, self.settings)
        self._choose_head(made)
        return made

    def head_facts(self) -> dict[str, Any]:
        """Returns what a run's folder keeps of a score head, which its settings do not say; {} of
        another head.
        """
        if self.head == "lm":
            return {}
        classes = self.classes or ONE_SCORE
        return {"kind": classes.kind, "names": classes.names, "padding_id": self.padding_id}

    def use_head_facts(self, facts: Mapping[str, Any]) -> None:
        """Takes what `head_facts` gave."""
        if self.head == "score" and facts:
            self.classes = Classes(facts["kind"], tuple(facts["names"]))
            self.padding_id = facts["padding_id"]

    def has_score_head(self) -> bool:
        """Returns whether the weights that are loaded hold a score head."""
        if not self.pretrained:
            return False
        return is_scorer(load_config(self.pretrained, self.source, self.key))

    def _choose_head(self, config: PretrainedConfig) -> None:
        """Writes into a config, in place, which head the model has; raises ConfigError for a family
        or a checkpoint that has not this one.
        """
        if self.head == "score":
            give_score_head(config, self.classes, self.key, self.pretrained)
            if self.padding_id is not None:
                config.get_text_config().pad_token_id = self.padding_id
        elif is_scorer(config):
            raise ConfigError(
                f"{self.key}.pretrained={self.pretrained} has a score head "
                f"({config.architectures[0]}) in place of one over tokens",
                key=f"{self.key}.pretrained",
                cure="--config-name classify trains it and compares its classes with labels, "
                "--config-name reward with pairs of answers; else take the model that it began as",
            )

    def build(
        self,
        tokenizer: PreTrainedTokenizerBase,
        load_arguments: dict[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> transformers.PreTrainedModel:
        """Builds the whole model with fp32 weights, on the CPU unless `load_arguments`, more of
        `from_pretrained`, name a device.

        device  where weights from scratch are drawn, if it has room for them

        Raises ConfigError when the vocabulary does not fit, or when loaded weights miss or do not
        fit a part of the model.
        """
        config = self._checked_config(tokenizer)
        if self.pretrained:
            # with the models' code
            from automodel_lite.models.checkpoints import converting_exactly

            with converting_exactly():
                lm = self._load(config, lambda load: load(), load_arguments or {})
            if self._grows(config, tokenizer):
                # Each new row is the mean of those before: a token about which nothing is known,
                # and the same on every rank; random rows would begin with logits above those of all
                # other tokens.
                # Some families look a token up in more than one table (Gemma 3n, Gemma 4).
                before = embedding_rows(lm)
                rows = len(tokenizer)
                known = {name: weight.shape for name, weight in lm.named_parameters()}
                # xLSTM's code for new rows fails
                with explained(
                    f"{self.key}.resize_embeddings=true: transformers cannot grow "
                    f"{type(lm).__name__}",
                    *(AttributeError, NotImplementedError),
                ):
                    with_head(lm).resize_token_embeddings(rows, mean_resizing=False)
                for name, grown in lm.named_parameters():
                    if grown.shape != known[name]:
                        first = known[name][0]
                        grown.data[first:] = grown.data[:first].mean(0)
                self.notes.append(
                    f"the embedding has {rows} rows in place of {before}; each new one begins as "
                    "the mean of the others"
                )
        else:
            with _place_to_draw(config, device) as place:
                lm = model_class(config).from_config(config, dtype=torch.float32)
                self.add_heads(lm)
                lm.to(place)
        self.freeze_weights(lm)
        return lm.train()

    def build_sharded(
        self,
        tokenizer: PreTrainedTokenizerBase,
        spread: Spread,
        device: torch.device,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> transformers.PreTrainedModel:
        """Builds the model as `spread` shards it, with the weights that `build` gives; raises
        ConfigError as it does.

        turn  entered while weights are read

        Sharded on the meta device, before it has weights, of which each rank then reads its own
        parts; whole on each rank first from scratch, and where the parts of a checkpoint do not lie
        along the shards.
        """
        # with the models' code
        from automodel_lite.models.sharded import CannotReadSlicesError, load_shards

        config = self._checked_config(tokenizer)

        def spread_trained(lm: transformers.PreTrainedModel) -> None:
            self.freeze_weights(lm)
            spread(lm)
            reading.enter_context(turn())

        # Blocks, scales and rows that are added do not lie along the shards.
        if self.pretrained and not quantization_of(config) and not self._grows(config, tokenizer):
            with suppress(CannotReadSlicesError), ExitStack() as reading:
                return self._load(
                    config, partial(load_shards, spread=spread_trained, device=device), {}
                ).train()
        with turn() if self.pretrained else nullcontext():
            lm = self.build(tokenizer, device=device)
        spread(lm)
        return lm

    def _load(
        self,
        config: PretrainedConfig,
        read: Callable[[Callable[..., Any]], Any],
        more: dict[str, Any],
    ) -> transformers.PreTrainedModel:
        """Loads the whole model, or this rank's shards of it; notes what the checkpoint holds
        beside the model.

        read  calls `from_pretrained` and returns its model and its report
        more  arguments of `from_pretrained`
        """
        assert self.pretrained
        # with transformers' quantizers
        from automodel_lite.models.quantized import dequantizing, forget, plain_arguments

        quantization = quantization_of(config)
        arguments = {**self.source, **more}
        if quantization and "quantization_config" not in arguments:
            arguments |= plain_arguments(quantization)
        load = partial(
            model_class(config).from_pretrained,
            self.pretrained,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, and an error below
            **arguments,
        )
        with ExitStack() as around:
            around.enter_context(loading_errors(self.pretrained, config, quantization))
            if quantization:
                around.enter_context(dequantizing())
            if self.mtp_loss:
                from automodel_lite.models.checkpoints import extending

                around.enter_context(extending(self.add_heads))
            model, report = read(load)
        # Weights that are missing are random: a model that trains and was never loaded.
        missing = sorted(report["missing_keys"])
        if self.head == "score" and SCORE_WEIGHT in missing:
            missing.remove(SCORE_WEIGHT)
            draw_score_head(model)
            self.notes.append("the score head is new: its weights are drawn")
        mismatched = sorted(
            str(key[0] if isinstance(key, tuple) else key) for key in report["mismatched_keys"]
        )
        if missing or mismatched:
            of_heads = self.mtp_loss and any(re.search("mtp|eh_proj", name) for name in missing)
            cure = (
                f" The checkpoint has no such heads: set {self.key}.mtp_loss=0." if of_heads else ""
            )
            raise ConfigError(
                f"the model {self.pretrained}: {len(missing)} weights are missing and "
                f"{len(mismatched)} have a different shape than in the config, "
                f"{(missing + mismatched)[0]} first; they would be initialized at random.{cure}"
            )
        # exported with this config, they would be tied by other engines
        for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
            if model.get_parameter(one) is not model.get_parameter(other):
                raise ConfigError(
                    f"the config of {self.pretrained} ties {one} to {other}, and the checkpoint "
                    f"has different values for them: set {self.key}.config.tie_word_embeddings="
                    "false."
                )
        if quantization:
            forget(model, report["unexpected_keys"])
        check_finite(model, f"the model {self.pretrained}")
        taken_over = heads_apart(report["unexpected_keys"], config)
        if self.head == "score":  # what it takes the place of
            taken_over = taken_over | {"lm_head.weight", "lm_head.bias", "embed_out.weight"}
        if unknown := sorted(set(report["unexpected_keys"]) - taken_over):
            self.notes.append(
                f"{len(unknown)} weights of the checkpoint are not part of the model and not "
                f"exported: {listed(unknown, 3)}"
            )
        return model

    def add_heads(self, lm: transformers.PreTrainedModel) -> None:
        """Gives a model the heads that `mtp_loss` trains, in place; raises ConfigError for a family
        without any.
        """
        if self.mtp_loss:
            add_heads(lm)

    def with_experts(self, experts: str) -> CausalLM:
        """Returns the same source with the experts computed so."""
        chosen = copy.copy(self)
        chosen.experts = experts
        return chosen

    def balance(self, lm: transformers.PreTrainedModel) -> Balance | None:
        """Returns the load-balancing loss of `router_aux_loss`, None without; raises ConfigError
        for a family without any.
        """
        weight = self.router_aux_loss
        return balance_of(lm, weight) if weight else None

    def freeze_weights(self, lm: transformers.PreTrainedModel) -> None:
        """Freezes what is not trained, in place; adds to `notes` what `freeze` names."""
        if not self.train_towers:
            freeze_towers(lm, self.dtype)
        if self.freeze:
            self.notes += freeze_named(lm, self.freeze)

    def stored_dtype(self, config: PretrainedConfig) -> torch.dtype:
        """Returns that of the checkpoint, as its config names it; fp32 without one."""
        stored = config.dtype if self.pretrained else None
        return stored if isinstance(stored, torch.dtype) else torch.float32

    def _checked_config(self, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
        config = self._config_as_stored(tokenizer)
        self.dtype = self.stored_dtype(config)
        rows = config.get_text_config().vocab_size
        if len(tokenizer) > rows and not self._grows(config, tokenizer):
            raise ConfigError(
                f"the tokenizer has {len(tokenizer)} tokens, the model's embedding {rows} rows: "
                "use the model's own tokenizer; for tokens that you have added set "
                f"{self.key}.resize_embeddings=true, for a model from scratch "
                f"{self.key}.config.vocab_size={len(tokenizer)}."
            )
        # Set before the model is built: its experts choose their function in the constructor.
        if self.experts != "auto":
            # with the models' code
            from automodel_lite.models.experts import use_experts

            use_experts(config, self.experts)
        return config


def model_class(config: PretrainedConfig) -> Any:
    """Returns the Auto class that loads the whole model: a composite's own class keeps its towers,
    where AutoModelForCausalLM would leave them out, or does not know it.
    """
    if is_scorer(config):
        return transformers.AutoModelForSequenceClassification
    for_text = transformers.AutoModelForCausalLM
    # A language model that is listed by itself; a composite's entry there would drop its towers
    # from the export.
    if config.get_text_config() is config and type(config) in for_text._model_mapping:
        return for_text
    for auto in (transformers.AutoModelForMultimodalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    return for_text


def load_whole(
    folder: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> transformers.PreTrainedModel:
    """Loads a folder or hub name by plain `from_pretrained`, under its own class."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    drop_kernels(config)
    return model_class(config).from_pretrained(
        folder, config=config, dtype=dtype, trust_remote_code=trust_remote_code
    )


def heads_apart(keys: Collection[str], config: PretrainedConfig) -> set[str]:
    """Returns the keys of a checkpoint that belong to heads behind the layers of the config
    (DeepSeek V3, GLM 4.5). transformers ignores them for the published numbers of layers alone.
    """
    num_layers = config_value(config.get_text_config(), "num_hidden_layers", 0)
    found = set()
    for key in keys:
        match = re.match(r"(.*\blayers\.(\d+)\.)", key)
        if match is None or int(match[2]) < num_layers:
            continue
        is_copy = key.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
        if is_copy or f"{match[1]}eh_proj.weight" in keys:
            found.add(key)
    return found


def quantization_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """Returns `quantization_config` of a checkpoint whose weights are quantized, also of a
    composite's text part.
    """
    for part in (config, config.get_text_config()):
        found = config_value(part, "quantization_config")
        if found:
            return dict(found if isinstance(found, dict) else found.to_dict())
    return None


@contextmanager
def _place_to_draw(config: PretrainedConfig, device: torch.device | None) -> Iterator[torch.device]:
    """Enters the device on which new weights are drawn: a GPU that holds all of them, or the CPU,
    whose one generator takes 15 s per billion, and on which each rank of a host draws its own 4
    bytes per weight.
    """
    place = torch.device("cpu")
    if device is not None and device.type == "cuda":
        needed = sum(parameter.nbytes for parameter in describe(config).parameters())
        if needed < 0.8 * torch.cuda.mem_get_info(device)[0]:
            place = device
    with place:
        yield place


def describe(
    config: PretrainedConfig, dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """Builds a config's model on the meta device: shapes without memory. Remote code was trusted
    already.
    """
    own = copy.deepcopy(config)  # from_config writes the dtype into it
    with torch.device("meta"):
        made = model_class(own).from_config(
            own, dtype=dtype, trust_remote_code=is_remote_code(type(own))
        )
    for parameter in made.parameters():
        if not parameter.is_meta:  # drawn by a function that asks for no device (DiffLlama)
            on_meta = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, on_meta)
    return made


def is_remote_code(kind: type) -> bool:
    """Is the class from a model's repository? transformers puts such code into a package of its
    own.
    """
    return kind.__module__.startswith("transformers_modules.")


def embedding_rows(model: transformers.PreTrainedModel) -> int:
    """Returns how many token ids the model knows."""
    embedding: Any = model.get_input_embeddings()
    return len(embedding.weight)
