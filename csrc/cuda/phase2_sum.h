// The SUM items of Phase 2.
#pragma once

#include "phase2_work.h"

namespace cs_kernels::cuda {

// The plain sum of a team's segment, and the gradients' products with the reference gradient. A
// thread reads several vectors of the reference gradient, then the same vectors of each other
// gradient in turn.
template <class T> struct Sum {
  const Work<T>& work;
  const TeamSegment<T> segment;
  const T* first; // the gradient at which the sum starts; null if there is none
  int first_task; // the task of `first`
  int group;      // the channel group if `first` is its reference gradient, else -1: no products
  bool began = false; // whether products have been written, so that more are added to them

  CS_DEVICE Sum(const Work<T>& of, std::int64_t tile)
      : work(of), segment(of, tile), first_task(segment.group < 0 ? 0 : segment.group),
        group(segment.group) {
    first = work.gradient(first_task);
    if (first != nullptr)
      return;
    group = -1;
    for (int task = 0; task < work.launch.tasks && first == nullptr; ++task) {
      first_task = task;
      first = work.gradient(task);
    }
  }

  CS_DEVICE void add_dot(int task, Wide<T> dot) const {
    const int offset = task * kDotsWidth + thread_index() + thread_index() / kTeam;
    double& sum = dots_of_lanes()[offset];
    sum = began ? sum + dot : dot;
  }

  template <int kSize, int kNumber> CS_DEVICE void add(const Pieces<T, kSize, kNumber>& pieces) {
    const std::uint64_t evict = policy_to_evict(); // PROJECT items read only `first` again
    Vector<T, kSize> vectors[kNumber];
    Wide<T> references[kNumber][kSize];
    Wide<T> totals[kNumber][kSize]; // start as the reference gradient
    Wide<T> dot = 0;
    read(pieces, first, vectors);
    widen_all(vectors, references);
    widen_all(vectors, totals);
    CS_UNROLL(kNumber)
    for (int n = 0; n < kNumber; ++n) {
      CS_UNROLL(kSize)
      for (int e = 0; e < kSize; ++e)
        dot += references[n][e] * references[n][e];
    }
    add_dot(first_task, dot);
    int other = 1; // counts the other tasks; for one task, runs once, without a gradient
    CS_UNROLL(1)
    do {
      const int task = other > first_task ? other : other - 1;
      const T* gradient = other < work.launch.tasks ? work.gradient(task) : nullptr;
      dot = 0;
      if (gradient != nullptr) {
        read(pieces, gradient, vectors, evict);
        CS_UNROLL(kNumber)
        for (int n = 0; n < kNumber; ++n) {
          Wide<T> g[kSize];
          widen(vectors[n], g);
          CS_UNROLL(kSize)
          for (int e = 0; e < kSize; ++e) {
            totals[n][e] += g[e];
            dot += references[n][e] * g[e];
          }
        }
      }
      add_dot(task, dot);
    } while (++other < work.launch.tasks);
    began = true;
    narrow_all<T>(totals, vectors);
    write(pieces, work.update(), vectors);
  }

  // If there is no gradient, the update is zero.
  template <int kSize, int kNumber>
  CS_DEVICE void clear(const Pieces<T, kSize, kNumber>& pieces) const {
    const Vector<T, kSize> zeros[kNumber] = {};
    write(pieces, work.update(), zeros);
  }

  CS_DEVICE void run() {
    if (first != nullptr)
      for_each_team_piece(segment, [&](const auto& pieces) { add(pieces); });
    else
      for_each_team_piece(segment, [&](const auto& pieces) { clear(pieces); });
    if (!began)
      for (int task = 0; task < work.launch.tasks; ++task)
        add_dot(task, 0);
  }
};

// Computes a tile's products [tasks, tasks]: d_ij over the tile's segments of channel group i. An
// item's first tile writes them; the other tiles add to them. group: the channel group of the
// thread's team.
CS_DEVICE void add_products(Shared& shared, int tasks, int group, bool first, double* products) {
  const double* of_lanes = dots_of_lanes();
  double* of_teams = dots_of_teams(tasks);
  synchronize_block();
  if (lane_of_team() == 0)
    shared.groups[thread_index() / kTeam] = group;
  for (int n = thread_index(); n < tasks * kTeams; n += kThreads) {
    const int of_team = n / kTeams * kDotsWidth + n % kTeams * (kTeam + 1);
    double sum = of_lanes[of_team];
    for (int lane = 1; lane < kTeam; ++lane)
      sum += of_lanes[of_team + lane];
    of_teams[n] = sum;
  }
  synchronize_block();
  for (int pair = thread_index(); pair < tasks * tasks; pair += kThreads) {
    const int i = pair / tasks;
    const int of_j = (pair - i * tasks) * kTeams;
    double sum = first ? 0 : products[pair];
    CS_UNROLL(kTeams)
    for (int team = 0; team < kTeams; ++team)
      if (shared.groups[team] == i)
        sum += of_teams[of_j + team];
    products[pair] = sum;
  }
}

// Computes a SUM item, in tiles with one segment per team.
template <class T>
CS_DEVICE void sum_tiles(const Work<T>& work, std::int64_t item, Shared& shared) {
  const PlannedTensor& tensor = work.tensor;
  const int tasks = work.launch.tasks;
  double* products = work.launch.item_products + (tensor.first_sum + item) * tasks * tasks;
  const Range tiles = work.tiles(item, item + 1);
  for (std::int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
    Sum<T> sum(work, tile);
    sum.run();
    if (tensor.layer >= 0)
      add_products(shared, tasks, sum.group, tile == tiles.begin, products);
  }
}

} // namespace cs_kernels::cuda
