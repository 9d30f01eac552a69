// What the threads of a block do together, and blocks among each other.
#pragma once

#include <platform.h>

#include <cstdint>

#include "tuning.h"

namespace cs_kernels::cuda {

// What an item works on: elements or rows.
struct Range {
  std::int64_t begin;
  std::int64_t end;
};

// Item number `index` of those that share out `all`, so many each.
CS_DEVICE Range item_range(std::int64_t index, std::int64_t each, std::int64_t all) {
  const std::int64_t begin = index * each;
  return {begin, begin + each < all ? begin + each : all};
}

// The sum over `lanes` threads that stand together, a power of two up to a warp; each has it. By
// all threads of the warp.
CS_DEVICE double warp_sum(double value, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2)
    value += exchanged(value, mask);
  return value;
}

// The sum over the block; each thread has it. room: [kWarps], shared.
CS_DEVICE double block_sum(double value, double* room) {
  value = warp_sum(value, kWarp);
  synchronize_block(); // the room is free
  if (thread_index() % kWarp == 0)
    room[thread_index() / kWarp] = value;
  synchronize_block();
  double total = 0;
  for (int warp = 0; warp < kWarps; ++warp)
    total += room[warp];
  return total;
}

// Whether this block is the last of those that arrive; it sees what the others wrote. room: shared.
CS_DEVICE bool arrive(std::int32_t* counter, std::int64_t expected, std::int32_t* room) {
  synchronize_block();
  if (thread_index() == 0)
    *room = count_in_order(counter) == expected - 1;
  synchronize_block();
  return *room != 0;
}

// Lets the blocks go on that wait for what this one wrote.
CS_DEVICE void publish(std::int32_t* flag) {
  synchronize_block();
  if (thread_index() == 0)
    count_in_order(flag);
}

// Until it is published.
CS_DEVICE void wait(const std::int32_t* flag) {
  if (thread_index() == 0)
    while (counted(flag) == 0)
      pause(kPause);
  synchronize_block();
}

} // namespace cs_kernels::cuda
