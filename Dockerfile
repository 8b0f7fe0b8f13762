# GPU image with flash-attn and Transformer Engine, both built against the torch of the base image.
# It has not been built or run by this project yet. The workflow `image` builds it and trains in it on a CPU before it is
# pushed: expect to adjust a version, and start with benchmarks/gpu_check.py on a GPU.
#   docker build -t automodel-lite .
#   docker run --gpus all --ipc host -v $PWD:/data -w /data automodel-lite \
#       torchrun --nproc-per-node 8 -m automodel_lite train --config-name finetune name=mine model.pretrained=... dataset.path=...
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel

# images whose Python is Ubuntu's own refuse pip without the second
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True MAX_JOBS=8 NVTE_FRAMEWORK=pytorch

RUN pip install ninja packaging wheel setuptools \
 && pip install --no-build-isolation flash-attn==2.8.3 \
 && pip install --no-build-isolation "transformer-engine[pytorch]==2.20.0"

WORKDIR /opt/automodel-lite
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE ./
COPY automodel_lite automodel_lite
COPY conf conf
COPY recipes recipes
COPY launch launch
COPY docs docs
# torch stays the one of the image
RUN pip freeze | grep -i "^torch==" > /tmp/torch.txt \
 && grep -v "^torch==" constraints.txt > /tmp/constraints.txt \
 && pip install -c /tmp/constraints.txt -c /tmp/torch.txt ".[all]"
WORKDIR /data
