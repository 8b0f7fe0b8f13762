"""What has no public form: the private names of other libraries that this package stands on.

Each is listed with its reason, and no other module imports one (a test reads the source of all of
them). They are found when they are first asked for, as the command line is read before torch:

    from automodel_lite.compat import Hydra

Tested with the oldest and the newest versions in `TESTED`, the range of pyproject.toml. When a
library moves one of them, this file and the functions around its uses are what has to follow.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

TESTED = {
    "hydra-core": ("1.3.2", "1.3.8"),
    "torch": ("2.11.0", "2.13.0"),
    "transformers": ("5.17.0", "5.23.0"),
}

# name here: (module, name there, why the public interface does not do)
IMPORTED = {
    # hydra.main and hydra.compose read the command line, make folders and configure logging before
    # a preset has been looked at; a preset may come from a stranger
    "Hydra": ("hydra._internal.hydra", "Hydra", "--cfg and completion with a loader of one's own"),
    "ConfigLoaderImpl": (
        "hydra._internal.config_loader_impl",
        "ConfigLoaderImpl",
        "a file is judged before it is merged; hydra.compose shows only the result",
    ),
    "create_config_search_path": (
        "hydra._internal.utils",
        "create_config_search_path",
        "several folders of presets; hydra.initialize takes one",
    ),
    "HydraCallbacks": (
        "hydra._internal.callbacks",
        "Callbacks",
        "sweepers ask for one in HydraContext, and nothing public makes it",
    ),
    # a world of ranks and GPUs that does not exist, for counting its memory
    "FakeStore": (
        "torch.testing._internal.distributed.fake_pg",
        "FakeStore",
        "a process group of any size in one process",
    ),
    "FakeTensor": ("torch._subclasses.fake_tensor", "FakeTensor", "tensors without memory"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode", "the same"),
    "TorchDispatchMode": (
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        "sees every operation; documented, but only under this name",
    ),
    "disable_current_modes": (
        "torch.utils._python_dispatch",
        "_disable_current_modes",
        "real tensors while fake ones are counted",
    ),
    "clear_sharding_prop_cache": (
        "torch.distributed.tensor.debug",
        "_clear_sharding_prop_cache",
        "DTensor remembers shapes of a world that is gone",
    ),
    "fully_shard_module": (
        "torch.distributed.fsdp._fully_shard",
        "_fully_shard",
        "asks for the device of a mesh, which does not exist there",
    ),
    "fsdp_param_group": (
        "torch.distributed.fsdp._fully_shard",
        "_fsdp_param_group",
        "the memory of gathers and reductions is theirs",
    ),
    # the rest
    "FsdpTrainingState": (
        "torch.distributed.fsdp._fully_shard._fsdp_common",
        "TrainingState",
        "torch 2.11 leaves the head of a tied model gathered after a forward alone",
    ),
    "set_group_timeout": (
        "torch.distributed.distributed_c10d",
        "_set_pg_timeout",
        "init_device_mesh takes no timeout, and gives its groups torch's 30 minutes",
    ),
    "flight_recorder": (
        "torch._C._distributed_c10d",
        None,
        "who waits for whom: torch's flight recorder has no public way out before a timeout",
    ),
    "StridedShard": (
        "torch.distributed.tensor.placement_types",
        "_StridedShard",
        "fsdp x tp gives such shards, and a checkpoint names what each rank holds",
    ),
    "local_shape_and_offset": (
        "torch.distributed.tensor._utils",
        "compute_local_shape_and_global_offset",
        "random bits by the place of a value in the whole weight",
    ),
    "record_registry": (
        "transformers.utils.output_capturing",
        "_CAN_RECORD_REGISTRY",
        "what a class returns of its inner layers, by its name; a sharded one has another",
    ),
    "ExceptionWrapper": (
        "torch._utils",
        "ExceptionWrapper",
        "what a data worker's queue could not send is told as its other errors are",
    ),
    "pytree": ("torch.utils", "_pytree", "tensors inside the arguments of a model's forward"),
    "muon": (
        "torch.optim._muon",
        None,
        "torch's own orthogonalization; the class works on whole matrices only",
    ),
    "compile_fx": ("torch._inductor.compile_fx", None, "one rank of a host compiles for all"),
    "inductor_config": ("torch._inductor.config", None, "the cores that ranks of a host share"),
    "cache_dir_utils": ("torch._inductor.runtime.cache_dir_utils", None, "where that is kept"),
    "dynamo": ("torch._dynamo", None, "limits, counters and errors of torch.compile"),
    "functorch_config": ("torch._functorch.config", None, "the partitioner's memory budget"),
}

# attributes of other libraries' objects: (class that has it, why)
ATTRIBUTES = {
    "_attn_implementation": (
        "transformers.PretrainedConfig",
        "set_attn_implementation only warns where a model cannot switch",
    ),
    "_global_mapping": (
        "transformers.utils.generic.GeneralInterface",
        "a mask function that was registered cannot be removed",
    ),
    "_get_dtype_plan": ("transformers.PreTrainedModel", "weights that a family keeps in fp32"),
    "_keys_to_ignore_on_load_unexpected": ("transformers.PreTrainedModel", "heads left on disk"),
    "_keys_to_ignore_on_save": ("transformers.PreTrainedModel", "what an export leaves out"),
    "_resolve_parallel_plans": ("transformers.PreTrainedModel", "plans of tp and ep, by family"),
    "_dequantize_one": (
        "transformers.integrations.finegrained_fp8.Fp8Dequantize",
        "takes the block from the grid of scales, not from the config",
    ),
    "_merge_kwargs": ("transformers.ProcessorMixin", "a processor's own settings for images"),
    "_process_images": ("transformers.ProcessorMixin", "images and their texts, without a prompt"),
    "_on_queue_feeder_error": (
        "multiprocessing.queues.Queue",
        "an item that cannot be sent is dropped, and who waits for it is not told",
    ),
    "_local_tensor": ("torch.distributed.tensor.DTensor", "a shard, without a node in the graph"),
    "_spec": ("torch.distributed.tensor.DTensor", "a shard on another device than its mesh's"),
    "_get_fsdp_state": ("torch.distributed.fsdp.FSDPModule", "see FsdpTrainingState"),
    "_accelerator_graph_capture_health_check": (
        "torch.optim.Optimizer",
        "a step on the CPU opens GPU 0 to ask whether it is recorded",
    ),
    "_foreach_norm": ("torch", "a norm per tensor in one kernel; what clip_grad_norm_ calls"),
    "_foreach_div_": ("torch", "the same for a division"),
}


def __getattr__(name: str) -> Any:
    if name not in IMPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute, _ = IMPORTED[name]
    found = import_module(module)
    value = found if attribute is None else getattr(found, attribute)
    globals()[name] = value
    return value
