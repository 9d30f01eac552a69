// Energies, strengths and priorities (eq:eq1 to eq:eq6) of one layer, by one block.
#pragma once

#include <cmath>
#include <cstdint>

#include "block.h"
#include "cs_kernels/cuda.h"
#include "numbers.h"

namespace cs_kernels::cuda {

CS_DEVICE double number_at(const Numbers& numbers, std::int64_t place) {
  switch (numbers.type) {
  case DataType::kFloat32:
    return load(static_cast<const float*>(numbers.data) + place);
  case DataType::kFloat64:
    return load(static_cast<const double*>(numbers.data) + place);
  case DataType::kBFloat16:
    return widened(load(static_cast<const BFloat16*>(numbers.data) + place));
  default:
    return widened(load(static_cast<const Float16*>(numbers.data) + place));
  }
}

// energy[row] of some rows. A row is worked on by as many threads as it feeds.
template <class T>
CS_DEVICE void row_energies(const PlannedTensor& tensor, const T* weight, bool aligned, Range rows,
                            double* energy, double* room) {
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
        const std::int64_t place =
            ((group * outer + run) * tensor.channels + channel) * tensor.inner + i -
            run * tensor.inner;
        if (vectors) {
          const auto w = as_vector<T>(load_once(words_at(weight + place)));
          for (int e = 0; e < kVector; ++e)
            sum += static_cast<double>(widened(w.x[e])) * widened(w.x[e]);
        } else {
          const double w = widened(load(weight + place));
          sum += w * w;
        }
      }
    }
    sum = whole_block ? block_sum(sum, room) : warp_sum(sum, lanes);
    if (lane == 0 && row < rows.end)
      energy[row] = sum / static_cast<double>(tensor.kernel_size);
  }
}

// eq:eq3. The energies may have been written by other blocks of the same launch.
CS_DEVICE double strength_at(const StrengthLaunch& layer, int task, std::int64_t row) {
  const std::int64_t place = task * layer.rows + row;
  const double gamma = number_at(layer.gamma, place);
  const double variance = number_at(layer.variance, place);
  return gamma * gamma / (variance + load(layer.epsilon + task)) * layer.energy[row];
}

// The sum over the rows. By all threads of the block; each has it.
CS_DEVICE double strength_total(const StrengthLaunch& layer, int task, double* room) {
  double sum = 0;
  for (std::int64_t row = thread_index(); row < layer.rows; row += kThreads)
    sum += strength_at(layer, task, row);
  return block_sum(sum, room);
}

// eq:eq5.
CS_DEVICE double normalized(double strength, double total) {
  return total == 0 ? 0 : strength / total;
}

// eq:eq6, fed with the tasks in order; a NaN never wins, the lowest of equals does.
struct TopTask {
  std::int64_t task = 0;
  double strength = 0;

  CS_DEVICE void meet(int candidate, double of_candidate) {
    const bool wins =
        of_candidate > strength || (strength != strength && of_candidate == of_candidate);
    if (candidate == 0 || wins) {
      task = candidate;
      strength = of_candidate;
    }
  }
};

// totals: [tasks], shared.
CS_DEVICE void find_priorities(const StrengthLaunch& layer, double* totals, double* room,
                               std::int64_t* priority) {
  for (int task = 0; task < layer.tasks; ++task) {
    const double total = strength_total(layer, task, room);
    if (thread_index() == 0)
      totals[task] = total;
  }
  synchronize_block();
  for (std::int64_t row = thread_index(); row < layer.rows; row += kThreads) {
    TopTask top;
    for (int task = 0; task < layer.tasks; ++task)
      top.meet(task, normalized(strength_at(layer, task, row), totals[task]));
    priority[row] = top.task;
  }
}

} // namespace cs_kernels::cuda
