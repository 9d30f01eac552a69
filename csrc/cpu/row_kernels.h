// The loops over one contiguous run of elements, compiled once for each instruction set.
//
// Where `stream` is true the output is written with streaming stores, in whole lines; a fence makes
// it visible to other threads.
#pragma once

#include <cstdint>

#include "cs_kernels/data_type.h"

namespace cs_kernels::cpu {

struct RowKernels {
  // energies[row] += the sum of squares of a row of n elements; the rows lie one after the other.
  // Reads rows * n.
  void (*add_energies)(const void* x, std::int64_t n, std::int64_t rows, double* energies);

  // out = sum_j gradients[j]; dots[j] += <gradients[reference], gradients[j]>, for count gradients.
  // Reads count * n, writes n. Of 16-bit types, squares may be up to 1e37.
  void (*sum_and_dots)(const void* const* gradients, int count, int reference, std::int64_t n,
                       void* out, double* dots);

  // out = sum_j weights[j] * gradients[j]. Reads count * n, writes n.
  void (*combine)(const void* const* gradients, const double* weights, int count, std::int64_t n,
                  bool stream, void* out);

  // products[i * (i + 1) / 2 + j] = <gradients[i], gradients[j]> for j <= i < count, at most
  // kMaxTasks. Reads count * n.
  void (*products)(const void* const* gradients, int count, std::int64_t n, double* products);

  // out = the positive or the negative of the gradients added up, as cpu::drop_signs says; the
  // first element has the index `place` among all. Reads count * n, writes n.
  void (*drop_signs)(const void* const* gradients, const double* leaks, int count,
                     std::uint64_t key, std::int64_t place, std::int64_t n, bool stream, void* out);

  // out = sum + scale * x, the sum alone where scale is zero; `out` may be `sum`. Reads 2 n,
  // writes n.
  void (*add_scaled)(const void* sum, const void* x, double scale, std::int64_t n, bool stream,
                     void* out);
};

struct InstructionSet {
  const char* name;
  RowKernels kernels[kDataTypes];
};

// The best one for this processor, or the one that CS_KERNELS_CPU_ISA names if it can run.
const InstructionSet& selected_instruction_set();

inline const RowKernels& row_kernels(DataType type) {
  return selected_instruction_set().kernels[static_cast<int>(type)];
}

} // namespace cs_kernels::cpu
