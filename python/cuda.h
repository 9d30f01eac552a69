#pragma once

#include <pybind11/pybind11.h>

// The kernels of csrc/cuda, on device addresses and a stream.
void define_cuda(pybind11::module_ module);
