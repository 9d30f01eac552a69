#include "cs_kernels/cuda/solvers.h"

#include <platform.h>

#include "cs_kernels/solve.h"
#include "tuning.h"

namespace cs_kernels::cuda {
namespace {

// One block for each Gramian, with one active thread, as the sums are short and depend on each
// other. Matrices are in shared memory. Reads K * K numbers, writes K.
CS_KERNEL(kWarp, 1) solver_kernel(SolverArguments arguments) {
  if (thread_index() != 0)
    return;
  auto* workspace = reinterpret_cast<double*>(shared_memory());
  solvers::with_solver(arguments.solver, [&](const auto& function) {
    solvers::solve_one(arguments, block_index(), workspace, function);
  });
}

} // namespace

std::size_t solver_memory(std::int32_t tasks) {
  return static_cast<std::size_t>(solvers::workspace_size(tasks)) * sizeof(double);
}

Status solve(const SolverArguments& arguments, Stream stream) {
  return launch(solver_kernel, arguments.count, kWarp, solver_memory(arguments.tasks), stream,
                arguments);
}

} // namespace cs_kernels::cuda
