#include "cs_kernels/cuda/phase2.h"

#include <algorithm>

#include "phase2_project.h"
#include "phase2_sum.h"
#include "phase2_work.h"
#include "strength.h"

namespace cs_kernels::cuda {
namespace {

// The last ENERGY item of a layer to finish derives the layer's priorities.
template <class T>
CS_DEVICE void energy_item(const Phase2Launch& launch, const Item& item, Shared& shared) {
  const Work<T> work(launch, item.tensor);
  const PlannedTensor& tensor = work.tensor;
  const Range rows = item_range(item.index, tensor.energy_rows, tensor.rows);
  double* energy = launch.energy + tensor.first_row;
  row_energies(tensor, pointer<const T>(load(work.call + kWeight)), work.aligned, rows, energy,
               shared.sums);
  if (!arrive(work.counters() + kEnergiesDone, tensor.energy_items, &shared.last))
    return;
  const auto of_layer = [&](const Numbers& numbers) {
    const std::int64_t first = tensor.first_row * launch.tasks;
    return Numbers{numbers.type,
                   static_cast<const char*>(numbers.data) + first * item_size(numbers.type)};
  };
  find_priorities({energy, of_layer(launch.gamma), of_layer(launch.variance),
                   launch.epsilon + tensor.layer * launch.tasks, tensor.rows, launch.tasks, true,
                   nullptr},
                  shared.totals, shared.sums, pointer<std::int64_t>(load(work.call + kPriority)));
  publish(work.counters() + kPriorityReady);
}

// The last SUM item of a layer to finish derives the layer's a_i.
template <class T>
CS_DEVICE void sum_item(const Phase2Launch& launch, const Item& item, Shared& shared) {
  const Work<T> work(launch, item.tensor);
  const PlannedTensor& tensor = work.tensor;
  if (tensor.energy_items > 0)
    wait(work.counters() + kPriorityReady);
  sum_tiles(work, item.index, shared);
  if (tensor.layer >= 0 && arrive(work.counters() + kSumsDone, tensor.sum_items, &shared.last)) {
    find_coefficients(launch, tensor, shared.sums);
    publish(work.counters() + kCoefficientsReady);
  }
}

// A block takes items until none is left, and draws its next ticket before it computes the current
// item. An item waits only for items with earlier tickets, which running blocks have already drawn.
template <class T> CS_KERNEL(kThreads, kPhase2Blocks<T>) phase2_kernel(Phase2Launch launch) {
  auto& shared = *reinterpret_cast<Shared*>(shared_memory());
  if (thread_index() == 0)
    shared.drawn = count(launch.ticket);
  synchronize_block();
  while (shared.drawn < launch.item_count) {
    const Item item = launch.items[shared.drawn];
    std::int32_t next = 0;
    if (thread_index() == 0)
      next = count(launch.ticket);
    if (item.kind == ItemKind::kEnergy)
      energy_item<T>(launch, item, shared);
    else if (item.kind == ItemKind::kSum)
      sum_item<T>(launch, item, shared);
    else
      project_item<T>(launch, item);
    synchronize_block();
    if (thread_index() == 0)
      shared.drawn = next;
    synchronize_block();
  }
}

} // namespace

std::size_t phase2_memory(std::int32_t tasks) { return shared_bytes(tasks); }

Phase2Tiling phase2_tiling(DataType type) {
  return with_type(type, [&](auto like) {
    constexpr int kVector = Vector<decltype(like)>::kSize;
    return Phase2Tiling{kTeams,
                        std::int64_t{kTeam} * kVector,
                        kPieces,
                        std::int64_t{kEnergyVectors} * kThreads * kVector,
                        kLeastEnergyRows,
                        kLeastItems,
                        kLag,
                        kProjectSums};
  });
}

Status phase2(const Phase2Launch& arguments, Stream stream) {
  return with_type(arguments.type, [&](auto like) {
    const auto kernel = phase2_kernel<decltype(like)>;
    const std::size_t bytes = phase2_memory(arguments.tasks);
    std::int64_t blocks = 0;
    Status status = resident_blocks(kernel, kThreads, bytes, &blocks);
    if (status == 0)
      status = launch(kernel, std::min(blocks, arguments.item_count), kThreads, bytes, stream,
                      arguments);
    return status;
  });
}

} // namespace cs_kernels::cuda
