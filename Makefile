# Two commands on a fresh machine: `make smoke` and `make test`. Only Python >= 3.11, pip and make are needed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
FTCLI  := $(BIN)/ftcli
SMOKE  := runs/smoke
FUZZ_SECONDS ?= 600
BENCH_DEVICE ?= cuda
GPU_WORKERS ?= 6
DIST   := $(CURDIR)/dist
TOOL   := $(DIST)/tool

.PHONY: help install smoke test fuzz mutants test-families test-seeds test-gpu test-tool release check static lint typecheck layers format bench docs clean

help:
	@echo "make smoke          install into .venv, then train, evaluate and export the bundled tiny model on this machine"
	@echo "make test           everything that needs no GPU (kernels through Triton's interpreter)"
	@echo "make fuzz           random recipes, rows, models, runs and kills, for FUZZ_SECONDS (600)"
	@echo "make mutants        breaks one line at a time in a copy and says which the nearest tests do not notice; about an hour"
	@echo "make test-families  a small random model of every further family through train, eval and export, and what takes long"
	@echo "make test-tool      the built wheel as an installed tool (pipx), in a folder of its own"
	@echo "make release        wheel and sdist in dist/, checked, and used in a fresh virtual environment"
	@echo "make test-gpu       the kernel tests compiled, and the tests that need a CUDA machine (an 80 GB card, GPU_WORKERS=6)"
	@echo "make check          format, lint, types, layers, generated docs and tests: what CI runs"
	@echo "make bench          the kernels and the training step on this machine's GPU (BENCH_DEVICE=cpu: does it run at all)"
	@echo "make docs           regenerate docs/recipes.md"
	@echo "make format         format the code"

install: $(VENV)/installed

# Bytecode by all cores: pip would write it on one, a third of the time of the installation. Some packages hold files
# that are no Python of today, which pip does not mind either.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# One thread, as in the tests: on a machine where others work, the threads of one small product wait for each other.
smoke: export OMP_NUM_THREADS := 1
smoke: install
	$(FTCLI) train recipes/smoke.yaml --resume never
	$(FTCLI) eval recipes/smoke.yaml --run $(SMOKE)
	$(FTCLI) export $(SMOKE)
	@echo "open $(SMOKE)/report.html"

# Bytecode is written: the workers, and every process that a test starts, would compile all they import anew.
test test-families test-seeds: export PYTHONDONTWRITEBYTECODE :=
# What was freed stays with the process, up to 1 GiB (glibc's settings): the system otherwise clears the pages of each
# tensor anew, a tenth of the time of the tests. Blocks of 256 MiB and more still come from the system one by one.
test test-families test-seeds: export MALLOC_MMAP_THRESHOLD_ = 268435456
test test-families test-seeds: export MALLOC_TRIM_THRESHOLD_ = 1073741824
test test-families test-seeds: export MALLOC_TOP_PAD_ = 67108864
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not families and not long and not seeds" -n auto --dist worksteal

fuzz: install
	OMP_NUM_THREADS=1 FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest tests/fuzz --timeout 0

mutants: install
	$(BIN)/python -m tests.mutants.run

# Runs that learn, with seeds that CI leaves out.
test-seeds: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m seeds tests/recipes -n auto --dist worksteal

test-families: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "(families or long) and not seeds" tests/ways tests/e2e tests/recipes tests/unit tests/ops tests/fuzz -n auto --dist worksteal

# What the installed $(TOOL)/bin/ftcli does in a folder where nothing of the checkout is found.
define use-tool
mkdir -p $(TOOL)/work
cd $(TOOL)/work && ../bin/ftcli recipes copy smoke mine.yaml && ../bin/ftcli check mine.yaml --offline
cd $(TOOL)/work && ../bin/ftcli train mine.yaml --offline --max-steps 2 --set train.warmup_steps=1
cd $(TOOL)/work && ../bin/ftcli export runs/mine --offline && ../bin/ftcli runs
rm -rf $(TOOL)
endef

# A wheel that was built from this checkout, with its own packages.
test-tool: export PIPX_HOME := $(TOOL)/pipx
test-tool: export PIPX_BIN_DIR := $(TOOL)/bin
test-tool: export PIPX_MAN_DIR := $(TOOL)/man
# Of its packages the commands compile what they import, and keep it: a third of all files.
test-tool: export PYTHONDONTWRITEBYTECODE :=
test-tool: install
	rm -rf $(TOOL) && mkdir -p $(TOOL)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(TOOL) .
	$(BIN)/python -m pipx install --quiet --python $(abspath $(BIN)/python) --pip-args="--no-compile -c $(CURDIR)/constraints.txt" $(TOOL)/*.whl
	$(use-tool)

# The wheel is built from the sdist, so that the sdist is known to be whole. Publishing is the owner's.
release: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	rm -rf $(TOOL) $(DIST)/ftcli-*
	$(BIN)/python -m hatchling build --target sdist --directory $(DIST)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) $(DIST)/ftcli-*.tar.gz
	$(BIN)/python -m twine check --strict $(DIST)/ftcli-*
	$(BIN)/check-wheel-contents $(DIST)/ftcli-*.whl
	$(PYTHON) -m venv $(TOOL)
	$(TOOL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(DIST)/ftcli-*.whl
	$(use-tool)
	@ls -l $(DIST)/ftcli-*

test-gpu:
	OMP_NUM_THREADS=2 $(PYTHON) -m pytest -m gpu tests/ops tests/gpu -n $(GPU_WORKERS) --dist worksteal

check: static test

static: lint typecheck layers

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

typecheck: install
	$(BIN)/mypy

layers: install
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# BENCH_DEVICE=cpu runs tiny cases, to see that the scripts work.
bench: install
ifeq ($(BENCH_DEVICE),cpu)
bench: export TRITON_INTERPRET := 1
BENCH_STEP := recipes/smoke.yaml --batch 2 --seq 64 --steps 2
else
BENCH_STEP := recipes/llama3.1-8b.yaml --batch 2 --seq 4096 --set train.gradient_checkpointing=false
endif
bench:
	$(BIN)/python kernels/bench/ops.py --device $(BENCH_DEVICE)
	$(BIN)/python kernels/bench/attention.py --device $(BENCH_DEVICE)
	$(BIN)/python kernels/bench/products.py --device $(BENCH_DEVICE)
	$(FTCLI) bench $(BENCH_STEP)

docs: install
	$(BIN)/python docs/tools/recipes_page.py

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
