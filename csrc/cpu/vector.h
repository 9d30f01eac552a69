// Vectors with a fixed number of lanes, in as many registers as needed, so that every instruction
// set adds in the same order.
//
// Everything has internal linkage, because the header is compiled for several instruction sets into
// one module: the linker could otherwise merge functions into a copy that this CPU cannot run.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace cs_kernels::cpu {
namespace {

#define CS_INLINE inline __attribute__((always_inline))

// Calls f(0), ..., f(n - 1), unrolled before the compiler decides which arrays to keep in
// registers; its own loop unrolling would come too late.
template <int n, class F> CS_INLINE void unrolled(const F& f) {
  if constexpr (n > 0) {
    unrolled<n - 1>(f);
    f(n - 1);
  }
}

#define CS_LAMBDA_INLINE __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

using DoublePart = double __attribute__((vector_size(kRegisterBytes)));
using FloatPart = float __attribute__((vector_size(kRegisterBytes)));
using WordPart = std::uint32_t __attribute__((vector_size(kRegisterBytes)));
using HalfPart = std::uint16_t __attribute__((vector_size(kRegisterBytes / 2)));
using HalfFloatPart = float __attribute__((vector_size(kRegisterBytes / 2)));

template <class V> CS_INLINE V load_raw(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

CS_INLINE FloatPart as_float(WordPart v) { return reinterpret_cast<FloatPart>(v); }
CS_INLINE WordPart as_words(FloatPart v) { return reinterpret_cast<WordPart>(v); }

// With kStream, a streaming store, which does not read the cache line first; `p` must be aligned to
// the size of `v`.
template <bool kStream, class V> CS_INLINE void store_raw(void* p, const V& v) {
#ifdef __SSE2__
  if constexpr (kStream && sizeof v == 8)
    return _mm_stream_si64(static_cast<long long*>(p), load_raw<long long>(&v));
  if constexpr (kStream && sizeof v == 16)
    return _mm_stream_si128(static_cast<__m128i*>(p), load_raw<__m128i>(&v));
#endif
#ifdef __AVX2__
  if constexpr (kStream && sizeof v == 32)
    return _mm256_stream_si256(static_cast<__m256i*>(p), load_raw<__m256i>(&v));
#endif
#ifdef __AVX512F__
  if constexpr (kStream && sizeof v == 64)
    return _mm512_stream_si512(static_cast<__m512i*>(p), load_raw<__m512i>(&v));
#endif
  std::memcpy(p, &v, sizeof v);
}

// Conversions of one register. Intrinsics are used where the compiler would split a wide generic
// vector into halves.
CS_INLINE DoublePart load_widened(const float* p) {
#if defined(__AVX512F__)
  return _mm512_cvtps_pd(load_raw<__m256>(p));
#elif defined(__AVX2__)
  return _mm256_cvtps_pd(load_raw<__m128>(p));
#elif defined(__SSE2__)
  const __m128i pair = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); // at any address
  return _mm_cvtps_pd(_mm_castsi128_ps(pair));
#else
  return __builtin_convertvector(load_raw<HalfFloatPart>(p), DoublePart);
#endif
}

template <class Scalar, class Part, int kLanes_> struct Vector {
  using Lane = Scalar;
  static constexpr int kLanes = kLanes_;
  static constexpr std::int64_t kPartLanes = kRegisterBytes / sizeof(Scalar);
  static constexpr int kParts = static_cast<int>(kLanes / kPartLanes);

  Part part[kParts];

  CS_INLINE Vector& operator+=(const Vector& other) {
    unrolled<kParts>([&](int i) CS_LAMBDA_INLINE { part[i] += other.part[i]; });
    return *this;
  }
  CS_INLINE void add_product(const Vector& a, const Vector& b) {
    unrolled<kParts>([&](int i) CS_LAMBDA_INLINE { part[i] += a.part[i] * b.part[i]; });
  }
  CS_INLINE void add_product(Scalar a, const Vector& b) {
    unrolled<kParts>([&](int i) CS_LAMBDA_INLINE { part[i] += a * b.part[i]; });
  }

  // positive() keeps the lanes above zero; not_positive() keeps all other lanes, including NaN.
  CS_INLINE Vector positive() const {
    Vector v;
    unrolled<kParts>([&](int i) CS_LAMBDA_INLINE { v.part[i] = part[i] > 0 ? part[i] : Part{}; });
    return v;
  }
  CS_INLINE Vector not_positive() const {
    Vector v;
    unrolled<kParts>([&](int i) CS_LAMBDA_INLINE { v.part[i] = part[i] > 0 ? Part{} : part[i]; });
    return v;
  }

  // Replaces each lane that differs in sign from a nonzero lane of the guide by the guide's lane.
  // Adding zero times both gives NaN if either is infinite or NaN.
  CS_INLINE void take_signs(const Vector& guide) {
    unrolled<kParts>([&](int i) CS_LAMBDA_INLINE {
      const Part x = part[i];
      const Part g = guide.part[i];
      const Part chosen = g > 0 ? (x > 0 ? x : g) : g < 0 ? (x < 0 ? x : g) : x;
      part[i] = chosen + (x + g) * 0;
    });
  }

  // Changes the sign of lane i if bit i is set.
  CS_INLINE void negate(std::uint32_t bits) {
    unrolled<kParts>([&](int i) CS_LAMBDA_INLINE {
#if defined(__AVX512F__)
      const auto sign = reinterpret_cast<Part>(WordPart{} + 0x80000000u);
      part[i] = _mm512_mask_xor_ps(part[i], static_cast<__mmask16>(bits), part[i], sign);
#else
      WordPart lane{};
      for (int j = 0; j < kPartLanes; ++j)
        lane[j] = 1u << (i * kPartLanes + j);
      const auto set = reinterpret_cast<WordPart>((lane & bits) != 0u);
      part[i] = as_float(as_words(part[i]) ^ (set & 0x80000000u));
#endif
    });
  }

  // `a` where positive / (positive - negative) > u, else `b`.
  static CS_INLINE Vector share_exceeds(const Vector& u, const Vector& positive,
                                        const Vector& negative, const Vector& a, const Vector& b) {
    Vector v;
    unrolled<kParts>([&](int i) CS_LAMBDA_INLINE {
      v.part[i] = u.part[i] * (positive.part[i] - negative.part[i]) < positive.part[i] ? a.part[i]
                                                                                       : b.part[i];
    });
    return v;
  }

  // Loads one register at a time: if the array were copied as a whole, it would stay in memory.
  static CS_INLINE Vector load(const Scalar* p) {
    Vector v;
    unrolled<kParts>([&](int i)
                         CS_LAMBDA_INLINE { v.part[i] = load_raw<Part>(p + i * kPartLanes); });
    return v;
  }
  template <bool kStream = false> CS_INLINE void store(Scalar* p) const {
    unrolled<kParts>([&](int i)
                         CS_LAMBDA_INLINE { store_raw<kStream>(p + i * kPartLanes, part[i]); });
  }

  // Sums pairwise, always in the same order.
  CS_INLINE double sum() const {
    Scalar lanes[kLanes];
    store(lanes);
    double partial[kLanes];
    for (int i = 0; i < kLanes; ++i)
      partial[i] = static_cast<double>(lanes[i]);
    for (int width = kLanes / 2; width > 0; width /= 2)
      for (int i = 0; i < width; ++i)
        partial[i] += partial[i + width];
    return partial[0];
  }
};

using Doubles = Vector<double, DoublePart, 8>;
using Floats = Vector<float, FloatPart, 16>;

CS_INLINE auto to_floats(DoublePart v) {
#if defined(__AVX512F__)
  return _mm512_cvtpd_ps(v);
#elif defined(__AVX2__)
  return _mm256_cvtpd_ps(v);
#elif defined(__SSE2__)
  return _mm_cvtsi128_si64(_mm_castps_si128(_mm_cvtpd_ps(v)));
#else
  return __builtin_convertvector(v, HalfFloatPart);
#endif
}

CS_INLINE WordPart load_words(const std::uint16_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<WordPart>(_mm512_cvtepu16_epi32(load_raw<__m256i>(p)));
#elif defined(__AVX2__)
  return reinterpret_cast<WordPart>(_mm256_cvtepu16_epi32(load_raw<__m128i>(p)));
#else
  return __builtin_convertvector(load_raw<HalfPart>(p), WordPart);
#endif
}

CS_INLINE auto narrowed(WordPart v) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(v));
#else
  return __builtin_convertvector(v, HalfPart);
#endif
}

// A lane of `mask` is all ones or all zeros, as after a comparison.
template <class Mask> CS_INLINE WordPart blend(Mask mask, WordPart a, WordPart b) {
  const auto m = reinterpret_cast<WordPart>(mask);
  return (a & m) | (b & ~m);
}

// bfloat16 is the upper half of a float.
CS_INLINE FloatPart load_bfloat16(const std::uint16_t* p) { return as_float(load_words(p) << 16); }

// Rounds to nearest, ties to even; a NaN stays a NaN, and becomes quiet.
CS_INLINE auto to_bfloat16(FloatPart v) {
  const WordPart w = as_words(v);
  const WordPart rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
  return narrowed(blend((w & 0x7fffffffu) > 0x7f800000u, (w >> 16) | 0x40u, rounded));
}

// float16 has 5 exponent bits with bias 15: shifted into a float's fields, the value is 2^-112
// times the correct one, subnormals included; infinities and NaN need a float's largest exponent.
CS_INLINE FloatPart load_float16(const std::uint16_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(load_raw<__m256i>(p));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(load_raw<__m128i>(p));
#else
  const WordPart w = load_words(p);
  const WordPart magnitude = as_words(as_float((w & 0x7fffu) << 13) * 0x1p112f);
  const auto special = reinterpret_cast<WordPart>((w & 0x7c00u) == 0x7c00u);
  return as_float(((w & 0x8000u) << 16) | magnitude | (special & 0x7f800000u));
#endif
}

// Rounds to nearest, ties to even. Without the instruction, subnormal results are rounded by adding
// a number whose unit in the last place is float16's smallest step.
CS_INLINE auto to_float16(FloatPart v) {
#if defined(__AVX512F__)
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
#else
  const WordPart w = as_words(v);
  const WordPart a = w & 0x7fffffffu;
  const WordPart normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const WordPart subnormal = as_words(as_float(a) + 0.5f) - 0x3f000000u;
  WordPart result = blend(a < (113u << 23), subnormal, normal);
  result = blend(a >= 0x47800000u - 0x1000u, WordPart{} + 0x7c00u, result);
  result = blend(a > 0x7f800000u, WordPart{} + 0x7e00u, result);
  return narrowed(result | ((w >> 16) & 0x8000u));
#endif
}

// Converts the first or the last half of a register's floats to doubles.
template <bool kLast> CS_INLINE DoublePart widened_half(const FloatPart& v) {
#if defined(__AVX512F__)
  return _mm512_cvtps_pd(kLast ? _mm512_extractf32x8_ps(v, 1) : _mm512_castps512_ps256(v));
#elif defined(__AVX2__)
  return _mm256_cvtps_pd(kLast ? _mm256_extractf128_ps(v, 1) : _mm256_castps256_ps128(v));
#elif defined(__SSE2__)
  return _mm_cvtps_pd(kLast ? _mm_movehl_ps(v, v) : v);
#else
  float lanes[kRegisterBytes / sizeof(float)];
  std::memcpy(lanes, &v, sizeof v);
  return load_widened(lanes + (kLast ? kRegisterBytes / sizeof(double) : 0));
#endif
}

// Adds floats to doubles, lanes i and i + 8 together. This must not go through memory, because the
// compiler would then keep the floats in memory during the loop that sums them.
CS_INLINE void add_widened(Doubles& total, const Floats& v) {
  DoublePart half[2 * Floats::kParts];
  unrolled<Floats::kParts>([&](int i) CS_LAMBDA_INLINE {
    half[2 * std::ptrdiff_t{i}] = widened_half<false>(v.part[i]);
    half[2 * i + 1] = widened_half<true>(v.part[i]);
  });
  unrolled<Doubles::kParts>(
      [&](int i) CS_LAMBDA_INLINE { total.part[i] += half[i] + half[i + Doubles::kParts]; });
}

CS_INLINE void add_widened(Doubles& total, const Doubles& v) { total += v; }

// Loads, stores and the accumulator of an element type. Products are added in the accumulator's
// precision for kBlock elements, then in double. Unconverted elements have the accumulator's type.
template <class V> struct Unconverted {
  using Element = typename V::Lane;
  using Accumulator = V;
  static constexpr std::int64_t kBlock = INT64_MAX;
  static CS_INLINE V load(const Element* p) { return V::load(p); }
  template <bool kStream = false> static CS_INLINE void store(Element* p, const V& v) {
    v.template store<kStream>(p);
  }
};

// Like Unconverted, for narrower elements, converted one register at a time.
template <class Scalar, class V, auto kWiden, auto kNarrow, std::int64_t kBlock_> struct Converted {
  using Element = Scalar;
  using Accumulator = V;
  static constexpr std::int64_t kBlock = kBlock_;
  static CS_INLINE V load(const Element* p) {
    V v;
    unrolled<V::kParts>([&](int i) CS_LAMBDA_INLINE { v.part[i] = kWiden(p + i * V::kPartLanes); });
    return v;
  }
  template <bool kStream = false> static CS_INLINE void store(Element* p, const V& v) {
    unrolled<V::kParts>([&](int i) CS_LAMBDA_INLINE {
      store_raw<kStream>(p + i * V::kPartLanes, kNarrow(v.part[i]));
    });
  }
};

using Float64 = Unconverted<Doubles>;
// Doubles hold every product of two floats exactly.
using Float32 = Converted<float, Doubles, load_widened, to_floats, INT64_MAX>;
// Twice as many lanes, for products that may be rounded.
using Float32InFloat = Unconverted<Floats>;
// A product of two 16-bit numbers is exact in float, unless it overflows or underflows; a lane adds
// up 16 products before the sum continues in double.
template <auto kWiden, auto kNarrow>
using Bits16 = Converted<std::uint16_t, Floats, kWiden, kNarrow, 16 * std::int64_t{Floats::kLanes}>;
using BFloat16 = Bits16<load_bfloat16, to_bfloat16>;
using Float16 = Bits16<load_float16, to_float16>;

// The last elements of a run, in a vector padded with zeros.
template <class Type>
CS_INLINE typename Type::Accumulator load_tail(const typename Type::Element* p, std::int64_t n) {
  typename Type::Element lanes[Type::Accumulator::kLanes] = {};
  std::memcpy(lanes, p, static_cast<std::size_t>(n) * sizeof *p);
  return Type::load(lanes);
}

template <class Type>
CS_INLINE void store_tail(typename Type::Element* p, const typename Type::Accumulator& v,
                          std::int64_t n) {
  typename Type::Element lanes[Type::Accumulator::kLanes];
  Type::store(lanes, v);
  std::memcpy(p, lanes, static_cast<std::size_t>(n) * sizeof *p);
}

template <class Type>
CS_INLINE typename Type::Accumulator load_some(const typename Type::Element* p, std::int64_t n) {
  return n >= Type::Accumulator::kLanes ? Type::load(p) : load_tail<Type>(p, n);
}

template <class Type>
CS_INLINE void store_some(typename Type::Element* p, const typename Type::Accumulator& v,
                          std::int64_t n) {
  if (n >= Type::Accumulator::kLanes)
    Type::store(p, v);
  else
    store_tail<Type>(p, v, n);
}

} // namespace
} // namespace cs_kernels::cpu
