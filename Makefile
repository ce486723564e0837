# make help says what there is. Nothing needs an activated environment: everything runs in .venv, made on first use.

PYTHON ?= python3
# PyPI's torch is the build for CUDA, several GB. TORCH_INDEX=URL names another index, such as the CPU one that
# pytorch.org's installation page gives. The lock has the hashes of the builds of both.
TORCH_INDEX ?=

BATCH ?= examples/mixed_batch.yaml
# Further arguments of pytest: make test TESTS=tests/unit
TESTS ?= tests
# Processes that share the tests, a file at a time, so that what a file prepares is prepared once; 0 runs them in one.
# Integration tests, whose files take longest, come first: by their numbers of cases, which is the default, they would be
# last, and one process would be busy at the end.
# Three keep two cores busy: a quarter of the time of a process is waiting, for gangs, servers and disks.
WORKERS ?= 3
# Seconds that a test of `make test` may take: more where other work has a higher priority.
TIMEOUT_S ?= 180
# Which of several parts of the files to run: make test-full PART=2/4
PART ?= 1/1

BIN := .venv/bin
PARALLEL = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
PACKAGES := .venv/.packages
READY := .venv/.ready
# What bench-gpu runs: a machine with a GPU may have its own torch and transformers, and nothing else.
PYTHON_GPU ?= $(BIN)/python
BENCH_READY := .venv-bench/.ready
BUILD_READY := .venv-build/.ready
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
# The scripts that install by the lock, and need nothing but Python.
INSTALL := .ci/install.py
LOCKED := requirements.txt $(INSTALL) .ci/lock_file.py
FROM_TORCH_INDEX = $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

# No phoning home, whatever of ours is started.
export DO_NOT_TRACK := true
export MLFLOW_DISABLE_TELEMETRY := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export HF_HUB_DISABLE_TELEMETRY := 1
# Compiled modules are kept, whatever an image sets: each process of the tests would compile what it imports again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-lineage demo-retrieval demo-reproduce demo-undo demo-untrusted demo-retrain test test-full test-cluster test-slurm test-ray test-browser test-lowest test-newest lint docs docs-serve check-style check-format check-types check-imports check-workflows check-secrets audit format bench \
	bench-planning bench-techniques bench-gpu bench-simulate bench-learning bench-predictions bench-lineage bench-execution bench-start bench-sweep bench-retraining bench-target bench-adapters bench-serve readme-figures code-size environment packages lock dist release-check clean

help:  ## Say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' Makefile

demo: $(READY)  ## Train a batch of eleven models on this machine's devices (BATCH=FILE for another)
	$(BIN)/ringmaster run $(BATCH)

demo-retrain: $(READY)  ## Let seven nights of retraining go by in a few minutes
	$(BIN)/python examples/seven_nights/run.py

demo-lineage: $(READY)  ## Find out where a family of models broke, what that reached and who may serve, 2 to 4 minutes
	$(BIN)/python examples/lineage/demo.py

demo-retrieval: $(READY)  ## Train a retriever and readers of drawn facts, change facts in their store, and ask again
	$(BIN)/python examples/retrieval/demo.py

demo-reproduce: $(READY)  ## Make models again from their lineage, bit by bit, and find a changed row, about a minute
	$(BIN)/python examples/provenance/demo.py reproduce

demo-undo: $(READY)  ## Train models again as if they had never read a row, about a minute
	$(BIN)/python examples/provenance/demo.py undo

demo-untrusted: $(READY)  ## Let an untrusted node of a pool lie, and see it named and its work repeated, 2 minutes
	$(BIN)/python examples/untrusted/demo.py

test: $(READY)  ## Run the tests (TESTS=tests/unit for a part of them)
	$(BIN)/python -m pytest $(PARALLEL) --timeout $(TIMEOUT_S) --maxfail 20 $(patsubst tests,tests/integration tests/unit,$(TESTS))

# The files of PART, out of the sorted ones that a command names.
in-part = $(shell $(1) | sort | awk 'BEGIN { split("$(PART)", part, "/") } NR % part[2] == part[1] % part[2]')

# Long tests are marked, are cases of a matrix, or draw examples. No other file is imported, which would take longer than
# most of them.
FULL = $(call in-part,grep -rlE 'mark\.full|tests\.matrix|^from hypothesis' --include='test_*.py' $(TESTS))

test-full: $(READY)  ## Run the long tests, which `make test` leaves out (PART=2/4 for the second quarter of their files)
	$(BIN)/python -m pytest $(PARALLEL) -m full $(or $(FULL),$(error PART=$(PART) of $(TESTS) has no long tests))

# Their own folders: importing the other tests would take half a minute.
test-cluster: TESTS = tests/cluster
test-slurm: TESTS = tests/slurm
test-ray: TESTS = tests/ray
test-browser: TESTS = tests/browser

# What each part of the tests of pools has: a pool that comes and goes, ranks that are killed, tables on PostgreSQL.
POOLS = $(addprefix tests/cluster/,test_services.py faults/test_faults_of_ranks.py faults/test_frozen_writers.py \
	faults/test_clock_jumps.py test_controllers_on_postgresql.py test_pool_databases.py test_tables_on_postgresql.py)
OTHER_POOLS = $(call in-part,find tests/cluster -name 'test_*.py' $(POOLS:%=! -path %))

test-cluster: $(READY)  ## Run the tests of pools: servers, nodes, and their faults, about 25 minutes (PART=2/3: 10)
	$(BIN)/python -m pytest -m 'cluster and not full' --session-timeout 3000 \
		$(if $(filter 1/1,$(PART)),$(TESTS),$(OTHER_POOLS) $(POOLS))

# QUICK=1 leaves out those that wait for Slurm's own timeouts.
test-slurm: $(READY)  ## Run the tests with a real Slurm cluster on this machine, as root, about 20 minutes (QUICK=1: 3)
	$(BIN)/python -m pytest -rs -m 'slurm$(if $(QUICK), and not full)' --session-timeout 3000 $(TESTS)

test-ray: $(READY)  ## Run the tests with a Ray cluster on this machine, and its faults, about 6 minutes (QUICK=1: 3)
	$(BIN)/python -m pytest -rs -m 'ray$(if $(QUICK), and not full)' --session-timeout 3000 $(TESTS)

test-browser: $(READY)  ## Read and click the pages of Prefect and MLflow in Chromium, about 5 minutes
	$(BIN)/python -m pytest -m 'browser and not full' --session-timeout 3000 $(TESTS)

# What a resolver may choose between pyproject.toml's bounds, whatever the lock has. torch alone is the locked version, as
# the build of its index. numba keeps its compiled kernels in the environment, as another numba cannot read those next to
# the sources.
test-lowest: .venv-lowest/.ready  ## Run the unit tests with the lowest versions that pyproject.toml allows
	$(call unit-tests,.venv-lowest)

test-newest:  ## Run the unit tests with the newest versions that pyproject.toml allows, installed anew each time
	$(call resolved,.venv-newest,highest)
	$(call unit-tests,.venv-newest)

unit-tests = NUMBA_CACHE_DIR=$(CURDIR)/$(1)/kernels $(1)/bin/python -m pytest $(PARALLEL) $(patsubst tests,tests/unit,$(TESTS))

define resolved
	$(PYTHON) -m venv --clear $(1)
	$(1)/bin/python $(INSTALL) $(FROM_TORCH_INDEX) --no-deps torch uv
	$(1)/bin/uv pip install --quiet --python $(1)/bin/python --resolution $(2) \
		'torch==$(shell sed -n 's/^torch==\([^ ]*\) .*/\1/p' requirements.txt)' --editable '.[dev]'
	NUMBA_CACHE_DIR=$(CURDIR)/$(1)/kernels $(1)/bin/python -m ringmaster.tasks.planning.compile_ahead
endef

.venv-lowest/.ready: pyproject.toml
	$(call resolved,.venv-lowest,lowest-direct)
	@touch $@

lint: check-style check-format check-types check-imports check-workflows docs  ## Check style, format, types, who imports whom, workflows, and the documentation

check-style: $(PACKAGES)
	$(BIN)/ruff check .

check-format: $(PACKAGES)
	$(BIN)/ruff format --check .

check-types: $(PACKAGES)
	$(BIN)/mypy

check-imports: $(PACKAGES)
	$(BIN)/python -m pytest tests/unit/project/test_architecture.py

# With a token of GitHub in GH_TOKEN it also asks GitHub about the actions: commits that are not theirs, advisories.
check-workflows: $(PACKAGES)
	$(BIN)/zizmor --no-progress --persona=pedantic .

# Not a part of lint, as it takes half a minute; a hook looks at the files of a commit.
check-secrets: $(READY)
	.ci/find_secrets

# By OSV, as a PyPI that does not know a package would count as no vulnerability.
OSV_URL ?= https://api.osv.dev/v1/query
audit: $(READY)  ## Look for known vulnerabilities of what the lock installs; needs the network
	$(BIN)/pip-audit --disable-pip --require-hashes --requirement requirements.txt \
		--vulnerability-service osv --osv-url $(OSV_URL) --progress-spinner off

# The site is built from sources, which are not imported. With --quiet, --strict would not see the warnings.
docs: $(PACKAGES)  ## Build the documentation site into site/; a broken link or an unknown reference fails
	$(MKDOCS) build --strict

docs-serve: $(READY)  ## Serve the documentation site on loopback, and build it again after each change
	$(MKDOCS) serve

format: $(READY)  ## Format the code, and mend what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## Measure whole runs against what a person would do by hand
	$(BIN)/python benchmarks/run.py

bench-techniques: $(READY)  ## Measure `single` against Hugging Face's Trainer and TRL, saves, overlap (as root), stages, the search, data
	$(BIN)/python -m benchmarks.trainers
	$(BIN)/python -m benchmarks.tasks
	$(BIN)/python -m benchmarks.checkpoints
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.stages
	$(BIN)/python -m benchmarks.search
	$(BIN)/python -m benchmarks.data

bench-gpu: $(if $(findstring .venv,$(PYTHON_GPU)),$(READY))  ## Measure a Llama of 1 B parameters, and 32 adapters of one, on a GPU (PYTHON_GPU=python3 where torch is)
	$(PYTHON_GPU) benchmarks/gpu/steps.py
	$(PYTHON_GPU) benchmarks/gpu/adapters.py
	$(PYTHON_GPU) benchmarks/gpu/estimates.py

bench-simulate: $(READY)  ## Measure what plans are worth when runtimes are wrong, with re-planning and without
	$(BIN)/python -m benchmarks.simulation $(BENCH)

# About 20 minutes on two quiet cores; BENCH="--draws 2 --families paper-txt-12x8" for less.
bench-learning: $(READY)  ## Measure plans by predictions that are corrected while training, compared with trying every option
	$(BIN)/python -m benchmarks.learning $(BENCH)

# About 15 minutes on two quiet cores; BENCH="--only bert vit" for some of its jobs.
bench-predictions: $(READY)  ## Measure how far predicted seconds of a step are from measured ones
	$(BIN)/python -m benchmarks.load_traces $(if $(BENCH),,--table)
	$(BIN)/python -m benchmarks.predictions $(BENCH)

# About 50 minutes, with Slurm and Ray; BENCH="deaths lost-node" for some of its measures. As root its nodes are network namespaces.
bench-execution: $(READY)  ## Measure what faults cost, short segments, wrong profiles, a thousand jobs, 128 nodes, lent nodes
	$(BIN)/python -m benchmarks.execution $(BENCH)

# About 20 minutes on two quiet cores; BENCH="--rounds 1 --only one" for less.
bench-start: $(READY)  ## Measure the first minute: whole commands compared with scripts of transformers' Trainer
	$(BIN)/python -m benchmarks.start $(BENCH)

# About 20 minutes on two quiet cores; BENCH=--quick for two, BENCH="--rounds 1" for a third.
bench-sweep: $(READY)  ## Measure a sweep of adapters against peft, one trial after another, and Ray Tune
	$(BIN)/python -m benchmarks.sweep $(BENCH)

# Trains the demo twice, a few minutes; BENCH=--table writes the table alone, from what the benchmarks have recorded.
readme-figures: $(READY)  ## Write the figures and the picture of the README
	$(BIN)/python -m benchmarks.readme $(BENCH)

# About 10 minutes on two quiet cores; BENCH="--seeds 1" for a tenth.
bench-retraining: $(READY)  ## Measure decisions when to retrain on replayed streams, compared with an oracle
	$(BIN)/python -m benchmarks.retraining $(BENCH)

# About 10 minutes on one core; BENCH="--seeds 1" for a third.
bench-target: $(READY)  ## Measure batch sizes that are chosen on the way to a target, and (as root) local updates over a slow link
	$(BIN)/python -m benchmarks.target $(BENCH)
	$(BIN)/python -m benchmarks.local_updates

code-size: $(READY)  ## Count files, statements, names and words
	$(BIN)/python -m benchmarks.code_size

# About 15 minutes; BENCH="engine memory" for some of its parts, BENCH=--tiny to try it.
bench-adapters: $(READY)  ## Measure adapters on one base: together, side by side, one after another, and peft with the Trainer
	$(BIN)/python -m benchmarks.adapters $(BENCH)

bench-serve: $(READY)  ## Measure a training endpoint: clients together, one against a plain loop of peft, requests to a warm server
	$(BIN)/python -m benchmarks.serving $(BENCH)

bench-lineage: $(READY)  ## Measure questions about 10,000 models, and the tensor store
	$(BIN)/python -m benchmarks.lineage $(BENCH)

# About 25 minutes on two cores; BENCH="--quick" or BENCH="--only sweep" for less.
bench-planning: $(READY) $(BENCH_READY)  ## Measure the planner, and other planners on the same problems
	$(BIN)/python -m benchmarks.planning --others $(BENCH)

# OR-Tools pins an older protobuf than MLflow is tested with, and its HiGHS clashes with highspy in one process: it has
# an environment of its own, for the benchmark alone.
$(BENCH_READY): $(READY)
	@echo 'Installing OR-Tools into .venv-bench, once.'
	$(PYTHON) -m venv .venv-bench
	$(BIN)/python -m pip freeze --exclude-editable --exclude torch --exclude protobuf > .venv-bench/constraints.txt
	.venv-bench/bin/python -m pip --disable-pip-version-check install --quiet \
		--constraint .venv-bench/constraints.txt 'ortools>=9.10'
	@touch $@

environment: $(READY)  ## Install the environment into .venv, which all of these do on first use

packages: $(PACKAGES)  ## Install it without the planner's compiled kernels, which `make lint` does not need

$(PACKAGES): pyproject.toml $(LOCKED)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'Ringmaster needs Python 3.11 or newer; "$(PYTHON)" is' "$$($(PYTHON) --version 2>&1)." \
		'To fix: install one, and name it: make PYTHON=python3.11 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
		echo 'This Python cannot make virtual environments. To fix: install its venv package' \
		'(on Debian and Ubuntu: apt install python3-venv)' >&2; exit 1; }
	@echo 'Making the environment in .venv: two to five minutes, once.'
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) $(FROM_TORCH_INDEX) 'ringmaster-ml[dev]'
	@$(BIN)/uv pip uninstall --quiet --python $(BIN)/python ringmaster  # the distribution's earlier name
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

$(READY): $(PACKAGES)
	@echo "Compiling the planner's kernels: one to two minutes, once."
	$(BIN)/python -m ringmaster.tasks.planning.compile_ahead
	@touch $@

# Builds and the lock need none of the project's dependencies: the lock may not have them yet.
$(BUILD_READY): $(LOCKED)
	$(PYTHON) -m venv --clear .venv-build
	.venv-build/bin/python $(INSTALL) hatchling uv
	@touch $@

# LOCK="--upgrade-package prefect" for one package, LOCK=--upgrade for all.
lock: $(BUILD_READY)  ## Write requirements.txt, the lock, after a change of pyproject.toml (LOCK=--upgrade for newer versions)
	.venv-build/bin/python .ci/lock.py $(if $(TORCH_INDEX),--torch $(TORCH_INDEX)) $(LOCK)

# What is not committed does not count. All times are the commit's, so that the same commit gives the same bytes.
dist: $(BUILD_READY)  ## Build the wheel and the source distribution of the commit that is checked out, into dist/
	rm -rf build/source dist
	mkdir -p build/source
	git archive HEAD | tar -x -C build/source
	cd build/source && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
		$(CURDIR)/.venv-build/bin/python -m hatchling build --directory $(CURDIR)/dist

release-check: $(READY) dist  ## Check dist/: a second build, the bill of materials, the quickstart in an empty environment, 5 minutes
	DIST=$(CURDIR)/dist $(BIN)/python -m pytest -m full tests/integration/releases/test_distributions.py

clean:  ## Remove the environment and the caches; what was trained stays in .ringmaster
	rm -rf .venv .venv-bench .venv-build .venv-lowest .venv-newest .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
