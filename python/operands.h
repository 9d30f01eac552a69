// The data types, memory layouts and addresses of an operator's tensors, read in one call.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arguments.h"
#include "dlpack.h"

namespace cs_kernels_python {

// Tensors, and their gradients for all tasks.
struct Operands {
  Operands(const pybind11::list& outputs, const pybind11::list& grads, std::int32_t tasks,
           const std::vector<std::int64_t>& channel_dims, const std::vector<std::int64_t>& groups);

  std::int64_t count() const { return static_cast<std::int64_t>(types.size()); }
  cs_kernels::DataType type(std::size_t tensor) const { return from_python(types[tensor]); }

  // Completes a launch's address table, which has a row of `width` 64-bit integers per output. A
  // row begins with the output's address and ends with its gradients' addresses. The column
  // `aligned` says whether all addresses in the row, including addresses that the caller has
  // written, are multiples of 16. With `whole_rows`, the first `layers` outputs must also have
  // contiguous channels whose size is a multiple of 16 bytes, and every other output must have a
  // size that is a multiple of 16 bytes.
  void write_table(Address table, std::size_t width, std::size_t aligned, std::size_t layers,
                   bool whole_rows) const;

  // Equal for operands with equal types and memory layouts.
  pybind11::bytes signature() const;

  std::int32_t tasks;
  dlpack::Device device{}; // of the first output
  std::vector<int> types;  // values of DataType, or kUnknownType
  std::vector<cs_kernels::ChannelLayout> layouts;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> kernel_sizes;
  std::vector<Address> outputs;
  std::vector<const void*> gradients; // [outputs, tasks]; null for None
  std::vector<std::size_t> unfit;     // outputs with an unusable address, type, device or layout
  std::vector<std::size_t> misfits;   // gradients for which has_layout_of() is false
};

} // namespace cs_kernels_python
