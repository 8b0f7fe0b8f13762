"""Which layers get an adapter.

Adapters go beside attention, dense MLPs and shared experts, beside routed experts on request, never
beside a router. Only the language model's layers are adapted, unless `target_modules` names layers
that a composite's towers alone have (qkv, or with wildcards vision_tower.*.q_proj); the output head
has linear layers, too. A mixture's router is recognized by its shape: beside the experts, a
linear layer with one output for each of them (or a single one, which gates the shared expert).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator

import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from automodel_lite.attention.spec import FAMILIES
from automodel_lite.errors import ConfigError, listed
from automodel_lite.models.layers import decoder_layers, has_experts, output_head, towers


def lora_targets(
    model: transformers.PreTrainedModel, wanted: str | list[str], experts: bool
) -> tuple[list[str], list[str]]:
    """Chooses what is adapted: "all-linear", or names such as [q_proj, v_proj], also outside the
    layers (lm_head).

    Returns names that end a module's, and a weight's: of fused experts [experts, out, in], and of
    some layers.
    experts      the routed experts too
    Raises ConfigError for a name that no layer has which can be adapted.
    """
    names = {module: name for name, module in model.named_modules()}
    linear, fused = _candidates(model, names, experts)
    if experts and not any(True for layer in decoder_layers(model) for _ in _mixtures(layer)):
        has_any = has_experts(model)
        why = "the experts of {} are one matrix (DBRX)" if has_any else "{} has no experts"
        raise ConfigError(f"peft.experts=true: {why.format(type(model).__name__)}: leave it out.")
    if isinstance(wanted, list):
        ends = [model.get_input_embeddings(), output_head(model)]
        is_tied = has_tied_head(model)
        # merged into a weight that both have, an adapter of one would change the other
        linear += [] if is_tied else [names[end] for end in ends]
        of_towers = [
            names[module]
            for tower in towers(model)
            for module in tower.modules()
            if type(module) is nn.Linear
        ]
        # a name that the language model has, too, is meant there
        chosen = [end for end in wanted if not any(_ends(name, end) for name in linear)]
        linear += [name for name in of_towers if any(_ends(name, end) for end in chosen)]
        if unknown := [end for end in wanted if not any(_ends(name, end) for name in linear)]:
            why = ""
            if is_tied and any(_ends(names[end], unknown[0]) for end in ends):
                why = " (embedding and head share a weight: peft.modules_to_save trains it)"
            there = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"peft.target_modules={wanted}: no layer that can be adapted is named {unknown[0]}"
                f"{why}; there are {listed(there)}."
            )
        linear = [name for name in linear if any(_ends(name, end) for end in wanted)]
    # Only beside fused experts does peft misread these names; elsewhere modules are adapted as
    # usual.
    by_weight = {
        name
        for name in linear
        if fused and name.rpartition(".")[2] in FAMILIES["taken_for_experts"]
    }
    weights = [f"{name}.weight" for name in by_weight]
    if experts:
        weights = [*fused, *weights]
    return (
        _shortest({name: 1 for name in linear if name not in by_weight}, names.values()),
        # The end of a weight has its module's name: experts.gate_up_proj, mlp.up_proj.weight.
        _shortest(
            {name: 3 if name.endswith(".weight") else 2 for name in weights},
            dict(model.named_parameters()),
        ),
    )


def has_tied_head(model: transformers.PreTrainedModel) -> bool:
    """Returns whether the embedding and the head are one weight."""
    return model.get_input_embeddings().weight is output_head(model).weight


def same_targets(wanted: list[str], own: list[str]) -> bool:
    """Returns whether names of target_modules mean the layers that an adapter names."""
    pairs = [(name, end) for name in own for end in wanted if _ends(name, end)]
    return {name for name, _ in pairs} == {*own} and {end for _, end in pairs} == {*wanted}


def _ends(name: str, end: str) -> bool:
    return fnmatch.fnmatchcase(f".{name}", f"*.{end}")


def _candidates(
    model: transformers.PreTrainedModel, names: dict[nn.Module, str], experts: bool
) -> tuple[list[str], list[str]]:
    """Returns whole names of linear layers, those of experts only with `experts`, and of fused
    weights of experts.
    """
    family = model.config.get_text_config().model_type
    refused = FAMILIES["not_adapted"].get(family, ())
    linear = []
    fused = []
    for layer in decoder_layers(model):
        mixtures = list(_mixtures(layer))
        of_experts = {module for _, routed in mixtures for module in routed.modules()}
        # A router is named so, or has one output for each expert, or a single one, which gates the
        # shared expert.
        skipped = {module for name, module in layer.named_modules() if "router" in name}
        for block, routed in mixtures:
            sizes = {
                1,
                len(routed)
                if isinstance(routed, nn.ModuleList)
                else len(_fused_weights(routed)[0][1]),
            }
            for name, module in block.named_modules():
                is_beside = isinstance(module, nn.Linear) and module not in of_experts
                if is_beside and (
                    module.out_features in sizes or name.rpartition(".")[2] == "gate"
                ):
                    skipped.add(module)
        if not experts:
            skipped |= of_experts
        adapted = [
            names[x]
            for x in layer.modules()
            if isinstance(x, (nn.Linear, nn.Embedding, Conv1D)) and x not in skipped
        ]
        linear += [name for name in adapted if not {*name.split(".")} & {*refused}]
        fused += [
            f"{names[x]}.{name}"
            for x in layer.modules()
            if x in of_experts
            for name, _ in _fused_weights(x)
        ]
    return linear, fused


def _mixtures(layer: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yields (block, its routed experts): a list of MLPs, or one module with fused weights."""
    for block in layer.modules():
        for name, child in block.named_children():
            kind = type(child).__name__.lower()
            is_list = isinstance(child, nn.ModuleList) and "expert" in name + kind
            if is_list or ("expert" in kind and _fused_weights(child)):
                yield block, child


def _fused_weights(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, weight)
        for name, weight in module.named_parameters(recurse=False)
        if weight.ndim == 3
    ]


def _shortest(chosen: dict[str, int], among: Iterable[str]) -> list[str]:
    """Returns the last parts of the chosen names, so many of each, if they mean these alone, as
    readers of adapters like them.
    """
    ends = sorted({".".join(name.split(".")[-num_parts:]) for name, num_parts in chosen.items()})
    return (
        ends
        if {name for name in among if any(_ends(name, end) for end in ends)} == {*chosen}
        else sorted(chosen)
    )
