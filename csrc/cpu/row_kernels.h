// Loops over one contiguous run of elements, compiled once per instruction set. With `stream`,
// whole cache lines of the output are written by streaming stores, which become visible to other
// threads only after a fence.
#pragma once

#include <cstdint>

#include "cs_kernels/data_type.h"

namespace cs_kernels::cpu {

constexpr int kSignedRuns = 4;

// The gradients of the row that is summed next, to prefetch them; null prefetches nothing. With
// `once`, only the reference gradient stays in the caches.
struct NextRow {
  const void* const* gradients = nullptr;
  bool once = false;
};

// Where weight * x is written or, with `add`, added: a place per run, which may be the run itself.
struct RunUpdates {
  void* const* places; // null writes nothing
  double weight;
  bool add;
};

struct RowKernels {
  // energies[row] += the sum of squares of a row of n elements; the rows are adjacent.
  // Reads rows * n.
  void (*add_energies)(const void* x, std::int64_t n, std::int64_t rows, double* energies);

  // out = sum_j gradients[j]; dots[j] += <gradients[reference], gradients[j]>, for count gradients.
  // Reads count * n, writes n. For 16-bit elements, squares above 1e37 may overflow. Streams only
  // if `out` is aligned to cache lines.
  void (*sum_and_dots)(const void* const* gradients, int count, int reference, std::int64_t n,
                       bool stream, void* out, double* dots, NextRow next);

  // out = sum_j weights[j] * gradients[j], or gradients[guide] where the two differ in sign, as in
  // cpu::combine; a negative `guide` means none. Reads count * n, writes n.
  void (*combine)(const void* const* gradients, const double* weights, int count, int guide,
                  std::int64_t n, bool stream, void* out);

  // products[i * (i + 1) / 2 + j] = <gradients[i], gradients[j]> for j <= i < count; count is at
  // most kMaxTasks. Reads count * n.
  void (*products)(const void* const* gradients, int count, std::int64_t n, double* products);

  // out = the sum of the positive or of the negative gradients, as in cpu::drop_signs; `index` is
  // the first element's index for the draws. Reads count * n, writes n.
  void (*drop_signs)(const void* const* gradients, const double* leaks, int count,
                     std::uint64_t key, std::int64_t index, std::int64_t n, bool stream, void* out);

  // out = sum + scale * x, or the sum alone if scale is zero; `out` may alias `sum`. Reads 2 n,
  // writes n.
  void (*add_scaled)(const void* sum, const void* x, double scale, std::int64_t n, bool stream,
                     void* out);

  // Adds x[0][i], then x[1][i] and so on to out[i], for at most kSignedRuns runs; subtracts
  // x[run][i] if the sign of element index[run] + i for this key is minus. A run must lie in one
  // aligned range of 2^37 indices. Reads (runs + 1) n and writes n for kSignedRuns runs; fewer are
  // added one by one. Updates are written once, and read first if they add. Float32 elements are
  // read again for a weight that does not fit float.
  void (*add_signed)(const void* const* x, int runs, std::uint64_t key, const std::int64_t* index,
                     std::int64_t n, float* out, const RunUpdates& updates);
};

struct InstructionSet {
  const char* name;
  RowKernels kernels[kDataTypes];
};

// The best kernels for this CPU, up to the instruction set that CS_KERNELS_CPU_ISA names.
const InstructionSet& selected_instruction_set();

inline const RowKernels& row_kernels(DataType type) {
  return selected_instruction_set().kernels[static_cast<int>(type)];
}

} // namespace cs_kernels::cpu
