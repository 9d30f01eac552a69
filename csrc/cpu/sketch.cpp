#include "cs_kernels/sketch.h"

#include <algorithm>
#include <atomic>

#include "chunks.h"
#include "parallel.h"
#include "row_kernels.h"

namespace cs_kernels::cpu {
namespace {

// Adds the elements whose bins are in [begin, end): kSignedRuns blocks at a time, so that a
// bin is read and written once for all of them.
void add_to_bins(const SketchTensor& tensor, std::uint64_t key, float* sketch, std::int64_t bins,
                 std::int64_t begin, std::int64_t end) {
  const RowKernels& kernels = row_kernels(tensor.type);
  const bool updating = tensor.update != nullptr;
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
    std::make_heap(breaks, breaks + count); // GCC would warn of std::sort's threshold.
    std::sort_heap(breaks, breaks + count);
    for (int i = 1; i < count; ++i) {
      const std::int64_t from = breaks[i - 1], size = breaks[i] - from;
      const void* x[kSignedRuns];
      void* places[kSignedRuns];
      std::int64_t index[kSignedRuns];
      int runs = 0;
      for (int n = 0; n < blocks; ++n) {
        index[runs] = (first + n) * bins + (from - rotations[n] + bins) % bins;
        const std::int64_t element = index[runs] - tensor.index;
        if (0 <= element && element < tensor.size) {
          x[runs] = at(tensor.data, tensor.type, element);
          places[runs] = updating ? at(tensor.update, tensor.type, element) : nullptr;
          ++runs;
        }
      }
      if (runs > 0 && size > 0)
        kernels.add_signed(x, runs, key, index, size, sketch + from,
                           {updating ? places : nullptr, tensor.weight, tensor.add});
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
