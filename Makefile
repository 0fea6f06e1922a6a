# make demo   train twice on generated pictures, without and with reuse, and compare
# make test   the tests (with CI=true the slow ones too)
# make check  ruff and pyright

PYTHON ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help

.PHONY: help demo test check

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
	$(BIN)/perfect-compare runs/demo/fresh runs/demo/reuse

test: .venv/ready
	$(BIN)/python -m pytest -m "$(if $(CI),not gpu,not gpu and not slow)"

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
