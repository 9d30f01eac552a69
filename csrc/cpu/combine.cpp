#include "cs_kernels/combine.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <vector>

#include "chunks.h"
#include "parallel.h"
#include "row_kernels.h"

namespace cs_kernels::cpu {
namespace {

// A range of elements of one tensor, and the tasks with a gradient of this tensor.
struct Piece {
  const GradientTensor* tensor;
  std::vector<std::int32_t>* tasks;
  std::int64_t first;
  std::int64_t size;
  std::int64_t index; // the first element's index, for sign dropping

  std::vector<const void*> gradients() const {
    std::vector<const void*> result;
    for (const std::int32_t task : *tasks)
      result.push_back(at(tensor->gradients[task], tensor->type, first));
    return result;
  }
  void* update() const { return at(tensor->update, tensor->type, first); }
};

// All tensors, cut into pieces that threads claim in order.
class Pieces {
public:
  Pieces(const GradientArguments& arguments, std::int64_t step)
      : tasks_(static_cast<std::size_t>(arguments.count)) {
    for (std::size_t t = 0; t < tasks_.size(); ++t) {
      const GradientTensor& tensor = arguments.tensors[t];
      for (std::int32_t task = 0; task < arguments.tasks; ++task)
        if (tensor.gradients[task] != nullptr)
          tasks_[t].push_back(task);
      for (std::int64_t i = 0; i < tensor.size; i += step)
        pieces_.push_back(
            {&tensor, &tasks_[t], i, std::min(step, tensor.size - i), tensor.first_index + i});
      elements_ += tensor.size;
      bytes_ += tensor.size * item_size(tensor.type) * (arguments.tasks + 1);
    }
  }

  std::size_t count() const { return pieces_.size(); }
  const Piece& operator[](std::size_t i) const { return pieces_[i]; }
  bool stream() const { return bytes_ > kStreamBytes; }

  // Calls work(piece, index) for each piece, on several threads.
  template <class Work> void for_each(int threads, const Work& work) const {
    std::atomic<std::size_t> next{0};
    run_parallel(useful_threads(threads, elements_), [&] {
      for (std::size_t i = next++; i < pieces_.size(); i = next++)
        work(pieces_[i], i);
      std::atomic_thread_fence(std::memory_order_seq_cst); // completes streaming stores
    });
  }

private:
  std::vector<std::vector<std::int32_t>> tasks_;
  std::vector<Piece> pieces_;
  std::int64_t elements_ = 0;
  std::int64_t bytes_ = 0;
};

// Calls write(kernels, gradients, factors, piece) for each piece, with one factor per gradient. If
// no task has a gradient, writes zeros.
template <class Factor, class Write>
void write_updates(const Pieces& pieces, int threads, const Factor& factor, const Write& write) {
  pieces.for_each(threads, [&](const Piece& piece, std::size_t) {
    const std::vector<const void*> gradients = piece.gradients();
    if (gradients.empty()) {
      std::memset(piece.update(), 0,
                  static_cast<std::size_t>(piece.size * item_size(piece.tensor->type)));
      return;
    }
    std::vector<double> factors;
    for (const std::int32_t task : *piece.tasks)
      factors.push_back(factor(piece, task));
    write(row_kernels(piece.tensor->type), gradients, factors, piece);
  });
}

} // namespace

void gramian(const GradientArguments& arguments, double* gramian, int threads) {
  const Pieces pieces(arguments, kGramianElements);
  const std::int64_t width = arguments.tasks;
  const auto pairs = static_cast<std::size_t>(width * (width + 1) / 2);
  std::vector<double> products(pieces.count() * pairs);
  pieces.for_each(threads, [&](const Piece& piece, std::size_t i) {
    const std::vector<const void*> gradients = piece.gradients();
    if (!gradients.empty())
      row_kernels(piece.tensor->type)
          .products(gradients.data(), static_cast<int>(gradients.size()), piece.size,
                    &products[i * pairs]);
  });
  // Products are added in the order of the pieces, so that any number of threads gives the same
  // bits.
  std::fill(gramian, gramian + arguments.groups * width * width, 0.0);
  for (std::size_t i = 0; i < pieces.count(); ++i) {
    const Piece& piece = pieces[i];
    double* of_group = gramian + piece.tensor->group * width * width;
    const double* product = &products[i * pairs];
    for (std::size_t a = 0; a < piece.tasks->size(); ++a)
      for (std::size_t b = 0; b <= a; ++b)
        of_group[(*piece.tasks)[a] * width + (*piece.tasks)[b]] += *product++;
  }
  for (std::int64_t group = 0; group < arguments.groups; ++group)
    for (std::int64_t a = 0; a < width; ++a)
      for (std::int64_t b = 0; b < a; ++b)
        gramian[(group * width + b) * width + a] = gramian[(group * width + a) * width + b];
}

void combine(const GradientArguments& arguments, const double* weights, std::int32_t protected_task,
             int threads) {
  const Pieces pieces(arguments, kChunkElements);
  write_updates(
      pieces, threads,
      [&](const Piece& piece, std::int32_t task) {
        return weights[piece.tensor->group * arguments.tasks + task];
      },
      [&](const RowKernels& kernels, const std::vector<const void*>& gradients,
          const std::vector<double>& factors, const Piece& piece) {
        const auto found = std::find(piece.tasks->begin(), piece.tasks->end(), protected_task);
        const auto guide = found - piece.tasks->begin();
        kernels.combine(gradients.data(), factors.data(), static_cast<int>(gradients.size()),
                        found == piece.tasks->end() ? -1 : static_cast<int>(guide), piece.size,
                        pieces.stream(), piece.update());
      });
}

void drop_signs(const GradientArguments& arguments, const double* leaks, std::uint64_t key,
                int threads) {
  const Pieces pieces(arguments, kChunkElements);
  write_updates(
      pieces, threads, [&](const Piece&, std::int32_t task) { return leaks[task]; },
      [&](const RowKernels& kernels, const std::vector<const void*>& gradients,
          const std::vector<double>& factors, const Piece& piece) {
        kernels.drop_signs(gradients.data(), factors.data(), static_cast<int>(gradients.size()),
                           key, piece.index, piece.size, pieces.stream(), piece.update());
      });
}

} // namespace cs_kernels::cpu
