// What the items of Phase 2 share: a block's shared memory, and the tensor that it works on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block.h"
#include "cs_kernels/combine.h"
#include "cs_kernels/cuda/phase2.h"
#include "types.h"

namespace cs_kernels::cuda {

struct Phase2Arguments : Phase2Launch {
  std::int32_t slots; // tiles that a block can hold; 0: every tile is left to PROJECT
};

// The last tiles of a SUM item, held in consecutive slots of a ring.
struct HeldItem {
  std::int32_t tensor;
  std::int32_t index;
  std::int32_t first; // tile of the item
  std::int32_t tiles;
};

// The first part of a block's shared memory.
struct alignas(16) Shared {
  double sums[strength_tasks(0) * kWarps];
  double numbers[kMaxTasks]; // sums of strengths, or the coefficients a_i
  std::int32_t drawn;
  std::int32_t last;
  std::int32_t ready;
  std::int32_t oldest;             // slot that is in use
  std::int32_t used;               // slots
  std::int32_t left[kProjectSums]; // tiles of SUM items
  HeldItem held[kMostSlots];       // each at its first slot
};

// The second: the products of an item, for all threads.
CS_DEVICE double* shared_products() {
  return reinterpret_cast<double*>(shared_memory() + sizeof(Shared));
}

// In the unrolled kernels, [K * K / lanes, kThreads] products: each lane has a share of every row.
CS_HOST_DEVICE_INLINE constexpr int product_share(int tasks) {
  return (tasks + product_lanes(tasks) - 1) / product_lanes(tasks);
}
CS_HOST_DEVICE_INLINE constexpr int unrolled_products(int tasks) {
  return tasks * product_share(tasks) * kThreads;
}

// The threads that share a task's products in the general kernel: each has a part of the columns.
CS_HOST_DEVICE_INLINE constexpr int general_parts(int tasks) {
  int parts = 1;
  while (parts < kGeneralColumns / 4 && 2 * parts * tasks <= kThreads &&
         2 * parts * tasks * tasks <= kGeneralProducts)
    parts *= 2;
  return parts;
}

// Elements of a tile: a vector of each thread, or the rounds of the general kernel.
template <class T, int kTasks> constexpr std::int64_t tile_elements() {
  return std::int64_t{kTasks > 0 ? kThreads * Vector<T>::kSize : kGeneralRounds * kGeneralColumns};
}

// The third, in the unrolled kernels: a slot has a tile's plain sums, its reference gradients, and
// the channel groups of its vectors.
template <class T> struct alignas(16) Slot {
  T sums[kThreads * Vector<T>::kSize];
  T references[kThreads * Vector<T>::kSize];
  std::int8_t groups[kThreads];
};
constexpr std::int64_t kSlotBytes = sizeof(Slot<float>);

template <class T, int kTasks> CS_DEVICE Slot<T>& slot_at(int number) {
  return reinterpret_cast<Slot<T>*>(shared_memory() + sizeof(Shared) +
                                    unrolled_products(kTasks) * sizeof(double))[number];
}

// A slot of the ring, from its number or a round later.
CS_DEVICE std::int32_t wrapped(std::int32_t slot, std::int32_t slots) {
  return slot < slots ? slot : slot - slots;
}

// The tensor that a block works on. Hot fields are copied to registers: the compiler must assume
// that stores alias the tables.
template <class T> struct Work {
  const Phase2Launch& launch;
  const PlannedTensor& tensor;
  const std::int64_t* call; // its row of the table of addresses
  T* update;
  const std::int64_t* priority;
  std::int64_t size;
  std::int64_t inner;
  bool aligned;
  bool contiguous_rows;

  CS_DEVICE Work(const Phase2Launch& arguments, std::int32_t number)
      : launch(arguments), tensor(arguments.tensors[number]),
        call(arguments.table + static_cast<std::int64_t>(number) * (kGradients + arguments.tasks)),
        update(pointer<T>(load(call + kUpdate))),
        priority(tensor.layer >= 0 ? pointer<const std::int64_t>(load(call + kPriority)) : nullptr),
        size(tensor.size), inner(tensor.inner), aligned(load(call + kAligned) != 0),
        contiguous_rows(tensor.length == tensor.inner) {}

  CS_DEVICE const T* gradient(std::int64_t task) const {
    return pointer<const T>(load(call + kGradients + task));
  }

  // The task whose channel group the elements of a run belong to, or -1; a run is `inner`
  // contiguous elements. Priorities may have been written in the same launch.
  CS_DEVICE std::int64_t task_of(std::int64_t run) const {
    if (priority == nullptr)
      return -1;
    std::int64_t row = run;
    if (!contiguous_rows) {
      const std::int64_t channels = tensor.channels;
      const std::int64_t group = quotient(run, channels * quotient(tensor.length, inner));
      row = group * channels + run - quotient(run, channels) * channels;
    }
    const std::int64_t task = priority[row];
    return task >= 0 && task < launch.tasks ? task : -1;
  }
  CS_DEVICE std::int64_t run_of(std::int64_t element) const {
    return priority == nullptr ? 0 : quotient(element, inner);
  }
  // The channel group of a vector: a task, -1, or kApart where its elements are not all of one row.
  static constexpr int kApart = -2;
  CS_DEVICE int group_at(std::int64_t element, std::int64_t end) const {
    if (element >= end)
      return kApart;
    const std::int64_t run = run_of(element);
    const std::int64_t row_end = priority == nullptr ? size : (run + 1) * inner;
    return element + Vector<T>::kSize <= row_end ? static_cast<int>(task_of(run)) : kApart;
  }
};

} // namespace cs_kernels::cuda
