// The SUM items of Phase 2.
#pragma once

#include "phase2_work.h"

namespace cs_kernels::cuda {

// A SUM item of up to 8 tasks: the plain sum, to memory or to a slot, and products[i, j] =
// <G_i, G_j> over channel group i. Products are in shared memory: the group changes from row to
// row, and registers cannot be indexed.
template <class T, int kTasks> struct Sum {
  static constexpr int kVector = Vector<T>::kSize;
  static constexpr auto kTile = tile_elements<T, kTasks>();
  static constexpr int kLanes = product_lanes(kTasks);
  static constexpr int kShare = product_share(kTasks);
  static constexpr int kApart = Work<T>::kApart;
  static constexpr int kNoSlot = -1;

  const Work<T>& work;
  const T* gradients[kTasks];
  double* kept; // [K * kShare, kThreads], from this thread's column on
  std::uint64_t evict;

  CS_DEVICE explicit Sum(const Work<T>& of)
      : work(of), kept(shared_products() + thread_index()), evict(policy_to_evict()) {
    CS_UNROLL(kTasks)
    for (int j = 0; j < kTasks; ++j)
      gradients[j] = work.gradient(j);
  }

  CS_DEVICE double& kept_at(int number) {
    const int offset = number * kThreads;
    return kept[offset];
  }

  // Adds dot(j), this thread's part of <G_group, G_j>, to the products; -1: nothing. Adjacent lanes
  // keep the products together: each adds up its share of the j for all of them. All threads of
  // a warp must call it.
  template <class Dot> CS_DEVICE void add(int group, const Dot& dot) {
    bool pending = group >= 0;
    // Once where the lanes have the same group, as within a row.
    while (kLanes > 1 ? any_of_warp(pending) : pending) {
      int greatest = pending ? group : -1;
      for (int mask = kLanes / 2; mask > 0; mask /= 2) {
        const int other = exchanged(greatest, mask);
        greatest = other > greatest ? other : greatest;
      }
      const bool counts = pending && group == greatest;
      Wide<T> sums[kLanes * kShare] = {};
      CS_UNROLL(kTasks)
      for (int j = 0; j < kTasks; ++j)
        sums[j] = counts ? dot(j) : 0;
      scatter_sum<kLanes, kShare>(sums);
      if (greatest >= 0)
        for (int n = 0; n < kShare; ++n)
          kept_at(greatest * kShare + n) += sums[n];
      pending = pending && !counts;
    }
  }

  // A vector of each gradient, and their channel group.
  struct Read {
    int group;
    Words words[kTasks];
  };

  // keep: whether a PROJECT item will read the reference gradient again.
  CS_DEVICE Read read(std::int64_t element, int group, bool keep) const {
    Read result;
    result.group = group;
    const bool whole = group != kApart;
    if (work.aligned) {
      CS_UNROLL(kTasks)
      for (int j = 0; j < kTasks; ++j)
        result.words[j] = whole && gradients[j] != nullptr
                              ? load(words_at(gradients[j] + element), keep && j == group, evict)
                              : Words{};
    } else {
      CS_UNROLL(kTasks)
      for (int j = 0; j < kTasks; ++j) {
        Vector<T> vector{};
        for (int e = 0; e < kVector; ++e)
          if (whole && gradients[j] != nullptr)
            vector.x[e] = load(gradients[j] + element + e);
        result.words[j] = as_words(vector);
      }
    }
    return result;
  }

  // The vectors of a warp. offset: of this thread's vector in the tile.
  CS_DEVICE void vector(std::int64_t element, int offset, int slot, const Words (&words)[kTasks],
                        int group) {
    // Masks, as the compiler may index an array of candidates in local memory.
    Words reference_words{};
    CS_UNROLL(kTasks)
    for (int j = 0; j < kTasks; ++j) {
      const std::uint32_t mask = j == group ? ~0u : 0u;
      for (int word = 0; word < 4; ++word)
        reference_words.x[word] |= words[j].x[word] & mask;
    }
    if (group != kApart) {
      Wide<T> total[kVector] = {};
      CS_UNROLL(kTasks)
      for (int j = 0; j < kTasks; ++j) {
        const auto g = as_vector<T>(words[j]);
        for (int e = 0; e < kVector; ++e)
          total[e] += widened(g.x[e]);
      }
      if (slot == kNoSlot) {
        store_narrowed(work.update + element, total, work.aligned);
      } else {
        auto& held = slot_at<T, kTasks>(slot);
        store_narrowed(held.sums + offset, total);
        *words_at(held.references + offset) = reference_words;
      }
    }
    const auto reference = as_vector<T>(reference_words);
    add(group, [&](int j) {
      const auto g = as_vector<T>(words[j]);
      Wide<T> dot = 0;
      for (int e = 0; e < kVector; ++e)
        dot += widened(reference.x[e]) * widened(g.x[e]);
      return dot;
    });
  }

  // The elements of a vector, one at a time, as far as they are before `end`: at the ends of rows.
  // offset: of the first one in the tile.
  CS_DEVICE void elements(std::int64_t element, int offset, std::int64_t end, int slot) {
    Wide<T> dots[kTasks] = {};
    std::int64_t group = -1;
    CS_UNROLL(1)
    for (int n = 0; n <= kVector; ++n, ++element, ++offset) {
      const bool inside = n < kVector && element < end;
      const std::int64_t next = inside ? work.task_of(work.run_of(element)) : -1;
      if (any_of_warp(next != group)) {
        add(static_cast<int>(group), [&](int j) { return dots[j]; });
        CS_UNROLL(kTasks)
        for (int j = 0; j < kTasks; ++j)
          dots[j] = 0;
        group = next;
      }
      if (!inside)
        continue;
      Wide<T> g[kTasks];
      Wide<T> total = 0;
      Wide<T> reference = 0;
      CS_UNROLL(kTasks)
      for (int j = 0; j < kTasks; ++j) {
        g[j] = gradients[j] != nullptr ? widened(load(gradients[j] + element)) : 0;
        total += g[j];
        reference = j == group ? g[j] : reference;
      }
      if (slot == kNoSlot) {
        work.update[element] = narrowed<T>(total);
      } else {
        slot_at<T, kTasks>(slot).sums[offset] = narrowed<T>(total);
        slot_at<T, kTasks>(slot).references[offset] = narrowed<T>(reference);
      }
      CS_UNROLL(kTasks)
      for (int j = 0; j < kTasks; ++j)
        dots[j] += reference * g[j];
    }
  }

  // Writes the first tiles, `left`, and keeps the others in the slots of the ring from `slot` on.
  CS_DEVICE void run(std::int32_t index, int left, int slot, int slots) {
    const PlannedTensor& tensor = work.tensor;
    for (int number = 0; number < kTasks * kShare; ++number)
      kept_at(number) = 0;
    const auto [begin, end] = item_range(index, tensor.tiles * kTile, tensor.size);
    const int offset = thread_index() * kVector;
    // The group decides what the cache keeps, so its load is ahead of the gradients'.
    constexpr auto kAhead = prefetches(kTasks) ? kTile : 0;
    Read next;
    int group = work.group_at(begin + offset, end);
    if constexpr (prefetches(kTasks)) {
      next = read(begin + offset, group, left > 0);
      group = work.group_at(begin + offset + kTile, end);
    }
    for (std::int64_t start = begin; start < end; start += kTile, --left) {
      const std::int64_t element = start + offset;
      if constexpr (!prefetches(kTasks))
        next = read(element, group, left > 0);
      const Read now = next;
      if constexpr (prefetches(kTasks))
        next = read(element + kTile, group, left > 1);
      group = work.group_at(element + kTile + kAhead, end);
      const int to = left > 0 ? kNoSlot : slot;
      if (to != kNoSlot)
        slot_at<T, kTasks>(to).groups[thread_index()] = static_cast<std::int8_t>(now.group);
      vector(element, offset, to, now.words, now.group);
      const bool apart = now.group == kApart && element < end;
      if (any_of_warp(apart))
        elements(element, offset, apart ? end : element, to);
      if (left <= 0)
        slot = wrapped(slot + 1, slots);
    }
    if (tensor.layer < 0)
      return;
    synchronize_block();
    double* products = work.launch.item_products + tensor.first_sum * kTasks * kTasks;
    const int lane = thread_index() % kWarp;
    for (int number = thread_index() / kWarp; number < kTasks * kShare; number += kWarps) {
      const int first = number * kThreads + lane;
      double sum = 0;
      for (int n = first; n < first + kThreads; n += kWarp)
        sum += shared_products()[n];
      sum = strided_sum(sum, kLanes);
      const int j = lane * kShare + number % kShare;
      if (lane < kLanes && j < kTasks)
        products[(number / kShare * kTasks + j) * tensor.sum_items + index] = sum;
    }
  }
};

// Sums an item. Its last tiles go to the free slots, its first tiles to memory, for PROJECT.
template <class T, int kTasks>
CS_DEVICE void sum_and_hold(const Work<T>& work, const Phase2Arguments& launch, const Item& item,
                            Shared& shared) {
  constexpr auto kTile = tile_elements<T, kTasks>();
  const PlannedTensor& tensor = work.tensor;
  const auto [begin, end] = item_range(item.index, tensor.tiles * kTile, work.size);
  const int tiles = static_cast<int>((end - begin + kTile - 1) / kTile);
  const int free = tensor.layer >= 0 ? launch.slots - shared.used : 0;
  const int held = free < tiles ? free : tiles;
  const int left = tiles - held;
  const int slot = wrapped(shared.oldest + shared.used, launch.slots);
  Sum<T, kTasks>(work).run(item.index, left, slot, launch.slots);
  if (thread_index() > 0 || tensor.layer < 0 || launch.slots == 0)
    return;
  launch.left[tensor.first_sum + item.index] = left;
  if (held > 0)
    shared.held[slot] = {item.tensor, item.index, left, held};
  shared.used += held;
}

// A SUM item of any number of tasks. A tile of all gradients is in shared memory; a thread computes
// all products with one gradient, over a part of the columns.
template <class T> struct Sum<T, 0> {
  const Work<T>& work;
  const int tasks;
  const int slots; // K * K
  const int parts;
  const int numbers; // parts * K * K
  const int task;    // this thread's
  const int part;
  double* products; // [parts, K, K]
  double* tile;     // [K, kGeneralColumns + 1]: columns in different banks
  double* groups;   // [kGeneralColumns], a task or -1

  CS_DEVICE explicit Sum(const Work<T>& of)
      : work(of), tasks(of.launch.tasks), slots(tasks * tasks), parts(general_parts(tasks)),
        numbers(parts * slots), task(thread_index() % tasks), part(thread_index() / tasks),
        products(shared_products()), tile(products + numbers), groups(column(tasks)) {}

  // The elements of a task.
  CS_DEVICE double* column(int j) const {
    const int first = j * (kGeneralColumns + 1);
    return tile + first;
  }

  CS_DEVICE void read(std::int64_t start, std::int64_t end) {
    CS_UNROLL(4)
    for (int i = thread_index(); i < tasks * kGeneralColumns; i += kThreads) {
      const int j = i / kGeneralColumns;
      const int e = i % kGeneralColumns;
      const T* gradient = work.gradient(j);
      const bool inside = gradient != nullptr && start + e < end;
      column(j)[e] = inside ? widened(load(gradient + start + e)) : 0;
    }
    const int e = thread_index();
    if (e < kGeneralColumns)
      groups[e] = start + e < end ? work.task_of(work.run_of(start + e)) : -1;
  }

  CS_DEVICE void write(std::int64_t start, std::int64_t end) {
    const int e = thread_index() - (kThreads - kGeneralColumns);
    if (e < 0 || start + e >= end)
      return;
    Wide<T> total = 0;
    for (int j = 0; j < tasks; ++j)
      total += static_cast<Wide<T>>(column(j)[e]);
    work.update[start + e] = narrowed<T>(total);
  }

  CS_DEVICE void multiply() {
    if (part >= parts)
      return;
    const double* g = column(task);
    const int first = part * slots + task;
    double* own = products + first;
    const int columns = kGeneralColumns / parts;
    int group = -1;
    double sum = 0;
    const auto add = [&] {
      const int row = group * tasks;
      if (group >= 0)
        own[row] += sum;
    };
    for (int e = part * columns; e < (part + 1) * columns; ++e) {
      const int next = static_cast<int>(groups[e]);
      if (next != group) {
        add();
        group = next;
        sum = 0;
      }
      if (group >= 0)
        sum += column(group)[e] * g[e];
    }
    add();
  }

  CS_DEVICE void run(std::int32_t index) {
    constexpr auto kTile = tile_elements<T, 0>();
    const PlannedTensor& tensor = work.tensor;
    for (int slot = thread_index(); slot < numbers; slot += kThreads)
      products[slot] = 0;
    const auto [begin, end] = item_range(index, tensor.tiles * kTile, tensor.size);
    for (std::int64_t start = begin; start < end; start += kGeneralColumns) {
      synchronize_block();
      read(start, end);
      synchronize_block();
      write(start, end);
      if (tensor.layer >= 0)
        multiply();
    }
    synchronize_block();
    if (tensor.layer < 0)
      return;
    double* out = work.launch.item_products + (tensor.first_sum + index) * slots;
    for (int slot = thread_index(); slot < slots; slot += kThreads) {
      double sum = 0;
      for (int n = 0; n < parts; ++n)
        sum += products[n * slots + slot];
      out[slot] = sum;
    }
  }
};

} // namespace cs_kernels::cuda
