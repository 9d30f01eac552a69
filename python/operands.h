// How an operator's tensors lie in memory, asked of all of them in one call.
#pragma once

#include <pybind11/pybind11.h>

void define_operands(pybind11::module_& module);
