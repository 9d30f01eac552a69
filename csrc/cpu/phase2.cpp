// Phase 2 on the CPU. Tensors are cut into chunks of rows, which threads claim in order. The rows
// of a unit (a channel group or a layer) are summed, then revisited if there is a conflict.
#include "cs_kernels/phase2.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <deque>
#include <fstream>
#include <numeric>
#include <thread>
#include <vector>

#include "chunks.h"
#include "cs_kernels/equations.h"
#include "parallel.h"
#include "row_kernels.h"
#include "strength.h"

namespace cs_kernels::cpu {
namespace {

// The stages of Phase 2 that a call runs.
enum class Stages { kAll, kProducts, kApply };

// The state of one tensor.
struct Work {
  const Phase2Tensor* tensor = nullptr;
  std::vector<const void*> gradients; // existing ones only
  std::vector<int> reference;         // [tasks]: index into `gradients`, or -1
  std::vector<double> energy;         // [rows]
  std::vector<std::int64_t> order;    // [rows]: rows in visiting order
  std::vector<double> dots;           // [rows, gradients], rows by index into `order`
  std::vector<double> coefficient;    // [tasks]: a_i
  bool past_caches = false;           // whether channel groups are too large for the caches
  std::atomic<std::int64_t> chunks_left{0};

  double* row_dots(std::int64_t index) {
    return dots.data() + index * static_cast<std::int64_t>(gradients.size());
  }
  int reference_of_row(std::int64_t row) const {
    const std::int64_t task = tensor->priority[row];
    const bool valid = task >= 0 && task < static_cast<std::int64_t>(reference.size());
    return valid ? reference[static_cast<std::size_t>(task)] : -1;
  }
};

// Rows that are revisited together: a channel group, or all rows of a layer.
struct Unit {
  Work* work = nullptr;
  RowRange range{}; // indices into work->order
  std::atomic<std::int64_t> chunks_left{0};
  std::atomic<bool> coefficients_known{false};
};

struct Chunk {
  Work* work;
  Unit* unit;     // null for energies, and for plain sums
  RowRange range; // rows for energies, elements for plain sums, else indices into `order`
};

// A thread's buffer for the sums of its chunks, between the two visits to each chunk. It outlives
// the call, because allocating fresh pages would cost as much as the buffer saves.
class Scratch {
public:
  explicit Scratch(std::int64_t chunk_bytes) {
    static thread_local std::vector<char> memory;
    if (chunk_bytes == 0)
      return;
    memory.resize(kScratchBytes);
    for (std::int64_t i = kScratchBytes / chunk_bytes; i-- > 0;)
      free_.push_back(memory.data() + i * chunk_bytes);
  }
  char* take() {
    if (free_.empty())
      return nullptr;
    char* sums = free_.back();
    free_.pop_back();
    return sums;
  }
  void give_back(char* sums) { free_.push_back(sums); }

private:
  std::vector<char*> free_; // the most recently used one is last
};

// A chunk whose rows are summed into `sums`, or into the update if `sums` is null.
struct Summed {
  const Chunk* chunk;
  char* sums;

  // The sums of a row's segment; in `sums`, rows are adjacent.
  char* row(std::int64_t index, std::int64_t offset) const {
    const Phase2Tensor& tensor = *chunk->work->tensor;
    return sums == nullptr
               ? at(tensor.update, tensor.type, offset)
               : at(sums, tensor.type, (index - chunk->range.first) * tensor.layout.inner);
  }
};

// The addresses of a segment in all gradients.
void find_segments(const Work& work, std::int64_t index, std::int64_t outer,
                   std::vector<const void*>& segments) {
  const std::int64_t row = work.order[static_cast<std::size_t>(index)];
  const std::int64_t offset = segment_offset(work.tensor->layout, row, outer);
  for (std::size_t j = 0; j < segments.size(); ++j)
    segments[j] = at(work.gradients[j], work.tensor->type, offset);
}

// Whether lines that are read only once are prefetched without displacing other lines from the
// caches. This is faster on AMD's EPYC, but a third slower on Intel's Xeon.
bool prefetches_once() {
#ifdef CS_X86_64
  static const bool once = __builtin_cpu_is("amd") != 0;
  return once;
#else
  return false;
#endif
}

// Sums a chunk's rows. If `threads` is positive, prefetches the row that this thread will probably
// sum next: the next row of the chunk or, after its last row, the first row of the chunk `threads`
// ahead, because threads claim chunks in turn.
void sum_rows(const Summed& summed, int threads) {
  Work& work = *summed.chunk->work;
  const RowRange& range = summed.chunk->range;
  const Phase2Tensor& tensor = *work.tensor;
  const ChannelLayout& layout = tensor.layout;
  const RowKernels& kernels = row_kernels(tensor.type);
  const int count = static_cast<int>(work.gradients.size());
  const std::vector<double> ones(work.gradients.size(), 1.0);
  std::vector<const void*> segment(work.gradients.size());
  std::vector<const void*> next(work.gradients.size());
  const auto rows = static_cast<std::int64_t>(work.order.size());
  const std::int64_t skipped = (threads - 1) * (range.last - range.first);
  for (std::int64_t outer = 0; outer < layout.outer; ++outer)
    for (std::int64_t index = range.first; index < range.last; ++index) {
      const std::int64_t row = work.order[static_cast<std::size_t>(index)];
      char* sums = summed.row(index, segment_offset(layout, row, outer));
      find_segments(work, index, outer, segment);
      if (threads > 0)
        find_segments(work,
                      std::min(rows, index + 1 < range.last ? index + 2 : index + 2 + skipped) - 1,
                      outer, next);
      const int reference = work.reference_of_row(row);
      if (reference >= 0)
        kernels.sum_and_dots(segment.data(), count, reference, layout.inner,
                             work.past_caches && threads > 0, sums, work.row_dots(index),
                             {threads > 0 ? next.data() : nullptr, prefetches_once()});
      else
        kernels.combine(segment.data(), ones.data(), count, -1, layout.inner, false, sums);
    }
}

// Computes a_i of the unit's channel groups, with d_ij added up in the order of the rows.
void find_coefficients(Unit& unit) {
  Work& work = *unit.work;
  const std::size_t count = work.gradients.size();
  const std::size_t tasks = work.coefficient.size();
  std::vector<double> dots(tasks * count, 0.0);
  std::vector<bool> present(tasks, false);
  for (std::int64_t index = unit.range.first; index < unit.range.last; ++index) {
    const std::int64_t row = work.order[static_cast<std::size_t>(index)];
    if (work.reference_of_row(row) < 0)
      continue;
    const auto task = static_cast<std::size_t>(work.tensor->priority[row]);
    present[task] = true;
    for (std::size_t j = 0; j < count; ++j)
      dots[task * count + j] += work.row_dots(index)[j];
  }
  for (std::size_t task = 0; task < tasks; ++task) {
    if (!present[task])
      continue;
    const double* d = &dots[task * count];
    work.coefficient[task] =
        projection_coefficient(d, static_cast<int>(count), work.reference[task]);
    if (double* products = work.tensor->products)
      for (std::size_t j = 0; j < tasks; ++j)
        if (work.reference[j] >= 0)
          products[task * tasks + j] = d[work.reference[j]];
  }
  unit.coefficients_known.store(true, std::memory_order_release);
}

// Adds a_i * G_i in forward order. The reverse order would begin with the rows read last, which are
// still in cache, but hardware prefetches forward.
void add_references(const Summed& summed) {
  const Work& work = *summed.chunk->work;
  const RowRange& range = summed.chunk->range;
  const Phase2Tensor& tensor = *work.tensor;
  const auto kernel = row_kernels(tensor.type).add_scaled;
  const bool stream = summed.sums != nullptr;
  for (std::int64_t outer = 0; outer < tensor.layout.outer; ++outer)
    for (std::int64_t index = range.first; index < range.last; ++index) {
      const std::int64_t row = work.order[static_cast<std::size_t>(index)];
      const int reference = work.reference_of_row(row);
      const double coefficient =
          reference < 0 ? 0 : work.coefficient[static_cast<std::size_t>(tensor.priority[row])];
      if (coefficient == 0 && !stream)
        continue;
      const std::int64_t offset = segment_offset(tensor.layout, row, outer);
      kernel(
          summed.row(index, offset),
          at(work.gradients[static_cast<std::size_t>(std::max(reference, 0))], tensor.type, offset),
          coefficient, tensor.layout.inner, stream, at(tensor.update, tensor.type, offset));
    }
}

// Revisits the chunks that this thread summed, which are in the core's own caches. A unit's chunks
// are adjacent in `summed`, because they were claimed in order. At a unit whose coefficients are
// unknown, stops or, with `last`, waits.
void visit_again(std::vector<Summed>& summed, Scratch& scratch, bool last) {
  auto done = summed.begin();
  while (done != summed.end()) {
    const Unit* unit = done->chunk->unit;
    if (!unit->coefficients_known.load(std::memory_order_acquire)) {
      if (!last)
        break;
      std::this_thread::yield();
      continue;
    }
    const auto end = std::find_if(
        done, summed.end(), [unit](const Summed& other) { return other.chunk->unit != unit; });
    for (auto it = done; it != end; ++it) {
      add_references(*it);
      if (it->sums != nullptr)
        scratch.give_back(it->sums);
    }
    done = end;
  }
  summed.erase(summed.begin(), done);
}

void sum_elements(const Chunk& chunk, bool stream) {
  const Phase2Tensor& tensor = *chunk.work->tensor;
  const std::int64_t first = chunk.range.first;
  std::vector<const void*> segment;
  segment.reserve(chunk.work->gradients.size());
  for (const void* gradient : chunk.work->gradients)
    segment.push_back(at(gradient, tensor.type, first));
  const std::vector<double> ones(segment.size(), 1.0);
  row_kernels(tensor.type)
      .combine(segment.data(), ones.data(), static_cast<int>(segment.size()), -1,
               chunk.range.last - first, stream, at(tensor.update, tensor.type, first));
}

std::int64_t last_cache_bytes() {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size"); // such as "32768K"
  std::int64_t kilobytes = 0;
  file >> kilobytes;
  return kilobytes > 0 ? kilobytes << 10 : kLastCacheBytes;
}

// Sets the visiting order of a layer's rows; returns the units into which this order is cut. If
// channel groups are too large to be in cache at their second visit, rows are visited in memory
// order, which is faster, and their sums are streamed.
std::vector<RowRange> order_rows(Work& work) {
  const Phase2Tensor& tensor = *work.tensor;
  const std::int64_t rows = tensor.layout.rows();
  work.order.resize(static_cast<std::size_t>(rows));
  std::iota(work.order.begin(), work.order.end(), std::int64_t{0});
  const std::int64_t bytes = tensor.layout.size() * item_size(tensor.type) *
                             static_cast<std::int64_t>(work.gradients.size() + 1);
  const std::int64_t read_again = 2 * tensor.layout.size() * item_size(tensor.type);
  static const std::int64_t group_bytes = last_cache_bytes() / kGroupPart;
  work.past_caches = read_again > group_bytes * static_cast<std::int64_t>(work.reference.size());
  if (tensor.layout.outer > 1 || bytes <= kGroupwiseBytes || work.past_caches)
    return {{0, rows}};
  std::stable_sort(work.order.begin(), work.order.end(), [&tensor](std::int64_t a, std::int64_t b) {
    return tensor.priority[a] < tensor.priority[b];
  });
  std::vector<RowRange> units;
  for (std::int64_t first = 0; first < rows;) {
    const std::int64_t task = tensor.priority[work.order[static_cast<std::size_t>(first)]];
    std::int64_t last = first;
    while (last < rows && tensor.priority[work.order[static_cast<std::size_t>(last)]] == task)
      ++last;
    units.push_back({first, last});
    first = last;
  }
  return units;
}

// One call: first the energies, then the sums. Threads claim chunks in order.
class Step {
public:
  Step(const Phase2Arguments& arguments, Stages stages, int threads)
      : tasks_(arguments.tasks), stages_(stages), threads_(threads),
        works_(static_cast<std::size_t>(arguments.count)) {
    for (std::size_t t = 0; t < works_.size(); ++t) {
      Work& work = works_[t];
      work.tensor = &arguments.tensors[t];
      elements_ += work.tensor->layout.size();
      bytes_ += work.tensor->layout.size() * item_size(work.tensor->type) * (tasks_ + 2);
      chunk_bytes_ = std::max(chunk_bytes_, kChunkElements * item_size(work.tensor->type));
      work.reference.assign(static_cast<std::size_t>(tasks_), -1);
      for (std::size_t task = 0; task < work.reference.size(); ++task)
        if (const void* gradient = work.tensor->gradients[task]) {
          work.reference[task] = static_cast<int>(work.gradients.size());
          work.gradients.push_back(gradient);
        }
      if (stages == Stages::kAll && work.tensor->priority != nullptr &&
          work.tensor->weight != nullptr)
        plan_energies(work);
    }
    energies_left_ = static_cast<std::int64_t>(energy_chunks_.size());
    if (energy_chunks_.empty())
      plan_sums();
  }

  std::int64_t elements() const { return elements_; }

  // Runs on each thread.
  void run() {
    for (std::size_t i = next_energy_++; i < energy_chunks_.size(); i = next_energy_++)
      find_energies(energy_chunks_[i]);
    while (!sums_planned_.load(std::memory_order_acquire))
      std::this_thread::yield();
    if (stages_ == Stages::kApply) {
      for (std::size_t i = next_chunk_++; i < chunks_.size(); i = next_chunk_++)
        add_references({&chunks_[i], nullptr});
      return;
    }
    const bool stream = bytes_ > kStreamBytes;
    Scratch scratch(stream && stages_ == Stages::kAll ? chunk_bytes_ : 0);
    std::vector<Summed> summed;
    for (std::size_t i = next_chunk_++; i < chunks_.size(); i = next_chunk_++) {
      const Chunk& chunk = chunks_[i];
      if (chunk.unit == nullptr) {
        sum_elements(chunk, stream);
        continue;
      }
      summed.push_back({&chunk, fits_scratch(chunk) ? scratch.take() : nullptr});
      sum_rows(summed.back(), stream ? threads_ : 0);
      if (chunk.unit->chunks_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
        find_coefficients(*chunk.unit);
      if (stages_ == Stages::kAll)
        visit_again(summed, scratch, false);
      else
        summed.clear();
    }
    visit_again(summed, scratch, true);
    std::atomic_thread_fence(std::memory_order_seq_cst); // completes streaming stores
  }

private:
  static bool fits_scratch(const Chunk& chunk) {
    const Phase2Tensor& tensor = *chunk.work->tensor;
    return !chunk.work->past_caches && tensor.layout.outer == 1 &&
           tensor.layout.inner * item_size(tensor.type) >= kStreamRow &&
           (chunk.range.last - chunk.range.first) * tensor.layout.inner <= kChunkElements;
  }

  void plan_energies(Work& work) {
    const std::vector<RowRange> rows = weight_chunks(work.tensor->layout);
    for (const RowRange& range : rows)
      energy_chunks_.push_back({&work, nullptr, range});
    work.chunks_left = static_cast<std::int64_t>(rows.size());
    work.energy.resize(static_cast<std::size_t>(work.tensor->layout.rows()));
  }

  // The thread that finishes a layer's last chunk derives the layer's priorities; the thread that
  // finishes the last layer plans the sums.
  void find_energies(const Chunk& chunk) {
    Work& work = *chunk.work;
    const auto [first, last] = chunk.range;
    row_energies(work.tensor->type, work.tensor->layout, work.tensor->weight, first, last,
                 &work.energy[static_cast<std::size_t>(first)]);
    if (work.chunks_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
      find_priorities(work);
    if (energies_left_.fetch_sub(1, std::memory_order_acq_rel) == 1)
      plan_sums();
  }

  void find_priorities(const Work& work) const {
    const Phase2Tensor& tensor = *work.tensor;
    const std::int64_t rows = tensor.layout.rows();
    std::vector<double> strength(static_cast<std::size_t>(tasks_ * rows));
    strengths({work.energy.data(), tensor.gamma, tensor.variance, tensor.epsilon, rows, tasks_,
               true, strength.data()});
    task_priority(strength.data(), tasks_, rows, tensor.priority);
  }

  void plan_sums() {
    for (Work& work : works_) {
      const Phase2Tensor& tensor = *work.tensor;
      if (tensor.layout.size() == 0)
        continue;
      if (tensor.priority != nullptr && !work.gradients.empty())
        plan_units(work);
      else if (stages_ == Stages::kApply)
        continue;
      else if (work.gradients.empty())
        std::memset(tensor.update, 0,
                    static_cast<std::size_t>(tensor.layout.size() * item_size(tensor.type)));
      else
        for (std::int64_t i = 0; i < tensor.layout.size(); i += kChunkElements)
          chunks_.push_back(
              {&work, nullptr, {i, std::min(tensor.layout.size(), i + kChunkElements)}});
    }
    sums_planned_.store(true, std::memory_order_release);
  }

  void plan_units(Work& work) {
    const auto rows = static_cast<std::size_t>(work.tensor->layout.rows());
    work.coefficient.assign(static_cast<std::size_t>(tasks_), 0.0);
    if (stages_ != Stages::kApply)
      work.dots.assign(rows * work.gradients.size(), 0.0);
    else
      for (std::int32_t task = 0; task < tasks_; ++task)
        work.coefficient[static_cast<std::size_t>(task)] = projection_coefficient(
            work.tensor->products + std::ptrdiff_t{task} * tasks_, tasks_, task);
    const std::int64_t step = rows_per_chunk(work.tensor->layout);
    for (const RowRange& range : order_rows(work)) {
      Unit& unit = units_.emplace_back();
      unit.work = &work;
      unit.range = range;
      unit.chunks_left = (range.last - range.first + step - 1) / step;
      for (std::int64_t i = range.first; i < range.last; i += step)
        chunks_.push_back({&work, &unit, {i, std::min(range.last, i + step)}});
    }
  }

  const std::int32_t tasks_;
  const Stages stages_;
  const int threads_;
  std::vector<Work> works_;
  std::int64_t elements_ = 0;
  std::int64_t bytes_ = 0;
  std::int64_t chunk_bytes_ = 0;

  std::vector<Chunk> energy_chunks_;
  std::atomic<std::size_t> next_energy_{0};
  std::atomic<std::int64_t> energies_left_{0};

  std::deque<Unit> units_;
  std::vector<Chunk> chunks_;
  std::atomic<bool> sums_planned_{false};
  std::atomic<std::size_t> next_chunk_{0};
};

void run(const Phase2Arguments& arguments, Stages stages, int threads) {
  for (std::int64_t t = 0; t < arguments.count && stages != Stages::kApply; ++t)
    if (double* products = arguments.tensors[t].products)
      std::fill(products, products + std::ptrdiff_t{arguments.tasks} * arguments.tasks, 0.0);
  Step step(arguments, stages, threads);
  run_parallel(useful_threads(threads, step.elements()), [&step] { step.run(); });
}

} // namespace

void phase2(const Phase2Arguments& arguments, int threads) {
  run(arguments, Stages::kAll, threads);
}

void phase2_products(const Phase2Arguments& arguments, int threads) {
  run(arguments, Stages::kProducts, threads);
}

void phase2_apply(const Phase2Arguments& arguments, int threads) {
  run(arguments, Stages::kApply, threads);
}

} // namespace cs_kernels::cpu
