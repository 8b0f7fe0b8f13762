"""Tokenize and plan the packs of a run beforehand, on any machine without a GPU; training then
finds them in the cache.

    python recipes/prepare_data.py --config-name llama_packed
    packed_sequence.packed_sequence_size=512

Takes the arguments of train_ft.py. Training does the same by itself where it is missing.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

# --help, --cfg and mistakes are answered before torch is imported; this does not return
if __name__ == "__main__":
    run_recipe("recipes.prepare_data:main")

from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.order import batch_shape
from automodel_lite.data.prepare import build_packer, prepare_data
from automodel_lite.launched import check_alone
from automodel_lite.training.auto import resolve_auto


def main(config: Config) -> int:
    """Fills the cache and prints what is in it."""
    check_alone()
    config = resolve_auto(config)
    data = prepare_data(config, batch_shape(config.training, dp_size=1), build_packer(config))
    print(data.documents.description)
    for note in data.notes:
        print(f"  {note}")
    print(
        data.report()
        or "a stream is tokenized and packed while it is trained on; nothing else is prepared"
    )
    for name, val_packs in data.val_packs.items():
        print(f"validation ({name}): {len(val_packs):,} packs")
    return 0
