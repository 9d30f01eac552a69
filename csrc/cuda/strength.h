// A block's computation of a layer's energies, strengths and priorities, Eq. (4) to (10).
#pragma once

#include <cstdint>

#include "block.h"
#include "cs_kernels/cuda/phase2.h"
#include "cs_kernels/equations.h"
#include "segment.h"
#include "types.h"

namespace cs_kernels::cuda {

// Reads several numbers of an array, with all loads in flight together.
template <int kNumber>
CS_DEVICE void numbers_at(const Numbers& numbers, const std::int64_t (&offsets)[kNumber],
                          double (&values)[kNumber]) {
  with_type(numbers.type, [&](auto like) {
    const auto* data = static_cast<const decltype(like)*>(numbers.data);
    CS_UNROLL(kNumber)
    for (int n = 0; n < kNumber; ++n)
      values[n] = widened(load(data + offsets[n]));
  });
}
CS_DEVICE double number_at(const Numbers& numbers, std::int64_t offset) {
  double value[1];
  numbers_at(numbers, {offset}, value);
  return value[0];
}

// Computes energy[row] for a range of rows. The longer a row, the more threads read it.
template <class T>
CS_DEVICE void row_energies(const PlannedTensor& tensor, const T* weight, bool aligned, Range rows,
                            double* energy, double* workspace) {
  const auto length = static_cast<std::uint32_t>(tensor.length);
  const std::int64_t bytes = tensor.length * static_cast<std::int64_t>(sizeof(T));
  int lanes = kTeam;
  while (lanes < kWarp && 2 * kRowBytes * lanes <= bytes)
    lanes *= 2;
  const bool whole_block = bytes >= kLongRow;
  if (whole_block)
    lanes = kThreads;
  const auto lane = static_cast<std::uint32_t>(thread_index() % lanes);
  for (std::int64_t base = rows.begin; base < rows.end; base += kThreads / lanes) {
    const std::int64_t row = base + thread_index() / lanes;
    double sum = 0;
    if (row < rows.end) {
      const Segment<T> segment(tensor, aligned, static_cast<std::uint32_t>(row), 0, length);
      for_each_piece<kEnergyLoads>(segment, lane, lanes, [&](const auto& pieces) {
        using Of = std::decay_t<decltype(pieces)>;
        typename Of::Vectors vectors;
        typename Of::Numbers w;
        read(pieces, weight, vectors);
        widen_all(vectors, w);
        Square<T> squares = 0; // of at most 48 numbers
        CS_UNROLL(Of::kNumber)
        for (int n = 0; n < Of::kNumber; ++n) {
          CS_UNROLL(Of::kSize)
          for (int e = 0; e < Of::kSize; ++e)
            squares += static_cast<Square<T>>(w[n][e]) * w[n][e];
        }
        sum += squares;
      });
    }
    sum = whole_block ? block_sum(sum, workspace) : warp_sum(sum, lanes);
    if (lane == 0 && row < rows.end)
      energy[row] = sum / static_cast<double>(tensor.kernel_size);
  }
}

// The connection strengths (Eq. 6) of a row, for the tasks from `task` on; 0 for tasks that do not
// exist. The energies are not read through the read-only path, because the same launch may have
// written them.
template <int kTasks>
CS_DEVICE void strengths_at(const StrengthLaunch& layer, int task, std::int64_t row,
                            double (&strengths)[kTasks]) {
  std::int64_t offsets[kTasks];
  CS_UNROLL(kTasks)
  for (int n = 0; n < kTasks; ++n)
    offsets[n] = task + n < layer.tasks ? (task + n) * layer.rows + row : 0;
  double gamma[kTasks];
  numbers_at(layer.gamma, offsets, gamma);
  numbers_at(layer.variance, offsets, strengths);
  CS_UNROLL(kTasks)
  for (int n = 0; n < kTasks; ++n)
    strengths[n] = task + n < layer.tasks
                       ? channel_strength(gamma[n], strengths[n], load(layer.epsilon + task + n),
                                          layer.energy[row])
                       : 0;
}

// Eq. (6) summed over rows, for the tasks from `task` on, returned to every thread. All threads of
// the block must call this. workspace: [kTasks, kWarps], shared memory.
template <int kTasks>
CS_DEVICE void strength_totals(const StrengthLaunch& layer, int task, double (&totals)[kTasks],
                               double* workspace) {
  CS_UNROLL(kTasks)
  for (int n = 0; n < kTasks; ++n)
    totals[n] = 0;
  CS_UNROLL(1)
  for (std::int64_t row = thread_index(); row < layer.rows; row += kThreads) {
    double strengths[kTasks];
    strengths_at(layer, task, row, strengths);
    CS_UNROLL(kTasks)
    for (int n = 0; n < kTasks; ++n)
      totals[n] += strengths[n];
  }
  block_sums(totals, workspace);
}

// Eq. (10) of every row. totals: [tasks], shared memory.
CS_DEVICE void find_priorities(const StrengthLaunch& layer, double* totals, double* workspace,
                               std::int64_t* priority) {
  constexpr int kTasks = kStrengthTasks;
  CS_UNROLL(1)
  for (int task = 0; task < layer.tasks; task += kTasks) {
    double sums[kTasks];
    strength_totals(layer, task, sums, workspace);
    CS_UNROLL(kTasks)
    for (int n = 0; n < kTasks; ++n)
      if (thread_index() == 0 && task + n < layer.tasks)
        totals[task + n] = sums[n];
  }
  synchronize_block();
  CS_UNROLL(1)
  for (std::int64_t row = thread_index(); row < layer.rows; row += kThreads) {
    TopTask top;
    CS_UNROLL(1)
    for (int task = 0; task < layer.tasks; task += kTasks) {
      double strengths[kTasks];
      strengths_at(layer, task, row, strengths);
      CS_UNROLL(kTasks)
      for (int n = 0; n < kTasks; ++n)
        if (task + n < layer.tasks)
          top.compare(task + n, normalized_strength(strengths[n], totals[task + n]));
    }
    priority[row] = top.task;
  }
}

} // namespace cs_kernels::cuda
