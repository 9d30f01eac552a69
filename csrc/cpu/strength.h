// Connection strength and priority of one layer, from the energies of its rows.
#pragma once

#include <cstdint>

#include "cs_kernels/phase2.h"

namespace cs_kernels::cpu {

// energy[row - first] = sum of squares of the row, for rows [first, last). Reads each of their
// elements once.
void row_energies(DataType type, const ChannelLayout& layout, const void* weight,
                  std::int64_t first, std::int64_t last, double* energy);

// strength[row] of one task; energies of all rows given.
void task_strength(const double* energy, std::int64_t rows, std::int64_t kernel_size,
                   const double* gamma, const double* variance, double epsilon, bool normalize,
                   double* strength);

} // namespace cs_kernels::cpu
