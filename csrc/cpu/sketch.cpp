#include "cs_kernels/sketch.h"

#include <algorithm>
#include <atomic>

#include "chunks.h"
#include "parallel.h"
#include "row_kernels.h"

namespace cs_kernels::cpu {
namespace {

// Adds the elements whose bins are in [begin, end).
void add_to_bins(const SketchTensor& tensor, std::uint64_t key, float* sketch, std::int64_t bins,
                 std::int64_t begin, std::int64_t end) {
  const RowKernels& kernels = row_kernels(tensor.type);
  const std::int64_t last = tensor.index + tensor.size;
  for (std::int64_t block = tensor.index / bins; block * bins < last; ++block) {
    const std::int64_t rotation =
        std::int64_t{sketch_rotation(key, static_cast<std::uint64_t>(block))} % bins;
    // The elements that go to bin 0 and up; then the elements before them, for the last bins.
    for (const std::int64_t origin : {block * bins - rotation + bins, block * bins - rotation}) {
      const std::int64_t from = std::max({origin + begin, block * bins, tensor.index});
      const std::int64_t to = std::min({origin + end, (block + 1) * bins, last});
      if (from < to)
        kernels.add_signed(at(tensor.data, tensor.type, from - tensor.index), key, from, to - from,
                           sketch + (from - origin));
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
