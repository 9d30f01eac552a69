#include "strength.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "chunks.h"
#include "cs_kernels/equations.h"
#include "parallel.h"
#include "row_kernels.h"

namespace cs_kernels::cpu {

void row_energies(DataType type, const ChannelLayout& layout, const void* weight,
                  std::int64_t first, std::int64_t last, double* energy) {
  const auto kernel = row_kernels(type).add_energies;
  std::fill(energy, energy + (last - first), 0.0);
  // The channels of a convolution's group are adjacent.
  for (std::int64_t outer = 0; outer < layout.outer; ++outer)
    for (std::int64_t row = first; row < last;) {
      const std::int64_t stop = std::min(last, (row / layout.channels + 1) * layout.channels);
      kernel(at(weight, type, segment_offset(layout, row, outer)), layout.inner, stop - row,
             energy + (row - first));
      row = stop;
    }
}

void channel_energies(DataType type, const ChannelLayout& layout, const void* weight,
                      double* energy, int threads) {
  const std::vector<RowRange> chunks = weight_chunks(layout);
  std::atomic<std::size_t> next{0};
  run_parallel(useful_threads(threads, layout.size()), [&] {
    for (std::size_t i = next++; i < chunks.size(); i = next++)
      row_energies(type, layout, weight, chunks[i].first, chunks[i].last, energy + chunks[i].first);
  });
}

void strengths(const StrengthArguments& arguments) {
  const std::int64_t rows = arguments.rows;
  for (std::int32_t task = 0; task < arguments.tasks; ++task) {
    double* const strength = arguments.strength + task * rows;
    for (std::int64_t row = 0; row < rows; ++row)
      strength[row] = channel_strength(arguments.gamma[task * rows + row],
                                       arguments.variance[task * rows + row],
                                       arguments.epsilon[task], arguments.energy[row]);
    if (!arguments.normalize)
      continue;
    const double total = std::accumulate(strength, strength + rows, 0.0);
    for (std::int64_t row = 0; row < rows; ++row)
      strength[row] = normalized_strength(strength[row], total);
  }
}

void task_priority(const double* strength, std::int32_t tasks, std::int64_t rows,
                   std::int64_t* priority) {
  for (std::int64_t row = 0; row < rows; ++row) {
    TopTask top;
    for (std::int32_t task = 0; task < tasks; ++task)
      top.compare(task, strength[task * rows + row]);
    priority[row] = top.task;
  }
}

} // namespace cs_kernels::cpu
