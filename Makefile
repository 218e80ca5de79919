# `make train` and `make test` set up what they need. PYTHON=python3.12 chooses an interpreter, ARGS="…" adds overrides.
PYTHON ?= $(shell command -v python3.12 >/dev/null 2>&1 && python3.12 -c '' 2>/dev/null && echo python3.12 || echo python3)
VENV ?= .venv
ARGS ?=
# How many files of tests run at a time. Their limits of time grow with the load.
TEST_WORKERS ?= 2
# A rank that can start no thread on a crowded machine dies, and the others lose their connections to it: such a test is
# repeated once, and what it said is printed with the results (tests/conftest.py).
PYTEST = $(VENV)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile \
	--reruns 1 --only-rerun 'Connection (reset|closed) by peer'

.PHONY: train test test-all test-rest test-long test-slurm lint check fix parity parity-gpu checkpoint-matrix chaos crash-points storage-faults slurm-chaos soak goodput gpu-test bench-llm bench-strategies bench-images overhead \
	clean

train: $(VENV)/.run
	$(VENV)/bin/python train.py $(ARGS)

# Linters, units, and one honest run of every strategy and axis (tests/quick.py). CI and a commit check types too.
test: lint
	$(PYTEST) $(ARGS)

# Everything: what CI runs, then all of the matrix, chaos, foreign packages and Slurm. Hours.
test-all: check test test-rest test-long

test-long: $(VENV)/.dev
	SHARDWISE_TEST_SLURM=1 $(PYTEST) --tier=long $(ARGS)

# What CI runs besides. Its Slurm of four emulated nodes is installed for it: root, on Debian or Ubuntu.
test-rest: $(VENV)/.dev
	SHARDWISE_TEST_SLURM=1 $(PYTEST) --tier=rest $(ARGS)

test-slurm: $(VENV)/.dev
	SHARDWISE_TEST_SLURM=1 $(VENV)/bin/python -m pytest --tier=all tests/slurm $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

check: lint
	$(VENV)/bin/mypy

fix: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Every strategy and every layout of axes against a plain loop; writes benchmarks/results/ and docs/parity.md.
parity: $(VENV)/.dev
	$(VENV)/bin/python benchmarks/parity_matrix.py $(ARGS)
	$(VENV)/bin/python benchmarks/report.py

parity-gpu: $(VENV)/.dev
	$(VENV)/bin/python benchmarks/parity_matrix.py --accelerator cuda $(ARGS)
	$(VENV)/bin/python benchmarks/report.py

# Saved under every strategy and layout, gone on with under others; writes benchmarks/results/ and docs/checkpointing.md.
checkpoint-matrix: $(VENV)/.dev
	$(VENV)/bin/python benchmarks/checkpoint_matrix.py $(ARGS)
	$(VENV)/bin/python benchmarks/report.py

# Runs that are interrupted in every way, about two hours; writes benchmarks/results/ and docs/reliability.md.
chaos: $(VENV)/.dev
	$(VENV)/bin/python benchmarks/chaos.py $(ARGS)
	$(VENV)/bin/python benchmarks/report.py

# A crash at every operation of a run on its folder, half an hour; writes benchmarks/results/ and docs/reliability.md.
crash-points: $(VENV)/.dev
	$(VENV)/bin/python benchmarks/crash_points.py $(ARGS)
	$(VENV)/bin/python benchmarks/report.py

# An error at every operation of a run on its folder, two hours; writes benchmarks/results/ and docs/reliability.md.
storage-faults: $(VENV)/.dev
	$(VENV)/bin/python benchmarks/storage_faults.py $(ARGS)
	$(VENV)/bin/python benchmarks/report.py

# A hundred faults of jobs of a real Slurm, and ten thousand saves: an hour each. Seconds from a dead rank to the next step.
slurm-chaos: $(VENV)/.dev
	$(VENV)/bin/python benchmarks/slurm_chaos.py $(ARGS)
	$(VENV)/bin/python benchmarks/report.py

soak: $(VENV)/.dev
	$(VENV)/bin/python benchmarks/soak.py $(ARGS)
	$(VENV)/bin/python benchmarks/report.py

goodput: $(VENV)/.run
	$(VENV)/bin/python benchmarks/goodput.py $(ARGS)
	$(VENV)/bin/python benchmarks/report.py

# On a machine with GPUs; writes benchmarks/results/.
gpu-test: $(VENV)/.run
	$(VENV)/bin/python benchmarks/gpu_checks/first_steps.py
	$(VENV)/bin/python benchmarks/parity_gpu.py $(ARGS)

# Llama 3 beside torchtitan, on GPUs; ARGS="--ranks 2" for two. Writes benchmarks/results/ and docs/performance.md.
bench-llm: $(VENV)/.run
	$(VENV)/bin/python benchmarks/race.py $(ARGS); code=$$?; $(VENV)/bin/python benchmarks/report.py && exit $$code

# Every strategy beside stock Lightning, Llama 1.5 B and 8 B on two GPUs.
bench-strategies: $(VENV)/.run
	$(VENV)/bin/python benchmarks/breadth_gpu.py --ranks 2 --models llama3_1b,llama3_8b $(ARGS); code=$$?; \
		$(VENV)/bin/python benchmarks/report.py && exit $$code

# Images on one GPU beside a plain loop, in turn; what this commit has measured is left out.
bench-images: $(VENV)/.run
	$(VENV)/bin/python benchmarks/images_gpu.py --missing --sections resnet50,vit_b16,vit_l16 \
		--only 'in turn|trainer, compile=model$$' $(ARGS); code=$$?; $(VENV)/bin/python benchmarks/report.py && exit $$code

# What the Trainer costs; without GPUs: make overhead ARGS="--accelerator cpu".
overhead: $(VENV)/.run
	$(VENV)/bin/python benchmarks/overhead.py $(ARGS)

# The package itself as well, for its console script.
$(VENV)/.run: requirements.txt pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --requirement requirements.txt
	$(VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.txt requirements-foreign.txt requirements-deepspeed.txt requirements.txt pyproject.toml | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --requirement requirements-dev.txt --requirement requirements-foreign.txt
	# It asks for torchmetrics<1.9 and runs with 1.9; what else it needs, those before it have brought.
	$(VENV)/bin/python -m pip install --quiet --no-deps pytorch-tabular==1.2.0
	$(VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@ $(VENV)/.run

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 13); sys.exit(0 if ok else "shardwise runs on Python 3.11 and 3.12, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12 …")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
