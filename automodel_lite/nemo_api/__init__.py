"""The public functions that users of NeMo AutoModel's packed-sequence path know, over the program's
own functions.

packed_sequence    pack_dataset, tokenize_dataset_parallel, block-causal masks
neat_packing       greedy_knapsack, neat_pack_dataset
collaters          default_collater, packed_sequence_thd_collater, neat_packed_collater ...,
                   SFTSingleTurnPreprocessor
thd_utils          process_input_for_thd, split_batch_into_thd_chunks
context_parallel   make_cp_batch_for_te

Imports: the rooms that it shows. Nothing imports it.
"""
