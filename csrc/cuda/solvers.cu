#include "cs_kernels/cuda/solvers.h"

#include <platform.h>

#include "block.h"
#include "cs_kernels/solve.h"
#include "tuning.h"

namespace cs_kernels::cuda {
namespace {

// A block, as a team whose parts are warps.
struct Warps {
  CS_DEVICE static int lane() { return thread_index() % kWarp; }
  CS_DEVICE static constexpr int lanes() { return kWarp; }
  CS_DEVICE static int part() { return thread_index() / kWarp; }
  CS_DEVICE static int parts() { return block_size() / kWarp; }
  CS_DEVICE static void sync() { synchronize_warp(); }
  CS_DEVICE static void sync_parts() { synchronize_block(); }
  CS_DEVICE static double sum(double x) { return warp_sum(x, kWarp); }
  CS_DEVICE static double least(double x) {
    for (int mask = kWarp / 2; mask > 0; mask /= 2)
      x = fmin(x, exchanged(x, mask));
    return x;
  }
};

// One block per Gramian. Matrices are in shared memory. Reads K * K numbers, writes K.
CS_KERNEL(kWarp* kSolverWarps, 1) solver_kernel(SolverArguments arguments) {
  auto* workspace = reinterpret_cast<double*>(shared_memory());
  solvers::with_solver(arguments.solver, [&](const auto& function) {
    solvers::solve_one(Warps{}, arguments, block_index(), workspace, function);
  });
}

std::size_t memory(std::int32_t tasks, int warps) {
  return static_cast<std::size_t>(solvers::workspace_size(tasks, warps)) * sizeof(double);
}

// The warps per block: UPGrad solves one problem per task; the other methods solve a single one.
int warps(Solver solver, std::int32_t tasks) {
  int found = 1;
  if (solver == Solver::upgrad)
    while (found < kSolverWarps && found < tasks && memory(tasks, found + 1) <= kSolverMemory)
      ++found;
  return found;
}

} // namespace

std::size_t solver_memory(std::int32_t tasks) {
  return memory(tasks, warps(Solver::upgrad, tasks));
}

Status solve(const SolverArguments& arguments, Stream stream) {
  const int parts = warps(arguments.solver, arguments.tasks);
  return launch(solver_kernel, arguments.count, kWarp * parts, memory(arguments.tasks, parts),
                stream, arguments);
}

} // namespace cs_kernels::cuda
