#include "cs_kernels/solvers.h"

#include <platform.h>

#include <cmath>
#include <cstdint>

#include "cs_kernels/cuda.h"
#include "tuning.h"

namespace cs_kernels::cuda {
namespace {

// A block a Gramian, of which one thread works: the chain of small sums is what takes its time. The
// solvers are those of the CPU, their matrices in shared memory. Reads K * K numbers, writes K.
CS_KERNEL(kWarp, 1) solver_kernel(SolverLaunch launch) {
  if (thread_index() != 0)
    return;
  const std::int64_t n = block_index();
  const std::int64_t tasks = launch.tasks;
  const solvers::Gramian gramian{launch.gramians + n * tasks * tasks, launch.tasks};
  double* weights = launch.weights + n * tasks;
  const solvers::Room room(reinterpret_cast<double*>(shared_memory()));
  if (!gramian.finite()) {
    solvers::fill(weights, launch.tasks, NAN);
    return;
  }
  switch (launch.method) {
  case Method::kPcgrad: {
    const std::uint64_t key = *static_cast<const std::uint64_t*>(launch.argument);
    return solvers::pcgrad(gramian, mixed(key + static_cast<std::uint64_t>(n)), weights, room);
  }
  case Method::kCagrad:
    return solvers::cagrad(gramian, *static_cast<const double*>(launch.argument), weights, room);
  case Method::kMgda:
    return solvers::mgda(gramian, weights, room);
  case Method::kAlignedMtl:
    return solvers::aligned_mtl(gramian, static_cast<solvers::AlignedScale>(launch.scale), weights,
                                room);
  case Method::kNashMtl:
    return solvers::nash_mtl(gramian, weights, room);
  case Method::kImtlG:
    return solvers::imtl_g(gramian, weights, room);
  case Method::kUpgrad:
    return solvers::upgrad(gramian, weights, room);
  }
}

} // namespace

std::size_t solver_memory(std::int32_t tasks) {
  return static_cast<std::size_t>(solvers::room_size(tasks)) * sizeof(double);
}

Status solve(const SolverLaunch& arguments, Stream stream) {
  return launch(solver_kernel, arguments.count, kWarp, solver_memory(arguments.tasks), stream,
                arguments);
}

} // namespace cs_kernels::cuda
