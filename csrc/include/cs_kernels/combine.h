// Gramian, weighted sum and sign dropping of K gradients, for every method but Phase 2. Plain
// pointers and sizes, no framework.
#pragma once

#include <cstdint>

#include "cs_kernels/data_type.h"

namespace cs_kernels {

constexpr std::int32_t kMaxTasks = 64; // of these kernels and of the solvers

// One shared tensor of the trunk, dense, all of its arrays in the same order of elements.
struct GradientTensor {
  DataType type;
  std::int64_t size;
  const void* const* gradients; // [tasks]; a null one stands for zeros
  void* update;                 // overlaps none of the gradients; null for a Gramian
  std::int64_t group;           // whose Gramian it adds to, or whose task weights it takes
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

// GradDrop: of every element either the positive or the negative gradients are added, the former
// with the probability that is their share of the sum of absolute values; of task j's, the part
// leaks[j] is added in any case. The choice is a function of the key and the element's index among
// all elements. Reads every gradient once, writes the update once.
void drop_signs(const GradientArguments& arguments, const double* leaks, std::uint64_t key,
                int threads);

} // namespace cpu
} // namespace cs_kernels
