// Used by all items of Phase 2: a block's shared memory, and the tensor that the block works on.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block.h"
#include "cs_kernels/combine.h"
#include "segment.h"

namespace cs_kernels::cuda {

// The first part of a block's shared memory.
struct alignas(16) Shared {
  double sums[kThreads];    // workspace
  double totals[kMaxTasks]; // of strengths
  std::int32_t drawn;
  std::int32_t last;
  std::int32_t groups[kTeams];
};

// The second part has the products of the teams' segments: per lane, [tasks, kDotsWidth], then per
// team, [tasks, kTeams]. Both arrays have at least two rows.
constexpr int kDotsWidth = kThreads + kThreads / kTeam; // puts teams in different banks
CS_HOST_DEVICE_INLINE constexpr int dots_rows(int tasks) { return tasks < 2 ? 2 : tasks; }
CS_DEVICE double* dots_of_lanes() {
  return reinterpret_cast<double*>(shared_memory() + sizeof(Shared));
}
CS_DEVICE double* dots_of_teams(int tasks) {
  const int offset = dots_rows(tasks) * kDotsWidth;
  return dots_of_lanes() + offset;
}
CS_HOST_DEVICE_INLINE constexpr int shared_bytes(int tasks) {
  constexpr int kRow = (kDotsWidth + kTeams) * sizeof(double);
  return static_cast<int>(sizeof(Shared)) + dots_rows(tasks) * kRow;
}

CS_DEVICE std::uint32_t lane_of_team() {
  return static_cast<std::uint32_t>(thread_index()) % kTeam;
}

// The tensor that a block works on.
template <class T> struct Work {
  const Phase2Launch& launch;
  const PlannedTensor& tensor;
  const std::int64_t* call; // the tensor's row of the address table
  bool aligned;

  CS_DEVICE Work(const Phase2Launch& arguments, std::int32_t number)
      : launch(arguments), tensor(arguments.tensors[number]),
        call(arguments.table + static_cast<std::int64_t>(number) * (kGradients + arguments.tasks)),
        aligned(load(call + kAligned) != 0) {}

  CS_DEVICE T* update() const { return pointer<T>(load(call + kUpdate)); }
  CS_DEVICE const T* gradient(int task) const {
    return pointer<const T>(load(call + kGradients + task));
  }
  CS_DEVICE std::int32_t* counters() const {
    return launch.counters + tensor.layer * kLayerCounters;
  }
  // The tiles of SUM items [first, last).
  CS_DEVICE Range tiles(std::int64_t first, std::int64_t last) const {
    const std::int64_t all = (tensor.size + kTeams - 1) / kTeams;
    const std::int64_t end = last * tensor.tiles;
    return {first * tensor.tiles, end < all ? end : all};
  }
};

// The segment of a thread's team in a tile, and the task of the segment's channel group, or -1. The
// priority is not read through the read-only path, because the same launch may have written it.
template <class T> struct TeamSegment : Segment<T> {
  int group;

  CS_DEVICE TeamSegment(const Work<T>& work, std::int64_t tile)
      : TeamSegment(work, static_cast<std::uint32_t>(tile) * kTeams + thread_index() / kTeam,
                    static_cast<std::uint32_t>(work.tensor.row_segments)) {}

private:
  CS_DEVICE TeamSegment(const Work<T>& work, std::uint32_t number, std::uint32_t of_row)
      : TeamSegment(work, number, number / of_row, number % of_row * work.tensor.segment) {}

  CS_DEVICE TeamSegment(const Work<T>& work, std::uint32_t number, std::uint32_t row,
                        std::int64_t begin)
      : Segment<T>(work.tensor, work.aligned, row, begin, elements(work.tensor, number, begin)),
        group(-1) {
    if (work.tensor.layer < 0 || this->length == 0)
      return;
    const std::int64_t task = pointer<const std::int64_t>(load(work.call + kPriority))[row];
    if (task >= 0 && task < work.launch.tasks)
      group = static_cast<int>(task);
  }

  CS_DEVICE static std::uint32_t elements(const PlannedTensor& tensor, std::uint32_t number,
                                          std::int64_t begin) {
    const std::int64_t left = tensor.length - begin;
    const std::int64_t most = left < tensor.segment ? left : tensor.segment;
    return number >= tensor.size ? 0 : static_cast<std::uint32_t>(most);
  }
};

// Calls visit(pieces) for a lane's pieces of its team's segment.
template <class T, class Visit>
CS_DEVICE void for_each_team_piece(const TeamSegment<T>& segment, Visit visit) {
  for_each_piece<kPieces>(static_cast<const Segment<T>&>(segment), lane_of_team(),
                          std::integral_constant<std::uint32_t, kTeam>{}, visit);
}

} // namespace cs_kernels::cuda
