# Every target sets up its own environment. GPU targets use GPU_PYTHON, which must have torch with
# CUDA, and download nothing.
VENV := .venv
PYTHON := $(VENV)/bin/python
RELEASE := build/release
CPP := $(shell find csrc python -name '*.cpp' -o -name '*.cu' -o -name '*.h')
NATIVE := CMakeLists.txt setup.py python/cuda_decision.py $(CPP)
# Loops that are unrolled for many types; the analysis of every path through them takes minutes.
UNROLLED := csrc/cpu/row_kernels.cpp $(filter %.cu,$(CPP))
EMULATION := $(wildcard tests/emulation/*)
ISSUE_FORMS := $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))

GPU_PYTHON ?= python3
SECONDS ?= 60

# Tests on many ranks share processes, so their group stays on one worker.
PYTEST := $(PYTHON) -m pytest --numprocesses 2 --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help quick test test-all test-interpreter test-emulation fuzz lint format docs docs-serve bench demo paper \
	uses wheel sdist test-gpu sanitize-gpu bench-gpu install-gpu clean

# Prints the comments with two number signs: descriptions beside targets, options below them.
help: ## Print this list
	@awk '/^[a-z-]+:.* ## / { name = $$0; sub(/:.*/, "", name); sub(/.* ## /, ""); printf "%-17s %s\n", name, $$0 } \
		/^## / { sub(/^## /, ""); printf "%-19s %s\n", "", $$0 }' $(firstword $(MAKEFILE_LIST))

# The newest pip resolves the packages in a third of the time of the pip beside Python 3.11.
$(PYTHON):
	python3 -m venv --upgrade-deps $(VENV)

# The tests need the compiled module. With a CUDA compiler, csrc/cuda is compiled even without a GPU,
# as a check of changes; this takes half a minute per architecture.
$(VENV)/.ready: pyproject.toml constraints.txt $(NATIVE) | $(PYTHON)
	CS_KERNELS_NATIVE=1 CUDAARCHS="$${CUDAARCHS-90}" \
		CS_KERNELS_CUDA="$${CS_KERNELS_CUDA-$$(command -v nvcc > /dev/null && echo 1 || echo 0)}" \
		$(PYTHON) -m pip install --quiet --constraint constraints.txt \
		--editable '.[dev]'
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt $(NATIVE) | $(PYTHON)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[demo]'
	touch $@

$(VENV)/.paper: pyproject.toml constraints.txt $(NATIVE) | $(PYTHON)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[paper]'
	touch $@

$(VENV)/.uses: pyproject.toml constraints.txt $(NATIVE) | $(PYTHON)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[uses]'
	touch $@

# Release tools come only from the package index, pinned by hash. They have their own environment,
# since their versions may conflict with the tests' packages.
$(RELEASE)/.ready: .ci/release-requirements.txt
	python3 -m venv $(RELEASE)
	PIP_EXTRA_INDEX_URL= $(RELEASE)/bin/python -m pip install --quiet --require-hashes --requirement $<
	touch $@

quick: $(VENV)/.ready ## Lint, and test the kernels and the loop; run it after every edit
	$(PYTHON) -m ruff check --quiet .
	$(PYTHON) -m ruff format --check --quiet .
	$(PYTHON) -m mypy
	$(PYTEST) --quick --quiet

test: $(VENV)/.ready ## Run every test on a sample of its parameters
## [PART=K/N] (the samples, and part K of N of the other cases)
	$(PYTEST) $(SAMPLES) --durations 15

SAMPLES := $(if $(PART),--part $(PART))
test-all: SAMPLES := --full
test-all: test test-interpreter test-emulation ## Run every case, on every backend that needs no GPU

test-interpreter: $(VENV)/.ready ## Test Triton's kernels on the CPU
	TRITON_INTERPRET=1 $(PYTEST) $(SAMPLES) --backends triton --durations 15 tests

# The address sanitizer has to be loaded first.
test-emulation: $(VENV)/.ready build/emulation/.ready ## Test the CUDA kernels on the CPU
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 CS_KERNELS_EMULATION=$(CURDIR)/build/emulation \
		$(PYTEST) $(SAMPLES) --backends cuda --durations 15 tests

# Runs a copy of the package under the address and undefined-behavior sanitizers.
fuzz: build/sanitized/.ready ## Call every operator at random, under sanitizers
## [SECONDS=60] [SEED=N] [BASELINE=1]
	rm -rf $(<D)/package && mkdir $(<D)/package && cp -R cs_kernels $(<D)/package
	cp $(<D)/_C*.so $(<D)/package/cs_kernels
	LD_PRELOAD="$$(for name in asan ubsan stdc++; do $(CXX) -print-file-name=lib$$name.so; done | xargs)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
		PYTHONMALLOC=malloc PYTHONPATH=$(<D)/package \
		$(PYTHON) tests/fuzz_operators.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

build/emulation/.ready: build/tidy/compile_commands.json $(NATIVE) $(EMULATION)
	$(VENV)/bin/cmake --build build/tidy --target _emulation
	mkdir -p $(@D) && cp build/tidy/_emulation*.so $(@D) && touch $@

lint: $(VENV)/.ready build/tidy/compile_commands.json ## Check formats, types, C++, workflows and forms
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms $(ISSUE_FORMS)
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(VENV)/bin/zizmor --offline --quiet .github
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP) $(EMULATION)
	printf '%s\n' $(filter-out $(UNROLLED),$(filter %.cpp,$(CPP))) | \
		xargs --max-procs 2 --max-args 1 $(VENV)/bin/clang-tidy --quiet -p build/tidy
	printf '%s\n' $(UNROLLED) | xargs --max-procs 2 --max-args 1 \
		$(VENV)/bin/clang-tidy --quiet -p build/tidy '--checks=-clang-analyzer-*'

define configure
	$(PYTHON) -m pip install --quiet --constraint constraints.txt pybind11 cmake ninja
	$(VENV)/bin/cmake -S . -B $(@D) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
		-DPython_EXECUTABLE=$(CURDIR)/$(PYTHON) \
		-Dpybind11_DIR=$$($(PYTHON) -m pybind11 --cmakedir) -DCS_KERNELS_CUDA=0 $(1) > /dev/null
endef

build/tidy/compile_commands.json: CMakeLists.txt $(VENV)/.ready
	$(call configure,-DCS_KERNELS_UNITY=0 -DCS_KERNELS_EMULATION=1)
	touch $@

build/sanitized/.ready: $(VENV)/.ready $(NATIVE)
	$(call configure,-DCS_KERNELS_SANITIZE=1 -DCS_KERNELS_BASELINE=$(if $(BASELINE),1,0))
	$(VENV)/bin/cmake --build $(@D) --target _C
	touch $@

format: $(VENV)/.ready ## Apply the automatic fixes
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP) $(EMULATION)

# A broken link, a missing file or a public name without documentation is an error. The sources are
# read, not imported, so this needs neither torch nor the compiled package.
docs: ## Build the site into build/site
docs-serve: ## Show the site, and follow edits
docs docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs $(if $(filter docs,$@),build --strict,serve)

$(VENV)/.docs: docs/requirements.txt | $(PYTHON)
	$(PYTHON) -m pip install --quiet --requirement $<
	touch $@

# One process per file, because the heap that a file leaves behind changes how fast the next file's
# peers allocate.
bench: $(VENV)/.ready ## Run the benchmarks, and write docs/benchmarks.md
## [QUICK=1] (small cases, without records)
ifdef QUICK
	$(PYTHON) -m pytest bench --quiet --quick
	$(PYTHON) bench/ranks.py --quick
else
	for table in phase2 methods steps features together price peers balancer host; do \
		$(PYTHON) -m pytest bench/test_$$table.py --quiet || exit 1; \
	done
	$(PYTHON) bench/ranks.py
	$(PYTHON) bench/page.py
endif

install-gpu:
	CS_KERNELS_CUDA=1 CUDAARCHS=native $(GPU_PYTHON) -m pip install --quiet --no-build-isolation --no-deps --editable .

# Records under bench/results contain each run's outcome.
GPU_PYTEST = $(GPU_PYTHON) -m pytest --override-ini filterwarnings=default
GPU_PROCESSES ?= 8

test-gpu: install-gpu ## Run every test on a GPU
## [GPU_PYTHON=python3] [GPU_PROCESSES=8]
	mkdir -p build && rm -f build/tests.xml
	$(GPU_PYTEST) --full --numprocesses $(GPU_PROCESSES) --backends triton,cuda \
		--ignore tests/test_triton_compiles.py --junit-xml build/tests.xml tests; \
		result=$$?; $(GPU_PYTHON) bench/outcome.py tests build/tests.xml $$result && exit $$result

# Initcheck must also observe torch's kernels, which write our kernels' inputs. Memcheck ignores
# failed API calls, since torch makes some and handles the failures.
sanitize-gpu: install-gpu ## Run the CUDA kernels under compute-sanitizer
## [GPU_PYTHON=python3]
	mkdir -p build
	for tool in memcheck racecheck synccheck initcheck; do \
		rm -f build/$$tool.xml; \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
			$$(test $$tool = initcheck || echo --kernel-name kns=cs_kernels) \
			$$(test $$tool = memcheck && echo --report-api-errors no) \
			$(GPU_PYTEST) --backends cuda -k sanitized --junit-xml build/$$tool.xml tests/test_gpu.py; \
		result=$$?; $(GPU_PYTHON) bench/outcome.py $$tool build/$$tool.xml $$result && \
			test $$result = 0 || exit 1; \
	done

# HRNet-18 needs timm.
bench-gpu: install-gpu ## Run the benchmarks on a GPU
## [GPU_PYTHON=python3]
	$(GPU_PYTEST) --quiet bench/test_gpu.py
	$(GPU_PYTEST) --quiet "bench/test_steps.py::test_training_steps[hrnet18]"
	$(GPU_PYTEST) --quiet bench/test_together.py::test_together_on_a_gpu

# Divides the cores among the processes; by default, torchrun gives each process one thread.
TORCHRUN = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(( $$(nproc) > $(RANKS) ? $$(nproc) / $(RANKS) : 1 ))} \
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node=$(RANKS)

# For the demo, a new environment gets neither the tests' packages nor CUDA kernels.
demo: $(if $(wildcard $(VENV)/.ready),$(VENV)/.ready,$(VENV)/.demo) ## Train three tasks of a photograph
## [QUICK=1] [DEVICE=cuda] [METHODS="NAME ..."] [RANKS=2] (processes)
	$(if $(RANKS),$(TORCHRUN),$(PYTHON)) examples/demo.py $(if $(QUICK),--quick) $(if $(METHODS),--methods $(METHODS)) $(if $(DEVICE),--device $(DEVICE))

paper: $(if $(wildcard $(VENV)/.ready),$(VENV)/.ready,$(VENV)/.paper) ## Run the paper's experiments
## TABLE=nyud|pascal|cityscapes|scaling|ablation|order|time [DATA=FOLDER] [SEEDS="0 1 2"]
## [JOBS=2] [RANKS=2] [PLAN=1] [OPTIONS="..."]
	cd examples && $(CURDIR)/$(PYTHON) -m paper $(TABLE) $(if $(DATA),--data $(abspath $(DATA))) \
		$(if $(SEEDS),--seeds $(SEEDS)) $(if $(JOBS),--jobs $(JOBS)) $(if $(RANKS),--ranks $(RANKS)) \
		$(if $(PLAN),--plan) $(OPTIONS)

uses: $(if $(wildcard $(VENV)/.ready),$(VENV)/.ready,$(VENV)/.uses) ## Run real uses over several seeds
## USE=pinn|digits|tabular|finetune|priorities|agreement|photograph|lagged|protect
## [SEEDS="0 1"] [JOBS=2] [QUICK=1] [DEVICE=cuda]
	cd examples && $(CURDIR)/$(PYTHON) -m uses $(USE) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(JOBS),--jobs $(JOBS)) \
		$(if $(QUICK),--quick) $(if $(DEVICE),--device $(DEVICE))

# The compilers' output goes to build/wheel.log, for bench/registers.py.
wheel: $(RELEASE)/.ready ## Build wheels into dist, and test each one
## [PYTHONS="python3.12 ..."] (else all of 3.11 to 3.14 that are installed)
## [CUDAARCHS="80-real;90"] [WHEEL_OPTIONS="--require-torch --no-pure"]
	$(RELEASE)/bin/python .ci/build_wheels.py $(WHEEL_OPTIONS) $(PYTHONS)

sdist: export PIP_EXTRA_INDEX_URL :=
sdist: $(RELEASE)/.ready ## Add the sources to dist, and check that a package index accepts its files
	$(RELEASE)/bin/python -m build --sdist
	$(RELEASE)/bin/python -m twine check --strict dist/*

clean: ## Remove the environment and the builds, except dist
	rm -rf $(VENV) build *.egg-info cs_kernels/_C*.so
