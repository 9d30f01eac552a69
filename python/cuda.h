#pragma once

#include <pybind11/pybind11.h>

// Adds the kernels on a GPU to a module: functions on addresses there, with a stream.
void define_cuda(pybind11::module_ module);
