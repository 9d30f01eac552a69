// Linear sketches of gradients: vectors of d numbers whose dot products estimate those of the
// gradients. Plain pointers and sizes, without a framework.
//
// Every element has an index among all parameters, from which its sign and its bin follow, so
// sketches of shards, micro-batches and ranks add up. A block is d consecutive indices. Its runs of
// 256 are permuted, and the whole is rotated: every bin gets one element of each block, so a
// thread that owns a bin reads these in order, without atomics. Two elements of different blocks
// meet with probability 1 / d, those of a block never.
#pragma once

#include <cstdint>

#include "cs_kernels/data_type.h"
#include "cs_kernels/host_device.h"
#include "cs_kernels/random.h"

namespace cs_kernels {

constexpr std::int64_t kSketchRun = 256;

// Which elements of a sketch's blocks go where.
struct SketchBins {
  std::uint32_t last; // d - 1; d is a power of two, at least kSketchRun and at most 2^30
  int shift;          // half of the bits of a run's number, rounded up

  CS_HOST_DEVICE_INLINE explicit SketchBins(std::int64_t size)
      : last(static_cast<std::uint32_t>(size - 1)), shift(0) {
    while (size >> (2 * shift) > kSketchRun)
      ++shift;
  }
};

// The permutation of a block.
struct SketchBlock {
  std::uint32_t rotation;
  std::uint32_t first; // odd multipliers
  std::uint32_t second;

  SketchBlock() = default;
  CS_HOST_DEVICE_INLINE SketchBlock(std::uint64_t key, std::uint64_t block) {
    const std::uint64_t bits = splitmix64(~key + block);
    rotation = static_cast<std::uint32_t>(bits);
    first = static_cast<std::uint32_t>(bits >> 32) | 1;
    second = lowbias32(first) | 1;
  }

  // The element, counted from the start of the block, that goes to a bin.
  CS_HOST_DEVICE_INLINE std::uint32_t element(const SketchBins& bins, std::uint32_t bin) const {
    constexpr auto kRun = static_cast<std::uint32_t>(kSketchRun);
    const std::uint32_t rotated = (bin - rotation) & bins.last;
    const std::uint32_t last_run = bins.last / kRun;
    std::uint32_t run = (rotated / kRun * first) & last_run;
    run ^= run >> bins.shift;
    run = (run * second) & last_run;
    return run * kRun + rotated % kRun;
  }
};

// The inverse permutation.
struct SketchBlockInverse {
  std::uint32_t rotation;
  std::uint32_t first;
  std::uint32_t second;

  CS_HOST_DEVICE_INLINE explicit SketchBlockInverse(const SketchBlock& block)
      : rotation(block.rotation), first(inverse(block.second)), second(inverse(block.first)) {}

  // The bin of a run's first element. The others follow; bin 0 comes after the last one.
  CS_HOST_DEVICE_INLINE std::uint32_t bin(const SketchBins& bins, std::uint32_t run) const {
    run = (run * first) & (bins.last / static_cast<std::uint32_t>(kSketchRun));
    run ^= run >> bins.shift;
    return (run * second * static_cast<std::uint32_t>(kSketchRun) + rotation) & bins.last;
  }

private:
  // Of an odd number, modulo 2^32: every step of Newton's method doubles the correct bits, 3 at
  // first.
  CS_HOST_DEVICE_INLINE static std::uint32_t inverse(std::uint32_t odd) {
    std::uint32_t x = odd;
    for (int bits = 3; bits < 32; bits *= 2)
      x *= 2 - odd * x;
    return x;
  }
};

// The signs of the elements 32 n ... 32 n + 31 are the bits of word n: 1 for minus.
using SignWords = RandomWords;

struct SketchTensor {
  DataType type;
  const void* data; // dense
  std::int64_t size;
  std::int64_t index; // of the first element
};

namespace cpu {

// Adds the signed elements to sketch [size]. Reads every element once; the sketch stays in a cache.
void sketch(const SketchTensor& tensor, std::uint64_t key, float* sketch, std::int64_t size,
            int threads);

} // namespace cpu
} // namespace cs_kernels
