// Compiled once per instruction set: CMake sets CS_INSTRUCTION_SET and the machine flags.
#include "row_kernels.h"

#include <type_traits>

#include "cs_kernels/combine.h"
#include "cs_kernels/random.h"
#include "cs_kernels/sketch.h"
#include "tuning.h"
#include "vector.h"

#define CS_STRINGIFY(x) #x
#define CS_NAME(x) CS_STRINGIFY(x)

namespace cs_kernels::cpu {
namespace {

CS_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

// Prefetches a line, to keep memory busy while a panel in cache is processed. `p` may be invalid.
CS_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Prefetches a line that is read only once, without displacing lines that are read again.
CS_INLINE void prefetch_once(const void* p) { __builtin_prefetch(p, 0, 0); }

// The number of elements in `bytes`.
template <class Element> constexpr std::int64_t elements_in(std::int64_t bytes) {
  return bytes / static_cast<std::int64_t>(sizeof(Element));
}

// Whether element i begins a cache line, in a run whose first element begins one.
template <class Element> CS_INLINE bool begins_line(std::int64_t i) {
  return i % elements_in<Element>(kLine) == 0;
}

// The number of elements before the first whole cache line; n if no element begins a line.
template <class Element> CS_INLINE std::int64_t before_line(const Element* out, std::int64_t n) {
  const std::int64_t bytes = -reinterpret_cast<std::intptr_t>(out) & (kLine - 1);
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(Element));
  return bytes % kSize == 0 ? smaller(n, bytes / kSize) : n;
}

template <class Type, int kRows>
void add_energies_of(const typename Type::Element* x, std::int64_t n, std::int64_t apart,
                     double* energies) {
  using Accumulator = typename Type::Accumulator;
  constexpr std::int64_t kLanes = Accumulator::kLanes;
  Doubles totals[kRows] = {};
  for (std::int64_t i = 0; i < n;) {
    const std::int64_t stop = i + smaller(n - i, Type::kBlock);
    Accumulator sums[kRows] = {};
    for (; i + kLanes <= stop; i += kLanes)
      unrolled<kRows>([&](int row) CS_LAMBDA_INLINE {
        const Accumulator v = Type::load(x + row * apart * n + i);
        sums[row].add_product(v, v);
      });
    if (i < stop) {
      unrolled<kRows>([&](int row) CS_LAMBDA_INLINE {
        const Accumulator v = load_tail<Type>(x + row * apart * n + i, stop - i);
        sums[row].add_product(v, v);
      });
      i = stop;
    }
    unrolled<kRows>([&](int row) CS_LAMBDA_INLINE { add_widened(totals[row], sums[row]); });
  }
  for (int row = 0; row < kRows; ++row)
    energies[row * apart] += totals[row].sum();
}

// Reads four rows at a time, a quarter of all rows apart, for four memory streams and four
// independent chains of additions.
template <class Type>
void add_energies(const void* data, std::int64_t n, std::int64_t rows, double* energies) {
  const auto* x = static_cast<const typename Type::Element*>(data);
  const std::int64_t quarter = rows / 4;
  for (std::int64_t row = 0; row < quarter; ++row)
    add_energies_of<Type, 4>(x + row * n, n, quarter, energies + row);
  for (std::int64_t row = 4 * quarter; row < rows; ++row)
    add_energies_of<Type, 1>(x + row * n, n, 1, energies + row);
}

template <class Type, int kCount>
void sum_and_dots_unrolled(const void* const* gradients, int reference, std::int64_t n, bool stream,
                           void* out, double* dots, NextRow next) {
  using Accumulator = typename Type::Accumulator;
  using Element = typename Type::Element;
  constexpr std::int64_t kLanes = Accumulator::kLanes;
  const Element* g[kCount];
  for (int j = 0; j < kCount; ++j)
    g[j] = static_cast<const Element*>(gradients[j]);
  const Element* r = g[reference];
  auto* update = static_cast<Element*>(out);

  const bool streams = stream && before_line(update, 1) == 0;
  const auto prefetch_line = [&](std::int64_t i) CS_LAMBDA_INLINE {
    const std::int64_t to = i + elements_in<Element>(kAhead);
    const auto line = [&](int j) CS_LAMBDA_INLINE {
      return to < n ? g[j] + to : static_cast<const Element*>(next.gradients[j]) + (to - n);
    };
    prefetch(line(reference));
    if (next.once)
      unrolled<kCount>([&](int j) CS_LAMBDA_INLINE { prefetch_once(line(j)); });
    else
      unrolled<kCount>([&](int j) CS_LAMBDA_INLINE { prefetch(line(j)); });
  };

  Doubles totals[kCount] = {};
  for (std::int64_t i = 0; i < n;) {
    const std::int64_t stop = i + smaller(n - i, Type::kBlock);
    Accumulator products[kCount] = {};
    const auto add = [&](const auto& load) CS_LAMBDA_INLINE {
      const Accumulator ref = load(r);
      Accumulator sum = load(g[0]);
      products[0].add_product(ref, sum);
      unrolled<kCount - 1>([&](int i) CS_LAMBDA_INLINE {
        const Accumulator v = load(g[i + 1]);
        products[i + 1].add_product(ref, v);
        sum += v;
      });
      return sum;
    };
    const auto load = [&](const Element* p) CS_LAMBDA_INLINE { return Type::load(p + i); };
    if (next.gradients == nullptr)
      for (; i + kLanes <= stop; i += kLanes)
        Type::store(update + i, add(load));
    for (; i + kLanes <= stop; i += kLanes) {
      if (begins_line<Element>(i))
        prefetch_line(i);
      const Accumulator sum = add(load);
      if (streams)
        Type::template store<true>(update + i, sum);
      else
        Type::store(update + i, sum);
    }
    if (const std::int64_t left = stop - i; left > 0) {
      store_tail<Type>(update + i,
                       add([i, left](const Element* p) { return load_tail<Type>(p + i, left); }),
                       left);
      i = stop;
    }
    unrolled<kCount>([&](int j) CS_LAMBDA_INLINE { add_widened(totals[j], products[j]); });
  }
  for (int j = 0; j < kCount; ++j)
    dots[j] += totals[j].sum();
}

// For any number of tasks: the reference gradient and the sum stay in L1 while all tasks are read.
template <class Type>
void sum_and_dots_panels(const void* const* gradients, int count, int reference, std::int64_t n,
                         void* out, double* dots) {
  using Accumulator = typename Type::Accumulator;
  using Element = typename Type::Element;
  constexpr std::int64_t kLanes = Accumulator::kLanes;
  constexpr std::int64_t kVectors = kPanel / kLanes;
  constexpr std::int64_t kBlockVectors = Type::kBlock > kPanel ? kVectors : Type::kBlock / kLanes;
  Accumulator ref[kVectors];
  Accumulator sum[kVectors];
  auto* update = static_cast<Element*>(out);
  for (std::int64_t start = 0; start < n; start += kPanel) {
    const std::int64_t size = smaller(kPanel, n - start);
    const std::int64_t vectors = (size + kLanes - 1) / kLanes;
    const auto load = [&](int j, std::int64_t k) {
      return load_some<Type>(static_cast<const Element*>(gradients[j]) + start + k * kLanes,
                             size - k * kLanes);
    };
    for (std::int64_t k = 0; k < vectors; ++k)
      ref[k] = load(reference, k);
    for (int j = 0; j < count; ++j)
      for (std::int64_t k = 0; k < vectors;) {
        Accumulator products = {};
        for (const std::int64_t stop = smaller(vectors, k + kBlockVectors); k < stop; ++k) {
          const Accumulator v = load(j, k);
          products.add_product(ref[k], v);
          if (j == 0)
            sum[k] = v;
          else
            sum[k] += v;
        }
        dots[j] += products.sum();
      }
    for (std::int64_t k = 0; k < vectors; ++k)
      store_some<Type>(update + start + k * kLanes, sum[k], size - k * kLanes);
  }
}

template <class Type>
void sum_and_dots(const void* const* gradients, int count, int reference, std::int64_t n,
                  bool stream, void* out, double* dots, NextRow next) {
  using Unrolled = void (*)(const void* const*, int, std::int64_t, bool, void*, double*, NextRow);
  static constexpr Unrolled unrolled_for[kUnrolledTasks] = {
      sum_and_dots_unrolled<Type, 1>, sum_and_dots_unrolled<Type, 2>,
      sum_and_dots_unrolled<Type, 3>, sum_and_dots_unrolled<Type, 4>,
      sum_and_dots_unrolled<Type, 5>, sum_and_dots_unrolled<Type, 6>,
      sum_and_dots_unrolled<Type, 7>, sum_and_dots_unrolled<Type, 8>};
  if (count > kUnrolledTasks)
    sum_and_dots_panels<Type>(gradients, count, reference, n, out, dots);
  else
    unrolled_for[count - 1](gradients, reference, n, stream, out, dots, next);
}

// Writes value(i, left) to out[i] and the following elements: all lanes, or only the first `left`.
template <class Type, class Value>
CS_INLINE void write(typename Type::Element* out, std::int64_t n, bool stream, const Value& value) {
  constexpr std::int64_t kLanes = Type::Accumulator::kLanes;
  const std::int64_t head = stream ? before_line(out, n) : n;
  std::int64_t i = 0;
  for (; i + kLanes <= head; i += kLanes)
    Type::store(out + i, value(i, kLanes));
  if (i < head)
    store_tail<Type>(out + i, value(i, head - i), head - i);
  for (i = head; i + kLanes <= n; i += kLanes)
    Type::template store<true>(out + i, value(i, kLanes));
  if (i < n)
    store_tail<Type>(out + i, value(i, n - i), n - i);
}

template <class Type, int kCount>
void combine_unrolled(const void* const* gradients, const double* weights, std::int64_t n,
                      bool stream, void* out) {
  using Accumulator = typename Type::Accumulator;
  using Element = typename Type::Element;
  const Element* g[kCount];
  typename Accumulator::Lane w[kCount];
  for (int j = 0; j < kCount; ++j) {
    g[j] = static_cast<const Element*>(gradients[j]);
    w[j] = static_cast<typename Accumulator::Lane>(weights[j]);
  }
  write<Type>(static_cast<Element*>(out), n, stream,
              [&](std::int64_t i, std::int64_t left) CS_LAMBDA_INLINE {
                Accumulator sum = {};
                unrolled<kCount>([&](int j) CS_LAMBDA_INLINE {
                  sum.add_product(w[j], load_some<Type>(g[j] + i, left));
                });
                return sum;
              });
}

// For any number of tasks: the sum stays in L1 while all tasks are read.
template <class Type>
void combine_panels(const void* const* gradients, const double* weights, int count, int guide,
                    std::int64_t n, bool stream, void* out) {
  using Accumulator = typename Type::Accumulator;
  using Element = typename Type::Element;
  constexpr std::int64_t kLanes = Accumulator::kLanes;
  auto* update = static_cast<Element*>(out);
  const std::int64_t head = stream ? before_line(update, n) : n;
  std::int64_t size = 0;
  for (std::int64_t start = 0; start < n; start += size) {
    size = smaller(kPanel, (start < head ? head : n) - start);
    Accumulator sum[kPanel / kLanes] = {};
    for (int j = 0; j < count; ++j) {
      const auto w = static_cast<typename Accumulator::Lane>(weights[j]);
      const auto* g = static_cast<const Element*>(gradients[j]) + start;
      for (std::int64_t k = 0; k * kLanes < size; ++k) {
        prefetch(g + k * kLanes + kPanel);
        sum[k].add_product(w, load_some<Type>(g + k * kLanes, size - k * kLanes));
      }
    }
    if (guide >= 0) {
      const auto* g = static_cast<const Element*>(gradients[guide]) + start;
      for (std::int64_t k = 0; k * kLanes < size; ++k)
        sum[k].take_signs(load_some<Type>(g + k * kLanes, size - k * kLanes));
    }
    for (std::int64_t k = 0; k * kLanes < size; ++k)
      if (start >= head && (k + 1) * kLanes <= size)
        Type::template store<true>(update + start + k * kLanes, sum[k]);
      else
        store_some<Type>(update + start + k * kLanes, sum[k], size - k * kLanes);
  }
}

template <class Type>
void combine(const void* const* gradients, const double* weights, int count, int guide,
             std::int64_t n, bool stream, void* out) {
  using Unrolled = void (*)(const void* const*, const double*, std::int64_t, bool, void*);
  static constexpr Unrolled unrolled_for[kUnrolledTasks] = {
      combine_unrolled<Type, 1>, combine_unrolled<Type, 2>, combine_unrolled<Type, 3>,
      combine_unrolled<Type, 4>, combine_unrolled<Type, 5>, combine_unrolled<Type, 6>,
      combine_unrolled<Type, 7>, combine_unrolled<Type, 8>};
  if (count > kUnrolledTasks || guide >= 0)
    combine_panels<Type>(gradients, weights, count, guide, n, stream, out);
  else
    unrolled_for[count - 1](gradients, weights, n, stream, out);
}

// Rows per tile of products; all sums of a tile fit in registers.
constexpr int kTile = kRegisterBytes == 64 ? 4 : 2;

// totals[i][j] += <a_i, b_j>; with kDiagonal, only for j <= i.
template <bool kDiagonal, class V>
CS_INLINE void products_of_tiles(const V* a, const V* b, std::int64_t stride, std::int64_t vectors,
                                 Doubles (*totals)[kTile]) {
  V sums[kTile][kTile] = {};
  const auto each_pair = [](const auto& f) CS_LAMBDA_INLINE {
    unrolled<kTile>([&](int i) CS_LAMBDA_INLINE {
      unrolled<kTile>([&](int j) CS_LAMBDA_INLINE {
        if (!kDiagonal || j <= i)
          f(i, j);
      });
    });
  };
  for (std::int64_t k = 0; k < vectors; ++k)
    each_pair([&](int i, int j) CS_LAMBDA_INLINE {
      sums[i][j].add_product(a[i * stride + k], b[j * stride + k]);
    });
  each_pair([&](int i, int j) CS_LAMBDA_INLINE { add_widened(totals[i][j], sums[i][j]); });
}

// For one panel of elements at a time, converts all gradients to the accumulator's type once, in
// L1, then multiplies them tile by tile. The last tile is padded with rows of zeros.
template <class Type>
void products(const void* const* gradients, int count, std::int64_t n, double* out) {
  using Accumulator = typename Type::Accumulator;
  constexpr std::int64_t kLanes = Accumulator::kLanes;
  constexpr std::int64_t kVectors = kProductPanel / kLanes;
  static_assert(Type::kBlock >= kProductPanel);
  constexpr std::int64_t kTiles = kMaxTasks / kTile;
  const std::int64_t tiles = (count + kTile - 1) / kTile;
  Accumulator panel[kTiles * kTile * kVectors];
  Doubles totals[kTiles * (kTiles + 1) / 2][kTile][kTile];
  std::memset(panel, 0, sizeof panel[0] * static_cast<std::size_t>(tiles * kTile * kVectors));
  std::memset(totals, 0, sizeof totals[0] * static_cast<std::size_t>(tiles * (tiles + 1) / 2));
  for (std::int64_t start = 0; start < n; start += kProductPanel) {
    const std::int64_t size = smaller(kProductPanel, n - start);
    const std::int64_t vectors = (size + kLanes - 1) / kLanes;
    for (int j = 0; j < count; ++j) {
      const auto* g = static_cast<const typename Type::Element*>(gradients[j]) + start;
      for (std::int64_t k = 0; k < vectors; ++k) {
        prefetch(g + k * kLanes + 2 * kProductPanel);
        panel[j * kVectors + k] = load_some<Type>(g + k * kLanes, size - k * kLanes);
      }
    }
    const auto tile = [&](std::int64_t i) { return &panel[i * kTile * kVectors]; };
    for (std::int64_t a = 0; a < tiles; ++a) {
      Doubles(*row)[kTile][kTile] = &totals[a * (a + 1) / 2];
      for (std::int64_t b = 0; b < a; ++b)
        products_of_tiles<false>(tile(a), tile(b), kVectors, vectors, row[b]);
      products_of_tiles<true>(tile(a), tile(a), kVectors, vectors, row[a]);
    }
  }
  for (int i = 0; i < count; ++i)
    for (int j = 0; j <= i; ++j) {
      const int a = i / kTile;
      out[i * (i + 1) / 2 + j] = totals[a * (a + 1) / 2 + j / kTile][i % kTile][j % kTile].sum();
    }
}

// Writes uniform numbers for n elements, n < 2^32.
CS_INLINE void fill_uniform(std::uint64_t key, std::int64_t index, std::int64_t n, float* out) {
  const auto first = static_cast<std::uint64_t>(index);
  const std::uint64_t to_next = (std::uint64_t{1} << 32) - (first & 0xffffffffu);
  const std::int64_t same =
      smaller(n, static_cast<std::int64_t>(to_next)); // elements whose indices share the high half
  const RandomWords numbers(key, first);
  for (std::int64_t i = 0; i < same; ++i)
    out[i] = numbers.at(static_cast<std::uint32_t>(first + static_cast<std::uint64_t>(i)));
  const RandomWords next(key, first + to_next);
  for (std::int64_t i = same; i < n; ++i)
    out[i] = next.at(static_cast<std::uint32_t>(first + static_cast<std::uint64_t>(i)));
}

// Computes the sum of each sign and chooses one of the two, in a panel that stays in L1. Adding
// zero times the whole sum gives NaN if any gradient is infinite or NaN.
template <class Type, bool kLeaky>
void drop_signs_of(const void* const* gradients, const double* leaks, int count, std::uint64_t key,
                   std::int64_t index, std::int64_t n, bool stream, void* out) {
  using Accumulator = typename Type::Accumulator;
  using Element = typename Type::Element;
  using Lane = typename Accumulator::Lane;
  using Uniform = std::conditional_t<std::is_same_v<Accumulator, Floats>, Float32InFloat, Float32>;
  constexpr std::int64_t kLanes = Accumulator::kLanes;
  constexpr std::int64_t kVectors = kPanel / kLanes;
  auto* update = static_cast<Element*>(out);
  const std::int64_t head = stream ? before_line(update, n) : n;
  std::int64_t size = 0;
  for (std::int64_t start = 0; start < n; start += size) {
    size = smaller(kPanel, (start < head ? head : n) - start);
    const std::int64_t vectors = (size + kLanes - 1) / kLanes;
    Accumulator positive[kVectors] = {};
    Accumulator negative[kVectors] = {};
    Accumulator kept_positive[kLeaky ? kVectors : 1] = {};
    Accumulator kept_negative[kLeaky ? kVectors : 1] = {};
    Accumulator leaked[kLeaky ? kVectors : 1] = {};
    for (int j = 0; j < count; ++j) {
      const auto* g = static_cast<const Element*>(gradients[j]) + start;
      const Lane leak = static_cast<Lane>(leaks[j]);
      for (std::int64_t k = 0; k < vectors; ++k) {
        prefetch(g + k * kLanes + kPanel);
        const Accumulator v = load_some<Type>(g + k * kLanes, size - k * kLanes);
        const Accumulator above = v.positive();
        const Accumulator below = v.not_positive();
        positive[k] += above;
        negative[k] += below;
        if constexpr (kLeaky) {
          kept_positive[k].add_product(1 - leak, above);
          kept_negative[k].add_product(1 - leak, below);
          leaked[k].add_product(leak, v);
        }
      }
    }
    float uniform[kPanel] = {};
    fill_uniform(key, index + start, size, uniform);
    for (std::int64_t k = 0; k < vectors; ++k) {
      const Accumulator u = Uniform::load(uniform + k * kLanes);
      Accumulator chosen = kLeaky ? Accumulator::share_exceeds(u, positive[k], negative[k],
                                                               kept_positive[k], kept_negative[k])
                                  : Accumulator::share_exceeds(u, positive[k], negative[k],
                                                               positive[k], negative[k]);
      if constexpr (kLeaky)
        chosen += leaked[k];
      positive[k] += negative[k];
      chosen.add_product(Lane{0}, positive[k]);
      if (start >= head && (k + 1) * kLanes <= size)
        Type::template store<true>(update + start + k * kLanes, chosen);
      else
        store_some<Type>(update + start + k * kLanes, chosen, size - k * kLanes);
    }
  }
}

template <class Type>
void drop_signs(const void* const* gradients, const double* leaks, int count, std::uint64_t key,
                std::int64_t index, std::int64_t n, bool stream, void* out) {
  bool leaky = false;
  for (int j = 0; j < count; ++j)
    leaky = leaky || leaks[j] != 0;
  (leaky ? drop_signs_of<Type, true> : drop_signs_of<Type, false>)(gradients, leaks, count, key,
                                                                   index, n, stream, out);
}

template <class Type>
void add_scaled(const void* sum, const void* x, double scale, std::int64_t n, bool stream,
                void* out) {
  using Accumulator = typename Type::Accumulator;
  using Element = typename Type::Element;
  const auto* s = static_cast<const Element*>(sum);
  const auto* g = static_cast<const Element*>(x);
  const auto a = static_cast<typename Accumulator::Lane>(scale);
  auto* update = static_cast<Element*>(out);
  // With 16-bit elements, lines are prefetched, because conversions fill the out-of-order window
  // before the processor reaches the next lines.
  constexpr bool kNarrow = sizeof(Element) == 2;
  if (scale != 0)
    write<Type>(update, n, stream, [&](std::int64_t i, std::int64_t left) CS_LAMBDA_INLINE {
      if ((stream || kNarrow) && begins_line<Element>(i)) {
        prefetch(s + i + elements_in<Element>(kAhead));
        prefetch(g + i + elements_in<Element>(kAhead));
      }
      Accumulator v = load_some<Type>(s + i, left);
      v.add_product(a, load_some<Type>(g + i, left));
      return v;
    });
  else
    write<Type>(update, n, stream, [&](std::int64_t i, std::int64_t left) CS_LAMBDA_INLINE {
      return load_some<Type>(s + i, left);
    });
}

// Whether a weight may be rounded to float. Near or beyond a limit of float's range, the weight may
// still have a product well within the range, which is then computed in double.
CS_INLINE bool fits_float(double weight) {
  const double size = weight < 0 ? -weight : weight;
  return size <= 0x1p100 && (size >= 0x1p-100 || size == 0);
}

// The type for products with a weight that fits float.
template <class Type>
using InFloat = std::conditional_t<std::is_same_v<Type, Float32>, Float32InFloat, Type>;

void add_scaled_float32(const void* sum, const void* x, double scale, std::int64_t n, bool stream,
                        void* out) {
  if (fits_float(scale))
    add_scaled<Float32InFloat>(sum, x, scale, n, stream, out);
  else
    add_scaled<Float32>(sum, x, scale, n, stream, out);
}

// Loads Floats::kLanes elements, half as many as a word has signs.
template <class Type> CS_INLINE Floats load_floats(const typename Type::Element* p) {
  if constexpr (sizeof(*p) == 8) {
    float lanes[Floats::kLanes];
    for (int i = 0; i < Floats::kLanes; ++i)
      lanes[i] = static_cast<float>(p[i]);
    return Floats::load(lanes);
  } else if constexpr (sizeof(*p) == 4) {
    return Floats::load(p);
  } else {
    return Type::load(p);
  }
}

// Whether runs, times a weight, are also written to updates, or added to them.
enum class Updating { kNot, kWrites, kAdds };

// Writes or adds weight * x, for the elements of half a sign word; `update` may be `x`.
template <class Type, Updating kUpdating>
CS_INLINE void weigh(const typename Type::Element* x, typename Type::Accumulator::Lane weight,
                     typename Type::Element* update) {
  using Accumulator = typename Type::Accumulator;
  unrolled<Floats::kLanes / Accumulator::kLanes>([&](std::ptrdiff_t i) CS_LAMBDA_INLINE {
    const std::ptrdiff_t first = i * Accumulator::kLanes;
    Accumulator v{};
    if constexpr (kUpdating == Updating::kAdds)
      v = Type::load(update + first);
    v.add_product(weight, Type::load(x + first));
    Type::store(update + first, v);
  });
}

constexpr int kWords = 16; // the words whose signs are computed together

// Adds one word of several runs to `out`, and makes its updates; its signs are signs[run][k].
template <class Type, int kRuns, Updating kUpdating>
CS_INLINE void add_word(const typename Type::Element* const* x, typename Type::Element* const* to,
                        typename InFloat<Type>::Accumulator::Lane weight,
                        const std::uint32_t (*signs)[kWords], int k, float* out) {
  unrolled<2>([&](std::ptrdiff_t half) CS_LAMBDA_INLINE {
    const std::ptrdiff_t first = half * Floats::kLanes;
    Floats sum = Floats::load(out + first);
    unrolled<kRuns>([&](int run) CS_LAMBDA_INLINE {
      Floats v = load_floats<Type>(x[run] + first);
      if constexpr (kUpdating != Updating::kNot)
        weigh<InFloat<Type>, kUpdating>(x[run] + first, weight, to[run] + first);
      v.negate(signs[run][k] >> first);
      sum += v;
    });
    sum.store(out + first);
  });
}

// Adds kRuns runs of whole words, with the sums in registers, and makes their updates.
template <class Type, int kRuns, Updating kUpdating>
void add_words(const void* const* x, void* const* places, double weight, const SignWords* words,
               const std::int64_t* index, std::int64_t n, float* out) {
  using Element = typename Type::Element;
  const auto w = static_cast<typename InFloat<Type>::Accumulator::Lane>(weight);
  const Element* from[kRuns];
  Element* to[kRuns];
  std::uint32_t next[kRuns];
  for (int run = 0; run < kRuns; ++run) {
    from[run] = static_cast<const Element*>(x[run]);
    to[run] = kUpdating == Updating::kNot ? nullptr : static_cast<Element*>(places[run]);
    next[run] = words[run].bits(static_cast<std::uint32_t>(index[run] / kSignWord));
  }
  std::int64_t i = 0;
  while (i < n) {
    // A run may begin anywhere in a word, so the signs of 32 of its elements may lie in two words.
    std::uint32_t signs[kRuns][kWords];
    for (int run = 0; run < kRuns; ++run) {
      const auto first = static_cast<std::uint32_t>((index[run] + i) / kSignWord);
      const auto shift = static_cast<std::uint32_t>(index[run] % kSignWord);
      std::uint32_t bits[kWords + 1];
      bits[0] = next[run];
      for (std::uint32_t k = 1; k <= kWords; ++k)
        bits[k] = words[run].bits(first + k);
      next[run] = bits[kWords];
      for (int k = 0; k < kWords; ++k)
        signs[run][k] = bits[k] >> shift | bits[k + 1] << 1 << (kSignWord - 1 - shift);
    }
    const std::int64_t last = smaller(n, i + kWords * kSignWord);
    for (int k = 0; i < last; i += kSignWord, ++k) {
      const Element* elements[kRuns];
      Element* updates[kRuns];
      unrolled<kRuns>([&](int run) CS_LAMBDA_INLINE {
        elements[run] = from[run] + i;
        updates[run] = kUpdating == Updating::kNot ? nullptr : to[run] + i;
        // Conversions fill the out-of-order window, as in add_scaled. With updates that add, a
        // prefetch gains nothing.
        if constexpr (sizeof(Element) == 2 && kUpdating != Updating::kAdds)
          prefetch(elements[run] + elements_in<Element>(kAhead));
      });
      add_word<Type, kRuns, kUpdating>(elements, updates, w, signs, k, out + i);
    }
  }
}

// The same for runs of any length: the last elements are padded with zeros to a word.
template <class Type, int kRuns, Updating kUpdating>
void add_signed_runs(const void* const* x, void* const* places, double weight,
                     const SignWords* words, const std::int64_t* index, std::int64_t n,
                     float* out) {
  using Element = typename Type::Element;
  constexpr auto kAddWords = add_words<Type, kRuns, kUpdating>;
  const std::int64_t whole = n - n % kSignWord;
  kAddWords(x, places, weight, words, index, whole, out);
  if (whole == n)
    return;
  const auto bytes = static_cast<std::size_t>(n - whole) * sizeof(Element);
  const auto bytes_of_sums = static_cast<std::size_t>(n - whole) * sizeof *out;
  Element padded[kRuns][kSignWord] = {};
  Element padded_updates[kRuns][kSignWord] = {};
  float sums[kSignWord] = {};
  const void* elements[kRuns];
  void* updates[kRuns];
  std::int64_t indices[kRuns];
  for (int run = 0; run < kRuns; ++run) {
    std::memcpy(padded[run], static_cast<const Element*>(x[run]) + whole, bytes);
    if constexpr (kUpdating == Updating::kAdds)
      std::memcpy(padded_updates[run], static_cast<Element*>(places[run]) + whole, bytes);
    elements[run] = padded[run];
    updates[run] = padded_updates[run];
    indices[run] = index[run] + whole;
  }
  std::memcpy(sums, out + whole, bytes_of_sums);
  kAddWords(elements, updates, weight, words, indices, kSignWord, sums);
  std::memcpy(out + whole, sums, bytes_of_sums);
  if constexpr (kUpdating != Updating::kNot)
    for (int run = 0; run < kRuns; ++run)
      std::memcpy(static_cast<Element*>(places[run]) + whole, padded_updates[run], bytes);
}

template <class Type, Updating kUpdating>
void add_signed_as(const void* const* x, void* const* places, double weight, int runs,
                   const SignWords* words, const std::int64_t* index, std::int64_t n, float* out) {
  if (runs == kSignedRuns)
    return add_signed_runs<Type, kSignedRuns, kUpdating>(x, places, weight, words, index, n, out);
  for (int run = 0; run < runs; ++run) {
    void* const* place = kUpdating == Updating::kNot ? nullptr : places + run;
    add_signed_runs<Type, 1, kUpdating>(x + run, place, weight, words + run, index + run, n, out);
  }
}

template <class Type>
void add_signed(const void* const* x, int runs, std::uint64_t key, const std::int64_t* index,
                std::int64_t n, float* out, const RunUpdates& updates) {
  SignWords words[kSignedRuns] = {SignWords(0), SignWords(0), SignWords(0), SignWords(0)};
  for (int run = 0; run < runs; ++run)
    words[run] = SignWords(key, static_cast<std::uint64_t>(index[run] / kSignWord));
  const double weight = updates.weight;
  void* const* places = updates.places;
  // The products of a weight that does not fit float are computed apart.
  const bool in_double = std::is_same_v<Type, Float32> && !fits_float(weight);
  const auto add = places == nullptr || in_double ? add_signed_as<Type, Updating::kNot>
                   : updates.add                  ? add_signed_as<Type, Updating::kAdds>
                                                  : add_signed_as<Type, Updating::kWrites>;
  add(x, places, weight, runs, words, index, n, out);
  for (int run = 0; run < runs && places != nullptr && in_double; ++run) {
    if (updates.add)
      add_scaled<Type>(places[run], x[run], weight, n, false, places[run]);
    else
      combine_unrolled<Type, 1>(&x[run], &weight, n, false, places[run]);
  }
}

template <class Type, auto kAddScaled = add_scaled<Type>>
constexpr RowKernels kernels = {add_energies<Type>, sum_and_dots<Type>, combine<Type>,
                                products<Type>,     drop_signs<Type>,   kAddScaled,
                                add_signed<Type>};

} // namespace

extern const InstructionSet CS_INSTRUCTION_SET;
const InstructionSet CS_INSTRUCTION_SET = {
    CS_NAME(CS_INSTRUCTION_SET),
    {kernels<Float32, add_scaled_float32>, kernels<Float64>, kernels<BFloat16>, kernels<Float16>}};

} // namespace cs_kernels::cpu
