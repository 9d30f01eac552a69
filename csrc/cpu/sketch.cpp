#include "cs_kernels/sketch.h"

#include <atomic>

#include "chunks.h"
#include "parallel.h"
#include "row_kernels.h"

namespace cs_kernels::cpu {

void sketch(const SketchTensor& tensor, std::uint64_t key, float* sketch, std::int64_t size,
            int threads) {
  // A thread owns a part of the bins, and reads only what goes there.
  const int parts = useful_threads(threads, tensor.size);
  std::atomic<int> next{0};
  run_parallel(parts, [&] {
    for (int part = next++; part < parts; part = next++)
      row_kernels(tensor.type)
          .sketch(tensor, key, sketch, size, size * part / parts, size * (part + 1) / parts);
  });
}

} // namespace cs_kernels::cpu
