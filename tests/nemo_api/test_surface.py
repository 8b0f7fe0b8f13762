"""Every documented function is defined in its own module, so that patching that module reaches it."""

from __future__ import annotations

from importlib import import_module

import pytest

PAGES = {
    "packed_sequence": (
        "pack_dataset",
        "tokenize_dataset_parallel",
        "create_block_causal_mask",
        "packed_block_causal_mask",
        "build_block_causal_additive_mask",
    ),
    "neat_packing": ("greedy_knapsack", "neat_pack_dataset", "_build_packed_sample"),
    "collaters": (
        "batchify",
        "extract_key_from_dicts",
        "pad_within_micro",
        "find_last_non_pad_token",
        "get_pad_token_from_key",
        "make_attention_mask_from_labels",
        "create_causal_mask_mapping",
        "add_causal_masks_to_batch",
        "default_collater",
        "packed_sequence_thd_collater",
        "pack_features_for_thd",
        "_indexed_mask_to_4d_block_causal",
        "neat_packed_collater",
        "SFTSingleTurnPreprocessor",
    ),
    "thd_utils": (
        "process_input_for_thd",
        "split_batch_into_thd_chunks",
        "thd_padding_mask_from_token_ids",
    ),
    "context_parallel": ("make_cp_batch_for_te", "_shard_thd_chunk_for_te"),
}


@pytest.mark.parametrize(
    ("page", "name"), [(page, name) for page, names in PAGES.items() for name in names]
)
def test_a_documented_function_is_defined_in_its_module(page: str, name: str) -> None:
    module = import_module(f"automodel_lite.nemo_api.{page}")
    assert vars(module)[name].__module__ == module.__name__


def test_the_ignored_label() -> None:
    assert (
        vars(import_module("automodel_lite.nemo_api.packed_sequence"))["CROSS_ENTROPY_IGNORE_IDX"]
        == -100
    )
