"""What held-out documents ask: of a dataset's own questions, or of the last turns of its validation
documents; and the exported model's answers at the end of a run.
"""

from __future__ import annotations

from pathlib import Path

from automodel_lite.config.components import build
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.evaluation.questions import questions_of
from automodel_lite.models.source import is_remote_code
from automodel_lite.telemetry.callbacks import MetricsLog
from automodel_lite.telemetry.console import Console
from automodel_lite.tools.load_generator import load_generator
from automodel_lite.training.build import BuiltModel
from automodel_lite.training.guards import Guards


def ask_exported(
    run: Guards,
    built: BuiltModel,
    data: PackSource,
    metrics: MetricsLog,
    console: Console,
    exported: Path,
) -> None:
    """Asks the held-out questions with the exported folder, as a user would load it; on the CPU:
    the GPU is full.
    """
    is_remote = is_remote_code(type(built.model.loss_model.lm))
    variables = run.config.tokenize.template_kwargs
    generator = load_generator(str(exported), is_remote, True, variables)
    questions = questions_of(data.documents)
    answers, scores = build(run.config.evaluation).ask(generator, questions)
    console.print(answers)
    metrics.log({"step": run.state.num_steps, **scores})
