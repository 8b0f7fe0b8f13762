"""The trained model on the Hugging Face hub: its model card (README.md of the exported folder), and the upload."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from omegaconf import OmegaConf

import automodel_lite
from automodel_lite.config.rules import looks_local
from automodel_lite.errors import ConfigError
from automodel_lite.redact import scrub
from automodel_lite.run.folder import RunFolder
from automodel_lite.tools.report import facts_of, packing_of, read_run

_MARK = "<!-- Written by automodel_lite: without this line, your changes to this file stay. -->"
_TEMPLATE = """\
---
{{ card_data }}
---

{{ mark }}

# {{ name }}

{{ base }} on packed sequences with automodel_lite {{ version }}.

## Use

```python
{{ use }}
```

## Data

{% for line in data %}- {{ line }}
{% endfor %}
## Results

| | |
|---|---|
{% for name, value in results %}| {{ name }} | {{ value }} |
{% endfor %}
## Training

```
{{ command }}
```

<details><summary>All settings</summary>

```yaml
{{ settings }}```

</details>
"""
_USE = {
    "hf": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")""",
    "adapter": """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")""",
}


def write_card(run: Path, folder: Path, repo: str | None = None) -> None:
    """README.md of an exported folder, from the run's data, settings, results and command. A user's own stays."""
    path = folder / "README.md"
    if not RunFolder(run).metrics.is_file():
        return
    if path.is_file() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    record = read_run(run)
    kind = "adapter" if (folder / "adapter_config.json").is_file() else "hf"
    pretrained = record.config.get("model", {}).get("pretrained")
    lines = {topic: text for topic, text in reversed(record.facts.get("lines", []))}
    data = [line for line in lines.get("data", "").splitlines() if line]
    of_this_machine = ("output_dir", "cache_dir")
    settings = {k: v for k, v in record.config.items() if v not in ({}, None, []) and k not in of_this_machine}
    card = ModelCard.from_template(
        _card_data(kind, pretrained, record.config),
        template_str=_TEMPLATE,
        mark=_MARK,
        name=record.name,
        version=automodel_lite.__version__,
        base=_base_text(pretrained),
        use=_USE[kind].format(name=repo or folder),
        data=[*data, *(f"{name}: {value}" for name, value in packing_of(record))],
        results=facts_of(record),
        command=record.facts.get("command", ""),
        settings=OmegaConf.to_yaml(OmegaConf.create(settings)),
    )
    path.write_text(scrub(str(card)), encoding="utf-8")


def _card_data(kind: str, pretrained: str | None, config: dict[str, Any]) -> ModelCardData:
    dataset = config.get("dataset", {}).get("path")
    return ModelCardData(
        base_model=pretrained if _is_hub_name(pretrained) else None,
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        datasets=[dataset] if _is_hub_name(dataset) else None,
        tags=["automodel_lite", "sft"],
    )


def _base_text(pretrained: str | None) -> str:
    if pretrained is None:
        return "Trained from scratch"
    is_public = _is_hub_name(pretrained)
    return f"[{pretrained}](https://huggingface.co/{pretrained}), trained" if is_public else "A local model, trained"


def _is_hub_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not looks_local(name)


def push(run: Path, folder: Path, repo: str, is_private: bool) -> str:
    """Uploads an exported folder in one commit, the repository made if there is none; returns its address.

    Raises ConfigError, with the cure, when the hub refuses it or is not reached.
    """
    cure = f"python recipes/export_hf.py {run} --push {repo}"
    try:
        api = HfApi()
        address = api.create_repo(repo, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Trained by automodel_lite: {run.name}")
        return str(address)
    except Exception as error:  # the hub's refusals, the network's errors, no token
        reason = scrub(" ".join(str(error).split()))[:300] or type(error).__name__
        raise ConfigError(
            f"hub.push={repo}: {folder} is not uploaded ({reason}): log in with `hf auth login` or HF_TOKEN, see "
            f"that the network reaches the hub, then {cure}."
        ) from error
