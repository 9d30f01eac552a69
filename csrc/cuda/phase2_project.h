// The projection of Phase 2: its coefficients, and the update of tiles that a block holds or that
// PROJECT items read again.
#pragma once

#include "cs_kernels/equations.h"
#include "phase2_work.h"

namespace cs_kernels::cuda {

// d_ij of the layer: adds up the products of its SUM items, [d_ij, item], in a fixed order. A warp
// has every kWarps-th d_ij; the loads of all of them are in flight together.
template <int kTasks>
CS_DEVICE void add_items(const PlannedTensor& tensor, const double* products, double* d) {
  constexpr int kNumbers = kTasks * kTasks;
  constexpr int kSums = (kNumbers + kWarps - 1) / kWarps;
  constexpr int kItems = kProductLoads / kSums; // of each
  constexpr int kStep = kItems * kWarp;
  const int warp = thread_index() / kWarp;
  const int lane = thread_index() % kWarp;
  double sums[kSums] = {};
  CS_UNROLL(1)
  for (std::int64_t first = lane; first < tensor.sum_items; first += kStep) {
    double values[kSums][kItems];
    CS_UNROLL(kSums)
    for (int n = 0; n < kSums; ++n) {
      const int number = warp + n * kWarps;
      CS_UNROLL(kItems)
      for (int m = 0; m < kItems; ++m) {
        const int offset = m * kWarp;
        const std::int64_t item = first + offset;
        const bool inside = number < kNumbers && item < tensor.sum_items;
        values[n][m] = inside ? products[number * tensor.sum_items + item] : 0;
      }
    }
    CS_UNROLL(kSums)
    for (int n = 0; n < kSums; ++n) {
      CS_UNROLL(kItems)
      for (int m = 0; m < kItems; ++m)
        sums[n] += values[n][m];
    }
  }
  CS_UNROLL(kSums)
  for (int n = 0; n < kSums; ++n) {
    const double sum = warp_sum(sums[n], kWarp);
    if (lane == 0 && warp + n * kWarps < kNumbers)
      d[warp + n * kWarps] = sum;
  }
}

// The same for many tasks, [item, d_ij]: a thread for each.
CS_DEVICE void add_items_of_many(const PlannedTensor& tensor, const double* products, int tasks,
                                 double* d) {
  const int numbers = tasks * tasks;
  for (int number = thread_index(); number < numbers; number += kThreads) {
    double sum = 0;
    CS_UNROLL(kProductLoads)
    for (std::int64_t item = 0; item < tensor.sum_items; ++item)
      sum += products[item * numbers + number];
    d[number] = sum;
  }
}

// Derives d_ij and a_i of a layer whose SUM items have ended.
template <int kTasks>
CS_DEVICE void find_coefficients(const Phase2Launch& launch, const PlannedTensor& tensor) {
  const int tasks = launch.tasks;
  const int numbers = tasks * tasks;
  const double* products = launch.item_products + tensor.first_sum * numbers;
  double* d = shared_products();
  if constexpr (kTasks > 0)
    add_items<kTasks>(tensor, products, d);
  else
    add_items_of_many(tensor, products, tasks, d);
  synchronize_block();
  for (int number = thread_index(); number < numbers; number += kThreads)
    launch.products[tensor.layer * numbers + number] = d[number];
  for (int i = thread_index(); i < tasks; i += kThreads) {
    const int first = i * tasks;
    launch.coefficients[tensor.layer * tasks + i] = projection_coefficient(d + first, tasks, i);
  }
}

// What a tile's update is made of, held in a slot.
template <class T> struct InSlot {
  static constexpr bool kWritten = false;
  const Slot<T>& held;
  std::int64_t start; // of the tile

  CS_DEVICE static bool aligned() { return true; }
  // Of this thread's vector, as its SUM item found it.
  CS_DEVICE int group_at(std::int64_t, std::int64_t) const { return held.groups[thread_index()]; }
  CS_DEVICE const T* sums(std::int64_t element) const { return held.sums + (element - start); }
  CS_DEVICE const T* references(std::int64_t element, std::int64_t) const {
    return held.references + (element - start);
  }
};

// The same in memory, where the update is the plain sum already.
template <class T> struct InMemory {
  static constexpr bool kWritten = true;
  const Work<T>& work;

  CS_DEVICE bool aligned() const { return work.aligned; }
  CS_DEVICE int group_at(std::int64_t element, std::int64_t end) const {
    return work.group_at(element, end);
  }
  CS_DEVICE const T* sums(std::int64_t element) const { return work.update + element; }
  CS_DEVICE const T* references(std::int64_t element, std::int64_t group) const {
    const T* gradient = work.gradient(group);
    return gradient != nullptr ? gradient + element : nullptr;
  }
};

// update = sum + a_i * G_i. In float64: a_i may be beyond float32's range where a_i * G_i is not.
template <class T, class Terms>
CS_DEVICE void project(const Work<T>& work, Range range, const double* coefficients,
                       const Terms& terms) {
  constexpr int kVector = Vector<T>::kSize;
  const auto some = [&](std::int64_t element, std::int64_t group, auto size) {
    const double coefficient = group < 0 ? 0 : coefficients[group];
    const T* reference = coefficient != 0 ? terms.references(element, group) : nullptr;
    if (Terms::kWritten && reference == nullptr)
      return;
    auto total = vector_at<size>(terms.sums(element), terms.aligned());
    if (reference != nullptr) {
      const auto of_group = vector_at<size>(reference, terms.aligned());
      for (int e = 0; e < size; ++e)
        total.x[e] = narrowed<T>(widened(total.x[e]) + coefficient * widened(of_group.x[e]));
    }
    store(work.update + element, total, work.aligned);
  };
  const std::integral_constant<int, kVector> whole;
  const std::integral_constant<int, 1> one;
  constexpr int kStep = kThreads * kVector;
  const int offset = thread_index() * kVector;
  for (std::int64_t element = range.begin + offset; element < range.end; element += kStep) {
    const int group = terms.group_at(element, range.end);
    if (group != Work<T>::kApart) {
      some(element, group, whole);
      continue;
    }
    const std::int64_t stop = element + kVector < range.end ? element + kVector : range.end;
    CS_UNROLL(1)
    for (std::int64_t e = element; e < stop; ++e)
      some(e, work.task_of(work.run_of(e)), one);
  }
}

// All threads must call it; the coefficients can be read after the next barrier.
CS_DEVICE void read_coefficients(const Phase2Launch& launch, const PlannedTensor& tensor,
                                 double* coefficients) {
  for (int i = thread_index(); i < launch.tasks; i += kThreads)
    coefficients[i] = launch.coefficients[tensor.layer * launch.tasks + i];
}

CS_DEVICE std::int32_t* coefficients_ready(const Phase2Launch& launch,
                                           const PlannedTensor& tensor) {
  return launch.counters + tensor.layer * kLayerCounters + kCoefficientsReady;
}

// The tensor of the oldest item that the block holds.
CS_DEVICE const PlannedTensor& oldest_held(const Phase2Launch& launch, const Shared& shared) {
  return launch.tensors[shared.held[shared.oldest].tensor];
}

// Writes the update of the oldest item that the block holds, whose a_i are known.
template <class T, int kTasks>
CS_DEVICE void write_oldest(const Phase2Arguments& launch, Shared& shared) {
  constexpr auto kTile = tile_elements<T, kTasks>();
  const HeldItem item = shared.held[shared.oldest];
  const std::int32_t first_slot = shared.oldest;
  const Work<T> work(launch, item.tensor);
  read_coefficients(launch, work.tensor, shared.numbers);
  synchronize_block();
  const std::int64_t first = item.index * work.tensor.tiles + item.first;
  for (int n = 0; n < item.tiles; ++n) {
    const Slot<T>& held = slot_at<T, kTasks>(wrapped(first_slot + n, launch.slots));
    const Range range = item_range(first + n, kTile, work.size);
    project(work, range, shared.numbers, InSlot<T>{held, range.begin});
  }
  synchronize_block();
  if (thread_index() == 0) {
    shared.oldest = wrapped(first_slot + item.tiles, launch.slots);
    shared.used -= item.tiles;
  }
  synchronize_block();
}

// Writes what the block holds and can write now. Looks at flags, without waiting.
template <class T, int kTasks>
CS_DEVICE void write_ready(const Phase2Arguments& launch, Shared& shared) {
  for (;;) {
    if (thread_index() == 0)
      shared.ready =
          shared.used > 0 && is_published(coefficients_ready(launch, oldest_held(launch, shared)));
    synchronize_block();
    if (shared.ready == 0)
      return;
    write_oldest<T, kTasks>(launch, shared);
  }
}

// Writes all that the block holds. This waits for SUM items that have been drawn, by blocks that
// run and wait for earlier items only, so it ends even if blocks are not all resident.
template <class T, int kTasks>
CS_DEVICE void write_rest(const Phase2Arguments& launch, Shared& shared) {
  while (shared.used > 0) {
    wait(coefficients_ready(launch, oldest_held(launch, shared)));
    write_oldest<T, kTasks>(launch, shared);
  }
}

// A PROJECT item: the first tiles of some SUM items, as many as these have left. Mostly none.
template <class T, int kTasks>
CS_DEVICE void project_item(const Phase2Arguments& launch, const Item& item, Shared& shared) {
  constexpr auto kTile = tile_elements<T, kTasks>();
  const PlannedTensor& tensor = launch.tensors[item.tensor];
  wait(coefficients_ready(launch, tensor));
  const auto [first, last] = item_range(item.index, tensor.project_sums, tensor.sum_items);
  const int sums = static_cast<int>(last - first);
  if (thread_index() < sums)
    shared.left[thread_index()] = launch.left != nullptr
                                      ? launch.left[tensor.first_sum + first + thread_index()]
                                      : static_cast<std::int32_t>(tensor.tiles);
  read_coefficients(launch, tensor, shared.numbers);
  synchronize_block();
  bool any = false;
  for (int i = 0; i < launch.tasks; ++i)
    any = any || shared.numbers[i] != 0;
  if (!any)
    return;
  const Work<T> work(launch, item.tensor);
  for (int n = 0; n < sums; ++n) {
    const std::int64_t begin = (first + n) * tensor.tiles * kTile;
    const std::int64_t end = begin + shared.left[n] * kTile;
    project(work, {begin, end < work.size ? end : work.size}, shared.numbers, InMemory<T>{work});
  }
}

} // namespace cs_kernels::cuda
