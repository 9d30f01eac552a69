// Gramian, weighted sum and sign dropping on a GPU; phase2.h describes the interface.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cs_kernels/cuda/launch.h"

namespace cs_kernels::cuda {

// The constants for the caller's plan.
struct GradientTiling {
  std::int64_t elements;   // per tile
  std::int64_t most_tiles; // per item
};
GradientTiling gradient_tiling(DataType type);

// Bytes of shared memory per block.
std::size_t gramian_memory(std::int32_t tasks);

// A row of the tensor table, which the caller makes once per trunk.
struct PlannedGradient {
  std::int64_t size; // in elements
  std::int64_t group;
  std::int64_t first_item; // index of the group's first item
  std::int64_t group_items;
  std::int64_t tiles;       // per item
  std::int64_t first_index; // index of the first element, for sign dropping
};

enum GradientCallField : std::int32_t {
  kGradientUpdate,
  kGradientAligned,
  kGradientGradients,
};

struct GradientItem {
  std::int32_t tensor;
  std::int32_t index;
};

struct GradientLaunch {
  DataType type;
  std::int32_t tasks;
  const GradientItem* items; // a group's items are adjacent
  std::int64_t item_count;
  const PlannedGradient* tensors;
  const std::int64_t* table; // [tensors, kGradientGradients + tasks]
};

// Reads every gradient once.
struct GramianLaunch {
  GradientLaunch gradients;
  std::int32_t* counters; // [groups], zeros
  double* products;       // workspace of items * tasks * tasks numbers
  double* gramian;        // [groups, tasks, tasks]
};
Status gramian(const GramianLaunch& launch, Stream stream);

// update = sum_j weights[group, j] * gradients[j], with the signs of the protected task's gradient
// as in cpu::combine. Reads every gradient once, writes the update.
struct CombineLaunch {
  GradientLaunch gradients;
  const double* weights; // [groups, tasks]
  std::int32_t protected_task;
};
Status combine(const CombineLaunch& launch, Stream stream);

// GradDrop. Reads every gradient once, writes the update.
struct DropLaunch {
  GradientLaunch gradients;
  const double* leaks;         // [tasks]
  std::uint64_t state;         // splitmix64(seed) + step
  const std::int64_t* counter; // steps to add to the state; null for none
};
Status drop_signs(const DropLaunch& launch, Stream stream);

} // namespace cs_kernels::cuda
