"""The JSON schema of presets."""

from __future__ import annotations

import json

import jsonschema
import yaml

from automodel_lite.cli.sources import Sources
from automodel_lite.config.check import known_keys
from automodel_lite.config.components import CONF_DIR
from automodel_lite.extras.cli.schema import json_schema


def test_the_json_schema_has_every_key_and_the_rules() -> None:
    schema = json_schema(Sources())
    json.dumps(schema)

    def keys(node: dict, prefix: str = "") -> list[str]:
        found = []
        for name, child in node.get("properties", {}).items():
            found += [f"{prefix}{name}", *keys(child, f"{prefix}{name}.")]
        return found

    assert set(known_keys()) <= set(keys(schema))
    training = schema["properties"]["training"]
    assert training["additionalProperties"] is False
    assert training["properties"]["max_steps"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert {"enum": ["auto", "fp32", "bf16"]} in training["properties"]["precision"]["anyOf"]
    assert "warmup_steps" in schema["properties"]["lr_scheduler"]["properties"]


def test_a_validator_takes_every_preset_and_finds_every_mistake() -> None:
    schema = json_schema(Sources())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for preset in CONF_DIR.glob("*.yaml"):
        assert not list(validator.iter_errors(yaml.safe_load(preset.read_text()))), preset
    wrong = {
        "seed": -1,
        "training": {"max_stepz": 3, "max_steps": 0, "precision": "fp61"},
        "optimizer": {"lr": "high", "weight_decay": 0.1},
        "peft": {"r": "many", "alpha": 16},
    }
    found = {".".join(map(str, error.path)) for error in validator.iter_errors(wrong)}
    assert found == {
        "seed",
        "training",
        "training.max_steps",
        "training.precision",
        "optimizer.lr",
        "peft.r",
    }
