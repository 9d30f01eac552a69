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
CS_DEVICE float widened(float x) { return x; }
CS_DEVICE float widened(BFloat16 x) { return low_bfloat16(x.bits); }
CS_DEVICE float widened(Float16 x) { return float16_to_float(x.bits); }

// The type of a thread's sums and products over a few vectors; totals are in float64.
template <class T> using Wide = decltype(widened(T{}));
// The type of a weight's squares; double for float32, because two tasks' strengths can be close.
template <class T> using Square = std::conditional_t<sizeof(T) >= 4, double, float>;

template <class T> CS_DEVICE T narrowed(Wide<T> x) {
  if constexpr (sizeof(T) >= 4)
    return x;
  else if constexpr (std::is_same_v<T, BFloat16>)
    return {float_to_bfloat16(x)};
  else
    return {float_to_float16(x)};
}

// 16 bytes of elements, or a single element.
template <class T, int kElements = 16 / sizeof(T)> struct Vector {
  static constexpr int kSize = kElements;
  using Word = std::conditional_t<std::is_same_v<T, float>, float, std::uint32_t>;
  Words<Word> words;
};
template <class T> struct Vector<T, 1> {
  static constexpr int kSize = 1;
  using Word = T;
  T words;
};

template <class T, int kSize>
CS_DEVICE void widen(const Vector<T, kSize>& vector, Wide<T> (&values)[kSize]) {
  if constexpr (kSize == 1) {
    values[0] = widened(vector.words);
  } else if constexpr (sizeof(T) >= 4) {
    memcpy(values, &vector.words, 16);
  } else {
    CS_UNROLL(kSize)
    for (int e = 0; e < kSize; e += 2) {
      const std::uint32_t pair = vector.words.x[e / 2];
      if constexpr (std::is_same_v<T, BFloat16>) {
        values[e] = low_bfloat16(pair);
        values[e + 1] = high_bfloat16(pair);
      } else {
        values[e] = float16_to_float(static_cast<std::uint16_t>(pair));
        values[e + 1] = float16_to_float(static_cast<std::uint16_t>(pair >> 16));
      }
    }
  }
}

template <class T, int kSize> CS_DEVICE Vector<T, kSize> narrow(const Wide<T> (&values)[kSize]) {
  Vector<T, kSize> vector;
  if constexpr (kSize == 1) {
    vector.words = narrowed<T>(values[0]);
  } else if constexpr (sizeof(T) >= 4) {
    memcpy(&vector.words, values, 16);
  } else {
    CS_UNROLL(kSize)
    for (int e = 0; e < kSize; e += 2)
      vector.words.x[e / 2] = narrowed<T>(values[e]).bits |
                              static_cast<std::uint32_t>(narrowed<T>(values[e + 1]).bits) << 16;
  }
  return vector;
}

template <class T> CS_DEVICE const Words<typename Vector<T>::Word>* words_at(const T* address) {
  return reinterpret_cast<const Words<typename Vector<T>::Word>*>(address);
}

// Loads the elements of a vector in one access. With an L2 cache policy, the memory must be
// constant during the launch.
template <int kSize, class T, class... Policy>
CS_DEVICE Vector<T, kSize> vector_at(const T* address, Policy... policy) {
  if constexpr (kSize > 1 && sizeof...(policy) > 0)
    return {load(words_at(address), policy...)};
  else if constexpr (kSize > 1)
    return {*words_at(address)};
  else
    return {*address};
}
template <class T, int kSize> CS_DEVICE void store(T* address, const Vector<T, kSize>& vector) {
  if constexpr (kSize > 1)
    *reinterpret_cast<Words<typename Vector<T>::Word>*>(address) = vector.words;
  else
    *address = vector.words;
}

// An address of global memory as a pointer.
template <class T> CS_DEVICE T* pointer(std::int64_t address) {
  return static_cast<T*>(global_pointer(address));
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

// Calls run(T{}, kTasks) for the kernel of this type and number of tasks; 0 is the general kernel.
template <int kTasks = 2, class Run> Status with_kernel(DataType type, int tasks, const Run& run) {
  if constexpr (kTasks > 0)
    if (kTasks != tasks)
      return with_kernel<kTasks == kUnrolledTasks ? 0 : kTasks + 1>(type, tasks, run);
  return with_type(type,
                   [&](auto like) { return run(like, std::integral_constant<int, kTasks>{}); });
}

} // namespace cs_kernels::cuda
