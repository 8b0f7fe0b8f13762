"""Packing: which documents share a row. Plans are made from lengths alone; tokens are read when a pack is read.

plan.py               plan_packs(lengths, ...) -> PackPlan: settings, over-long documents, counts
strategies.py         ExactFill, BestFit, NextFit, Wrapped, OnePerRow
packer.py             Packer: the options of the config node `packed_sequence`
packs.py              PackedDataset, which reads packs lazily; EMPTY_PACK
report.py             what a plan costs and gains, as text and as data
balance.py            packs of equal attention work side by side
stream.py             PackStream: packs of documents that arrive one by one
exact_fill.py         ExactFiller, which fills the tail of each pack by subset-sum
histogram.py          best-fit on the histogram of lengths
order.py              seeded orders, the same on every machine
"""
