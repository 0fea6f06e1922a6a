# make demo      train on generated pictures: without reuse, with it, and with it in half the memory
# make test      the tests, JOBS=2 at a time (with CI=true the slow ones too)
# make backends  install DALI and FFCV too (FFCV's system packages by apt), and test the backends
# make check     ruff and pyright

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
.DEFAULT_GOAL := help

.PHONY: help demo test backends check

help:
	@sed -n 's/^# //p' Makefile

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	touch $@

demo: .venv/ready
	$(BIN)/python examples/make_pictures.py runs/demo/pictures
	$(BIN)/perfect-train configs/demo/fresh.yaml --out runs/demo/fresh
	$(BIN)/perfect-train configs/demo/reuse.yaml --out runs/demo/reuse
	$(BIN)/perfect-train configs/demo/reuse_offload.yaml --out runs/demo/reuse_offload
	$(BIN)/perfect-compare runs/demo/fresh runs/demo/reuse runs/demo/reuse_offload

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(if $(CI),not gpu,not gpu and not slow)"

## Without root or sudo, a laptop goes on without FFCV; CI does not.
.venv/backends: .venv/ready scripts/install_ffcv_packages.sh
	if PYTHON=$(BIN)/python scripts/install_ffcv_packages.sh; then \
		$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dali,ffcv]' -c constraints.txt && \
		$(BIN)/python -c 'import ffcv, nvidia.dali' && touch $@; \
	elif [ "$(CI)" ]; then \
		echo "CI tests every backend: see above what FFCV lacks" >&2; exit 1; \
	else \
		echo "going on without FFCV" >&2; \
		$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dali]' -c constraints.txt; \
	fi

backends: .venv/backends
	$(BIN)/python -m pytest -m "not gpu" $(addprefix tests/integration/test_,backends.py beton.py convert.py)

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
