// Energies, strengths and priorities of one layer, Eq. (4) to (10), computed by one block.
#pragma once

#include <cstdint>

#include "block.h"
#include "cs_kernels/cuda/phase2.h"
#include "cs_kernels/equations.h"
#include "segment.h"
#include "types.h"

namespace cs_kernels::cuda {

// Some numbers of an array; their loads are in flight together.
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

// energy[row] of some rows. The number of threads of a row grows with its length.
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
        Square<T> squares = 0; // of 48 numbers at most
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

// Eq. (6) of some pairs of a task and a row: tasks from `task` on, for each of the rows `row`,
// `row` + kThreads, ...; 0 where there is none. Other blocks of the same launch may have written
// the energies.
template <int kTasks, int kRows>
CS_DEVICE void strengths_at(const StrengthLaunch& layer, int task, std::int64_t row,
                            double (&strengths)[kRows * kTasks]) {
  constexpr int kPairs = kRows * kTasks;
  const auto row_of = [&](int n) {
    const int offset = n / kTasks * kThreads;
    return row + offset;
  };
  const auto task_of = [&](int n) { return task + n % kTasks; };
  const auto exists = [&](int n) { return row_of(n) < layer.rows && task_of(n) < layer.tasks; };
  std::int64_t offsets[kPairs];
  CS_UNROLL(kPairs)
  for (int n = 0; n < kPairs; ++n)
    offsets[n] = exists(n) ? task_of(n) * layer.rows + row_of(n) : 0;
  double gamma[kPairs];
  numbers_at(layer.gamma, offsets, gamma);
  numbers_at(layer.variance, offsets, strengths);
  CS_UNROLL(kPairs)
  for (int n = 0; n < kPairs; ++n)
    strengths[n] = exists(n)
                       ? channel_strength(gamma[n], strengths[n], load(layer.epsilon + task_of(n)),
                                          layer.energy[row_of(n)])
                       : 0;
}

// The sums over the rows, of tasks from `task` on. All threads of the block must call it; each gets
// them. workspace: [kTogether, kWarps], shared.
template <int kTogether, int kRows>
CS_DEVICE void strength_totals(const StrengthLaunch& layer, int task, double (&totals)[kTogether],
                               double* workspace) {
  constexpr int kStep = kRows * kThreads;
  CS_UNROLL(kTogether)
  for (int n = 0; n < kTogether; ++n)
    totals[n] = 0;
  CS_UNROLL(1)
  for (std::int64_t row = thread_index(); row < layer.rows; row += kStep) {
    double strengths[kRows * kTogether];
    strengths_at<kTogether, kRows>(layer, task, row, strengths);
    CS_UNROLL(kRows * kTogether)
    for (int n = 0; n < kRows * kTogether; ++n)
      totals[n % kTogether] += strengths[n];
  }
  block_sums(totals, workspace);
}

// Eq. (10) of every row. totals: [tasks], shared.
CS_DEVICE void find_priorities(const StrengthLaunch& layer, double* totals, double* workspace,
                               std::int64_t* priority) {
  constexpr int kTasks = kStrengthTasks;
  constexpr int kRows = kStrengthRows;
  constexpr int kStep = kRows * kThreads;
  CS_UNROLL(1)
  for (int task = 0; task < layer.tasks; task += kTasks) {
    double sums[kTasks];
    strength_totals<kTasks, kRows>(layer, task, sums, workspace);
    CS_UNROLL(kTasks)
    for (int n = 0; n < kTasks; ++n)
      if (thread_index() == 0 && task + n < layer.tasks)
        totals[task + n] = sums[n];
  }
  synchronize_block();
  CS_UNROLL(1)
  for (std::int64_t row = thread_index(); row < layer.rows; row += kStep) {
    TopTask tops[kRows];
    CS_UNROLL(1)
    for (int task = 0; task < layer.tasks; task += kTasks) {
      double strengths[kRows * kTasks];
      strengths_at<kTasks, kRows>(layer, task, row, strengths);
      CS_UNROLL(kRows * kTasks)
      for (int n = 0; n < kRows * kTasks; ++n) {
        const int of = task + n % kTasks;
        if (of < layer.tasks)
          tops[n / kTasks].compare(of, normalized_strength(strengths[n], totals[of]));
      }
    }
    CS_UNROLL(kRows)
    for (int n = 0; n < kRows; ++n) {
      const int offset = n * kThreads;
      if (row + offset < layer.rows)
        priority[row + offset] = tops[n].task;
    }
  }
}

} // namespace cs_kernels::cuda
