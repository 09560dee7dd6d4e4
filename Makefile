# One word per chore. Every target makes .venv when it is missing; only Python (>= 3.11) and make are needed beforehand.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# What tests compare the Fisher with, and all that it needs to be imported; its other dependencies stay out.
ORACLE := curvlinops-for-pytorch einconv einops linear_operator

.PHONY: demo test test-slow check docs bench clean

# Beside another busy process threads that spin for each other take 50 times as long; these soon give up their core.
demo: $(READY)  ## PRONG beside SGD, batch norm and Adam on the paper's autoencoder
	GOMP_SPINCOUNT=1000 $(VENV)/bin/prong run autoencoder --quick
	$(VENV)/bin/prong report runs/autoencoder-quick

# One thread per worker: two torch processes with two threads each fight over two cores.
test: $(READY)  ## the specification, coverage included
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal -m "not slow" --cov --cov-report=term-missing:skip-covered --cov-fail-under=95

test-slow: $(READY)  ## the tests that take minutes
	$(RUN) -m pytest -m slow --timeout=1800

check: $(READY)  ## format, lint, types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

docs: $(READY)  ## the documentation as a site/ folder
	$(RUN) -m mkdocs build --strict

bench: $(READY)  ## the cost of an update, PRONG beside its peers; `prong bench --help` has more
	$(VENV)/bin/prong bench step-cost

clean:
	rm -rf $(VENV) site

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[lab,dev]"
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(ORACLE)
	touch $@
