"""What a run will take, on paper: FLOPs, memory and traffic per step, and how they grow with the number of GPUs.

    python recipes/estimate.py --config-name llama3_1_8b --gpus 8 64 1024 --peak-tflops 989 --mfu 0.45
    python recipes/estimate.py --config-name llama3_1_70b --gpus 64 --simulate

Nothing is loaded but the model's config; the formulas are in docs/scaling.md. With `model.pretrained` the folder's
config.json is read, those of the presets without a network; `training.global_batch_size` is scaled with the GPUs (weak
scaling). --simulate runs the real step of such a world under fake tensors (70B: half a minute) and counts its memory.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from omegaconf import OmegaConf

from automodel_lite.cli import argument_parser, compose_config, run_tool
from automodel_lite.config.check import check_config
from automodel_lite.config.rules import Range, argument
from automodel_lite.launched import check_alone

POSITIVE = argument(float, Range(above=0))
FRACTION = argument(float, Range(above=0, most=1))
ONE_OR_MORE = argument(int, Range(1, 10**8))


def main(argv: list[str] | None = None) -> None:
    args, overrides = parser().parse_known_args(argv)
    check_alone()
    raw = compose_config(args.config_name, [*overrides, "name=estimate"])
    if OmegaConf.is_missing(raw.dataset, "path"):
        raw.dataset.path = "not read"
    config = check_config(raw)
    from automodel_lite.training.plan import build_parts
    from automodel_lite.training.scaling import Hardware, estimate
    from automodel_lite.training.start import try_model

    parts = build_parts(replace(config, attention={}))  # a kernel may need the GPU that is only planned
    try_model(parts.model)
    model = parts.model.described({"vocab_size": args.vocab_size})
    if args.simulate:
        from automodel_lite.training.simulation import simulate_gpus

        for number in args.gpus:
            print(f"{number} GPUs, a rank holds {simulate_gpus(parts, model, number)}")
        return
    hardware = Hardware(
        peak_flops=args.peak_tflops * 1e12,
        mfu_frac=args.mfu,
        in_node_bytes_per_s=args.nvlink_gb * 1e9,
        between_nodes_bytes_per_s=args.network_gb * 1e9,
        gpus_per_node=args.gpus_per_node,
    )
    print("gpus   dp x cp   tokens per step   compute s   exposed traffic s   step s   tokens/s/gpu   memory GiB/gpu")
    for gpus in args.gpus:
        print(estimate(parts, model, hardware, gpus, args.document_tokens))


def parser() -> argparse.ArgumentParser:
    found = argument_parser(__doc__)
    found.add_argument("--config-name", required=True)
    found.add_argument("--gpus", type=argument(int, Range(1, 10**7)), nargs="+", default=[8, 64, 1024])
    found.add_argument("--simulate", action="store_true", help="count the memory of a rank instead of estimating")
    found.add_argument("--gpus-per-node", type=argument(int, Range(1, 10**6)), default=8)
    found.add_argument("--peak-tflops", type=POSITIVE, default=989.0, help="dense bf16 of one GPU (H100 SXM: 989)")
    found.add_argument("--mfu", type=FRACTION, default=0.45, help="fraction of the peak that compute reaches")
    found.add_argument("--nvlink-gb", type=POSITIVE, default=300.0, help="GB/s per GPU inside a node, one direction")
    found.add_argument("--network-gb", type=POSITIVE, default=40.0, help="GB/s per GPU between nodes, one direction")
    found.add_argument("--document-tokens", type=ONE_OR_MORE, default=600, help="mean length of a document")
    found.add_argument("--vocab-size", type=ONE_OR_MORE, default=8192, help="of a model from scratch")
    return found


if __name__ == "__main__":
    run_tool(main)
