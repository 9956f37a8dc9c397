# Every target makes the environment that it needs; a second run finds it by its stamp.
#
#   make demo     train a small network on real data with two processes and plot the run
#   make test     everything that make check does, then the test suite
#   make test-xla the tests of XLA devices, on torch_xla's CPU runtime in an environment of its own (7 GB)
#   make test-oldest-torch   the unit tests on the oldest torch that pyproject.toml allows, in the same environment
#   make test-newest-torch   unit tests, numerics, checkpoints and layouts on the newest torch, in its own environment (6.5 GB)
#   make test-cpu-adam   the tests of DeepSpeed's own Adam, which is compiled for some minutes the first time
#   make fuzz     a million generated inputs for everything that reads files and variables of others, in about 15 minutes
#   make quick    lint of the files that changed, and the unit tests, in about three minutes
#   make check    lint, format, types, dependency law, spelling, room rules, documentation
#   make coverage the lines that no test reaches, as a report and in htmlcov/, and what runs on an accelerator
#   make bench    speed beside plain PyTorch and the previous major release
#   make bench-xla       a step on an XLA device beside a hand-written torch_xla loop
#   make bench-clients   checkpoints, and programs of Transformers, Diffusers and others, on both packages
#   make soak     100,000 steps while processes are killed, beside a run that nobody disturbs
#   make pages    rewrite what tools write into README.md and the documentation
#   make docs     the documentation as a site in site/
#   make format   rewrite the code in the house format
#   make clean    remove environments, caches and build output

PYTHON ?= python3
VENV := .venv
REFERENCE_VENV := .venv-reference
XLA_VENV := .venv-xla
NEWEST_VENV := .venv-newest
REFERENCE_PACKAGES := accelerate==1.15.0 lightning-fabric==2.6.6 torchdata
XLA_TEST_PACKAGES := pytest pytest-timeout pytest-xdist torchdata transformers
# What the programs of tests/clients/programs import.
CLIENT_PACKAGES := datasets diffusers peft scikit-learn sentence-transformers tensorboard transformers trl
BIN := $(VENV)/bin
export NO_MKDOCS_2_WARNING := 1
# Some virtual machines advertise AMX and then fault on its instructions, which oneDNN generates for bf16.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16
PIP_INSTALL := -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

# Tests that start groups of processes run after the others: those of one file one at a time, two files beside each other.
GROUP_TESTS := $(wildcard tests/multiprocess tests/numerics tests/toy_device tests/clients tests/examples tests/faults)
# Hundreds of programs are started: each would compile the package again where no bytecode is kept.
TEST_ENVIRONMENT := PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
PYTEST := $(TEST_ENVIRONMENT) $(BIN)/python -m pytest

.DELETE_ON_ERROR:
.PHONY: demo test test-xla test-oldest-torch test-newest-torch test-cpu-adam fuzz quick check coverage device-coverage bench bench-xla bench-clients soak pages walks docs format clean unit-tests group-tests

# --- environments ----------------------------------------------------------------------------------------------------

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The demo needs the library and two packages, so that a newcomer waits for little more than torch.
$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.created
	$(BIN)/python $(PIP_INSTALL) --editable ".[demo]"
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.created
	$(BIN)/python $(PIP_INSTALL) --editable ".[dev]"
	touch $@ $(VENV)/.demo

# Merge two constraints files: a pin of the first replaces that of the second.
MERGE_CONSTRAINTS := awk -F== 'NR == FNR {own[$$1]; print; next} !($$1 in own)'

XLA_PIP_INSTALL := $(XLA_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
	--constraint $(XLA_VENV)/constraints.txt
$(XLA_VENV)/.ready: pyproject.toml constraints.txt constraints-xla.txt
	$(PYTHON) -m venv $(XLA_VENV)
	$(MERGE_CONSTRAINTS) constraints-xla.txt constraints.txt > $(XLA_VENV)/constraints.txt
	$(XLA_PIP_INSTALL) --editable ".[demo,xla]" $(XLA_TEST_PACKAGES)
	touch $@

$(XLA_VENV)/.tests: $(XLA_VENV)/.ready
	$(XLA_PIP_INSTALL) --editable ".[test,xla]"
	touch $@

# Not make check: types and lint are those of the torch in constraints.txt.
$(NEWEST_VENV)/.ready: pyproject.toml constraints.txt constraints-newest.txt
	$(PYTHON) -m venv $(NEWEST_VENV)
	$(MERGE_CONSTRAINTS) constraints-newest.txt constraints.txt > $(NEWEST_VENV)/constraints.txt
	$(NEWEST_VENV)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--constraint $(NEWEST_VENV)/constraints.txt --editable ".[test]"
	touch $@

$(REFERENCE_VENV)/.ready: constraints.txt
	$(PYTHON) -m venv $(REFERENCE_VENV)
	$(REFERENCE_VENV)/bin/python $(PIP_INSTALL) $(REFERENCE_PACKAGES)
	touch $@

$(REFERENCE_VENV)/.clients: $(REFERENCE_VENV)/.ready
	$(REFERENCE_VENV)/bin/python $(PIP_INSTALL) $(CLIENT_PACKAGES)
	touch $@

# --- targets ---------------------------------------------------------------------------------------------------------

demo: $(VENV)/.demo
	$(BIN)/accelerate launch --cpu --num_processes 2 examples/digits_cnn.py --output demo-output

test: check unit-tests group-tests

unit-tests: $(VENV)/.dev
	$(PYTEST) -n 2 --dist loadfile -m "not multiprocess" $(GROUP_TESTS:%=--ignore=%)

group-tests: $(VENV)/.dev unit-tests
	$(PYTEST) -n 2 --dist loadfile $(GROUP_TESTS)
	$(PYTEST) -n 2 --dist loadfile -m multiprocess $(GROUP_TESTS:%=--ignore=%)

# No GPU is looked for: torch_xla comes with a torch for CUDA.
XLA_PYTEST := CUDA_VISIBLE_DEVICES= $(TEST_ENVIRONMENT) $(XLA_VENV)/bin/python -m pytest -n 2 --dist loadfile

# One process computes on one device or drives several, from its start: so there are two runs.
test-xla: $(XLA_VENV)/.ready
	PJRT_DEVICE=CPU $(XLA_PYTEST) tests/xla
	PJRT_DEVICE=CPU XLA_USE_SPMD=1 $(XLA_PYTEST) tests/xla/spmd

test-oldest-torch: $(XLA_VENV)/.tests
	USE_TORCH_XLA=0 $(XLA_PYTEST) -m "not multiprocess" $(GROUP_TESTS:%=--ignore=%) --ignore=tests/xla

# Hides GPUs, because this torch is built for CUDA and the tests expect the CPU.
NEWEST_PYTEST := CUDA_VISIBLE_DEVICES= $(TEST_ENVIRONMENT) $(NEWEST_VENV)/bin/python -m pytest -n 2 --dist loadfile
NEWEST_GROUP_TESTS := tests/numerics $(patsubst %,tests/multiprocess/test_%.py, \
	broadcast_loading checkpoints deepspeed_state fsdp fsdp_state_files layout_checkpoints megatron_state pippy \
	save_model sharded_loading state training)
test-newest-torch: $(NEWEST_VENV)/.ready
	$(NEWEST_PYTEST) -m "not multiprocess" $(GROUP_TESTS:%=--ignore=%) --ignore=tests/xla
	$(NEWEST_PYTEST) $(NEWEST_GROUP_TESTS)

test-cpu-adam: $(VENV)/.dev
	ACCELERATE_TEST_CPU_ADAM=1 $(PYTEST) tests/multiprocess/test_deepspeed_cpu_adam.py

# Inputs that find something are kept in tests/hostile/corpus, which the tests replay.
FUZZ_INPUTS ?= 1000000
FUZZ_SECONDS ?= 2400
fuzz: $(VENV)/.dev
	$(TEST_ENVIRONMENT) $(BIN)/python -m tests.hostile.fuzz --inputs $(FUZZ_INPUTS) --seconds $(FUZZ_SECONDS)

check: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python tools/check_rooms.py
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/mkdocs build --strict --quiet

# Files that differ from the branch point, and new ones.
BASE ?= main
CHANGED = { git diff --name-only --diff-filter=d "$$(git merge-base HEAD $(BASE) || echo HEAD)"; \
	git ls-files --others --exclude-standard; } | grep '[.]py$$'

quick: $(VENV)/.dev
	$(CHANGED) | xargs -r $(BIN)/ruff check
	$(CHANGED) | xargs -r $(BIN)/ruff format --check
	$(BIN)/python tools/check_rooms.py
	$(PYTEST) -n 2 --dist loadfile -m "not multiprocess" tests/unit

# Processes write a file each; the report is made of all of them. COVERED=tests/unit measures a part of the tests.
COVERAGE := $(BIN)/python -m coverage
coverage: $(VENV)/.dev
	$(COVERAGE) erase
	-$(TEST_ENVIRONMENT) $(COVERAGE) run -m pytest -n 2 --dist loadfile $(COVERED)
	$(COVERAGE) combine --quiet
	$(COVERAGE) html --quiet
	$(COVERAGE) report
	mkdir -p build/coverage
	$(COVERAGE) json --quiet -o build/coverage/every.json
	$(MAKE) --no-print-directory device-coverage

# What the tests on the toy device run by themselves, beside what any test runs.
DEVICE_COVERAGE := COVERAGE_FILE=$(abspath build/coverage/device) $(COVERAGE)
device-coverage: $(VENV)/.dev
	$(DEVICE_COVERAGE) erase
	-$(TEST_ENVIRONMENT) $(DEVICE_COVERAGE) run -m pytest -n 2 --dist loadfile -q tests/toy_device
	$(DEVICE_COVERAGE) combine --quiet
	$(DEVICE_COVERAGE) json --quiet -o build/coverage/device.json
	$(BIN)/python -m tools.device_coverage build/coverage/device.json build/coverage/every.json

walks: $(VENV)/.dev
	$(BIN)/python -m tools.record_walks

pages: walks
	$(BIN)/python -m tools.write_pages

bench: $(VENV)/.dev $(REFERENCE_VENV)/.ready
	$(BIN)/python benchmarks/run.py --reference $(REFERENCE_VENV)/bin/python

bench-xla: $(XLA_VENV)/.ready
	CUDA_VISIBLE_DEVICES= $(XLA_VENV)/bin/python benchmarks/run.py --cases xla

# Checkpoints go to the other package and back; then the programs run on both.
bench-clients: $(VENV)/.dev $(REFERENCE_VENV)/.clients
	ACCELERATE_TEST_REFERENCE=$(abspath $(REFERENCE_VENV)/bin/python) $(PYTEST) -q tests/compat/test_checkpoint_layout.py \
		tests/compat/test_trainer_checkpoint.py
	$(BIN)/python -m tools.compare_clients --reference $(REFERENCE_VENV)/bin/python

# SOAK="--steps 4000 --kills 3" makes it shorter.
soak: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py $(SOAK)

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) $(REFERENCE_VENV) $(XLA_VENV) $(NEWEST_VENV) site build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache htmlcov .coverage .coverage.* src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
