#include "strength.h"

namespace cs_kernels::cuda {
namespace {

template <class T> CS_KERNEL(kThreads, kSmallBlocks) energy_kernel(EnergyLaunch launch) {
  auto* workspace = reinterpret_cast<double*>(shared_memory());
  const PlannedTensor& tensor = *launch.tensor;
  const Range rows = item_range(block_index(), tensor.energy_rows, tensor.rows);
  row_energies(tensor, static_cast<const T*>(launch.weight), launch.aligned, rows, launch.energy,
               workspace);
}

// One block per task.
CS_KERNEL(kThreads, kSmallBlocks) strength_kernel(StrengthLaunch launch) {
  auto* workspace = reinterpret_cast<double*>(shared_memory());
  const int task = static_cast<int>(block_index());
  double total[] = {1};
  if (launch.normalize)
    strength_totals(launch, task, total, workspace);
  for (std::int64_t row = thread_index(); row < launch.rows; row += kThreads) {
    double strength[1];
    strengths_at(launch, task, row, strength);
    launch.strength[task * launch.rows + row] = normalized_strength(strength[0], total[0]);
  }
}

CS_KERNEL(kThreads, kSmallBlocks) priority_kernel(PriorityLaunch launch) {
  const std::int64_t row = block_index() * kThreads + thread_index();
  if (row >= launch.rows)
    return;
  TopTask top;
  for (int task = 0; task < launch.tasks; ++task)
    top.compare(task, number_at(launch.strength, task * launch.rows + row));
  launch.priority[row] = top.task;
}

constexpr std::size_t kWorkspace = kWarps * sizeof(double);

} // namespace

Status energies(const EnergyLaunch& arguments, Stream stream) {
  return with_type(arguments.type, [&](auto like) {
    return launch(energy_kernel<decltype(like)>, arguments.items, kThreads, kWorkspace, stream,
                  arguments);
  });
}

Status strengths(const StrengthLaunch& arguments, Stream stream) {
  return launch(strength_kernel, arguments.tasks, kThreads, kWorkspace, stream, arguments);
}

Status task_priority(const PriorityLaunch& arguments, Stream stream) {
  return launch(priority_kernel, (arguments.rows + kThreads - 1) / kThreads, kThreads, 0, stream,
                arguments);
}

const char* status_message(Status status) { return error_text(status); }

Status available() { return loadable(strength_kernel); }

} // namespace cs_kernels::cuda
