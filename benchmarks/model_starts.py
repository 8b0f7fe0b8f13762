"""CPU seconds and peak memory of a rank until its model is loaded or drawn, and checked; gloo, one thread a rank.

    python -m benchmarks.model_starts 1 2 4    numbers of ranks

A Llama of 253 M parameters (0.94 GiB in fp32), from scratch and from a checkpoint in bf16. The numbers are above those of
the imports; numbers of ranks take turns, and the table shows medians.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
}
ROUNDS = 3


def measure(folder: str, overrides: list[str]) -> tuple[float, float]:
    """Returns this rank's CPU seconds and GiB; the imports, those of the model's code too, come first."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    import recipes.train_ft  # noqa: F401
    from automodel_lite.cli import compose_config
    from automodel_lite.config.check import check_config
    from automodel_lite.parallel.mesh import init_mesh
    from automodel_lite.training.build import build_model
    from automodel_lite.training.decide import decide
    from automodel_lite.training.plan import build_parts

    torch.set_num_threads(1)
    folders = [f"output_dir={folder}/run", f"cache_dir={folder}/cache"]
    config = check_config(compose_config("smoke", [*folders, *overrides]))
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b")
    mesh = init_mesh(config.mesh)
    peak, began = _peak_gib(), time.process_time()
    build_model(decide(build_parts(config), tokenizer, mesh.shape, mesh.device), tokenizer, mesh)
    return time.process_time() - began, _peak_gib() - peak


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def save_model(folder: str) -> None:
    """Writes the model as a checkpoint in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**MODEL)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100MB")


def on_ranks(num_ranks: int, overrides: list[str]) -> tuple[float, float]:
    """Returns rank 0's numbers."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    module = [f"--nproc-per-node={num_ranks}", "-m", "benchmarks.model_starts"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*launcher, *module, folder, *overrides],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{num_ranks} ranks failed:\n{done.stderr[-3000:]}")
    _, seconds, gib = lines[0].split()
    return float(seconds), float(gib)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", nargs="+", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(f"{folder}/model")
        sources = {
            "from scratch": [f"++model.config.{key}={value}" for key, value in MODEL.items()],
            "bf16": ["model=pretrained", f"model.pretrained={folder}/model"],
        }
        found = defaultdict(list)
        for _ in range(ROUNDS):
            for source, overrides in sources.items():
                for num_ranks in args.ranks:
                    found[source, num_ranks].append(on_ranks(num_ranks, overrides))
    print("| checkpoint | ranks | CPU-s of a rank | lowest to highest | peak GiB |")
    print("| --- | --- | --- | --- | --- |")
    for (source, num_ranks), rounds in found.items():
        seconds = [one for one, _ in rounds]
        peak = max(gib for _, gib in rounds)
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(f"| {source} | {num_ranks} | {median(seconds):.2f} | {spread} | {peak:.2f} |")


if __name__ == "__main__":
    if "RANK" in os.environ:
        cpu_s, gib = measure(sys.argv[1], sys.argv[2:])
        if os.environ["RANK"] == "0":
            print(f"RESULT {cpu_s} {gib}", flush=True)
        os._exit(0)
    main()
