# make demo      four promises, each against what one would do otherwise, and runs/demo/index.html
# make demo-long train on its pictures: without reuse, with a cache, with reuse, in half the memory
# make test      the quick tests, JOBS=2 at a time; make test-ci: what CI runs; make test-all: all
# make gpu-tests   the tests of the CUDA paths, on the GPU; without one, on a fake one of the CPU
#                  TORCH=2.11: with that version of torch, in an environment of its own
# make slow-tests  the quick tests, and which of them are dear: 1.0 is a fixed loop on this machine
# make backends  install DALI and FFCV too (FFCV's system packages by apt), and test the backends
# make ray       install Ray (500 MB), and test a fleet on two nodes, both of them on this machine
# make mutants   puts over a hundred faults into a copy, one at a time: which tests notice each
# make docs      builds the site of docs/ into site/, with every warning an error
# make readme    writes the numbers and the picture of README from the result files
# make check     ruff and pyright

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
UV := $(BIN)/uv pip install --quiet --python .venv -c constraints.txt
.DEFAULT_GOAL := help
## uv leaves torch's 2,000 files to be compiled at their first import: this keeps what was compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-long test slow-tests test-ci test-all gpu-tests backends ray mutants docs readme check

help:
	@sed -n 's/^# //p' Makefile

## What a run needs: pip takes minutes over it, uv half of one.
.venv/run: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check uv -c constraints.txt
	$(UV) -e .
	touch $@

.venv/dev: .venv/run
	$(UV) -e '.[dev]'
	touch $@

demo: .venv/run
	$(BIN)/python examples/demo runs/demo

LONG := fresh cached reuse reuse_offload
demo-long: .venv/run
	$(BIN)/python examples/make_pictures.py runs/demo/pictures
	set -e; for run in $(LONG); do \
		$(BIN)/perfect-train configs/demo/$$run.yaml --out runs/demo-long/$$run; \
	done
	$(BIN)/perfect-compare $(addprefix runs/demo-long/,$(LONG))

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not gpu"

## The tiers are explained in tests/conftest.py.
test: .venv/dev
	$(PYTEST) --tier test

slow-tests: .venv/dev
	$(PYTEST) --tier test --slow-tests

## Tests of several processes wait while their worker idles: one worker more than usual fills it.
test-ci: JOBS = 3
test-ci: .venv/dev
	$(PYTEST) --tier ci

test-all: .venv/dev
	$(PYTEST) --tier all

## Another version of torch brings its own torchvision and libraries of CUDA.
.venv-torch-%/dev: .venv/run
	$(PYTHON) -m venv $(@D)
	grep -vE '^(torch|torchvision|nvidia-.*)==' constraints.txt > $(@D)/constraints.txt
	$(BIN)/uv pip install --quiet --python $(@D) -c $(@D)/constraints.txt -e '.[dev]' 'torch==$*.*'
	touch $@

## tests/fakecuda/ plays a GPU where there is none.
GPU_VENV = $(if $(TORCH),.venv-torch-$(TORCH),.venv)
GPU_TESTS = OMP_NUM_THREADS=1 $(GPU_VENV)/bin/python tests/fakecuda/on_gpu.py \
	$(GPU_VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal -m gpu
LATE = streams.py offload_runner_faults.py streams_models.py captured_streams.py preemption.py \
	placing_gpu.py captured_devices.py device_draws.py several_devices.py fleet_devices.py
REORDERED = captured_streams.py captured_devices.py offload_cudagraph.py
gpu-tests: $(GPU_VENV)/dev
	$(GPU_TESTS) tests
	FAKE_CUDA_ASYNC=1 FAKE_CUDA_DEVICES=4 $(GPU_TESTS) $(addprefix tests/integration/test_,$(LATE))
	FAKE_CUDA_SHUFFLE=1 FAKE_CUDA_DEVICES=4 $(GPU_TESTS) $(addprefix tests/integration/test_,$(REORDERED))

## Without root or sudo, a laptop goes on without FFCV; CI does not.
.venv/backends: .venv/dev scripts/install_ffcv_packages.sh
	if PYTHON=$(BIN)/python scripts/install_ffcv_packages.sh; then \
		$(UV) -e '.[dali,ffcv]' && \
		$(BIN)/python -c 'import ffcv, nvidia.dali' && touch $@; \
	elif [ "$(CI)" ]; then \
		echo "CI tests every backend: see above what FFCV lacks" >&2; exit 1; \
	else \
		echo "going on without FFCV" >&2; \
		$(UV) -e '.[dali]'; \
	fi

backends: .venv/backends
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" $(addprefix tests/integration/test_,backends.py backends_dali.py beton.py convert.py)

.venv/ray: .venv/dev
	$(UV) -e '.[ray]'
	touch $@

## Nodes are processes, and so are the workers on them: one test at a time.
ray: .venv/ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration/test_ray_fleet.py tests/integration/test_ray_tune.py

mutants: .venv/dev
	$(BIN)/python tests/mutants/run.py --only "$(ONLY)" $(if $(OUT),--out $(OUT)) $(if $(GO_ON),--go-on)

.venv/docs: .venv/dev
	$(UV) -e '.[docs]'
	touch $@

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

readme: .venv/dev
	$(BIN)/python scripts/readme_numbers.py --write $(if $(DEMO),--demo $(DEMO))
	$(BIN)/python -m benchmarks.readme_picture

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
