// Sums over a block, and synchronization between blocks.
#pragma once

#include <platform.h>

#include <cstdint>

#include "tuning.h"

namespace cs_kernels::cuda {

// The elements or rows of an item.
struct Range {
  std::int64_t begin;
  std::int64_t end;
};

// The range of item `index` if `all` elements are cut into items of `each`.
CS_DEVICE Range item_range(std::int64_t index, std::int64_t each, std::int64_t all) {
  const std::int64_t begin = index * each;
  return {begin, begin + each < all ? begin + each : all};
}

// The sum over `lanes` adjacent threads, returned to each of them. `lanes` is a power of two, at
// most a warp. All threads of the warp must call this.
CS_DEVICE double warp_sum(double value, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2)
    value += exchanged(value, mask);
  return value;
}

// The sums over the block, returned to every thread. workspace: [kNumber, kWarps], shared memory.
template <int kNumber> CS_DEVICE void block_sums(double (&values)[kNumber], double* workspace) {
  synchronize_block(); // earlier readers of the workspace are done
  CS_UNROLL(kNumber)
  for (int n = 0; n < kNumber; ++n) {
    const double sum = warp_sum(values[n], kWarp);
    if (thread_index() % kWarp == 0)
      workspace[n * kWarps + thread_index() / kWarp] = sum;
  }
  synchronize_block();
  CS_UNROLL(kNumber)
  for (int n = 0; n < kNumber; ++n) {
    values[n] = 0;
    for (int warp = 0; warp < kWarps; ++warp)
      values[n] += workspace[n * kWarps + warp];
  }
}

// The sum over the block, returned to every thread. workspace: [kWarps], shared memory.
CS_DEVICE double block_sum(double value, double* workspace) {
  double values[] = {value};
  block_sums(values, workspace);
  return values[0];
}

// Whether this block arrives last; if so, it sees the writes of all other blocks. `last` is in
// shared memory.
CS_DEVICE bool arrive(std::int32_t* counter, std::int64_t expected, std::int32_t* last) {
  synchronize_block();
  if (thread_index() == 0)
    *last = count_in_order(counter) == expected - 1;
  synchronize_block();
  return *last != 0;
}

// Sets a flag, and makes this block's writes visible to blocks that wait for the flag.
CS_DEVICE void publish(std::int32_t* flag) {
  synchronize_block();
  if (thread_index() == 0)
    count_in_order(flag);
}

// Whether a flag is published. One thread calls this; the published writes become visible to the
// other threads after a barrier.
CS_DEVICE bool is_published(const std::int32_t* flag) { return counted(flag) != 0; }

// Waits until the flag is published.
CS_DEVICE void wait(const std::int32_t* flag) {
  if (thread_index() == 0)
    while (!is_published(flag))
      pause(kPause);
  synchronize_block();
}

} // namespace cs_kernels::cuda
