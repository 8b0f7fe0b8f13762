"""Loaded by the fork server before the ranks of a test are forked: modules, and tables that are made once per process."""

# ruff: noqa: E402
import gc

gc.disable()  # nothing that is imported here is garbage

import datasets  # noqa: F401
import hypothesis  # noqa: F401
import jinja2  # noqa: F401
import pytest  # noqa: F401
import torch
import torch._dynamo
import torch.nn.attention.flex_attention
import transformers.core_model_loading
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import automodel_lite.models.sharded  # noqa: F401
import recipes.train_ft  # noqa: F401
from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.parallel.peers import versions
from tests.attention.families import FAMILIES
from tests.conftest import SELDOM

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
check_config(compose_config("smoke", []))  # Hydra's plugins, the code of the options
versions()
get_checkpoint_conversion_mapping("llama")
for config in FAMILIES.values():
    transformers.AutoModelForCausalLM._model_mapping[type(config())]
gc.collect()
# a rank's collections neither look through what is loaded here nor copy its pages: a fifth of its CPU time
gc.freeze()
gc.set_threshold(*SELDOM)
gc.enable()
