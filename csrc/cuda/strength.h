// Energies, strengths and priorities of one layer, Eq. (4) to (10), computed by one block.
#pragma once

#include <cstdint>

#include "block.h"
#include "cs_kernels/cuda/phase2.h"
#include "cs_kernels/equations.h"
#include "types.h"

namespace cs_kernels::cuda {

CS_DEVICE double number_at(const Numbers& numbers, std::int64_t offset) {
  return with_type(numbers.type, [&](auto like) -> double {
    return widened(load(static_cast<const decltype(like)*>(numbers.data) + offset));
  });
}

// energy[row] of some rows. The number of threads of a row grows with its length.
template <class T>
CS_DEVICE void row_energies(const PlannedTensor& tensor, const T* weight, bool aligned, Range rows,
                            double* energy, double* workspace) {
  constexpr int kVector = Vector<T>::kSize;
  const bool vectors = aligned && tensor.inner % kVector == 0;
  const std::int64_t step = vectors ? kVector : 1;
  int lanes = 1;
  while (lanes < kWarp && lanes * step < tensor.length)
    lanes *= 2;
  const bool whole_block = tensor.length * static_cast<std::int64_t>(sizeof(T)) >= kLongRow;
  if (whole_block)
    lanes = kThreads;
  const int teams = kThreads / lanes;
  const int team = thread_index() / lanes;
  const int lane = thread_index() % lanes;
  const std::int64_t outer = quotient(tensor.length, tensor.inner);
  for (std::int64_t base = rows.begin; base < rows.end; base += teams) {
    const std::int64_t row = base + team;
    double sum = 0;
    if (row < rows.end) {
      const std::int64_t group = quotient(row, tensor.channels);
      const std::int64_t channel = row - group * tensor.channels;
      CS_UNROLL(kEnergyLoads)
      for (std::int64_t i = lane * step; i < tensor.length; i += lanes * step) {
        const std::int64_t run = outer == 1 ? 0 : quotient(i, tensor.inner);
        const std::int64_t offset =
            ((group * outer + run) * tensor.channels + channel) * tensor.inner + i -
            run * tensor.inner;
        if (vectors) {
          const auto w = as_vector<T>(load_once(words_at(weight + offset)));
          for (int e = 0; e < kVector; ++e)
            sum += static_cast<double>(widened(w.x[e])) * widened(w.x[e]);
        } else {
          const double w = widened(load(weight + offset));
          sum += w * w;
        }
      }
    }
    sum = whole_block ? block_sum(sum, workspace) : warp_sum(sum, lanes);
    if (lane == 0 && row < rows.end)
      energy[row] = sum / static_cast<double>(tensor.kernel_size);
  }
}

// Eq. (6). Other blocks of the same launch may have written the energies.
CS_DEVICE double strength_at(const StrengthLaunch& layer, int task, std::int64_t row) {
  const std::int64_t offset = task * layer.rows + row;
  return channel_strength(number_at(layer.gamma, offset), number_at(layer.variance, offset),
                          load(layer.epsilon + task), layer.energy[row]);
}

// The sum over the rows. All threads of the block must call it; each gets it.
CS_DEVICE double strength_total(const StrengthLaunch& layer, int task, double* workspace) {
  double sum = 0;
  for (std::int64_t row = thread_index(); row < layer.rows; row += kThreads)
    sum += strength_at(layer, task, row);
  return block_sum(sum, workspace);
}

// totals: [tasks], shared.
CS_DEVICE void find_priorities(const StrengthLaunch& layer, double* totals, double* workspace,
                               std::int64_t* priority) {
  for (int task = 0; task < layer.tasks; ++task) {
    const double total = strength_total(layer, task, workspace);
    if (thread_index() == 0)
      totals[task] = total;
  }
  synchronize_block();
  for (std::int64_t row = thread_index(); row < layer.rows; row += kThreads) {
    TopTask top;
    for (int task = 0; task < layer.tasks; ++task)
      top.compare(task, normalized_strength(strength_at(layer, task, row), totals[task]));
    priority[row] = top.task;
  }
}

} // namespace cs_kernels::cuda
