// Linear sketches of gradients: vectors of d bins whose dot products estimate the gradients' dot
// products. The functions take plain pointers and sizes, and need no framework.
//
// An element's index among all parameters determines its sign and its bin, so sketches of shards,
// micro-batches and ranks add up. A block is d consecutive indices, rotated by a random number.
// Every bin therefore gets one element of each block, and the thread that owns a bin adds these
// elements in order, without atomics. Elements of different blocks share a bin with probability
// 1 / d; elements of the same block never do.
#pragma once

#include <cstdint>

#include "cs_kernels/data_type.h"
#include "cs_kernels/host_device.h"
#include "cs_kernels/random.h"

namespace cs_kernels {

// The bin of a block's first element, to be taken modulo d, a power of two.
CS_HOST_DEVICE_INLINE std::uint32_t sketch_rotation(std::uint64_t key, std::uint64_t block) {
  return static_cast<std::uint32_t>(splitmix64(~key + block));
}

// The signs of the elements 32 n ... 32 n + 31 are the bits of word n: 1 for minus.
constexpr std::int64_t kSignWord = 32;
using SignWords = RandomWords;

struct SketchTensor {
  DataType type;
  const void* data; // dense
  std::int64_t size;
  std::int64_t index; // the first element's index
  // Null, or a dense output, which may be `data`: weight * data is written or, with `add`, added.
  void* update;
  double weight;
  bool add;
};

namespace cpu {

// Adds the elements, with their signs, to sketch [bins]. Reads every element once (float32
// ones twice if the weight does not fit float), and writes or changes each element of an update
// once; the sketch stays in cache.
void sketch(const SketchTensor& tensor, std::uint64_t key, float* sketch, std::int64_t bins,
            int threads);

} // namespace cpu
} // namespace cs_kernels
