"""Which model families train here end to end, exactly, and which are refused, and why: docs/models.md.

    python benchmarks/survey_models.py                          print one line per family
    python benchmarks/survey_models.py --write docs/models.md   and write its blocks of the page (half an hour on two cores)
    python benchmarks/survey_models.py --families llama qwen3_5 mistral3

Every decoder-only causal LM of the installed transformers, and the composites (vision, audio) that text is trained on,
as a tiny random bf16 checkpoint that is then *run*: by the recipe, in fp32 on CPU, on one process, on four (mesh.cp=4,
sharded: six experts leave one of them empty), with LoRA, and from blocks of fp8 with ragged ends. Truth is the family's
own code on one document at a time. The stream is longer than anything that the family measures in tokens. Nothing is
downloaded.

A router near a tie sends a token elsewhere when a sum is rounded otherwise. So a difference that rounding could make is
computed again in fp64, and counts as a fault only if models of other random weights show it, too.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import recipes.train_ft as train_ft
from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import check_packing_isolation
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.spec import attention_specs
from automodel_lite.cli import compose_config
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.config.check import check_config
from automodel_lite.data.packing.packs import join_packs, lay_out_packs
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.data.tokens.trees import grow_trees
from automodel_lite.errors import ConfigError
from automodel_lite.models.flops import cost_model
from automodel_lite.models.settings import experts_per_token
from automodel_lite.models.source import CausalLM, model_class
from automodel_lite.nemo_api.collaters import pack_features_for_thd
from automodel_lite.parts.adapters.adapter import load_adapted
from automodel_lite.prefix_trees import find_nodes
from automodel_lite.run.weight_files import stored_dtypes
from automodel_lite.thd import ThdBatch, to_thd
from benchmarks.models_page import of_models
from benchmarks.survey import forked, survey, wait, words
from benchmarks.tiny_models import COMPOSITES, VOCAB, decoder_families, tiny_model

LENGTHS = [23, 5, 14]
PACK = 48
EXACT = 1e-5
"""Largest difference of logits and gradients, relative to the largest logit and gradient, in fp32."""
SAME_STEP = 1e-5
"""Relative difference of a step's loss and gradient norm."""
NEAR_TIE = 1e-3
"""A larger difference is a fault of any model; one token of a tiny mixture that goes elsewhere makes up to 1e-4."""
SEEDS = range(3)
FP8_BLOCK = 16
NUM_RANKS = 4
BYTES = 8 << 30


@dataclass
class Finding:
    """What came out for one family. Each step: a number below its limit, `refused: sentence`, or what went wrong."""

    family: str
    native: str = ""
    refused: str = ""
    # name -> "exact, 3e-07" | "refused: ..." | "WRONG ..." | ...
    steps: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    is_mixture: bool = False
    near_ties: int = 0  # seeds before the reported one whose mixture differed by less than NEAR_TIE
    version: str = transformers.__version__

    @property
    def verdict(self) -> str:
        for verdict in ("WRONG", "BROKEN"):
            if any(word.startswith(verdict) for word in self.steps.values()):
                return verdict
        if self.refused or not self.steps:
            return "refused" if self.refused else "not tried"
        # fp8 is refused where transformers cannot read it
        needed = [word for name, word in self.steps.items() if name != "fp8"]
        return "in part" if any(word.startswith("refused") for word in needed) else "exact"


def line(finding: Finding) -> str:
    detail = finding.refused or ", ".join(f"{name}: {word}" for name, word in finding.steps.items())
    return f"{finding.family:22s} {finding.verdict:9s} {finding.seconds:4.0f} s  {detail}"


def in_processes(family: str) -> Finding:
    start = time.time()
    for seed in SEEDS:
        finding = of_seed(family, seed)
        finding.near_ties = seed
        if not is_near_tie(finding):
            break
    finding.seconds = time.time() - start
    return finding


def is_near_tie(finding: Finding) -> bool:
    """Could rounding be the reason of all that is wrong: a router near a tie, or an attention that is exact in fp64 and
    whose queries are not scaled (Gemma 4), so that two keys are near a tie?
    """
    wrong = [word for word in finding.steps.values() if word.startswith("WRONG")]
    sizes = [re.match(r"WRONG by ([0-9.e+-]+)", word) for word in wrong]
    may_tie = finding.is_mixture or "in fp64" in finding.steps.get("packed", "")
    return (
        may_tie
        and bool(wrong)
        and all(size and float(size[1].rstrip(",")) < NEAR_TIE for size in sizes)
    )


def of_seed(family: str, seed: int) -> Finding:
    with tempfile.TemporaryDirectory(prefix=f"survey_{family}_") as name:
        folder = Path(name)
        result = folder / "finding.json"
        text = wait(forked(lambda: alone(family, folder, seed), result, BYTES), result)
        if not text.startswith("{"):
            return Finding(family, steps={"start": text})
        finding = Finding(**json.loads(text))
        if not finding.refused and "step" in finding.steps:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            results = [folder / f"rank{rank}" for rank in range(NUM_RANKS)]
            pids = [
                forked(lambda rank=rank: of_rank(rank, folder, port), result, BYTES)
                for rank, result in enumerate(results)
            ]
            row, *_ = [wait(pid, result) for pid, result in zip(pids, results)]
            finding.steps["cp 4"] = against_truth(row, folder) if row.startswith("{") else row
    return finding


# ------------------------------------------------------------------------------------------------------- one process
def alone(family: str, folder: Path, seed: int) -> str:
    """The steps of one process -> the finding as JSON."""
    finding = Finding(family)
    try:
        save(tiny_model(family, seed), folder / "model")
        model, truth = load(folder), None
        finding.is_mixture = experts_per_token(model.config.get_text_config()) is not None
        truth = separate(model)
    except Exception as error:
        finding.native = words(error)
        return json.dumps(asdict(finding))
    (folder / "truth.json").write_text(json.dumps(step_of(truth)))
    finding.native = native_packing(folder, truth)
    try:
        attention_specs(model.config, "cpu", torch.float32)
        install(model, ReferenceAttention())
        check_packing_isolation(model)
    except ConfigError as error:
        finding.refused = str(error)
        return json.dumps(asdict(finding))
    except Exception as error:
        finding.steps["packed"] = f"BROKEN: {words(error)}"
        return json.dumps(asdict(finding))
    steps = {
        "costs": lambda: "exact" if cost_model(model.config).per_token > 0 else "WRONG",
        "packed": lambda: compare_packed(model, folder, documents(), packed),
        "trees": lambda: compare_packed(model, folder, rows_of_trees(), as_trees),
        "step": lambda: against_truth(run(folder, "full"), folder),
        "export": lambda: same_keys(folder),
        "LoRA": lambda: against_truth(run(folder, "lora", "peft=lora"), folder, with_norm=False),
        "adapter": lambda: adapter_answers(folder),
        "fp8": lambda: from_fp8(folder),
    }
    for name, step in steps.items():
        try:
            finding.steps[name] = step()
        except ConfigError as error:
            finding.steps[name] = f"refused: {error}"
        except Exception as error:
            finding.steps[name] = f"BROKEN: {words(error)}"
    return json.dumps(asdict(finding))


def save(model: PreTrainedModel, folder: Path) -> None:
    """A bf16 checkpoint with a tokenizer, and documents of token ids beside it."""
    dtypes = stored_dtypes(model, torch.bfloat16)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name in dtypes:
            weight.data = weight.data.to(dtypes[name])
    model.save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {
        f"w{index}": index for index in range(3, VOCAB - 8)
    }  # Qwen's adds some
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w3"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    rows = "".join(json.dumps(row) + "\n" for row in documents())
    (folder.parent / "documents.jsonl").write_text(rows)


def load(folder: Path, attention: str = "eager") -> PreTrainedModel:
    """By transformers alone, in fp32."""
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    model: PreTrainedModel = model_class(config).from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()


def documents() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(3, VOCAB - 8, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    return [{"input_ids": ids, "labels": [*ids[1:], IGNORE_INDEX]} for ids in rows]


def batch() -> ThdBatch:
    return to_thd(join_packs([pack_features_for_thd(documents())]))


Result = tuple[Tensor, dict[str, Tensor], float]
"""Logits [T, V], gradients by name, the summed loss."""


def separate(model: PreTrainedModel, rows: list[dict[str, list[int]]] | None = None) -> Result:
    """One forward per document, gradients summed."""
    rows = rows or documents()
    logits = [
        model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0] for row in rows
    ]
    return backward(
        model, torch.cat(logits), torch.tensor([label for row in rows for label in row["labels"]])
    )


def packed(model: PreTrainedModel) -> Result:
    return backward(model, model(**batch().model_inputs()).logits[0], batch().labels)


def rows_of_trees() -> list[dict[str, list[int]]]:
    """Sorted rows of a tree of depth 3, longer than what families measure in tokens, and one that shares nothing."""
    generator = torch.Generator().manual_seed(1)
    trunk, *ends = (
        torch.randint(3, VOCAB - 8, (n,), generator=generator).tolist()
        for n in (17, 9, 1, 6, 4, 12)
    )
    middle = [*trunk, *ends[0]]
    rows = [[*trunk, *ends[2]], [*middle, *ends[1]], [*middle, *ends[3]], middle, [*ends[4], 3]]
    return [{"input_ids": ids, "labels": [*ids[1:], IGNORE_INDEX]} for ids in sorted(rows)]


def as_trees(model: PreTrainedModel) -> Result:
    """The logits of each row are those along its path."""
    arrays = [
        {name: np.array(ids, np.int32) for name, ids in row.items()} for row in rows_of_trees()
    ]
    flat = flatten(grow_trees(arrays, least_shared=8))
    packs = lay_out_packs(
        flat, flat.offsets[:-1], flat.lengths, np.array([len(flat)]), flat.num_tokens
    )
    stream = to_thd(join_packs(packs))
    nodes = find_nodes(stream.cu_seqlens_padded, stream.position_ids)
    assert nodes is not None
    rows = nodes.paths.split(nodes.path_lens.tolist())
    order = sorted(range(len(rows)), key=lambda i: stream.input_ids[rows[i]].tolist())
    logits = model(**stream.model_inputs()).logits[0][torch.cat([rows[i] for i in order])]
    return backward(
        model, logits, torch.tensor([label for row in rows_of_trees() for label in row["labels"]])
    )


def backward(model: PreTrainedModel, logits: Tensor, labels: Tensor) -> Result:
    loss = F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=IGNORE_INDEX)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), grads, loss.item()


def largest_difference(got: Result, want: Result) -> float:
    """Relative, the larger one of logits and gradients."""
    if missing := want[1].keys() ^ got[1].keys():
        raise RuntimeError(f"gradients of {sorted(missing)[:3]} are there on one side only")
    largest_grad = max(grad.abs().max() for grad in want[1].values())
    of_grads = max(
        ((got[1][name] - grad).abs().max() / largest_grad for name, grad in want[1].items())
    )
    return float(max((got[0] - want[0]).abs().max() / want[0].abs().max(), of_grads))


def step_of(result: Result) -> dict[str, float]:
    """What the first step of a run must print."""
    num_labels = sum(LENGTHS) - len(LENGTHS)
    norm = torch.stack([grad.double().norm() for grad in result[1].values()]).norm().item()
    return {"loss": result[2] / num_labels, "grad_norm": norm / num_labels}


def compare_packed(
    model: PreTrainedModel,
    folder: Path,
    rows: list[dict[str, list[int]]],
    stream: Callable[[PreTrainedModel], Result],
) -> str:
    """In fp32; where rounding alone could be the reason (Gemma 4 does not scale its queries), in fp64 as well."""
    difference = largest_difference(stream(model), separate(load(folder), rows))
    if difference < EXACT:
        return relative(difference)
    for lm in (own := load(folder).double(), model.double()):
        lm.config.get_text_config()._experts_implementation = "eager"  # grouped_mm has no fp64
    with InDouble():
        double = largest_difference(stream(model), separate(own, rows))
    model.float()
    return (
        f"exact, {double:.0e} in fp64"
        if double < EXACT
        else f"WRONG by {difference:.0e}, {double:.0e} in fp64"
    )


class InDouble(TorchFunctionMode):
    """Keeps fp64 where families cast to fp32 by themselves (norms, softmax, routers)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_double = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if is_double and (
            func is Tensor.float
            or (func is Tensor.to and torch.float32 in (*args[1:], *kwargs.values()))
        ):
            return args[0]
        if is_double and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def native_packing(folder: Path, truth: Result) -> str:
    """transformers' own attention on the same stream: sdpa where the family has it, told by position_ids alone."""
    words = []
    for implementation in ("sdpa", "eager"):
        try:
            model, stream = load(folder, implementation), batch()
            inputs = {
                "input_ids": stream.input_ids[None],
                "position_ids": stream.position_ids[None],
            }
            got = backward(model, model(**inputs, use_cache=False).logits[0], stream.labels)
            words.append(
                f"{implementation} {relative(largest_difference(got, truth)).replace('WRONG by', 'off by')}"
            )
        except Exception:
            words.append(f"{implementation} fails")
    return ", ".join(words)


# ---------------------------------------------------------------------------------------------------- whole runs
def run(folder: Path, name: str, *overrides: str) -> str:
    """Two steps of the recipe, in this process, and its export -> the first step's row of metrics.jsonl."""
    settings = [
        f"name={name}",
        f"output_dir={folder / name}",
        f"cache_dir={folder / name}_cache",
        f"model.pretrained={folder / 'model'}",
        f"dataset.path={folder / 'documents.jsonl'}",
        f"packed_sequence.packed_sequence_size={PACK}",
        "dataset.labels=aligned",
        "tokenize.train_on=all",
        "training.max_steps=2",
        "training.num_epochs=null",
        "training.global_batch_size=1",
        "training.log_every_steps=1",
        "training.max_grad_norm=1e9",
        "training.num_threads=1",
        "lr_scheduler=constant",
        "lr_scheduler.warmup_steps=0",
        "optimizer.lr=1e-3",
        "report=false",
        *overrides,
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        train_ft.main(check_config(compose_config("finetune", settings)))
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    if len(steps) != 2 or not steps[1]["loss"] < 1e6:
        raise RuntimeError(f"the run's steps are {steps}")
    return json.dumps(steps[0])


def of_rank(rank: int, folder: Path, port: int) -> str:
    """The recipe with mesh.cp=4, the model sharded over all ranks -> the first step's row, or what went wrong."""
    world = str(NUM_RANKS)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        return run(folder, "four", f"mesh.cp={NUM_RANKS}")
    except ConfigError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"BROKEN: {words(error)}"


def against_truth(row: str, folder: Path, with_norm: bool = True) -> str:
    """The first step's loss and gradient norm against those of the documents one by one."""
    got, want = json.loads(row), json.loads((folder / "truth.json").read_text())
    keys = ("loss", "grad_norm") if with_norm else ("loss",)
    return relative(max(abs(got[key] - want[key]) / abs(want[key]) for key in keys), SAME_STEP)


def same_keys(folder: Path) -> str:
    """The export has the checkpoint's keys and dtypes, and loads completely under the same class."""
    want, got = (weights_of(folder / name) for name in ("model", "full/hf"))
    if want != got:
        return f"WRONG: {sorted(map(str, want.items() ^ got.items()))[:3]}"
    config = transformers.AutoConfig.from_pretrained(folder / "full/hf")
    report = model_class(config).from_pretrained(folder / "full/hf", output_loading_info=True)[1]
    wrong = [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]
    return f"WRONG: {wrong[:3]}" if wrong else "exact"


def weights_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """key -> dtype and shape, of all files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                part = file.get_slice(key)
                found[key] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def adapter_answers(folder: Path) -> str:
    """The saved adapter loads, and the router is not in it."""
    model = load_adapted(str(folder / "lora/adapter"), torch.float32)
    names = [name for name, _ in model.named_parameters() if "lora_" in name]
    if not names:
        return "WRONG: nothing is adapted"
    routers = [
        name
        for name in names
        if name.split(".lora_")[0].rsplit(".", 1)[-1] in ("gate", "router", "classifier")
    ]
    return f"WRONG: {routers[:2]}" if routers else "exact"


def from_fp8(folder: Path) -> str:
    """The checkpoint in fp8 with a scale for each block of 16 x 16, ragged at its ends, is loaded as the weights that
    it stands for: those of a plain checkpoint, dequantized here.
    """
    blocks, plain = folder / "blocks", folder / "plain"
    for copied in (blocks, plain):
        shutil.copytree(folder / "model", copied)
    generator, side = torch.Generator().manual_seed(0), FP8_BLOCK
    stored = load_file(plain / "model.safetensors")
    meant = dict(stored)
    names = [key for key in stored if key.endswith("_proj.weight") and stored[key].ndim == 2]
    for name in names:
        rows, columns = meant[name].shape
        scale = torch.rand(-(-rows // side), -(-columns // side), generator=generator) + 0.5
        of_each = scale.repeat_interleave(side, 0).repeat_interleave(side, 1)[:rows, :columns]
        stored[name] = meant[name].to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale
        meant[name] = stored[name].float() * of_each
    for weights, copied in ((stored, blocks), (meant, plain)):
        save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((blocks / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [side, side]}
    (blocks / "config.json").write_text(json.dumps(settings))
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    got, want = (CausalLM(str(copied)).build(tokenizer).state_dict() for copied in (blocks, plain))
    if not names:
        return "exact, none"
    wrong = [key for key, value in want.items() if not torch.equal(got[key], value)]
    return f"WRONG: {wrong[:3]}" if wrong else "exact"


def relative(difference: float, limit: float = EXACT) -> str:
    return f"exact, {difference:.0e}" if difference < limit else f"WRONG by {difference:.0e}"


if __name__ == "__main__":
    every = [*decoder_families(), *COMPOSITES]
    sys.exit(survey(Finding, every, in_processes, line, of_models))
