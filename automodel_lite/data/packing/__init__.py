"""Packing: which documents share a row. Plans are made from lengths alone; tokens are read when a pack is read.

plan.py          plan_packs(lengths, ...) -> PackPlan: settings, over-long documents, counts
strategies.py    ExactFill, BestFit, NextFit, Wrapped, OnePerRow
histogram.py     best-fit on the histogram of lengths; ExactFiller, which fills the tail of each pack by subset-sum
packer.py        Packer: the options of the config node `packed_sequence`; packs of equal attention work side by side
packs.py         PackedDataset, which reads packs lazily; PackStream: packs of documents that arrive one by one
report.py        what a plan costs and gains, as text and as data
"""
