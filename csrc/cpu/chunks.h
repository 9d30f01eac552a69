// Offsets of a tensor's rows, and the chunks of rows that threads claim.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cs_kernels/phase2.h"
#include "tuning.h"

namespace cs_kernels::cpu {

inline const char* at(const void* base, DataType type, std::int64_t offset) {
  return static_cast<const char*>(base) + offset * item_size(type);
}

inline char* at(void* base, DataType type, std::int64_t offset) {
  return static_cast<char*>(base) + offset * item_size(type);
}

inline std::int64_t segment_offset(const ChannelLayout& layout, std::int64_t row,
                                   std::int64_t outer) {
  const std::int64_t group = row / layout.channels;
  const std::int64_t channel = row % layout.channels;
  return ((group * layout.outer + outer) * layout.channels + channel) * layout.inner;
}

struct RowRange {
  std::int64_t first;
  std::int64_t last;
};

inline std::int64_t rows_per_chunk(const ChannelLayout& layout) {
  const std::int64_t rows = kChunkElements / std::max<std::int64_t>(1, layout.row_size());
  const std::int64_t run = layout.outer > 1 ? kRunElements / layout.inner : 1;
  return std::max<std::int64_t>({1, rows, run});
}

// Chunks for the energies, whose kernel reads four rows at a time.
inline std::vector<RowRange> weight_chunks(const ChannelLayout& layout) {
  const std::int64_t step = 4 * rows_per_chunk(layout);
  std::vector<RowRange> chunks;
  for (std::int64_t first = 0; first < layout.rows(); first += step)
    chunks.push_back({first, std::min(layout.rows(), first + step)});
  return chunks;
}

// A thread gets at least two chunks, because starting it takes about as long as one or two.
inline int useful_threads(int threads, std::int64_t elements) {
  return static_cast<int>(
      std::clamp<std::int64_t>(elements / (2 * kChunkElements), 1, std::max(threads, 1)));
}

} // namespace cs_kernels::cpu
