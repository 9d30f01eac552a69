// The factors of connection strength, where a trunk's normalizations keep them.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "operands.h"

namespace cs_kernels_python {

// Gamma, running variance and epsilon of each layer and task, [layers, tasks].
struct NormFactors {
  // Of each layer and task: the dictionaries of parameters and buffers, and the normalization.
  NormFactors(const Operands& operands, const pybind11::list& parameters,
              const pybind11::list& buffers, const pybind11::list& norms);

  // Whether all are there, on the device of the outputs, dense, gammas and variances of one type
  // each; else the addresses are not to be used.
  bool fit = true;
  int gamma_type;
  int variance_type;
  std::vector<const void*> gamma; // [rows] each
  std::vector<const void*> variance;
  std::vector<double> epsilon;
};

} // namespace cs_kernels_python
