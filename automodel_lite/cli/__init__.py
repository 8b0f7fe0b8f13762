"""The command line: presets and overrides, the commands of an installed package, and the sentences
that a process ends with.
"""

from automodel_lite.cli.compose import compose_config
from automodel_lite.cli.exit_codes import run_tool
from automodel_lite.cli.hydra_app import run_recipe
from automodel_lite.cli.line import argument_parser
from automodel_lite.cli.recipes import Recipe

__all__ = ["Recipe", "argument_parser", "compose_config", "run_recipe", "run_tool"]
