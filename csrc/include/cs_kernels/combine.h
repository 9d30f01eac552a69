// Gramian, weighted sum and sign dropping of K gradients, for every method but Phase 2. Plain
// pointers and sizes, no framework.
#pragma once

#include <cstdint>

#include "cs_kernels/data_type.h"

namespace cs_kernels {

constexpr std::int32_t kMaxTasks = 64; // also of the solvers

// One shared tensor of the trunk: dense, its arrays have one order of elements.
struct GradientTensor {
  DataType type;
  std::int64_t size;
  const void* const* gradients; // [tasks]; null: zeros
  void* update;                 // aliases no gradient; null for a Gramian
  std::int64_t group;           // index of its Gramian or of its task weights
  std::int64_t first_index;     // of its elements, for sign dropping
};

struct GradientArguments {
  std::int32_t tasks;
  std::int64_t groups;
  std::int64_t count;
  const GradientTensor* tensors;
};

namespace cpu {

// gramian [groups, tasks, tasks], written. Reads every gradient once.
void gramian(const GradientArguments& arguments, double* gramian, int threads);

// update = sum_j weights[group, j] * gradients[j]; weights [groups, tasks]. Reads every gradient
// once, writes the update once.
void combine(const GradientArguments& arguments, const double* weights, int threads);

// GradDrop: adds either the positive or the negative gradients of an element, with the positive
// ones' share of the sum of absolute values as their probability. The part leaks[j] of task j's is
// always added. The choice is a function of the key and the element's index, which goes on from the
// tensor's first one in memory order. Reads every gradient once, writes the update once.
void drop_signs(const GradientArguments& arguments, const double* leaks, std::uint64_t key,
                int threads);

} // namespace cpu
} // namespace cs_kernels
