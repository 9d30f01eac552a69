// Gramian, weighted sum and sign dropping of K gradients, for every method except Phase 2. The
// functions take plain pointers and sizes, and need no framework.
#pragma once

#include <cstdint>

#include "cs_kernels/data_type.h"

namespace cs_kernels {

constexpr std::int32_t kMaxTasks = 64; // also for the solvers

// One dense shared tensor of the trunk. Its gradients and its update have the same memory order.
struct GradientTensor {
  DataType type;
  std::int64_t size;
  const void* const* gradients; // [tasks]; null for zeros
  void* update;                 // may be one of the gradients; null for a Gramian
  std::int64_t group;           // index of the tensor's Gramian or task weights
  std::int64_t first_index;     // index of the first element, for sign dropping
};

struct GradientArguments {
  std::int32_t tasks;
  std::int64_t groups;
  std::int64_t count;
  const GradientTensor* tensors;
};

namespace cpu {

// Writes gramian [groups, tasks, tasks]. Reads every gradient once.
void gramian(const GradientArguments& arguments, double* gramian, int threads);

// update = sum_j weights[group, j] * gradients[j]; weights [groups, tasks]. Where the protected
// task's gradient is nonzero and the sum differs from it in sign, the update is this gradient; a
// negative `protected_task` protects no task. Reads every gradient once, writes the update once.
void combine(const GradientArguments& arguments, const double* weights, std::int32_t protected_task,
             int threads);

// GradDrop: per element, adds either the positive or the negative gradients; the probability of
// the positive gradients is their share of the sum of absolute values. The fraction leaks[j] of
// task j's gradient is always added. The choice is a function of the key and the element's index,
// which counts from the tensor's first_index in memory order. Reads every gradient once, writes the
// update once.
void drop_signs(const GradientArguments& arguments, const double* leaks, std::uint64_t key,
                int threads);

} // namespace cpu
} // namespace cs_kernels
