// Task weights [count, tasks] from Gramians [count, tasks, tasks], for at most kMaxTasks tasks.
#pragma once

#include <array>
#include <cstdint>

namespace cs_kernels {

// All solvers, by name: solve.h defines the function `name`; the operator is `name`_weights.
#define CS_SOLVERS(solver)                                                                         \
  solver(pcgrad) solver(cagrad) solver(mgda) solver(aligned_mtl) solver(nash_mtl) solver(imtl_g)   \
      solver(upgrad) solver(fair_grad) solver(config) solver(gradvac)

#define CS_SOLVER(name) name,
enum class Solver : std::int32_t { CS_SOLVERS(CS_SOLVER) };
#undef CS_SOLVER

#define CS_SOLVER(name) #name,
inline constexpr std::array kSolverNames{CS_SOLVERS(CS_SOLVER)};
#undef CS_SOLVER

struct SolverArguments {
  Solver solver;
  const double* gramians;
  std::int64_t count;
  std::int32_t tasks;
  double* weights;
  std::uint64_t option;        // a random state, the bits of c or alpha, or Aligned-MTL's scale
  const std::int64_t* counter; // steps to add to the random state; null for none
  double rate;                 // GradVac's weight of a new cosine in the targets
  double* similarities;        // [count, tasks, tasks], GradVac's targets, updated; null for none
};

namespace cpu {

// Reads K * K numbers and writes K per Gramian.
void solve(const SolverArguments& arguments);

} // namespace cpu
} // namespace cs_kernels
