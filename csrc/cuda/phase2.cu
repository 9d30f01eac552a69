#include "cs_kernels/cuda/phase2.h"

#include <algorithm>

#include "phase2_project.h"
#include "phase2_sum.h"
#include "phase2_work.h"
#include "strength.h"

namespace cs_kernels::cuda {
namespace {

// Bytes of a block without its slots. kTasks is 0 for the general kernel.
constexpr std::size_t shared_bytes(int unrolled, int tasks) {
  const int numbers = unrolled > 0 ? unrolled_products(tasks)
                                   : general_parts(tasks) * tasks * tasks +
                                         tasks * (kGeneralColumns + 1) + kGeneralColumns;
  return sizeof(Shared) + static_cast<std::size_t>(numbers) * sizeof(double);
}

// The last ENERGY item of a layer derives its priorities.
template <class T, int kTasks>
CS_DEVICE void energy_item(const Phase2Launch& launch, const Item& item, Shared& shared) {
  const PlannedTensor& tensor = launch.tensors[item.tensor];
  const std::int64_t* call =
      launch.table + static_cast<std::int64_t>(item.tensor) * (kGradients + launch.tasks);
  std::int32_t* counters = launch.counters + tensor.layer * kLayerCounters;
  const Range rows = item_range(item.index, tensor.energy_rows, tensor.rows);
  double* energy = launch.energy + tensor.first_row;
  row_energies(tensor, pointer<const T>(load(call + kWeight)), load(call + kAligned) != 0, rows,
               energy, shared.sums);
  if (!arrive(counters + kEnergiesDone, tensor.energy_items, &shared.last))
    return;
  const auto of_layer = [&](const Numbers& numbers) {
    const std::int64_t first = tensor.first_row * launch.tasks;
    return Numbers{numbers.type,
                   static_cast<const char*>(numbers.data) + first * item_size(numbers.type)};
  };
  find_priorities<kTasks>(
      {energy, of_layer(launch.gamma), of_layer(launch.variance),
       launch.epsilon + tensor.layer * launch.tasks, tensor.rows, launch.tasks, true, nullptr},
      shared.numbers, shared.sums, pointer<std::int64_t>(load(call + kPriority)));
  publish(counters + kPriorityReady);
}

// The last SUM item of a layer derives its a_i.
template <class T, int kTasks>
CS_DEVICE void sum_item(const Phase2Arguments& launch, const Item& item, Shared& shared) {
  const PlannedTensor& tensor = launch.tensors[item.tensor];
  std::int32_t* counters = launch.counters + tensor.layer * kLayerCounters;
  if (tensor.layer >= 0 && tensor.energy_items > 0)
    wait(counters + kPriorityReady);
  const Work<T> work(launch, item.tensor);
  if constexpr (kTasks > 0)
    sum_and_hold<T, kTasks>(work, launch, item, shared);
  else
    Sum<T, 0>(work).run(item.index);
  if (tensor.layer >= 0 && arrive(counters + kSumsDone, tensor.sum_items, &shared.last)) {
    find_coefficients<kTasks>(launch, tensor);
    publish(counters + kCoefficientsReady);
  }
}

// A block takes items until none is left. It draws the next ticket during the current item; an item
// waits for earlier tickets only, which running blocks hold.
template <class T, int kTasks>
CS_KERNEL(kThreads, phase2_blocks(kTasks))
phase2_kernel(Phase2Arguments launch) {
  auto& shared = *reinterpret_cast<Shared*>(shared_memory());
  if (thread_index() == 0) {
    shared.drawn = count(launch.ticket);
    shared.oldest = shared.used = 0;
  }
  synchronize_block();
  while (shared.drawn < launch.item_count) {
    const Item item = launch.items[shared.drawn];
    std::int32_t next = 0;
    if (thread_index() == 0)
      next = count(launch.ticket);
    if (item.kind == ItemKind::kEnergy)
      energy_item<T, kTasks>(launch, item, shared);
    else if (item.kind == ItemKind::kSum)
      sum_item<T, kTasks>(launch, item, shared);
    else
      project_item<T, kTasks>(launch, item, shared);
    synchronize_block();
    if (thread_index() == 0)
      shared.drawn = next;
    if constexpr (kTasks > 0)
      write_ready<T, kTasks>(launch, shared);
    else
      synchronize_block();
  }
  if constexpr (kTasks > 0)
    write_rest<T, kTasks>(launch, shared);
}

} // namespace

std::size_t phase2_memory(std::int32_t tasks) {
  return shared_bytes(is_unrolled(tasks) ? tasks : 0, tasks);
}

Phase2Tiling phase2_tiling(DataType type, std::int32_t tasks) {
  return with_type(type, [&](auto like) {
    using T = decltype(like);
    return Phase2Tiling{is_unrolled(tasks) ? tile_elements<T, kUnrolledTasks>()
                                           : tile_elements<T, 0>(),
                        kEnergyTiles * kThreads * Vector<T>::kSize,
                        kLeastEnergyRows,
                        is_unrolled(tasks) ? kMostTiles : kMostGeneralTiles,
                        kLeastItems,
                        phase2_lag(is_unrolled(tasks) ? tasks : 0),
                        is_unrolled(tasks) ? kProjectSums : 1};
  });
}

Phase2Blocks phase2_blocks_on(const SharedMemory& gpu, std::int32_t tasks) {
  const std::int64_t resident = phase2_blocks(is_unrolled(tasks) ? tasks : 0);
  if (!is_unrolled(tasks))
    return {resident, 0};
  const std::int64_t bytes =
      std::min((gpu.multiprocessor - kCacheBytes) / resident - gpu.reserved, gpu.block);
  const std::int64_t slots =
      (bytes - static_cast<std::int64_t>(shared_bytes(tasks, tasks))) / kSlotBytes;
  return {resident, std::clamp<std::int64_t>(slots, 0, kMostSlots)};
}

Status phase2(const Phase2Launch& arguments, Stream stream) {
  return with_kernel(arguments.type, arguments.tasks, [&](auto like, auto unrolled) {
    const auto kernel = phase2_kernel<decltype(like), unrolled>;
    Phase2Arguments launched{arguments, 0};
    SharedMemory gpu{};
    Status status = shared_memory_sizes(&gpu.multiprocessor, &gpu.block, &gpu.reserved);
    if (arguments.left != nullptr)
      launched.slots = static_cast<std::int32_t>(phase2_blocks_on(gpu, arguments.tasks).slots);
    if (launched.slots == 0)
      launched.left = nullptr;
    const std::size_t bytes = shared_bytes(unrolled, arguments.tasks) + launched.slots * kSlotBytes;
    std::int64_t blocks = 0;
    if (status == 0)
      status = resident_blocks(kernel, kThreads, bytes, &blocks);
    if (status == 0)
      status =
          launch(kernel, std::min(blocks, arguments.item_count), kThreads, bytes, stream, launched);
    return status;
  });
}

} // namespace cs_kernels::cuda
