#include "cs_kernels/solvers.h"

#include <vector>

#include "cs_kernels/solve.h"

namespace cs_kernels::cpu {

void solve(const SolverArguments& arguments) {
  std::vector<double> workspace(static_cast<std::size_t>(solvers::workspace_size(arguments.tasks)));
  solvers::with_solver(arguments.solver, [&](const auto& function) {
    for (std::int64_t n = 0; n < arguments.count; ++n)
      solvers::solve_one(solvers::OneLane{}, arguments, n, workspace.data(), function);
  });
}

} // namespace cs_kernels::cpu
