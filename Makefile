# `make demo` and `make test` work from a fresh clone: each sets up .venv first, and does so again only when
# constraints.txt or pyproject.toml changed.
PYTHON ?= python3
SEED ?= 0
DEVICE_TESTS ?= tests/device tests/actor tests/trainer tests/models tests/python_backend
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_RLVR := .venv/.installed-rlvr
PYTEST := $(BIN)/python -m pytest -q

.PHONY: demo demo-llm demo-rlvr demo-agent test test-all test-device gpu-check test-repeated mutants crash fuzz test-trl trl-environment test-vllm check check-deploy format generate docs clean

demo: $(INSTALLED)
	$(BIN)/python -m examples.demo sentences run.seed=$(SEED)
	@echo 'Open runs/demo/report.html in a browser. For your own models, go on with docs/getting-started.md.'

demo-llm: $(INSTALLED)
	$(BIN)/python -m examples.demo chat run.seed=$(SEED)

# ALGORITHM=sao: with a critic; another name without one, such as rloo, in place of grpo.
demo-rlvr: $(INSTALLED_RLVR)
	$(BIN)/python -m examples.demo $(or $(filter sao,$(ALGORITHM)),reasoning $(ALGORITHM:%=actor.algorithm.name=%)) run.seed=$(SEED)

demo-agent: $(INSTALLED_RLVR)
	$(BIN)/python -m examples.demo agent run.seed=$(SEED)

test: $(INSTALLED)
	$(PYTEST) -n 3 --dist worksteal -m "not slow"

# Fewer at a time: on a starved machine server 2.51 takes a model that is loading for a dead one.
test-all: $(INSTALLED_RLVR) test-device
	$(PYTEST) -n 2 --dist worksteal

# On simulated GPUs (tests/support/simulated_cuda): each code path that differs there once: tests/device, and of
# the other folders the tests marked `device`. Needs g++.
test-device: $(INSTALLED)
	PYTHONPATH=tests/support $(BIN)/python -m simulated_cuda.build
	PYTHONPATH=$(CURDIR)/tests/support/simulated_cuda/startup:$(CURDIR)/tests/support \
		$(PYTEST) -n 2 --dist worksteal -p simulated_cuda.plugin -m "not slow" $(DEVICE_TESTS)

# A real GPU: whether everything works there, and how fast, in at most eight minutes; without one, tiny models on the
# CPU. Uses the environment of PYTHON as it is, because its torch must be one for the GPU.
gpu-check:
	$(PYTHON) -m benchmarks gpu --out runs/gpu-check

# Hours: five runs of each Python in a fresh clone, two of them beside busy loops; PYTHONS="python3.11 ...": only those.
test-repeated:
	$(PYTHON) tests/repeat.py $(if $(PYTHONS),--pythons $(PYTHONS))

# Breaks the code in each of the ways of tests/mutations.toml, which a test must notice.
# ONLY="PART ...": the faults whose name or path has one of these parts.
mutants: $(INSTALLED)
	$(BIN)/python tests/mutants.py $(ONLY)

# Fifty kills of server, models and sidecar (CRASH_KILLS=N, CRASH_RANKS=2, …), as many of a run two steps ahead with
# vLLM, then a soak test of SOAK_MINUTES.
crash: $(INSTALLED)
	CRASH_KILLS=$${CRASH_KILLS:-50} SOAK_MINUTES=$${SOAK_MINUTES:-10} $(PYTEST) -s tests/crash

# Twenty rounds of bad requests of each kind (FUZZ_SEED=N: others); `make test-all` plays two.
fuzz: $(INSTALLED)
	FUZZ_ROUNDS=$${FUZZ_ROUNDS:-20} $(PYTEST) -s tests/fuzz

test-trl: $(INSTALLED) trl-environment
	TRL_ENVIRONMENT=runs/trl-environment $(BIN)/python -m pytest -q tests/gateway/test_trl_run.py

# Installs the CPU build of vLLM, which needs Python 3.11 or newer and other packages than ours, into runs/.
test-vllm: $(INSTALLED)
	VLLM_ENVIRONMENT=runs/vllm-environment $(BIN)/python -m pytest -q tests/server/test_vllm_run.py

check: $(INSTALLED) check-deploy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/render_configs.py --check
	$(BIN)/python tools/config_reference.py --check
	$(BIN)/python tests/mutants.py --list

# What kustomize, Kubernetes' schemas, linters and, where it is installed, promtool say of deploy/ and the Dockerfile.
check-deploy: $(INSTALLED)
	rm -rf build/deploy && mkdir -p build && cp -R deploy build/deploy
	echo TRAINING_KEY=check > build/deploy/base/keys.env
	set -e; for overlay in deploy/overlays/*; do $(BIN)/kubectl kustomize build/$$overlay > build/$$overlay.yaml; done
	$(BIN)/kubernetes-validate --strict --quiet build/deploy/overlays/*.yaml
	$(BIN)/hadolint --no-color Dockerfile.triton
	$(BIN)/shellcheck deploy/slurm/run.sbatch tools/install.sh
	if command -v promtool > /dev/null; then cd deploy/monitoring && promtool check rules alerts.yml && promtool check config prometheus.yml; fi

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(INSTALLED)
	$(BIN)/python tools/config_reference.py
	$(BIN)/python tools/render_configs.py
	$(BIN)/python deploy/monitoring/generate.py

# Strict: a broken link, a missing page, or one that no table of contents lists, is an error. Needs Python 3.11.
docs: $(INSTALLED)
	$(BIN)/python tools/config_reference.py
	$(BIN)/sphinx-build -W --keep-going --nitpicky --fresh-env --quiet docs build/docs
	@echo build/docs/index.html

clean:
	rm -rf .venv runs build

$(INSTALLED): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else "Python 3.10 to 3.12 is needed, this is %d.%d: make PYTHON=python3.11 ..." % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[serving,train,judge,demo,gateway,tracing,dev]'
	@touch $@

# Apart from the rest: one of its packages has no wheel, so it needs a C compiler and Python's headers.
$(INSTALLED_RLVR): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[rlvr]'
	@touch $@

# TRL needs another NumPy, so it has an environment of its own, also for `python -m benchmarks trl`; PPO is in an older TRL beside it.
trl-environment: runs/trl-environment/complete

runs/trl-environment/complete: benchmarks/trl_requirements.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --requirement $<
	$(@D)/bin/python -m pip install --quiet --no-deps --target $(@D)/trl-ppo trl==1.12.0
	@touch $@
