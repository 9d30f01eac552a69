// Compiled once for each instruction set: CMake sets CS_INSTRUCTION_SET and the machine flags.
#include "row_kernels.h"

#include "vector.h"

#define CS_STRINGIFY(x) #x
#define CS_NAME(x) CS_STRINGIFY(x)

namespace cs_kernels::cpu {
namespace {

constexpr int kUnrolledTasks = 8;    // above, one task at a time over a panel that stays in L1
constexpr std::int64_t kPanel = 512; // elements

CS_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

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

// Four rows at a time, a quarter of all apart: as many long streams from memory, and as many
// additions that need not wait for one another.
template <class Type>
void add_energies(const void* data, std::int64_t n, std::int64_t rows, double* energies) {
  const auto* x = static_cast<const typename Type::Element*>(data);
  const std::int64_t quarter = rows / 4;
  for (std::int64_t row = 0; row < quarter; ++row)
    add_energies_of<Type, 4>(x + row * n, n, quarter, energies + row);
  for (std::int64_t row = 4 * quarter; row < rows; ++row)
    add_energies_of<Type, 1>(x + row * n, n, 1, energies + row);
}

template <class Type, int kCount, bool kDots>
void sum_and_dots_unrolled(const void* const* gradients, int reference, std::int64_t n, void* out,
                           double* dots) {
  using Accumulator = typename Type::Accumulator;
  using Element = typename Type::Element;
  constexpr std::int64_t kLanes = Accumulator::kLanes;
  const Element* g[kCount];
  for (int j = 0; j < kCount; ++j)
    g[j] = static_cast<const Element*>(gradients[j]);
  const Element* r = g[kDots ? reference : 0];
  auto* update = static_cast<Element*>(out);

  Doubles totals[kCount] = {};
  for (std::int64_t i = 0; i < n;) {
    const std::int64_t stop = i + smaller(n - i, Type::kBlock);
    Accumulator products[kCount] = {};
    const auto add = [&](const auto& load) CS_LAMBDA_INLINE {
      const Accumulator ref = load(r);
      Accumulator sum = load(g[0]);
      if constexpr (kDots)
        products[0].add_product(ref, sum);
      unrolled<kCount - 1>([&](int i) CS_LAMBDA_INLINE {
        const Accumulator v = load(g[i + 1]);
        if constexpr (kDots)
          products[i + 1].add_product(ref, v);
        sum += v;
      });
      return sum;
    };
    for (; i + kLanes <= stop; i += kLanes)
      Type::store(update + i,
                  add([i](const Element* p) CS_LAMBDA_INLINE { return Type::load(p + i); }));
    if (const std::int64_t left = stop - i; left > 0) {
      store_tail<Type>(update + i,
                       add([i, left](const Element* p) { return load_tail<Type>(p + i, left); }),
                       left);
      i = stop;
    }
    if constexpr (kDots)
      unrolled<kCount>([&](int j) CS_LAMBDA_INLINE { add_widened(totals[j], products[j]); });
  }
  if constexpr (kDots)
    for (int j = 0; j < kCount; ++j)
      dots[j] += totals[j].sum();
}

// Any number of tasks: the reference and the sum stay in L1 while the tasks pass by.
template <class Type>
void sum_and_dots_panels(const void* const* gradients, int count, int reference, std::int64_t n,
                         void* out, double* dots) {
  using Accumulator = typename Type::Accumulator;
  using Element = typename Type::Element;
  constexpr std::int64_t kLanes = Accumulator::kLanes;
  constexpr std::int64_t kVectors = kPanel / kLanes;
  constexpr std::int64_t kBlockVectors = Type::kBlock > kPanel ? kVectors : Type::kBlock / kLanes;
  Accumulator ref[kVectors] = {};
  Accumulator sum[kVectors];
  auto* update = static_cast<Element*>(out);
  for (std::int64_t start = 0; start < n; start += kPanel) {
    const std::int64_t size = smaller(kPanel, n - start);
    const std::int64_t vectors = (size + kLanes - 1) / kLanes;
    const auto load = [&](int j, std::int64_t k) {
      const auto* p = static_cast<const Element*>(gradients[j]) + start + k * kLanes;
      const std::int64_t left = size - k * kLanes;
      return left >= kLanes ? Type::load(p) : load_tail<Type>(p, left);
    };
    if (reference >= 0)
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
        if (reference >= 0)
          dots[j] += products.sum();
      }
    for (std::int64_t k = 0; k < vectors; ++k) {
      Element* p = update + start + k * kLanes;
      const std::int64_t left = size - k * kLanes;
      if (left >= kLanes)
        Type::store(p, sum[k]);
      else
        store_tail<Type>(p, sum[k], left);
    }
  }
}

template <class Type>
void sum_and_dots(const void* const* gradients, int count, int reference, std::int64_t n, void* out,
                  double* dots) {
  using Unrolled = void (*)(const void* const*, int, std::int64_t, void*, double*);
  static constexpr Unrolled with_dots[kUnrolledTasks] = {
      sum_and_dots_unrolled<Type, 1, true>, sum_and_dots_unrolled<Type, 2, true>,
      sum_and_dots_unrolled<Type, 3, true>, sum_and_dots_unrolled<Type, 4, true>,
      sum_and_dots_unrolled<Type, 5, true>, sum_and_dots_unrolled<Type, 6, true>,
      sum_and_dots_unrolled<Type, 7, true>, sum_and_dots_unrolled<Type, 8, true>};
  static constexpr Unrolled sum_alone[kUnrolledTasks] = {
      sum_and_dots_unrolled<Type, 1, false>, sum_and_dots_unrolled<Type, 2, false>,
      sum_and_dots_unrolled<Type, 3, false>, sum_and_dots_unrolled<Type, 4, false>,
      sum_and_dots_unrolled<Type, 5, false>, sum_and_dots_unrolled<Type, 6, false>,
      sum_and_dots_unrolled<Type, 7, false>, sum_and_dots_unrolled<Type, 8, false>};
  if (count > kUnrolledTasks)
    sum_and_dots_panels<Type>(gradients, count, reference, n, out, dots);
  else
    (reference >= 0 ? with_dots : sum_alone)[count - 1](gradients, reference, n, out, dots);
}

template <class Type> void add_scaled(void* out, const void* data, double scale, std::int64_t n) {
  using Accumulator = typename Type::Accumulator;
  constexpr std::int64_t kLanes = Accumulator::kLanes;
  const auto* x = static_cast<const typename Type::Element*>(data);
  auto* update = static_cast<typename Type::Element*>(out);
  const auto a = static_cast<typename Accumulator::Lane>(scale);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Accumulator sum = Type::load(update + i);
    sum.add_product(a, Type::load(x + i));
    Type::store(update + i, sum);
  }
  if (i < n) {
    Accumulator sum = load_tail<Type>(update + i, n - i);
    sum.add_product(a, load_tail<Type>(x + i, n - i));
    store_tail<Type>(update + i, sum, n - i);
  }
}

// A scale that float cannot hold belongs to a reference many orders away from its rivals: the
// product is representable, and is formed in double.
void add_scaled_float32(void* out, const void* data, double scale, std::int64_t n) {
  const double size = scale < 0 ? -scale : scale;
  if (size > 0x1p100 || size < 0x1p-100)
    add_scaled<Float32>(out, data, scale, n);
  else
    add_scaled<Float32InFloat>(out, data, scale, n);
}

} // namespace

extern const InstructionSet CS_INSTRUCTION_SET;
const InstructionSet CS_INSTRUCTION_SET = {
    CS_NAME(CS_INSTRUCTION_SET),
    {{add_energies<Float32>, sum_and_dots<Float32>, add_scaled_float32},
     {add_energies<Float64>, sum_and_dots<Float64>, add_scaled<Float64>},
     {add_energies<BFloat16>, sum_and_dots<BFloat16>, add_scaled<BFloat16>},
     {add_energies<Float16>, sum_and_dots<Float16>, add_scaled<Float16>}}};

} // namespace cs_kernels::cpu
