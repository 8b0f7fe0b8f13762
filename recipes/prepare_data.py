"""Tokenize and plan the packs of a run beforehand, on any machine without a GPU; training then finds them in the cache.

    python recipes/prepare_data.py --config-name llama_packed packed_sequence.packed_sequence_size=512

Takes the arguments of train_ft.py. Training does the same by itself where it is missing. Many tasks, on any nodes,
share the tokenizing with tokenize.num_shards=16 and tokenize.shard=0, 1, ... (launch/slurm_prepare.sbatch).
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

if __name__ == "__main__":  # --help, --cfg and mistakes are answered before torch is imported; this does not return
    run_recipe("recipes.prepare_data:main")

from dataclasses import replace

from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.order import batch_shape
from automodel_lite.data.prepare import prepare_data, prepare_shard
from automodel_lite.launched import check_alone


def main(config: Config) -> int:
    """Fills the cache and prints what is in it; of many tasks, the last one to finish joins their shards."""
    check_alone()
    tokenize = config.tokenize
    if tokenize.shard is not None:
        notes, missing = prepare_shard(config)
        print(f"shard {tokenize.shard} of {tokenize.num_shards}", *notes, sep="\n  ")
        if missing:
            print(f"still missing: shard {', '.join(map(str, missing))}; the last task joins them")
            return 0
        config = replace(config, tokenize=replace(tokenize, shard=None))
    data = prepare_data(config, batch_shape(config.training, dp_size=1))
    print(data.documents.description)
    for note in data.notes:
        print(f"  {note}")
    print(data.report() or "a stream is tokenized and packed while it is trained on; nothing else is prepared")
    for name, val_packs in data.val_packs.items():
        print(f"validation ({name}): {len(val_packs):,} packs")
    return 0
