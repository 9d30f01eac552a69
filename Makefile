# Every target sets up .venv by itself. `make test`, `make lint`, `make bench`, `make demo [QUICK=1]
# [METHODS="NAME ..."]`.
VENV := .venv
PYTHON := $(VENV)/bin/python
NATIVE := CMakeLists.txt setup.py $(shell find csrc python -name '*.cpp' -o -name '*.h')
CPP := $(filter %.cpp %.h,$(NATIVE))

.PHONY: test lint format bench demo clean

$(VENV)/.ready: pyproject.toml constraints.txt $(NATIVE)
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --editable '.[dev,demo,bench]'
	touch $@

test: $(VENV)/.ready
	$(PYTHON) -m pytest

lint: $(VENV)/.ready build/tidy/compile_commands.json
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)
	$(VENV)/bin/clang-tidy --quiet -p build/tidy $(filter %.cpp,$(CPP))

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

demo: $(VENV)/.ready
	$(PYTHON) examples/demo.py $(if $(QUICK),--quick) $(if $(METHODS),--methods $(METHODS))

clean:
	rm -rf $(VENV) build *.egg-info cs_kernels/_C*.so
