// Functions that define the parts of the module.
#pragma once

#include <pybind11/pybind11.h>

void define_operands(pybind11::module_& module);

// The kernels of csrc/cpu.
void define_cpu(pybind11::module_& module);

// Sketches on the CPU, and the hooks of a backward pass that make them.
void define_sketch(pybind11::module_& module);

// The kernels of csrc/cuda, which take device addresses and a stream.
void define_cuda(pybind11::module_ module);
