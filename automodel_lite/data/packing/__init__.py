"""Packing: which documents share a row. Plans are made from lengths alone; tokens are read when a pack is read.

plan.py               plan_packs(lengths, ...) -> PackPlan: settings, over-long documents, counts
strategies.py         the strategies
packer.py             Packer: the options of the config node `packed_sequence`
packs.py              PackedDataset, which reads packs lazily; EMPTY_PACK
report.py             what a plan costs and gains, as text and as data
balance.py            packs of equal attention work side by side
stream.py             PackStream: packs of documents that arrive one by one
exact_fill.py         the streaming packer, the default
histogram.py          the global packer: best-fit on the histogram of lengths
refine.py             its refinement to the lower bound
column_generation.py  the packer for narrow hard mixes (needs scipy)
order.py              seeded orders, the same on every machine
"""
