// The solvers on a GPU; gramians and weights are device addresses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cs_kernels/cuda/launch.h"
#include "cs_kernels/solvers.h"

namespace cs_kernels::cuda {

// Bytes of shared memory per block.
std::size_t solver_memory(std::int32_t tasks);

// Reads K * K numbers and writes K per Gramian.
Status solve(const SolverArguments& arguments, Stream stream);

} // namespace cs_kernels::cuda
