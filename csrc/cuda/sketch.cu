#include "cs_kernels/cuda/sketch.h"

#include "cs_kernels/sketch.h"
#include "types.h"

namespace cs_kernels::cuda {
namespace {

// Each thread has one bin, and adds the bin's element of each block in order. The rotations of a
// batch of blocks are in shared memory, because they are the same for all threads.
template <class T, bool kUpdates>
CS_KERNEL(kThreads, kSmallBlocks)
sketch_kernel(SketchLaunch launch) {
  auto* const rotations = reinterpret_cast<std::uint32_t*>(shared_memory());
  // Updates take registers, too.
  constexpr int kLoads = kUpdates ? kSketchLoads / 2 : kSketchLoads;
  const auto last = static_cast<std::uint32_t>(launch.bins - 1);
  const auto bin = static_cast<std::uint32_t>(block_index() * kThreads + thread_index());
  const auto* const data = static_cast<const T*>(launch.data);
  auto* const update = static_cast<T*>(launch.update);
  const auto weight = static_cast<Wide<T>>(kUpdates ? *launch.weight : 0);
  const std::int64_t end = (launch.index + launch.size - 1) / launch.bins + 1;
  // The indices of a tensor's sign words lie in at most two ranges of 2^32.
  const auto first_word = static_cast<std::uint64_t>(launch.index / kSignWord);
  const SignWords of_first(launch.key, first_word);
  const SignWords of_next(launch.key, first_word + (std::uint64_t{1} << 32));
  const bool inside = bin <= last;
  float sum = inside ? launch.sketch[bin] : 0;
  for (std::int64_t start = launch.index / launch.bins; start < end; start += kThreads) {
    const int blocks = static_cast<int>(end - start < kThreads ? end - start : kThreads);
    synchronize_block();
    if (thread_index() < blocks)
      rotations[thread_index()] =
          sketch_rotation(launch.key, static_cast<std::uint64_t>(start + thread_index()));
    synchronize_block();
    for (int base = 0; base < blocks; base += kLoads) {
      float values[kLoads];
      std::uint32_t signs[kLoads];
      Wide<T> results[kLoads];
      std::int64_t elements[kLoads];
      CS_UNROLL(kLoads)
      for (int n = 0; n < kLoads; ++n) {
        const int block = base + n < blocks ? base + n : base;
        const std::int64_t element =
            (start + block) * launch.bins + ((bin - rotations[block]) & last) - launch.index;
        const bool exists = base + n < blocks && element >= 0 && element < launch.size;
        const Wide<T> value = exists ? widened(data[element]) : 0;
        values[n] = static_cast<float>(value);
        if constexpr (kUpdates) {
          const Wide<T> before = exists && launch.add ? widened(update[element]) : 0;
          results[n] = before + weight * value;
          elements[n] = exists ? element : -1;
        }
        const auto index = static_cast<std::uint64_t>(launch.index + element);
        const SignWords& words = (index >> 5) >> 32 == first_word >> 32 ? of_first : of_next;
        signs[n] = words.bits(static_cast<std::uint32_t>(index >> 5)) >> (index & 31) & 1;
      }
      CS_UNROLL(kLoads)
      for (int n = 0; n < kLoads; ++n)
        sum += signs[n] != 0 ? -values[n] : values[n];
      if constexpr (kUpdates) {
        CS_UNROLL(kLoads)
        for (int n = 0; n < kLoads; ++n)
          if (elements[n] >= 0)
            update[elements[n]] = narrowed<T>(results[n]);
      }
    }
  }
  if (inside)
    launch.sketch[bin] = sum;
}

} // namespace

Status sketch(const SketchLaunch& arguments, Stream stream) {
  if (arguments.size == 0)
    return 0;
  return with_type(arguments.type, [&](auto like) {
    using T = decltype(like);
    return launch(arguments.update != nullptr ? sketch_kernel<T, true> : sketch_kernel<T, false>,
                  (arguments.bins + kThreads - 1) / kThreads, kThreads,
                  kThreads * sizeof(std::uint32_t), stream, arguments);
  });
}

} // namespace cs_kernels::cuda
