// The factors of connection strength, where a trunk's normalizations keep them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "operands.h"

namespace cs_kernels_python {

// Gamma, running variance and epsilon of each layer and task, [layers, tasks].
struct NormFactors {
  // Of each layer and task: the dictionaries of parameters and buffers, and the normalization.
  NormFactors(const Operands& operands, const pybind11::list& parameters,
              const pybind11::list& buffers, const pybind11::list& norms);

  // Writes rows of three 64-bit integers for copies of all gammas and then all variances: source,
  // target, bytes. The targets are in order from these addresses on.
  void write_copies(Address table, Address gammas, Address variances) const;

  // Whether all are there, on the device of the outputs, dense, gammas and variances of one type
  // each; else the addresses are not to be used.
  bool fit = true;
  int gamma_type;
  int variance_type;
  std::vector<const void*> gamma; // [rows] each
  std::vector<const void*> variance;
  std::vector<double> epsilon;
  std::vector<std::int64_t> sizes; // rows
};

} // namespace cs_kernels_python
