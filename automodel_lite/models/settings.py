"""What `model.config.*` sets: known to the family, a size that a model can have, written where the
family keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PretrainedConfig
from transformers.utils import is_timm_available

from automodel_lite.attention.spec import FAMILIES, config_value
from automodel_lite.errors import ConfigError, did_you_mean, format_value, is_limit, one_line

Settings = dict[str, Any]  # of a config.json, or of a part of it


def check_described(config: PretrainedConfig, typed: Settings) -> None:
    """Raises ConfigError for sizes that no model can have, and for a missing package; libraries
    meet them late, or never.

    typed  what the user has set, by its whole name
    """
    # with the names of all families
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    # timm's towers are found late, in the constructor: after minutes of reading a large config's
    # other parts.
    towers = [config_value(config, key) for key in config.sub_configs]
    classes = [MODEL_MAPPING_NAMES.get(tower.model_type) for tower in towers if tower]
    if "TimmWrapperModel" in classes and not is_timm_available():
        raise ConfigError(
            f"model_type={config.model_type} needs the package timm for its vision tower: pip "
            "install timm."
        )
    text = config.get_text_config()
    for key, most in FAMILIES["largest_sizes"].items():
        value = _number(text, [key])
        if value is not None and value < 1:
            raise cannot_work(f"{key}={value} must be at least 1.", typed)
        if value is not None and value > most:
            raise cannot_work(f"{key}={value:,} must be at most {most:,}.", typed)
    # transformers finds this in the first forward, as a product of shapes that do not fit.
    heads, kv_heads = (
        _number(text, [key]) for key in ("num_attention_heads", "num_key_value_heads")
    )
    if heads and kv_heads and heads % kv_heads:
        raise cannot_work(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}.",
            typed,
        )
    chosen = experts_per_token(text)
    experts = number_of_experts(text)
    if chosen and experts and chosen > experts:
        raise cannot_work(f"a token cannot be sent to {chosen} of {experts} experts.", typed)


def number_of_experts(text: PretrainedConfig) -> int | None:
    """Returns how many experts each sparse layer has; None where the config names no number."""
    return _number(text, FAMILIES["experts"])


def experts_per_token(text: PretrainedConfig) -> int | None:
    """Experts that each token is sent to; None where the config names no number."""
    return _number(text, FAMILIES["experts_per_token"])


def _number(config: PretrainedConfig, keys: Sequence[str]) -> int | None:
    """Returns the first of the keys' numbers, also of those that stand in a dict (DBRX's). As it is
    written: attributes that may differ by layer raise errors.
    """
    written = config.to_dict()
    for part in [*written.values()]:
        written = {**part, **written} if isinstance(part, dict) else written
    for key in keys:
        value = written.get(config.attribute_map.get(key, key))
        if isinstance(value, int):
            return value
    return None


def apply_settings(config: PretrainedConfig, overrides: Settings) -> None:
    """Writes the settings into the config, in place, also into those of a composite's parts."""
    inner = _inner_configs(config)
    for key, value in overrides.items():
        if key in inner and isinstance(value, dict):
            apply_settings(inner[key], value)
        elif key in OF_ROPE and key not in config.to_dict():
            config.rope_parameters = _rope_with(config, key, value)
        else:
            setattr(config, key, value)
    # Frequencies follow from several keys, which transformers completes and checks only when it is
    # told to.
    if not overrides.keys().isdisjoint({*OF_ROPE, "rope_parameters"}):
        config.standardize_rope_params()
        config.validate_rope()


def _rope_with(config: PretrainedConfig, key: str, value: Any) -> Settings:
    """Returns the `rope_parameters` of a config whose rope_theta or rope_scaling is `value`."""
    old: Settings = config.rope_parameters
    if any(isinstance(of_a_kind, dict) for of_a_kind in old.values()):
        raise ValueError(
            f"rope_parameters of {config.model_type} differ by kind of layer: set them, not {key}."
        )
    if key == "rope_theta":
        return {**old, key: value}
    # scaling is replaced, or removed by null
    kept = {name: old[name] for name in ("rope_theta", "partial_rotary_factor") if name in old}
    return kept | (value or {"rope_type": "default"})


OF_ROPE = ("rope_theta", "rope_scaling")
"""What config.json has under these names transformers keeps in `rope_parameters`."""


def cannot_work(reason: object, typed: Settings) -> ConfigError:
    """Makes the sentence for settings that a model's own code refuses."""
    settings = " ".join(f"{key}={value}" for key, value in typed.items())
    is_name = isinstance(reason, KeyError) and " " not in str(reason.args[0])
    text = f"{reason} is not known." if is_name else one_line(reason).strip('"')
    return ConfigError(
        f"a model with these settings does not work: {text or type(reason).__name__} "
        f"({settings or 'its config.json'})"
    )


def describe_with(typed: Settings, make: Callable[[], Any]) -> Any:
    """Returns what `make` makes; what the family's own config class refuses is a ConfigError that
    names what was `typed`.
    """
    try:
        return make()
    except Exception as error:  # checks of the model's own config class
        if is_limit(error):
            raise
        raise cannot_work(error, typed) from error


def check_settings(
    settings: Settings,
    config: PretrainedConfig,
    node: str,
    group: str = "",
    is_loaded: bool = False,
) -> None:
    """Raises ConfigError for a setting that the family does not have, with the nearest
    that it has, and for one that promises something about training and that nothing reads.

    node       the config node of the model, `model` or `teacher`
    group      where the settings stand in its config: `text_config.`
    is_loaded  weights are those of a checkpoint
    """
    prefix = f"{node}.config.{group}"
    known = [*config.to_dict(), *config.attribute_map]
    if "rope_parameters" in known:
        known += OF_ROPE
    inner = _inner_configs(config)
    for key, value in settings.items():
        if key in inner and isinstance(value, dict):
            check_settings(value, inner[key], node, f"{group}{key}.", is_loaded)
        elif key not in known:
            of_text = [f"{name}.{key}" for name, part in inner.items() if key in part.to_dict()]
            near = f"; did you mean {prefix}{of_text[0]}?" if of_text else did_you_mean(key, known)
            raise ConfigError(
                f"{prefix}{key}={value}: {config.model_type} has no such setting{near}"
            )
        elif value not in (None, 0, getattr(config, key, 0)) and key in FAMILIES["of_other_losses"]:
            ours = FAMILIES["of_other_losses"][key]
            cure = f"set {ours} in its place" if ours else "leave it out"
            raise ConfigError(
                f"{prefix}{key}={format_value(value)} is of a loss that is not computed here: "
                f"{cure}."
            )
        elif is_loaded and key in FAMILIES["drawn_by"]:
            raise ConfigError(
                f"{prefix}{key}={value} is of weights that are drawn, and {node}.pretrained loads "
                "all of them: leave it out."
            )
    scaling = settings.get("rope_scaling")
    if scaling is not None and not (
        isinstance(scaling, dict) and {"rope_type", "type"} & {*scaling}
    ):
        raise ConfigError(
            f"{prefix}rope_scaling={scaling} must be null or name its rope_type, such as "
            f"{prefix}rope_scaling={{rope_type: yarn, factor: 4.0}}."
        )


def _inner_configs(config: PretrainedConfig) -> dict[str, PretrainedConfig]:
    """Returns the configs of a composite's language model, which is first, and of its towers, by
    their setting.
    """
    found = {
        name: config_value(config, name)
        for name in sorted(config.sub_configs, key=lambda n: n != "text_config")
    }
    return {name: part for name, part in found.items() if isinstance(part, PretrainedConfig)}
