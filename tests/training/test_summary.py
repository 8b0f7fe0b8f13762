"""The block that a run prints before its first step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.feeding.source import TrainingPlan
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.packing.report import packing_report
from automodel_lite.training.summary import steps_text

LENGTHS = np.array([4, 3, 5, 4, 6, 2])  # three packs of eight tokens


def test_a_run_too_short_to_learn_is_told_so():
    report = packing_report(plan_packs(LENGTHS, 8), LENGTHS)
    shape = BatchShape(global_batch_size=2, micro_batch_size=1, dp_size=1)
    plan = TrainingPlan(max_steps=20, steps_per_epoch=2, shape=shape)
    said = "20 = 10.0 epochs of 2; a step is 2 packs (about 4 documents) in micro-batches of 1 on 1 data-parallel rank"
    assert steps_text(plan, report, num_warmup=5) == said

    wide = replace(plan, max_steps=1, steps_per_epoch=1, shape=replace(shape, global_batch_size=8))
    assert steps_text(wide, report, num_warmup=20).splitlines() == [
        "1 = 1.0 epochs of 1; a step is 8 packs (about 6 documents) in micro-batches of 1 on 1 data-parallel rank",
        "NOTE: the data are 3 packs, fewer than a step takes: lower packed_sequence.packed_sequence_size or training.global_batch_size for more steps",
        "NOTE: the run ends within its warm-up: lower lr_scheduler.warmup_steps=20",
    ]
