#include "cs_kernels/cuda/combine.h"

#include "block.h"
#include "cs_kernels/random.h"
#include "types.h"

namespace cs_kernels::cuda {
namespace {

// Elements of a block's pass, and of a tile.
template <class T> constexpr std::int64_t kStep = std::int64_t{kThreads} * Vector<T>::kSize;
template <class T> constexpr std::int64_t kTile = kGradientVectors * kStep<T>;

// The item of a block.
template <class T> struct Piece {
  const PlannedGradient tensor; // a copy: stores might alias the table
  const std::int64_t* call;     // its row of the table of addresses
  std::int64_t item;
  bool aligned;
  Range range;

  CS_DEVICE explicit Piece(const GradientLaunch& launch)
      : Piece(launch, block_index(), launch.items[block_index()]) {}

  CS_DEVICE const T* gradient(int task) const {
    return pointer<const T>(load(call + kGradientGradients + task));
  }
  CS_DEVICE T* update() const { return pointer<T>(load(call + kGradientUpdate)); }
  // Whether the 16 bytes from an element on can be read by one access.
  CS_DEVICE bool whole(std::int64_t element) const {
    return aligned && element + Vector<T>::kSize <= tensor.size;
  }

private:
  CS_DEVICE Piece(const GradientLaunch& launch, std::int64_t number, const GradientItem& of)
      : tensor(launch.tensors[of.tensor]),
        call(launch.table +
             static_cast<std::int64_t>(of.tensor) * (kGradientGradients + launch.tasks)),
        item(number), aligned(load(call + kGradientAligned) != 0),
        range(item_range(of.index, tensor.tiles * kTile<T>, tensor.size)) {}
};

// The index of a pair j <= i.
CS_DEVICE constexpr int pair_of(int i, int j) { return i * (i + 1) / 2 + j; }

// Adds up the products of a group's items, [pair, item] or, for many tasks, [item, pair].
template <int kTasks>
CS_DEVICE void add_up(const GramianLaunch& launch, const PlannedGradient& tensor) {
  const int tasks = launch.gradients.tasks;
  const int pairs = pair_of(tasks, 0);
  const double* products = launch.products + tensor.first_item * pairs;
  double* out = launch.gramian + tensor.group * tasks * tasks;
  constexpr int kTeam = kTasks > 0 ? kWarp : 1; // threads that add up one pair
  const int lane = thread_index() % kTeam;
  int i = 0;
  int first = 0; // pair_of(i, 0)
  for (int base = 0; base < pairs; base += kThreads / kTeam) {
    const int pair = base + thread_index() / kTeam;
    double sum = 0;
    if (pair < pairs)
      for (std::int64_t n = lane; n < tensor.group_items; n += kTeam)
        sum += products[kTasks > 0 ? pair * tensor.group_items + n : n * pairs + pair];
    sum = warp_sum(sum, kTeam);
    if (pair >= pairs || lane != 0)
      continue;
    while (first + i < pair)
      first += ++i;
    const int j = pair - first;
    out[i * tasks + j] = sum;
    out[j * tasks + i] = sum;
  }
}

// The products of an item's gradients, for up to 8 tasks: in registers, then over the block.
template <class T, int kTasks>
CS_DEVICE void multiply(const Piece<T>& piece, double* out, std::int64_t stride,
                        double* workspace) {
  constexpr int kVector = Vector<T>::kSize;
  const T* gradients[kTasks];
  CS_UNROLL(kTasks)
  for (int j = 0; j < kTasks; ++j)
    gradients[j] = piece.gradient(j);
  double products[pair_of(kTasks, 0)] = {};
  const int offset = thread_index() * kVector;
  for (std::int64_t element = piece.range.begin + offset; element < piece.range.end;
       element += kStep<T>) {
    Vector<T> g[kTasks];
    const bool whole = piece.whole(element);
    CS_UNROLL(kTasks)
    for (int j = 0; j < kTasks; ++j) {
      if (gradients[j] == nullptr)
        g[j] = {};
      else if (whole)
        g[j] = as_vector<T>(load(words_at(gradients[j] + element)));
      else
        for (int e = 0; e < kVector; ++e)
          g[j].x[e] = element + e < piece.range.end ? load(gradients[j] + element + e) : T{};
    }
    CS_UNROLL(kTasks)
    for (int i = 0; i < kTasks; ++i)
      CS_UNROLL(kTasks)
    for (int j = 0; j <= i; ++j) {
      Wide<T> dot = 0;
      for (int e = 0; e < kVector; ++e)
        dot += widened(g[i].x[e]) * widened(g[j].x[e]);
      products[pair_of(i, j)] += dot;
    }
  }
  // [pair, warp]
  CS_UNROLL(kTasks * (kTasks + 1) / 2)
  for (int pair = 0; pair < pair_of(kTasks, 0); ++pair) {
    const double sum = warp_sum(products[pair], kWarp);
    if (thread_index() % kWarp == 0)
      workspace[pair * kWarps + thread_index() / kWarp] = sum;
  }
  synchronize_block();
  for (int pair = thread_index(); pair < pair_of(kTasks, 0); pair += kThreads) {
    double sum = 0;
    for (int warp = 0; warp < kWarps; ++warp)
      sum += workspace[pair * kWarps + warp];
    out[pair * stride] = sum;
  }
}

// For any number of tasks: a tile of all gradients in shared memory, a thread for each pair.
template <class T>
CS_DEVICE void multiply_many(const Piece<T>& piece, int tasks, double* out, double* workspace) {
  constexpr int kWidth = kGeneralColumns + 1; // columns in different banks
  const int pairs = pair_of(tasks, 0);
  double* products = workspace;
  double* tile = products + pairs;
  for (int pair = thread_index(); pair < pairs; pair += kThreads)
    products[pair] = 0;
  for (std::int64_t start = piece.range.begin; start < piece.range.end; start += kGeneralColumns) {
    synchronize_block();
    for (int n = thread_index(); n < tasks * kGeneralColumns; n += kThreads) {
      const int j = n / kGeneralColumns;
      const int e = n % kGeneralColumns;
      const T* gradient = piece.gradient(j);
      const bool inside = gradient != nullptr && start + e < piece.range.end;
      tile[j * kWidth + e] = inside ? widened(load(gradient + start + e)) : 0;
    }
    synchronize_block();
    int i = 0;
    int first = 0; // pair_of(i, 0)
    for (int pair = thread_index(); pair < pairs; pair += kThreads) {
      while (first + i < pair)
        first += ++i;
      const int row_i = i * kWidth;
      const int row_j = (pair - first) * kWidth;
      double sum = 0;
      for (int e = 0; e < kGeneralColumns; ++e)
        sum += tile[row_i + e] * tile[row_j + e];
      products[pair] += sum;
    }
  }
  for (int pair = thread_index(); pair < pairs; pair += kThreads)
    out[pair] = products[pair];
}

// kTasks is 0 for the general kernel.
constexpr std::size_t gramian_bytes(int unrolled, int tasks) {
  const int pairs = tasks * (tasks + 1) / 2;
  const int numbers = unrolled > 0 ? pairs * kWarps : pairs + tasks * (kGeneralColumns + 1);
  return 16 + static_cast<std::size_t>(numbers) * sizeof(double);
}

// One item; the last one of a group adds up. Reads every gradient once.
template <class T, int kTasks>
CS_KERNEL(kThreads, gramian_blocks(kTasks))
gramian_kernel(GramianLaunch launch) {
  auto* last = reinterpret_cast<std::int32_t*>(shared_memory());
  auto* workspace = reinterpret_cast<double*>(shared_memory() + 16);
  const Piece<T> piece(launch.gradients);
  const PlannedGradient& tensor = piece.tensor;
  const int pairs = pair_of(launch.gradients.tasks, 0);
  double* of_group = launch.products + tensor.first_item * pairs;
  const std::int64_t index = piece.item - tensor.first_item;
  if constexpr (kTasks > 0)
    multiply<T, kTasks>(piece, of_group + index, tensor.group_items, workspace);
  else
    multiply_many(piece, launch.gradients.tasks, of_group + index * pairs, workspace);
  if (arrive(launch.counters + tensor.group, tensor.group_items, last))
    add_up<kTasks>(launch, tensor);
}

// Calls write(first element, whether a whole vector) for the vectors and last elements of an item.
template <class T, class Write> CS_DEVICE void for_each_vector(const Piece<T>& piece, Write write) {
  constexpr int kVector = Vector<T>::kSize;
  const int offset = thread_index() * kVector;
  for (std::int64_t element = piece.range.begin + offset; element < piece.range.end;
       element += kStep<T>) {
    if (piece.whole(element)) {
      write(element, std::true_type{});
      continue;
    }
    const std::int64_t stop =
        element + kVector < piece.range.end ? element + kVector : piece.range.end;
    CS_UNROLL(1)
    for (std::int64_t e = element; e < stop; ++e)
      write(e, std::false_type{});
  }
}

// Calls add(task, its elements) for every task with a gradient.
template <class T, int kSize, class Add>
CS_DEVICE void for_each_task(const Piece<T>& piece, int tasks, std::int64_t element, Add add) {
  CS_UNROLL(kTaskLoads)
  for (int j = 0; j < tasks; ++j) {
    const T* gradient = piece.gradient(j);
    if (gradient == nullptr)
      continue;
    Vector<T> g;
    if constexpr (kSize > 1)
      g = as_vector<T>(load(words_at(gradient + element)));
    else
      g.x[0] = load(gradient + element);
    add(j, g);
  }
}

template <class T> CS_KERNEL(kThreads, kSmallBlocks) combine_kernel(CombineLaunch launch) {
  const Piece<T> piece(launch.gradients);
  const int tasks = launch.gradients.tasks;
  const double* weights = launch.weights + piece.tensor.group * tasks;
  T* update = piece.update();
  for_each_vector(piece, [&](std::int64_t element, auto vectors) {
    constexpr int kSize = vectors ? Vector<T>::kSize : 1;
    Wide<T> total[kSize] = {};
    for_each_task<T, kSize>(piece, tasks, element, [&](int j, const Vector<T>& g) {
      const auto weight = static_cast<Wide<T>>(load(weights + j));
      for (int e = 0; e < kSize; ++e)
        total[e] += weight * widened(g.x[e]);
    });
    store_narrowed(update + element, total);
  });
}

template <class T> CS_KERNEL(kThreads, kSmallBlocks / 2) drop_signs_kernel(DropLaunch launch) {
  const Piece<T> piece(launch.gradients);
  const int tasks = launch.gradients.tasks;
  T* update = piece.update();
  const std::uint64_t key = splitmix64(advanced(launch.state, launch.counter));
  // A tile has indices of at most two ranges of 2^32.
  const auto first = static_cast<std::uint64_t>(piece.tensor.first_index + piece.range.begin);
  const UniformNumbers of_first(key, first);
  const UniformNumbers of_next(key, first + (std::uint64_t{1} << 32));
  for_each_vector(piece, [&](std::int64_t element, auto vectors) {
    using W = Wide<T>;
    constexpr int kSize = vectors ? Vector<T>::kSize : 1;
    W positive[kSize] = {};
    W negative[kSize] = {};
    W kept_positive[kSize] = {};
    W kept_negative[kSize] = {};
    W leaked[kSize] = {};
    for_each_task<T, kSize>(piece, tasks, element, [&](int j, const Vector<T>& elements) {
      const auto leak = static_cast<W>(load(launch.leaks + j));
      for (int e = 0; e < kSize; ++e) {
        const W g = widened(elements.x[e]);
        const W above = g > 0 ? g : 0;
        const W below = g > 0 ? 0 : g; // and NaN
        positive[e] += above;
        negative[e] += below;
        kept_positive[e] += (1 - leak) * above;
        kept_negative[e] += (1 - leak) * below;
        leaked[e] += leak * g;
      }
    });
    for (int e = 0; e < kSize; ++e) {
      const auto number = static_cast<std::uint64_t>(piece.tensor.first_index + element + e);
      const UniformNumbers& numbers = number >> 32 == first >> 32 ? of_first : of_next;
      const W u = numbers.at(static_cast<std::uint32_t>(number));
      const W chosen =
          u * (positive[e] - negative[e]) < positive[e] ? kept_positive[e] : kept_negative[e];
      // Zero times the sum: infinities and NaN are not dropped.
      leaked[e] += chosen + 0 * (positive[e] + negative[e]);
    }
    store_narrowed(update + element, leaked);
  });
}

} // namespace

std::size_t gramian_memory(std::int32_t tasks) {
  return gramian_bytes(is_unrolled(tasks) ? tasks : 0, tasks);
}

GradientTiling gradient_tiling(DataType type) {
  return with_type(
      type, [](auto like) { return GradientTiling{kTile<decltype(like)>, kMostGramianTiles}; });
}

Status gramian(const GramianLaunch& arguments, Stream stream) {
  const std::int32_t tasks = arguments.gradients.tasks;
  return with_kernel(arguments.gradients.type, tasks, [&](auto like, auto unrolled) {
    return launch(gramian_kernel<decltype(like), unrolled>, arguments.gradients.item_count,
                  kThreads, gramian_bytes(unrolled, tasks), stream, arguments);
  });
}

Status combine(const CombineLaunch& arguments, Stream stream) {
  return with_type(arguments.gradients.type, [&](auto like) {
    return launch(combine_kernel<decltype(like)>, arguments.gradients.item_count, kThreads, 0,
                  stream, arguments);
  });
}

Status drop_signs(const DropLaunch& arguments, Stream stream) {
  return with_type(arguments.gradients.type, [&](auto like) {
    return launch(drop_signs_kernel<decltype(like)>, arguments.gradients.item_count, kThreads, 0,
                  stream, arguments);
  });
}

} // namespace cs_kernels::cuda
