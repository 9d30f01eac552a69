// The projection of Phase 2: its coefficients, and the PROJECT items.
#pragma once

#include "cs_kernels/equations.h"
#include "phase2_work.h"

namespace cs_kernels::cuda {

// Derives d_ij and a_i of a layer whose SUM items have finished. The items' products are added up
// in a fixed order, by several threads per pair; each thread has a share of the items.
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

// The a_i of a segment's channel group, once the caller has waited for kCoefficientsReady.
template <class T>
CS_DEVICE Wide<T> coefficient_of(const Work<T>& work, const TeamSegment<T>& segment) {
  const std::int64_t first = work.tensor.layer * work.launch.tasks;
  return segment.group < 0 ? 0
                           : static_cast<Wide<T>>(work.launch.coefficients[first + segment.group]);
}

// Computes a PROJECT item: revisits those segments of a few SUM items whose a_i is nonzero. Their
// sums and reference gradients are likely to be in the L2 cache.
template <class T> CS_DEVICE void project_item(const Phase2Launch& launch, const Item& item) {
  const Work<T> work(launch, item.tensor);
  const PlannedTensor& tensor = work.tensor;
  wait(work.counters() + kCoefficientsReady);
  const Range sums = item_range(item.index, tensor.project_sums, tensor.sum_items);
  const Range tiles = work.tiles(sums.begin, sums.end);
  for (std::int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
    const TeamSegment<T> segment(work, tile);
    const Wide<T> coefficient = coefficient_of(work, segment);
    const T* reference = coefficient != 0 ? work.gradient(segment.group) : nullptr;
    if (reference == nullptr)
      continue;
    T* update = work.update();
    for_each_team_piece(segment, [&](const auto& pieces) {
      using Of = std::decay_t<decltype(pieces)>;
      typename Of::Vectors vectors;
      typename Of::Vectors of_reference;
      typename Of::Numbers sums;
      typename Of::Numbers references;
      read(pieces, update, vectors);
      read(pieces, reference, of_reference);
      widen_all(vectors, sums);
      widen_all(of_reference, references);
      CS_UNROLL(Of::kNumber)
      for (int n = 0; n < Of::kNumber; ++n) {
        CS_UNROLL(Of::kSize)
        for (int e = 0; e < Of::kSize; ++e)
          sums[n][e] += coefficient * references[n][e];
      }
      narrow_all<T>(sums, vectors);
      write(pieces, update, vectors);
    });
  }
}

} // namespace cs_kernels::cuda
