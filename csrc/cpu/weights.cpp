#include "cs_kernels/weights.h"

#include <cmath>
#include <cstddef>
#include <vector>

#include "cs_kernels/random.h"
#include "cs_kernels/solvers.h"

namespace cs_kernels::cpu {
namespace {

// solve(gramian, its number, its weights, room) for each that is finite; NaN for the others.
template <class Solve> void for_each(const WeightArguments& arguments, const Solve& solve) {
  const std::int64_t tasks = arguments.tasks;
  std::vector<double> memory(static_cast<std::size_t>(solvers::room_size(arguments.tasks)));
  const solvers::Room room(memory.data());
  for (std::int64_t n = 0; n < arguments.count; ++n) {
    const solvers::Gramian gramian{arguments.gramians + n * tasks * tasks, arguments.tasks};
    double* weights = arguments.weights + n * tasks;
    if (gramian.finite())
      solve(gramian, n, weights, room);
    else
      solvers::fill(weights, arguments.tasks, NAN);
  }
}

} // namespace

void pcgrad_weights(const WeightArguments& arguments, std::uint64_t seed, std::uint64_t step) {
  const std::uint64_t key = random_key(seed, step);
  for_each(arguments,
           [key](const solvers::Gramian& g, std::int64_t n, double* weights, solvers::Room room) {
             solvers::pcgrad(g, mixed(key + static_cast<std::uint64_t>(n)), weights, room);
           });
}

void cagrad_weights(const WeightArguments& arguments, double c) {
  for_each(arguments, [c](const solvers::Gramian& g, std::int64_t, double* weights,
                          solvers::Room room) { solvers::cagrad(g, c, weights, room); });
}

void mgda_weights(const WeightArguments& arguments) {
  for_each(arguments, [](const solvers::Gramian& g, std::int64_t, double* weights,
                         solvers::Room room) { solvers::mgda(g, weights, room); });
}

void aligned_mtl_weights(const WeightArguments& arguments, std::int32_t scale) {
  const auto mode = static_cast<solvers::AlignedScale>(scale);
  for_each(arguments, [mode](const solvers::Gramian& g, std::int64_t, double* weights,
                             solvers::Room room) { solvers::aligned_mtl(g, mode, weights, room); });
}

void nash_mtl_weights(const WeightArguments& arguments) {
  for_each(arguments, [](const solvers::Gramian& g, std::int64_t, double* weights,
                         solvers::Room room) { solvers::nash_mtl(g, weights, room); });
}

void imtl_g_weights(const WeightArguments& arguments) {
  for_each(arguments, [](const solvers::Gramian& g, std::int64_t, double* weights,
                         solvers::Room room) { solvers::imtl_g(g, weights, room); });
}

void upgrad_weights(const WeightArguments& arguments) {
  for_each(arguments, [](const solvers::Gramian& g, std::int64_t, double* weights,
                         solvers::Room room) { solvers::upgrad(g, weights, room); });
}

} // namespace cs_kernels::cpu
