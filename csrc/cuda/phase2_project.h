// The projection of Phase 2: its coefficients, and the update of what a block holds or of what
// PROJECT items read again.
#pragma once

#include "cs_kernels/equations.h"
#include "phase2_work.h"

namespace cs_kernels::cuda {

// Derives d_ij and a_i of a layer whose SUM items have ended. d_ij adds up the items' in a fixed
// order: some threads have one pair, each a part of the items.
CS_DEVICE void find_coefficients(const Phase2Launch& launch, const PlannedTensor& tensor,
                                 double* workspace) {
  const int tasks = launch.tasks;
  const int pairs = tasks * tasks;
  int width = 1;
  while (width < kThreads && width < pairs)
    width *= 2;
  const int parts = kThreads / width;
  const int part = thread_index() / width;
  const double* of_items = launch.item_products + tensor.first_sum * pairs;
  double* products = launch.products + tensor.layer * pairs;
  for (int first = 0; first < pairs; first += width) {
    const int pair = first + thread_index() % width;
    double sum = 0;
    if (pair < pairs) {
      CS_UNROLL(kProductLoads)
      for (std::int64_t item = part; item < tensor.sum_items; item += parts)
        sum += of_items[item * pairs + pair];
    }
    workspace[thread_index()] = sum;
    synchronize_block();
    if (part == 0 && pair < pairs) {
      for (int other = 1; other < parts; ++other)
        sum += workspace[other * width + thread_index()];
      products[pair] = sum;
    }
    synchronize_block();
  }
  for (int i = thread_index(); i < tasks; i += kThreads)
    launch.coefficients[tensor.layer * tasks + i] =
        projection_coefficient(products + std::int64_t{i} * tasks, tasks, i);
}

// The a_i of a segment's channel group, of a layer whose flag has been waited for.
template <class T>
CS_DEVICE Wide<T> coefficient_of(const Work<T>& work, const TeamSegment<T>& segment) {
  const std::int64_t first = work.tensor.layer * work.launch.tasks;
  return segment.group < 0 ? 0
                           : static_cast<Wide<T>>(work.launch.coefficients[first + segment.group]);
}

// sums += coefficient * references, for some pieces.
template <class T, int kSize, int kNumber>
CS_DEVICE void project(Wide<T> coefficient, Vector<T, kSize> (&sums)[kNumber],
                       const Vector<T, kSize> (&references)[kNumber]) {
  CS_UNROLL(kNumber)
  for (int n = 0; n < kNumber; ++n) {
    Wide<T> sum[kSize];
    Wide<T> reference[kSize];
    widen(sums[n], sum);
    widen(references[n], reference);
    CS_UNROLL(kSize)
    for (int e = 0; e < kSize; ++e)
      sum[e] += coefficient * reference[e];
    sums[n] = narrow<T>(sum);
  }
}

// Writes the update of the oldest item that the block holds, whose a_i are known.
template <class T> CS_DEVICE void write_oldest(const Phase2Arguments& launch, Shared& shared) {
  const HeldItem item = shared.held[shared.oldest];
  const Work<T> work(launch, item.tensor);
  const TeamSegment<T> segment(work, item.index);
  const Wide<T> coefficient = coefficient_of(work, segment);
  const T* held = room_at<T>(launch.tasks, shared.oldest);
  T* update = work.update();
  for_each_team_piece(segment, [&](const auto& pieces) {
    typename std::decay_t<decltype(pieces)>::Vectors sums;
    read_held(pieces, held, sums);
    if (coefficient != 0) {
      typename std::decay_t<decltype(pieces)>::Vectors references;
      read_held(pieces, held + kHalfRoom<T>, references);
      project<T>(coefficient, sums, references);
    }
    write(pieces, update, sums);
  });
  synchronize_block();
  if (thread_index() == 0) {
    shared.oldest = wrapped(shared.oldest + 1, launch.rooms);
    --shared.used;
  }
}

// The flag of the oldest item that the block holds.
CS_DEVICE std::int32_t* oldest_ready(const Phase2Launch& launch, const Shared& shared) {
  const std::int64_t layer = launch.tensors[shared.held[shared.oldest].tensor].layer;
  return launch.counters + layer * kLayerCounters + kCoefficientsReady;
}

// A PROJECT item: those of some SUM items that no block holds. Mostly none.
template <class T> CS_DEVICE void project_item(const Phase2Arguments& launch, const Item& item) {
  const Work<T> work(launch, item.tensor);
  const PlannedTensor& tensor = work.tensor;
  wait(work.counters() + kCoefficientsReady);
  const auto [first, last] = item_range(item.index, tensor.project_sums, tensor.sum_items);
  for (std::int64_t sum = first; sum < last; ++sum) {
    if (launch.left != nullptr && launch.left[tensor.first_sum + sum] == 0)
      continue;
    const TeamSegment<T> segment(work, sum);
    const Wide<T> coefficient = coefficient_of(work, segment);
    const T* reference = coefficient != 0 ? work.gradient(segment.group) : nullptr;
    if (reference == nullptr)
      continue;
    T* update = work.update();
    for_each_team_piece(segment, [&](const auto& pieces) {
      typename std::decay_t<decltype(pieces)>::Vectors sums;
      typename std::decay_t<decltype(pieces)>::Vectors references;
      read(pieces, update, sums);
      read(pieces, reference, references);
      project<T>(coefficient, sums, references);
      write(pieces, update, sums);
    });
  }
}

} // namespace cs_kernels::cuda
