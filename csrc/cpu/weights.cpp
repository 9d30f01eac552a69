#include "cs_kernels/weights.h"

#include <cmath>

#include "cs_kernels/random.h"
#include "cs_kernels/solvers.h"

namespace cs_kernels::cpu {
namespace {

// solve(gramian, its number, its weights) for each that is finite; NaN for the others.
template <class Solve> void for_each(const WeightArguments& arguments, const Solve& solve) {
  const std::int64_t tasks = arguments.tasks;
  for (std::int64_t n = 0; n < arguments.count; ++n) {
    const solvers::Gramian gramian{arguments.gramians + n * tasks * tasks, arguments.tasks};
    double* weights = arguments.weights + n * tasks;
    if (gramian.finite())
      solve(gramian, n, weights);
    else
      solvers::fill(weights, arguments.tasks, NAN);
  }
}

} // namespace

void pcgrad_weights(const WeightArguments& arguments, std::uint64_t seed, std::uint64_t step) {
  const std::uint64_t key = random_key(seed, step);
  for_each(arguments, [key](const solvers::Gramian& g, std::int64_t n, double* weights) {
    solvers::pcgrad(g, mixed(key + static_cast<std::uint64_t>(n)), weights);
  });
}

void cagrad_weights(const WeightArguments& arguments, double c) {
  for_each(arguments, [c](const solvers::Gramian& g, std::int64_t, double* weights) {
    solvers::cagrad(g, c, weights);
  });
}

void mgda_weights(const WeightArguments& arguments) {
  for_each(arguments, [](const solvers::Gramian& g, std::int64_t, double* weights) {
    solvers::mgda(g, weights);
  });
}

void aligned_mtl_weights(const WeightArguments& arguments, std::int32_t scale) {
  const auto mode = static_cast<solvers::AlignedScale>(scale);
  for_each(arguments, [mode](const solvers::Gramian& g, std::int64_t, double* weights) {
    solvers::aligned_mtl(g, mode, weights);
  });
}

void nash_mtl_weights(const WeightArguments& arguments) {
  for_each(arguments, [](const solvers::Gramian& g, std::int64_t, double* weights) {
    solvers::nash_mtl(g, weights);
  });
}

void imtl_g_weights(const WeightArguments& arguments) {
  for_each(arguments, [](const solvers::Gramian& g, std::int64_t, double* weights) {
    solvers::imtl_g(g, weights);
  });
}

void upgrad_weights(const WeightArguments& arguments) {
  for_each(arguments, [](const solvers::Gramian& g, std::int64_t, double* weights) {
    solvers::upgrad(g, weights);
  });
}

} // namespace cs_kernels::cpu
