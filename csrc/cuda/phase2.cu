#include "cs_kernels/cuda/phase2.h"

#include <algorithm>

#include "block.h"
#include "cs_kernels/combine.h"
#include "strength.h"
#include "types.h"

namespace cs_kernels::cuda {
namespace {

// The first part of a block's shared memory.
struct alignas(16) Shared {
  double sums[kWarps];
  double numbers[kMaxTasks]; // sums of strengths, or the coefficients a_i
  std::int32_t drawn;
  std::int32_t last;
};

// The rest: the products of each thread [K * K, kThreads], or those of the general kernel.
CS_DEVICE double* shared_products() {
  return reinterpret_cast<double*>(shared_memory() + sizeof(Shared));
}

// The threads that share a task's products in the general kernel: each has a part of the columns.
CS_HOST_DEVICE_INLINE constexpr int general_parts(int tasks) {
  int parts = 1;
  while (parts < kGeneralColumns / 4 && 2 * parts * tasks <= kThreads &&
         2 * parts * tasks * tasks <= kGeneralProducts)
    parts *= 2;
  return parts;
}

// kTasks is 0 for the general kernel.
constexpr std::size_t shared_bytes(int unrolled, int tasks) {
  const int squared = tasks * tasks;
  const int numbers = unrolled > 0 ? squared * kThreads
                                   : general_parts(tasks) * squared +
                                         tasks * (kGeneralColumns + 1) + kGeneralColumns;
  return sizeof(Shared) + static_cast<std::size_t>(numbers) * sizeof(double);
}

// The tensor that a block works on. Hot fields are copied to registers: the compiler must assume
// that stores alias the tables.
template <class T> struct Work {
  const Phase2Launch& launch;
  const PlannedTensor& tensor;
  const std::int64_t* call; // its row of the table of addresses
  T* update;
  const std::int64_t* priority;
  std::int64_t size;
  std::int64_t inner;
  bool aligned;
  bool contiguous_rows;

  CS_DEVICE Work(const Phase2Launch& arguments, std::int32_t number)
      : launch(arguments), tensor(arguments.tensors[number]),
        call(arguments.table + static_cast<std::int64_t>(number) * (kGradients + arguments.tasks)),
        update(pointer<T>(load(call + kUpdate))),
        priority(tensor.layer >= 0 ? pointer<const std::int64_t>(load(call + kPriority)) : nullptr),
        size(tensor.size), inner(tensor.inner), aligned(load(call + kAligned) != 0),
        contiguous_rows(tensor.length == tensor.inner) {}

  CS_DEVICE const T* gradient(std::int64_t task) const {
    return pointer<const T>(load(call + kGradients + task));
  }

  // The task whose channel group the elements of a run belong to, or -1; a run is `inner`
  // contiguous elements. Priorities may have been written in the same launch.
  CS_DEVICE std::int64_t task_of(std::int64_t run) const {
    if (priority == nullptr)
      return -1;
    std::int64_t row = run;
    if (!contiguous_rows) {
      const std::int64_t channels = tensor.channels;
      const std::int64_t group = quotient(run, channels * quotient(tensor.length, inner));
      row = group * channels + run - quotient(run, channels) * channels;
    }
    const std::int64_t task = priority[row];
    return task >= 0 && task < launch.tasks ? task : -1;
  }
  CS_DEVICE std::int64_t run_of(std::int64_t element) const {
    return priority == nullptr ? 0 : quotient(element, inner);
  }
  // Whether the 16 bytes from an element on can be read by one access.
  CS_DEVICE bool readable(std::int64_t element) const {
    return aligned && element + Vector<T>::kSize <= size;
  }
  // Whether they belong to one row.
  CS_DEVICE bool in_run(std::int64_t element, std::int64_t run) const {
    return priority == nullptr || element + Vector<T>::kSize <= (run + 1) * inner;
  }
};

template <class T, int kTasks> constexpr std::int64_t tile_elements() {
  return std::int64_t{kTasks > 0 ? kTileVectors * kThreads * Vector<T>::kSize
                                 : kGeneralRounds * kGeneralColumns};
}

// A SUM item of up to 8 tasks: writes the plain sum, and products[i, j] = <G_i, G_j> over channel
// group i. Each thread has its products in shared memory: the group changes from row to row, and
// registers cannot be indexed.
template <class T, int kTasks> struct Sum {
  static constexpr int kVector = Vector<T>::kSize;

  const Work<T>& work;
  const T* gradients[kTasks];
  double* kept; // [K * K, kThreads], from this thread's column on
  std::uint64_t evict;

  CS_DEVICE explicit Sum(const Work<T>& of)
      : work(of), kept(shared_products() + thread_index()), evict(policy_to_evict()) {
    CS_UNROLL(kTasks)
    for (int j = 0; j < kTasks; ++j)
      gradients[j] = work.gradient(j);
  }

  CS_DEVICE double& kept_at(int slot) {
    const int offset = slot * kThreads;
    return kept[offset];
  }

  // One 16-byte load per gradient. The channel group is of the first element.
  struct Read {
    bool whole;
    int group;
    Words words[kTasks];
  };

  CS_DEVICE int group_at(std::int64_t element, std::int64_t end) const {
    return element < end ? static_cast<int>(work.task_of(work.run_of(element))) : -1;
  }

  CS_DEVICE Read read(std::int64_t element, std::int64_t end, int group) const {
    Read result;
    result.group = group;
    result.whole = element < end && work.readable(element);
    CS_UNROLL(kTasks)
    for (int j = 0; j < kTasks; ++j)
      result.words[j] = result.whole && gradients[j] != nullptr
                            ? load(words_at(gradients[j] + element), j == group, evict)
                            : Words{};
    return result;
  }

  CS_DEVICE void vector(std::int64_t element, const Words (&words)[kTasks], int group) {
    if (!work.in_run(element, work.run_of(element)))
      return elements(element, element + kVector);
    Wide<T> total[kVector] = {};
    CS_UNROLL(kTasks)
    for (int j = 0; j < kTasks; ++j) {
      const auto g = as_vector<T>(words[j]);
      for (int e = 0; e < kVector; ++e)
        total[e] += widened(g.x[e]);
    }
    store_narrowed(work.update + element, total);
    if (group < 0)
      return;
    // Masks, as the compiler may index an array of candidates in local memory.
    Words reference_words{};
    CS_UNROLL(kTasks)
    for (int j = 0; j < kTasks; ++j) {
      const std::uint32_t mask = j == group ? ~0u : 0u;
      for (int word = 0; word < 4; ++word)
        reference_words.x[word] |= words[j].x[word] & mask;
    }
    const auto reference = as_vector<T>(reference_words);
    CS_UNROLL(kTasks)
    for (int j = 0; j < kTasks; ++j) {
      const auto g = as_vector<T>(words[j]);
      Wide<T> dot = 0;
      for (int e = 0; e < kVector; ++e)
        dot += widened(reference.x[e]) * widened(g.x[e]);
      kept_at(group * kTasks + j) += dot;
    }
  }

  // One element at a time: at the ends of rows, and where memory is not aligned.
  CS_DEVICE void elements(std::int64_t element, std::int64_t end) {
    CS_UNROLL(1)
    for (; element < end; ++element) {
      const std::int64_t group = work.task_of(work.run_of(element));
      Wide<T> g[kTasks];
      Wide<T> total = 0;
      Wide<T> reference = 0;
      CS_UNROLL(kTasks)
      for (int j = 0; j < kTasks; ++j) {
        g[j] = gradients[j] != nullptr ? widened(load(gradients[j] + element)) : 0;
        total += g[j];
        reference = j == group ? g[j] : reference;
      }
      work.update[element] = narrowed<T>(total);
      if (group < 0)
        continue;
      CS_UNROLL(kTasks)
      for (int j = 0; j < kTasks; ++j)
        kept_at(static_cast<int>(group) * kTasks + j) += reference * g[j];
    }
  }

  CS_DEVICE void run(std::int32_t index) {
    constexpr auto kTile = tile_elements<T, kTasks>();
    constexpr int kStep = kThreads * kVector;
    const PlannedTensor& tensor = work.tensor;
    for (int slot = 0; slot < kTasks * kTasks; ++slot)
      kept_at(slot) = 0;
    const auto [begin, end] = item_range(index, tensor.tiles * kTile, tensor.size);
    const int offset = thread_index() * kVector;
    // The group decides what the cache keeps, so its load is ahead of the gradients'.
    constexpr int kAhead = prefetches(kTasks) ? kStep : 0;
    Read next;
    int group = group_at(begin + offset, end);
    if constexpr (prefetches(kTasks)) {
      next = read(begin + offset, end, group);
      group = group_at(begin + offset + kStep, end);
    }
    for (std::int64_t element = begin + offset; element < end; element += kStep) {
      if constexpr (!prefetches(kTasks))
        next = read(element, end, group);
      const Read now = next;
      if constexpr (prefetches(kTasks))
        next = read(element + kStep, end, group);
      group = group_at(element + kStep + kAhead, end);
      if (now.whole)
        vector(element, now.words, now.group);
      else
        elements(element, element + kVector < end ? element + kVector : end);
    }
    if (tensor.layer < 0)
      return;
    synchronize_block();
    double* products = work.launch.item_products + tensor.first_sum * kTasks * kTasks;
    const int lane = thread_index() % kWarp;
    for (int slot = thread_index() / kWarp; slot < kTasks * kTasks; slot += kWarps) {
      const int first = slot * kThreads + lane;
      double sum = 0;
      for (int n = first; n < first + kThreads; n += kWarp)
        sum += shared_products()[n];
      sum = warp_sum(sum, kWarp);
      if (lane == 0)
        products[slot * tensor.sum_items + index] = sum;
    }
  }
};

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

// Adds up d_ij of the layer over its SUM items, in their order, and derives a_i.
template <int kTasks>
CS_DEVICE void find_coefficients(const Phase2Launch& launch, const PlannedTensor& tensor) {
  const int tasks = launch.tasks;
  const int slots = tasks * tasks;
  const double* products = launch.item_products + tensor.first_sum * slots;
  double* out = launch.products + tensor.layer * slots;
  double* d = shared_products();
  // [slot, item], with a warp for each slot; many tasks: [item, slot], with a thread for each.
  constexpr int kTeam = kTasks > 0 ? kWarp : 1;
  const int lane = thread_index() % kTeam;
  for (int slot = thread_index() / kTeam; slot < slots; slot += kThreads / kTeam) {
    double sum = 0;
    for (std::int64_t item = lane; item < tensor.sum_items; item += kTeam)
      sum += products[kTasks > 0 ? slot * tensor.sum_items + item : item * slots + slot];
    sum = warp_sum(sum, kTeam);
    if (lane == 0)
      d[slot] = out[slot] = sum;
  }
  synchronize_block();
  for (int i = thread_index(); i < tasks; i += kThreads) {
    const int first = i * tasks;
    launch.coefficients[tensor.layer * tasks + i] = projection_coefficient(d + first, tasks, i);
  }
}

// A PROJECT item: update += a_i * G_i. In float64: a_i may be beyond float32's range where a_i *
// G_i is not.
template <class T>
CS_DEVICE void project(const Work<T>& work, std::int32_t index, std::int64_t tile,
                       double* coefficients, std::int32_t* any) {
  constexpr int kVector = Vector<T>::kSize;
  const PlannedTensor& tensor = work.tensor;
  const int tasks = work.launch.tasks;
  for (int i = thread_index(); i < tasks; i += kThreads)
    coefficients[i] = work.launch.coefficients[tensor.layer * tasks + i];
  synchronize_block();
  if (thread_index() == 0) {
    *any = 0;
    for (int i = 0; i < tasks; ++i)
      *any |= coefficients[i] != 0;
  }
  synchronize_block();
  if (*any == 0)
    return;
  const auto [begin, end] = item_range(index, tensor.tiles * tile, tensor.size);
  constexpr int kStep = kThreads * kVector;
  const int offset = thread_index() * kVector;
  for (std::int64_t element = begin + offset; element < end; element += kStep) {
    const std::int64_t run = work.run_of(element);
    if (work.readable(element) && work.in_run(element, run)) {
      const std::int64_t group = work.task_of(run);
      const double coefficient = group < 0 ? 0 : coefficients[group];
      const T* gradient = coefficient != 0 ? work.gradient(group) : nullptr;
      if (gradient == nullptr)
        continue;
      const auto reference = as_vector<T>(load(words_at(gradient + element)));
      auto total = as_vector<T>(*words_at(work.update + element));
      for (int e = 0; e < kVector; ++e)
        total.x[e] = narrowed<T>(widened(total.x[e]) + coefficient * widened(reference.x[e]));
      *words_at(work.update + element) = as_words(total);
      continue;
    }
    const std::int64_t stop = element + kVector < end ? element + kVector : end;
    CS_UNROLL(1)
    for (std::int64_t e = element; e < stop; ++e) {
      const std::int64_t group = work.task_of(work.run_of(e));
      const double coefficient = group < 0 ? 0 : coefficients[group];
      const T* gradient = coefficient != 0 ? work.gradient(group) : nullptr;
      if (gradient != nullptr)
        work.update[e] =
            narrowed<T>(widened(work.update[e]) + coefficient * widened(load(gradient + e)));
    }
  }
}

// The last ENERGY item of a layer derives its priorities.
template <class T>
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
  find_priorities({energy, of_layer(launch.gamma), of_layer(launch.variance),
                   launch.epsilon + tensor.layer * launch.tasks, tensor.rows, launch.tasks, true,
                   nullptr},
                  shared.numbers, shared.sums, pointer<std::int64_t>(load(call + kPriority)));
  publish(counters + kPriorityReady);
}

// The last SUM item of a layer derives its a_i.
template <class T, int kTasks>
CS_DEVICE void sum_item(const Phase2Launch& launch, const Item& item, Shared& shared) {
  const PlannedTensor& tensor = launch.tensors[item.tensor];
  std::int32_t* counters = launch.counters + tensor.layer * kLayerCounters;
  if (tensor.layer >= 0 && tensor.energy_items > 0)
    wait(counters + kPriorityReady);
  const Work<T> work(launch, item.tensor);
  Sum<T, kTasks>(work).run(item.index);
  if (tensor.layer >= 0 && arrive(counters + kSumsDone, tensor.sum_items, &shared.last)) {
    find_coefficients<kTasks>(launch, tensor);
    publish(counters + kCoefficientsReady);
  }
}

template <class T, int kTasks>
CS_DEVICE void project_item(const Phase2Launch& launch, const Item& item, Shared& shared) {
  const PlannedTensor& tensor = launch.tensors[item.tensor];
  wait(launch.counters + tensor.layer * kLayerCounters + kCoefficientsReady);
  project(Work<T>(launch, item.tensor), item.index, tile_elements<T, kTasks>(), shared.numbers,
          &shared.last);
}

// A block takes items until none is left. It draws the next ticket during the current item; an item
// waits for earlier tickets only, which running blocks hold.
template <class T, int kTasks>
CS_KERNEL(kThreads, phase2_blocks(kTasks))
phase2_kernel(Phase2Launch launch) {
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
      sum_item<T, kTasks>(launch, item, shared);
    else
      project_item<T, kTasks>(launch, item, shared);
    synchronize_block();
    if (thread_index() == 0)
      shared.drawn = next;
    synchronize_block();
  }
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
                        phase2_lag(is_unrolled(tasks) ? tasks : 0)};
  });
}

Status phase2(const Phase2Launch& arguments, Stream stream) {
  return with_kernel(arguments.type, arguments.tasks, [&](auto like, auto unrolled) {
    const auto kernel = phase2_kernel<decltype(like), unrolled>;
    const std::size_t bytes = shared_bytes(unrolled, arguments.tasks);
    std::int64_t blocks = 0;
    const Status status = resident_blocks(kernel, kThreads, bytes, &blocks);
    return status != 0 ? status
                       : launch(kernel, std::min(blocks, arguments.item_count), kThreads, bytes,
                                stream, arguments);
  });
}

} // namespace cs_kernels::cuda
