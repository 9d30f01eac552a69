// Random numbers as pure functions of a key and a place: the same for every thread, rank and
// device, and nothing to keep but the key.
#pragma once

#include <cstdint>

#include "cs_kernels/host_device.h"

namespace cs_kernels {

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014), of the state after one increment.
CS_HOST_DEVICE_INLINE std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Of a method that was seeded, in one of its steps.
CS_HOST_DEVICE_INLINE std::uint64_t random_key(std::uint64_t seed, std::uint64_t step) {
  return mixed(mixed(seed) + step);
}

// A 32-bit mixer with little bias: the multipliers are those of "lowbias32" (Wellons 2018).
CS_HOST_DEVICE_INLINE std::uint32_t mixed32(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// The high and the low half of the place are mixed in one after the other, so that the loop over an
// array needs 32-bit multiplications only.
struct UniformNumbers {
  std::uint32_t low;
  std::uint32_t high;

  CS_HOST_DEVICE_INLINE UniformNumbers(std::uint64_t key, std::uint64_t place)
      : UniformNumbers(mixed(key + (place >> 32))) {}
  // Of the key of a range of 2^32 places.
  CS_HOST_DEVICE_INLINE explicit UniformNumbers(std::uint64_t of_range)
      : low(static_cast<std::uint32_t>(of_range)),
        high(static_cast<std::uint32_t>(of_range >> 32)) {}
  // In [0, 1), a multiple of 2^-24.
  CS_HOST_DEVICE_INLINE float at(std::uint32_t low_place) const {
    const std::uint32_t bits = mixed32(mixed32(low_place ^ low) + high);
    return static_cast<float>(static_cast<std::int32_t>(bits >> 8)) * 0x1p-24f;
  }
};

} // namespace cs_kernels
