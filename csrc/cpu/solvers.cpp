#include "cs_kernels/solvers.h"

#include <vector>

#include "cs_kernels/solve.h"

namespace cs_kernels::cpu {

void solve(const SolverArguments& arguments) {
  std::vector<double> workspace(static_cast<std::size_t>(solvers::workspace_size(arguments.tasks)));
  for (std::int64_t n = 0; n < arguments.count; ++n)
    solvers::solve(arguments, n, workspace.data());
}

} // namespace cs_kernels::cpu
