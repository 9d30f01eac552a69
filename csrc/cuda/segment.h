// A segment: a range of one row (output channel) of a tensor, or of the whole tensor in memory
// order. A team of adjacent lanes visits its 16-byte vectors, and the single elements at its ends.
#pragma once

#include <cstdint>

#include "cs_kernels/cuda/phase2.h"
#include "types.h"

namespace cs_kernels::cuda {

template <class T> struct Segment {
  static constexpr std::uint32_t kVector = Vector<T>::kSize;

  std::int64_t base;    // offset in memory of the segment, or of its row if that has several runs
  std::uint32_t length; // in elements
  std::uint32_t first;  // index in the row of the first element, if the row has several runs
  std::uint32_t inner;  // elements of a run; 0 if the row is a single run
  std::int64_t skip;    // elements between two runs
  std::uint32_t head;   // elements before the vectors
  std::uint32_t vectors;

  // Elements of a row from `begin` on. `aligned`: the memory is aligned to 16 bytes.
  CS_DEVICE Segment(const PlannedTensor& tensor, bool aligned, std::uint32_t row,
                    std::int64_t begin, std::uint32_t elements)
      : length(elements), first(static_cast<std::uint32_t>(begin)),
        inner(static_cast<std::uint32_t>(tensor.inner)), skip(0), head(0) {
    bool vectorized = aligned;
    if (tensor.inner == tensor.length) {
      base = row * tensor.length + begin;
      inner = 0;
      head = -static_cast<std::uint32_t>(base) % kVector;
      vectorized = aligned && head < length;
    } else {
      const auto channels = static_cast<std::uint32_t>(tensor.channels);
      const std::uint32_t group = row / channels;
      base = group * tensor.channels * tensor.length + (row - group * channels) * tensor.inner;
      skip = (tensor.channels - 1) * tensor.inner;
      vectorized = aligned && inner % kVector == 0;
    }
    vectors = vectorized ? (length - head) / kVector : 0;
    head = vectorized ? head : length;
  }

  // Elements of a tensor in memory order; `begin` is a multiple of the vector size.
  CS_DEVICE Segment(std::int64_t begin, std::int64_t end, bool aligned)
      : base(begin), length(static_cast<std::uint32_t>(end - begin)), first(0), inner(0), skip(0),
        head(aligned ? 0 : length), vectors(aligned ? length / kVector : 0) {}

  // Bytes from the beginning of the tensor to an element.
  CS_DEVICE std::int64_t offset(std::uint32_t element) const {
    std::int64_t place = base + element;
    if (inner > 0)
      place += first + (first + element) / inner * skip;
    return place * static_cast<std::int64_t>(sizeof(T));
  }
};

// Several pieces of a segment that one lane visits: vectors of kElements, or single elements.
template <class T, int kElements, int kPieces> struct Pieces {
  static constexpr int kSize = kElements;
  static constexpr int kNumber = kPieces;
  using Vectors = Vector<T, kSize>[kNumber];
  using Numbers = Wide<T>[kNumber][kSize];
  std::int64_t offsets[kNumber]; // in bytes, from the beginning of the tensor

  // The address of a piece of a tensor.
  CS_DEVICE T* of(T* tensor, int n) const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(tensor) + offsets[n]);
  }
  CS_DEVICE const T* of(const T* tensor, int n) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(tensor) + offsets[n]);
  }
};

// Reads these pieces of a tensor; `policy` is passed to vector_at.
template <class T, int kSize, int kNumber, class... Policy>
CS_DEVICE void read(const Pieces<T, kSize, kNumber>& pieces, const T* tensor,
                    Vector<T, kSize> (&vectors)[kNumber], Policy... policy) {
  CS_UNROLL(kNumber)
  for (int n = 0; n < kNumber; ++n)
    vectors[n] = vector_at<kSize>(pieces.of(tensor, n), policy...);
}
template <class T, int kSize, int kNumber>
CS_DEVICE void widen_all(const Vector<T, kSize> (&vectors)[kNumber],
                         Wide<T> (&numbers)[kNumber][kSize]) {
  CS_UNROLL(kNumber)
  for (int n = 0; n < kNumber; ++n)
    widen(vectors[n], numbers[n]);
}
template <class T, int kSize, int kNumber>
CS_DEVICE void narrow_all(const Wide<T> (&numbers)[kNumber][kSize],
                          Vector<T, kSize> (&vectors)[kNumber]) {
  CS_UNROLL(kNumber)
  for (int n = 0; n < kNumber; ++n)
    vectors[n] = narrow<T>(numbers[n]);
}
// Writes these pieces of a tensor.
template <class T, int kSize, int kNumber>
CS_DEVICE void write(const Pieces<T, kSize, kNumber>& pieces, T* tensor,
                     const Vector<T, kSize> (&vectors)[kNumber]) {
  CS_UNROLL(kNumber)
  for (int n = 0; n < kNumber; ++n)
    store(pieces.of(tensor, n), vectors[n]);
}

// Calls run(number), where the constant `number` is the number of steps that begin before `all`, at
// most kMost.
template <int kMost, class Run>
CS_DEVICE void with_steps(std::uint32_t all, std::uint32_t step, const Run& run) {
  if constexpr (kMost > 1)
    if (all <= (kMost - 1) * step)
      return with_steps<kMost - 1>(all, step, run);
  run(std::integral_constant<int, kMost>{});
}

// Calls visit(pieces) for a lane's vectors, up to kMost at a time, then for its single elements.
// The number of pieces is a constant, so there is no branch between pieces. Single elements, and
// vectors in rows of several runs, are rare, so they are visited two at a time.
template <int kMost, class T, class Lanes, class Visit>
CS_DEVICE void for_each_piece(const Segment<T>& segment, std::uint32_t lane, Lanes lanes,
                              Visit visit) {
  constexpr std::uint32_t kVector = Segment<T>::kVector;
  const auto visit_all = [&](auto size, auto most, std::uint32_t all, auto offset_of) {
    CS_UNROLL(1)
    for (std::uint32_t piece = lane; piece < all; piece += most * lanes)
      with_steps<most>(all - piece, lanes, [&](auto number) {
        Pieces<T, size, number> pieces;
        CS_UNROLL(number)
        for (int n = 0; n < number; ++n)
          pieces.offsets[n] = offset_of(piece, n * lanes);
        visit(pieces);
      });
  };
  const std::integral_constant<int, 1> one;
  const std::integral_constant<int, 2> two;
  const std::integral_constant<int, kVector> vector;
  if (segment.inner == 0) // offsets differ by a constant
    visit_all(vector, std::integral_constant<int, kMost>{}, segment.vectors,
              [&](std::uint32_t piece, std::uint32_t later) {
                const std::int64_t offset = segment.offset(segment.head + piece * kVector);
                return offset + std::int64_t{16} * later;
              });
  else
    visit_all(vector, two, segment.vectors, [&](std::uint32_t piece, std::uint32_t later) {
      return segment.offset((piece + later) * kVector);
    });
  visit_all(one, two, segment.length - segment.vectors * kVector,
            [&](std::uint32_t piece, std::uint32_t later) {
              const std::uint32_t element = piece + later;
              return segment.offset(element < segment.head ? element
                                                           : element + segment.vectors * kVector);
            });
}

} // namespace cs_kernels::cuda
