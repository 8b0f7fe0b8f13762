"""Packing: which documents share a row. Plans are made from lengths alone; tokens are read when a
pack is read.

plan.py       plan_packs(lengths, ...) -> PackPlan: settings, counts
strategies.py which documents share a pack
overlong.py   the one rule of documents that are longer than a pack
histogram.py  best-fit on the histogram of lengths; ExactFiller, which fills the tail of each pack
              by subset-sum
packs.py      Packer, the options of the config node `packed_sequence`; packs, read lazily; batches
report.py     what a plan costs and gains, as text and as data
"""
