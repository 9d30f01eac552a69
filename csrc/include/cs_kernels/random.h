// Random numbers as pure functions of a key and an index: stateless, and the same on every thread,
// rank and device.
#pragma once

#include <cstdint>

#include "cs_kernels/host_device.h"

namespace cs_kernels {

// SplitMix64 (Steele, Lea, Flood 2014): one increment of the state, then the finalizer.
CS_HOST_DEVICE_INLINE std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The random state of a step: splitmix64(seed) + step, plus the counter if there is one. The step's
// key is splitmix64 of this state.
CS_HOST_DEVICE_INLINE std::uint64_t advanced(std::uint64_t state, const std::int64_t* counter) {
  return counter == nullptr ? state : state + static_cast<std::uint64_t>(*counter);
}

// The mixer "lowbias32" (Wellons 2018).
CS_HOST_DEVICE_INLINE std::uint32_t lowbias32(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// Random words by index. The index's high half is part of the key, so that a loop over an array
// needs only 32-bit multiplications.
struct RandomWords {
  std::uint32_t low;
  std::uint32_t high;

  CS_HOST_DEVICE_INLINE RandomWords(std::uint64_t key, std::uint64_t index)
      : RandomWords(splitmix64(key + (index >> 32))) {}
  // `of_range` is the key of a range of 2^32 indices.
  CS_HOST_DEVICE_INLINE explicit RandomWords(std::uint64_t of_range)
      : low(static_cast<std::uint32_t>(of_range)),
        high(static_cast<std::uint32_t>(of_range >> 32)) {}
  CS_HOST_DEVICE_INLINE std::uint32_t bits(std::uint32_t low_index) const {
    return lowbias32(lowbias32(low_index ^ low) + high);
  }
  // A number in [0, 1), a multiple of 2^-24.
  CS_HOST_DEVICE_INLINE float at(std::uint32_t low_index) const {
    return static_cast<float>(static_cast<std::int32_t>(bits(low_index) >> 8)) * 0x1p-24f;
  }
};

} // namespace cs_kernels
