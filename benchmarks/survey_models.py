"""Which Hugging Face families are exact on packed documents, and which are refused, and why.

    python benchmarks/survey_models.py                       print the table
    python benchmarks/survey_models.py --write docs/models.md  and write it
    python benchmarks/survey_models.py --families llama qwen3

Each family gets a tiny random model (fp32, CPU). Truth is one forward and backward per document through the family's
own eager attention; against it stands one packed forward and backward on the reference kernel, and transformers' own
packed path (sdpa and position_ids) as it comes. Nothing is downloaded. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from automodel_lite.attention.adapter import install
from automodel_lite.attention.probe import check_packing_isolation
from automodel_lite.attention.reference import ReferenceAttention
from automodel_lite.attention.spec import attention_spec
from automodel_lite.errors import ConfigError
from automodel_lite.nemo_api.collaters import pack_features_for_thd, packed_sequence_thd_collater
from automodel_lite.thd import IGNORE_INDEX, ThdBatch, to_thd

FAMILIES = """
    apertus arcee bitnet cohere cohere2 deepseek_v2 deepseek_v3 doge dots1 ernie4_5 ernie4_5_moe exaone4 falcon
    falcon_h1 flex_olmo gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe gpt2 gpt_neo gpt_neox gpt_oss gptj
    granite granitemoe granitemoehybrid helium hunyuan_v1_dense hunyuan_v1_moe jamba lfm2 llama llama4_text mamba mamba2
    minimax ministral mistral mixtral nemotron nemotron_h olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 stablelm starcoder2 vaultgemma xglm
"""
LENGTHS = [23, 5, 14]
WINDOW = 8
EXACT = 1e-5
"""Largest difference of logits and gradients, relative to the largest logit and gradient, in fp32."""

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "query_pre_attn_scalar": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "moe_num_experts": 2,
    "shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_positions": 128,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "rotary_dim": 4,
    "num_heads": 4,
    "num_layers": 2,
    "ffn_dim": 32,
    "word_embed_proj_dim": 32,
    "d_model": 32,
    "attention_heads": 4,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "lru_width": 32,
    "attention_dropout": 0.0,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
SPECIAL: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "dots1": {"num_key_value_heads": 4, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_k": 1, "num_experts_per_tok": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["linear_attention", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"num_heads": None, "state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "mixtral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {"sliding_window": WINDOW},
    "qwen2": WINDOWED,
    "qwen2_moe": WINDOWED,
    "qwen3": WINDOWED,
    "qwen3_moe": WINDOWED,
    "starcoder2": {"sliding_window": WINDOW},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
}


@dataclass(frozen=True)
class Finding:
    """What came out for one family."""

    family: str
    verdict: str  # exact | refused | WRONG | not tried
    detail: str
    native: str  # transformers' own packed path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--families", nargs="*", default=FAMILIES.split())
    parser.add_argument("--write", type=Path, help="a Markdown file to write")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    findings = []
    for family in arguments.families:
        findings.append(survey(family))
        print("{0.family:18s} {0.verdict:10s} native: {0.native:24s} {0.detail}".format(findings[-1]), flush=True)
    if arguments.write:
        arguments.write.write_text(markdown(findings))
    return int(any(finding.verdict == "WRONG" for finding in findings))


def survey(family: str) -> Finding:
    """Builds the family's tiny model and compares packed against separate."""
    try:
        model = tiny_model(family)
    except Exception as error:  # families that need other packages or settings
        return Finding(family, "not tried", first_line(error), "")
    features = documents()
    batch = to_thd(packed_sequence_thd_collater([pack_features_for_thd(features)]))
    try:
        want = separate(model, features)
    except Exception as error:
        return Finding(family, "not tried", first_line(error), "")
    native = native_packing(model, batch, want)
    try:
        attention_spec(model.config, "cpu", torch.float32)
        install(model, ReferenceAttention())
        check_packing_isolation(model)
        difference = largest_difference(packed(model, batch), want)
    except ConfigError as error:
        return Finding(family, "refused", str(error), native)
    except Exception as error:
        return Finding(family, "WRONG", f"{type(error).__name__}: {first_line(error)}", native)
    return Finding(family, "exact" if difference < EXACT else "WRONG", f"{difference:.0e}", native)


def tiny_model(family: str) -> PreTrainedModel:
    """Random weights large enough that every layer matters."""
    torch.manual_seed(0)
    known = AutoConfig.for_model(family).to_dict()
    settings = {key: value for key, value in SMALL.items() if key in known}
    if known.get("sliding_window", 0) is None:
        del settings["sliding_window"]
    config = AutoConfig.for_model(family, **settings | SPECIAL.get(family, {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.2)
    return model


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in LENGTHS]
    return [{"input_ids": ids, "labels": [*ids[1:], IGNORE_INDEX]} for ids in rows]


Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def separate(model: PreTrainedModel, features: list[dict[str, list[int]]]) -> Result:
    """One forward per document, gradients summed."""
    logits = [model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0] for row in features]
    return backward(model, torch.cat(logits), torch.tensor([x for row in features for x in row["labels"]]))


def packed(model: PreTrainedModel, batch: ThdBatch) -> Result:
    return backward(model, model(**batch.model_inputs()).logits[0], batch.labels)


def backward(model: PreTrainedModel, logits: torch.Tensor, labels: torch.Tensor) -> Result:
    F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORE_INDEX).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), grads


def largest_difference(got: Result, want: Result) -> float:
    """Relative, the larger one of logits and gradients."""
    largest_grad = max(grad.abs().max() for grad in want[1].values())
    of_grads = max(((got[1][name] - grad).abs().max() / largest_grad for name, grad in want[1].items()))
    return float(max((got[0] - want[0]).abs().max() / want[0].abs().max(), of_grads))


def native_packing(model: PreTrainedModel, batch: ThdBatch, want: Result) -> str:
    """transformers' own attention on the same stream: sdpa where the family has it, told by position_ids alone."""
    words = []
    for implementation in ("sdpa", "eager"):
        try:
            model.set_attn_implementation(implementation)
            inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None], "use_cache": False}
            difference = largest_difference(backward(model, model(**inputs).logits[0], batch.labels), want)
            words.append(
                f"{implementation} exact" if difference < EXACT else f"{implementation} off by {difference:.0e}"
            )
        except Exception:
            words.append(f"{implementation} fails")
    return ", ".join(words)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]


def markdown(findings: Iterable[Finding]) -> str:
    findings = list(findings)
    counts = {
        verdict: [f for f in findings if f.verdict == verdict] for verdict in ("exact", "refused", "WRONG", "not tried")
    }
    lines = [
        "# Model families on packed sequences",
        "",
        "Written by `python benchmarks/survey_models.py --write docs/models.md`: do not edit, run it again.",
        "",
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, fp32 on CPU, tiny random "
        f"models. Documents of {LENGTHS} tokens, one forward and backward each through the family's eager attention, "
        "against one packed forward and backward on the reference kernel. The number is the largest difference of "
        "logits and gradients, relative to the largest logit and gradient; exact means below 1e-5.",
        "",
        f"**{len(counts['exact'])} exact, {len(counts['refused'])} refused at start-up, {len(counts['WRONG'])} "
        "wrong.** A refusal is a sentence before training starts, never a quiet leak.",
        "",
        "| family | packed here | transformers' own packing (position_ids, use_cache=False) |",
        "|---|---|---|",
        *(f"| {f.family} | exact, {f.detail} | {f.native} |" for f in counts["exact"]),
        "",
        "## Refused",
        "",
        "| family | what the user reads | transformers' own packing |",
        "|---|---|---|",
        *(f"| {f.family} | {f.detail} | {f.native} |" for f in counts["refused"]),
    ]
    for verdict, title in (("WRONG", "Wrong"), ("not tried", "Not tried")):
        if counts[verdict]:
            lines += ["", f"## {title}", "", *(f"- {f.family}: {f.detail}" for f in counts[verdict])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
