// Element types, their 16-byte vectors, and the types of sums.
#pragma once

#include <platform.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cs_kernels/cuda/launch.h"
#include "tuning.h"

namespace cs_kernels::cuda {

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

CS_DEVICE double widened(double x) { return x; }
CS_DEVICE double widened(float x) { return x; }
CS_DEVICE float widened(BFloat16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
CS_DEVICE float widened(Float16 x) { return float16_to_float(x.bits); }

// float64 for float32: it holds squares of gradients beyond 1e19 or below 1e-19, and the sum of K
// gradients is rounded once. float32 for 16-bit types, over a few vectors.
template <class T> using Wide = decltype(widened(T{}));

template <class T> CS_DEVICE T narrowed(double x) {
  if constexpr (sizeof(T) >= 4)
    return static_cast<T>(x);
  else if constexpr (std::is_same_v<T, BFloat16>)
    return {float_to_bfloat16(static_cast<float>(x))};
  else
    return {float_to_float16(static_cast<float>(x))};
}

// 16 bytes of elements, or one.
template <class T, int kElements = 16 / sizeof(T)> struct Vector {
  static constexpr int kSize = kElements;
  T x[kSize];
};

template <class T> CS_DEVICE Vector<T> as_vector(Words words) {
  Vector<T> vector;
  memcpy(&vector, &words, 16);
  return vector;
}
template <class T> CS_DEVICE Words as_words(const Vector<T>& vector) {
  Words words;
  memcpy(&words, &vector, 16);
  return words;
}
template <class T> CS_DEVICE const Words* words_at(const T* address) {
  return reinterpret_cast<const Words*>(address);
}
template <class T> CS_DEVICE Words* words_at(T* address) {
  return reinterpret_cast<Words*>(address);
}
// Elements of a vector: in one access where memory is aligned to 16 bytes.
template <int kSize, class T> CS_DEVICE Vector<T, kSize> vector_at(const T* address, bool aligned) {
  if constexpr (kSize > 1)
    if (aligned)
      return as_vector<T>(*words_at(address));
  Vector<T, kSize> vector;
  for (int e = 0; e < kSize; ++e)
    vector.x[e] = address[e];
  return vector;
}
template <class T, int kSize>
CS_DEVICE void store(T* address, const Vector<T, kSize>& vector, bool aligned) {
  if constexpr (kSize > 1)
    if (aligned) {
      *words_at(address) = as_words(vector);
      return;
    }
  for (int e = 0; e < kSize; ++e)
    address[e] = vector.x[e];
}
template <class T, int kSize>
CS_DEVICE void store_narrowed(T* address, const Wide<T> (&values)[kSize], bool aligned = true) {
  Vector<T, kSize> vector;
  for (int e = 0; e < kSize; ++e)
    vector.x[e] = narrowed<T>(values[e]);
  store(address, vector, aligned);
}

template <class T> CS_DEVICE T* pointer(std::int64_t address) {
  return reinterpret_cast<T*>(address);
}

// n / d for n, d >= 0: unsigned division is shorter, and has a path for 32 bits.
CS_DEVICE std::int64_t quotient(std::int64_t n, std::int64_t d) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(n) / static_cast<std::uint64_t>(d));
}

// Calls run(T{}) for an element type.
template <class Run> constexpr auto with_type(DataType type, const Run& run) {
  switch (type) {
  case DataType::kFloat32:
    return run(float{});
  case DataType::kFloat64:
    return run(double{});
  case DataType::kBFloat16:
    return run(BFloat16{});
  default:
    return run(Float16{});
  }
}

// Calls run(T{}, number of tasks) for the kernel of this type and number; 0: the general kernel.
template <int kTasks = 2, class Run> Status with_kernel(DataType type, int tasks, const Run& run) {
  if constexpr (kTasks > 0)
    if (kTasks != tasks)
      return with_kernel<kTasks == kUnrolledTasks ? 0 : kTasks + 1>(type, tasks, run);
  return with_type(type,
                   [&](auto like) { return run(like, std::integral_constant<int, kTasks>{}); });
}

} // namespace cs_kernels::cuda
