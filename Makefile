# `make demo` and `make test` set everything up by themselves, in .venv, on a machine with Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-integrations lint types unit mutate soak browser bench docs format dist clean

demo: $(INSTALLED)
	$(BIN)/python -m cdgrab_experiments.demo

test: lint types unit

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

unit: $(INSTALLED) browser
	$(BIN)/python -m pytest -n 2

# Tools that are large to install: Ray, TRL, Lightning and others. Those that `dev` has are tested by `make test` too.
test-integrations: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test-integrations]'
	CDGRAB_TEST_INTEGRATIONS=1 $(BIN)/python -m pytest tests/integrations

# Whether the tests notice faults; minutes, and no part of `make test`.
mutate: $(INSTALLED)
	$(BIN)/python -m tests.mutate

# Damage and faults at length; minutes, and no part of `make test`.
soak: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python -m tests.soak.damage

# The report is tested in a real browser. Where none can be installed, that test says so and is skipped.
browser:
	@command -v chromedriver >/dev/null || ! command -v apt-get >/dev/null || { \
	    root=; test "$$(id -u)" = 0 || root="sudo -n"; get="$$root env DEBIAN_FRONTEND=noninteractive apt-get -qq"; \
	    { $$get update && $$get install -y --no-install-recommends chromium chromium-driver chromium-sandbox; } >/dev/null 2>&1; } || true

# The documentation as a site, in site/: `python -m http.server -d site` shows it. A broken link or reference fails.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(INSTALLED) browser
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict
	$(BIN)/python -m pytest tests/site

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.sorter
	$(BIN)/python -m benchmarks.exchange
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.scaling

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What is uploaded: a source distribution and a wheel, checked. What is in them is tested in tests/package.
dist: $(INSTALLED)
	rm -rf dist build
	$(BIN)/python -m build --quiet --no-isolation --outdir dist .
	$(BIN)/python -m twine check --strict dist/*

# Installed again only when what is to be installed has changed.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "cdgrab needs Python 3.11 or newer; run: make PYTHON=/path/to/python3 demo")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fast,experiments,text,dev]'
	touch $@

clean:
	rm -rf .venv results build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
