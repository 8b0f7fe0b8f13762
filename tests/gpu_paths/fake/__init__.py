"""A GPU that computes nothing: a CUDA runtime, driver, cuBLAS, cuDNN and NCCL in which every call succeeds.

Preloaded under torch's CUDA wheel, everything on the host is real: allocator, streams, events, ProcessGroupNCCL, FSDP,
inductor, Triton, ptxas. It shows that each line of a GPU's path runs, waits of the host (torch's own guard), peaks of
memory, cubins with their registers and spills (cubins.py), what the ranks of a communicator send, and which process
opens which card. It shows no numbers (what is read back is made up, but for small copies of the host's), no time of a
kernel, and no autotuning. What reads back what kernels have made cannot run: DDP, which compares the models of its
ranks, sampling, and vision towers that compute sizes on the device.

    python -m tests.gpu_paths.fake.run recipes/train_ft.py --config-name smoke training.compile=true
    python -m tests.gpu_paths.fake.run -m tests.gpu_paths.fake.whole_plan FOLDER   (gpu_check, part by part)
    FAKE_GPUS=2 python -m tests.gpu_paths.fake.run recipes/train_ft.py --nproc 2 ... mesh.cp=2

FAKE_GPU_GB=84.9  FAKE_GPU_NAME="NVIDIA H200"  FAKE_GPU_TRACE=1 (calls that wait)  FAKE_NCCL_LOG=FOLDER
FAKE_GPU_CONTEXTS=FOLDER (a file per process: the cards that it opened, and by which call)
"""
