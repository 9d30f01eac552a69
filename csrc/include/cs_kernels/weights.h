// The solvers of solvers.h over several Gramians at once: [count, tasks, tasks] to [count, tasks].
// At most kMaxTasks tasks.
#pragma once

#include <cstdint>

namespace cs_kernels {

struct WeightArguments {
  const double* gramians;
  std::int64_t count;
  std::int32_t tasks;
  double* weights;
};

namespace cpu {

// The random orders of Gramian number n are those of key + n.
void pcgrad_weights(const WeightArguments& arguments, std::uint64_t seed, std::uint64_t step);
void cagrad_weights(const WeightArguments& arguments, double c);
void mgda_weights(const WeightArguments& arguments);
void aligned_mtl_weights(const WeightArguments& arguments, std::int32_t scale);
void nash_mtl_weights(const WeightArguments& arguments);
void imtl_g_weights(const WeightArguments& arguments);
void upgrad_weights(const WeightArguments& arguments);

} // namespace cpu
} // namespace cs_kernels
