"""What held-out documents ask: of a dataset's own questions, or of the last turns of its validation
documents; and the exported model's answers at the end of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from automodel_lite.config.components import build
from automodel_lite.data.feeding.planned import document_kind
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.reading.documents import Documents, Question, question_of
from automodel_lite.errors import DataError
from automodel_lite.models.source import is_remote_code
from automodel_lite.parts.evaluation.generator import load_generator
from automodel_lite.parts.evaluation.questions import with_images
from automodel_lite.telemetry.callbacks import MetricsLog
from automodel_lite.telemetry.console import Console
from automodel_lite.training.build import BuiltModel
from automodel_lite.training.guards import Guards


def has_questions(documents: Documents) -> bool:
    """Returns whether there is anything to ask that is not trained on; text and token ids are not
    read for it.
    """
    if document_kind(documents) in ("text", "tokens", "rows") or not documents.val:
        return bool(documents.questions)
    return next(questions_of(documents), None) is not None


def questions_of(documents: Documents) -> Iterator[Question]:
    """Yields the dataset's own; where it has none, what its validation documents ask; without any,
    its documents, of a file that is evaluated.
    """
    if documents.questions:
        yield from documents.questions
        return
    for rows in documents.val.values() or [documents.train]:
        for index in range(len(rows)):
            try:
                document = rows[index]
                question = question_of(document)
            except DataError:  # counted where the documents were tokenized
                continue
            if question and question.answer is not None:
                images = document.get("images")
                yield with_images(question, images) if images else question


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
