// The energies of a layer's rows, for connection strength and for Phase 2.
#pragma once

#include <cstdint>

#include "cs_kernels/phase2.h"

namespace cs_kernels::cpu {

// energy[row - first] = sum of squares of the row, for rows [first, last). Reads the rows once.
void row_energies(DataType type, const ChannelLayout& layout, const void* weight,
                  std::int64_t first, std::int64_t last, double* energy);

} // namespace cs_kernels::cpu
