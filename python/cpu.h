// The kernels of csrc/cpu.
#pragma once

#include <pybind11/pybind11.h>

void define_cpu(pybind11::module_& module);
