#include "cs_kernels/sketch.h"

#include <algorithm>
#include <atomic>

#include "chunks.h"
#include "parallel.h"
#include "row_kernels.h"

namespace cs_kernels::cpu {
namespace {

// Writes or adds weight * x to `update`, for a run of elements that are still in L1.
void update_run(const RowKernels& kernels, const SketchTensor& tensor, const void* x,
                std::int64_t size, void* update) {
  if (tensor.add && tensor.weight != 0)
    return kernels.add_scaled(update, x, tensor.weight, size, false, update);
  // Unlike add_scaled, combine also multiplies by a zero weight, so a non-finite element gives NaN.
  const void* const terms[] = {x, update};
  const double weights[] = {tensor.weight, 1};
  kernels.combine(terms, weights, tensor.add ? 2 : 1, -1, size, false, update);
}

// Adds the elements whose bins are in [begin, end): a few blocks at a time, so that a bin is read
// and written once for all of them.
void add_to_bins(const SketchTensor& tensor, std::uint64_t key, float* sketch, std::int64_t bins,
                 std::int64_t begin, std::int64_t end) {
  const RowKernels& kernels = row_kernels(tensor.type);
  const std::int64_t last = tensor.index + tensor.size;
  const std::int64_t last_block = (last - 1) / bins;
  for (std::int64_t first = tensor.index / bins; first <= last_block; first += kSignedRuns) {
    const auto blocks =
        static_cast<int>(std::min<std::int64_t>(kSignedRuns, last_block - first + 1));
    // Between two breaks, each block has either one run of elements or none.
    std::int64_t rotations[kSignedRuns];
    std::int64_t breaks[3 * kSignedRuns + 2] = {begin, end};
    int count = 2;
    for (int n = 0; n < blocks; ++n) {
      const std::int64_t start = (first + n) * bins;
      rotations[n] = sketch_rotation(key, static_cast<std::uint64_t>(first + n)) % bins;
      for (const std::int64_t element : {start, tensor.index, last})
        if (start <= element && element < start + bins)
          breaks[count++] = std::clamp((element + rotations[n]) % bins, begin, end);
    }
    std::sort(breaks, breaks + count);
    for (int i = 1; i < count; ++i) {
      const std::int64_t step = tensor.update == nullptr ? bins : kSketchPiece;
      for (std::int64_t from = breaks[i - 1]; from < breaks[i]; from += step) {
        const std::int64_t size = std::min(step, breaks[i] - from);
        const void* x[kSignedRuns];
        std::int64_t index[kSignedRuns];
        int runs = 0;
        for (int n = 0; n < blocks; ++n) {
          index[runs] = (first + n) * bins + (from - rotations[n] + bins) % bins;
          if (tensor.index <= index[runs] && index[runs] < last) {
            x[runs] = at(tensor.data, tensor.type, index[runs] - tensor.index);
            ++runs;
          }
        }
        if (runs > 0)
          kernels.add_signed(x, runs, key, index, size, sketch + from);
        for (int run = 0; run < runs && tensor.update != nullptr; ++run) {
          void* const update = at(tensor.update, tensor.type, index[run] - tensor.index);
          update_run(kernels, tensor, x[run], size, update);
        }
      }
    }
  }
}

} // namespace

void sketch(const SketchTensor& tensor, std::uint64_t key, float* sketch, std::int64_t bins,
            int threads) {
  // A thread owns a range of bins, and reads only the elements for these bins.
  const int parts = useful_threads(threads, tensor.size);
  std::atomic<int> next{0};
  run_parallel(parts, [&] {
    for (int part = next++; part < parts; part = next++)
      add_to_bins(tensor, key, sketch, bins, bins * part / parts, bins * (part + 1) / parts);
  });
}

} // namespace cs_kernels::cpu
