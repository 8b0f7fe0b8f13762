"""What the recipe puts together: the built model, optimizers, evaluation, memory, the dry run.

Imports: every room below (telemetry, run, data, parallel, models, attention, config).
"""
