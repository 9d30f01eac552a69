# Every target sets up .venv by itself. `make test`, `make lint`, `make bench`, `make demo [QUICK=1]
# [METHODS="NAME ..."]`. On a machine with a GPU, `make test-gpu` and `make bench-gpu` build for and
# run with the Python that has torch with CUDA: GPU_PYTHON, python3 by default. They download nothing.
VENV := .venv
PYTHON := $(VENV)/bin/python
NATIVE := CMakeLists.txt setup.py $(shell find csrc python -name '*.cpp' -o -name '*.h')
CPP := $(filter %.cpp %.h,$(NATIVE))

GPU_PYTHON ?= python3

.PHONY: test test-interpreter lint format bench demo test-gpu bench-gpu install-gpu clean

$(VENV)/.ready: pyproject.toml constraints.txt $(NATIVE)
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[dev,demo,bench]'
	touch $@

test: $(VENV)/.ready
	$(PYTHON) -m pytest --numprocesses 2

# Triton's kernels on the CPU.
test-interpreter: $(VENV)/.ready
	TRITON_INTERPRET=1 $(PYTHON) -m pytest --numprocesses 2 -k "triton or laws" tests

lint: $(VENV)/.ready build/tidy/compile_commands.json
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)
	printf '%s\n' $(filter %.cpp,$(CPP)) | \
		xargs --max-procs 2 --max-args 1 $(VENV)/bin/clang-tidy --quiet -p build/tidy

build/tidy/compile_commands.json: CMakeLists.txt $(VENV)/.ready
	$(PYTHON) -m pip install --quiet --constraint constraints.txt pybind11 cmake ninja
	$(VENV)/bin/cmake -S . -B build/tidy -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja \
		-DPython_EXECUTABLE=$(CURDIR)/$(PYTHON) \
		-Dpybind11_DIR=$$($(PYTHON) -m pybind11 --cmakedir) > /dev/null
	touch $@

format: $(VENV)/.ready
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

# A process a file: what one has done to the heap changes how fast the peers of the next allocate.
bench: $(VENV)/.ready
	for table in phase2 methods steps; do \
		$(PYTHON) -m pytest bench/test_$$table.py --benchmark-disable-gc --quiet || exit 1; \
	done

install-gpu:
	$(GPU_PYTHON) -m pip install --quiet --no-build-isolation --no-deps --editable .

test-gpu: install-gpu
	$(GPU_PYTHON) -m pytest --override-ini filterwarnings=default -k "triton or gpu" \
		--ignore tests/test_triton_compiles.py tests

bench-gpu: install-gpu
	$(GPU_PYTHON) -m pytest --override-ini filterwarnings=default --quiet bench/test_gpu.py

demo: $(VENV)/.ready
	$(PYTHON) examples/demo.py $(if $(QUICK),--quick) $(if $(METHODS),--methods $(METHODS))

clean:
	rm -rf $(VENV) build *.egg-info cs_kernels/_C*.so
