#include "cs_kernels/cuda/combine.h"

#include "block.h"
#include "cs_kernels/random.h"
#include "segment.h"

namespace cs_kernels::cuda {
namespace {

// Elements per tile.
template <class T>
constexpr std::int64_t kTile = std::int64_t{kGradientVectors} * kThreads * Vector<T>::kSize;

// A block's item.
template <class T> struct Piece {
  const PlannedGradient tensor; // a copy, because stores might alias the table
  const std::int64_t* call;     // the tensor's row of the address table
  std::int64_t item;
  bool aligned;
  Range range;

  CS_DEVICE explicit Piece(const GradientLaunch& launch)
      : Piece(launch, block_index(), launch.items[block_index()]) {}

  CS_DEVICE const T* gradient(int task) const {
    return pointer<const T>(load(call + kGradientGradients + task));
  }
  CS_DEVICE T* update() const { return pointer<T>(load(call + kGradientUpdate)); }
  // Calls visit(pieces) for this thread's pieces of the item, up to kMost vectors at a time.
  template <int kMost, class Visit> CS_DEVICE void visit(Visit visit) const {
    for_each_piece<kMost>(Segment<T>(range.begin, range.end, aligned),
                          static_cast<std::uint32_t>(thread_index()), kThreads, visit);
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

// Adds up the products of a group's items. Their layout is [pair, item] in the unrolled kernels and
// [item, pair] in the general kernel.
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

// Computes the products of an item's gradients for 2 to 8 tasks, summed in registers, then over the
// block. A task without a gradient reads another task's gradient, and its products are set to zero.
template <class T, int kTasks>
CS_DEVICE void multiply(const Piece<T>& piece, double* out, std::int64_t stride,
                        double* workspace) {
  constexpr int kPairs = pair_of(kTasks, 0);
  const T* gradients[kTasks];
  bool exists[kTasks];
  const T* any = nullptr;
  CS_UNROLL(kTasks)
  for (int j = 0; j < kTasks; ++j) {
    gradients[j] = piece.gradient(j);
    exists[j] = gradients[j] != nullptr;
    any = exists[j] ? gradients[j] : any;
  }
  CS_UNROLL(kTasks)
  for (int j = 0; j < kTasks; ++j)
    gradients[j] = exists[j] ? gradients[j] : any;
  double products[kPairs] = {};
  const auto add = [&](const auto& pieces) {
    using Of = std::decay_t<decltype(pieces)>;
    Wide<T> dots[kPairs] = {};
    CS_UNROLL(Of::kNumber)
    for (int n = 0; n < Of::kNumber; ++n) {
      Wide<T> g[kTasks][Of::kSize];
      CS_UNROLL(kTasks)
      for (int j = 0; j < kTasks; ++j)
        widen(vector_at<Of::kSize>(pieces.of(gradients[j], n)), g[j]);
      CS_UNROLL(kTasks)
      for (int i = 0; i < kTasks; ++i) {
        CS_UNROLL(kTasks)
        for (int j = 0; j <= i; ++j) {
          CS_UNROLL(Of::kSize)
          for (int e = 0; e < Of::kSize; ++e)
            dots[pair_of(i, j)] += g[i][e] * g[j][e];
        }
      }
    }
    CS_UNROLL(kPairs)
    for (int pair = 0; pair < kPairs; ++pair)
      products[pair] += dots[pair];
  };
  if (any != nullptr)
    piece.template visit<gramian_vectors(kTasks)>(add);
  // workspace: [pair, warp]
  CS_UNROLL(kTasks)
  for (int i = 0; i < kTasks; ++i) {
    CS_UNROLL(kTasks)
    for (int j = 0; j <= i; ++j) {
      const double sum = warp_sum(products[pair_of(i, j)], kWarp);
      if (thread_index() % kWarp == 0)
        workspace[pair_of(i, j) * kWarps + thread_index() / kWarp] =
            exists[i] && exists[j] ? sum : 0;
    }
  }
  synchronize_block();
  for (int pair = thread_index(); pair < kPairs; pair += kThreads) {
    double sum = 0;
    for (int warp = 0; warp < kWarps; ++warp)
      sum += workspace[pair * kWarps + warp];
    out[pair * stride] = sum;
  }
}

// Like `multiply`, for any number of tasks: a tile of all gradients is in shared memory, and a
// thread computes one pair at a time.
template <class T>
CS_DEVICE void multiply_many(const Piece<T>& piece, int tasks, double* out, double* workspace) {
  constexpr int kWidth = kGeneralColumns + 1; // puts a column's elements in different banks
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

// `unrolled` is the kernel's kTasks: 0 for the general kernel.
constexpr std::size_t gramian_bytes(int unrolled, int tasks) {
  const int pairs = tasks * (tasks + 1) / 2;
  const int numbers = unrolled > 0 ? pairs * kWarps : pairs + tasks * (kGeneralColumns + 1);
  return 16 + static_cast<std::size_t>(numbers) * sizeof(double);
}

// Computes one item; the last block of a group to finish adds up the group's products. Reads every
// gradient once.
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

// Calls add(task, numbers, is_first) for these pieces of every existing gradient. If no gradient
// exists, calls `add` once, with zeros.
template <class T, class Pieces, class Add>
CS_DEVICE void for_each_task(const Piece<T>& piece, const Pieces& pieces, int tasks,
                             const Add& add) {
  const auto read_and_add = [&](int j, const T* gradient, auto first) {
    typename Pieces::Vectors vectors;
    typename Pieces::Numbers g;
    read(pieces, gradient, vectors);
    widen_all(vectors, g);
    add(j, g, first);
  };
  int j = 0;
  const T* gradient = piece.gradient(0);
  while (gradient == nullptr && ++j < tasks)
    gradient = piece.gradient(j);
  if (gradient == nullptr) {
    const typename Pieces::Numbers zeros = {};
    add(0, zeros, std::true_type{});
    return;
  }
  read_and_add(j, gradient, std::true_type{});
  CS_UNROLL(1)
  while (++j < tasks) {
    gradient = piece.gradient(j);
    if (gradient != nullptr)
      read_and_add(j, gradient, std::false_type{});
  }
}

// sum = number or sum += number.
template <class Number>
CS_DEVICE void add_to(Number& sum, Number number, std::true_type /* first */) {
  sum = number;
}
template <class Number>
CS_DEVICE void add_to(Number& sum, Number number, std::false_type /* first */) {
  sum += number;
}

template <class T, bool kProtects>
CS_KERNEL(kThreads, kCombineBlocks)
combine_kernel(CombineLaunch launch) {
  const Piece<T> piece(launch.gradients);
  const int tasks = launch.gradients.tasks;
  const double* weights = launch.weights + piece.tensor.group * tasks;
  piece.template visit<kCombineVectors<T>>([&](const auto& pieces) {
    using Of = std::decay_t<decltype(pieces)>;
    typename Of::Numbers totals;
    typename Of::Numbers guide = {};
    for_each_task(piece, pieces, tasks, [&](int j, const typename Of::Numbers& g, auto first) {
      const auto weight = static_cast<Wide<T>>(load(weights + j));
      const bool guides = kProtects && j == launch.protected_task;
      CS_UNROLL(Of::kNumber)
      for (int n = 0; n < Of::kNumber; ++n) {
        CS_UNROLL(Of::kSize)
        for (int e = 0; e < Of::kSize; ++e) {
          add_to(totals[n][e], weight * g[n][e], first);
          if (guides)
            guide[n][e] = g[n][e];
        }
      }
    });
    CS_UNROLL(Of::kNumber)
    for (int n = 0; kProtects && n < Of::kNumber; ++n) {
      CS_UNROLL(Of::kSize)
      for (int e = 0; e < Of::kSize; ++e) {
        const Wide<T> x = totals[n][e];
        const Wide<T> g = guide[n][e];
        const bool differs = (g > 0 && !(x > 0)) || (g < 0 && !(x < 0));
        // Adding zero times both gives NaN if either is infinite or NaN, chosen or not.
        totals[n][e] = (differs ? g : x) + 0 * (x + g);
      }
    }
    typename Of::Vectors vectors;
    narrow_all<T>(totals, vectors);
    write(pieces, piece.update(), vectors);
  });
}

template <class T> CS_KERNEL(kThreads, kCombineBlocks) drop_signs_kernel(DropLaunch launch) {
  const Piece<T> piece(launch.gradients);
  const int tasks = launch.gradients.tasks;
  const std::uint64_t key = splitmix64(advanced(launch.state, launch.counter));
  // An item's indices lie in at most two ranges of 2^32.
  const auto first = static_cast<std::uint64_t>(piece.tensor.first_index + piece.range.begin);
  const RandomWords of_first(key, first);
  const RandomWords of_next(key, first + (std::uint64_t{1} << 32));
  piece.template visit<kDropVectors<T>>([&](const auto& pieces) {
    using Of = std::decay_t<decltype(pieces)>;
    typename Of::Numbers positive;
    typename Of::Numbers negative;
    typename Of::Numbers leaked_positive; // added if the other sign is chosen
    typename Of::Numbers leaked_negative;
    for_each_task(piece, pieces, tasks, [&](int j, const typename Of::Numbers& g, auto begins) {
      const auto leak = static_cast<Wide<T>>(load(launch.leaks + j));
      CS_UNROLL(Of::kNumber)
      for (int n = 0; n < Of::kNumber; ++n) {
        CS_UNROLL(Of::kSize)
        for (int e = 0; e < Of::kSize; ++e) {
          const Wide<T> above = g[n][e] > 0 ? g[n][e] : 0;
          const Wide<T> below = g[n][e] - above; // includes NaN
          add_to(positive[n][e], above, begins);
          add_to(negative[n][e], below, begins);
          add_to(leaked_positive[n][e], leak * above, begins);
          add_to(leaked_negative[n][e], leak * below, begins);
        }
      }
    });
    CS_UNROLL(Of::kNumber)
    for (int n = 0; n < Of::kNumber; ++n) {
      const std::int64_t element = pieces.offsets[n] / static_cast<std::int64_t>(sizeof(T));
      const auto index = static_cast<std::uint64_t>(piece.tensor.first_index + element);
      CS_UNROLL(Of::kSize)
      for (int e = 0; e < Of::kSize; ++e) {
        const std::uint64_t number = index + static_cast<std::uint64_t>(e);
        const RandomWords& numbers = number >> 32 == first >> 32 ? of_first : of_next;
        const Wide<T> u = numbers.at(static_cast<std::uint32_t>(number));
        const Wide<T> p = positive[n][e];
        const bool chosen = u * (p - negative[n][e]) < p;
        // Adding zero times the other sum gives NaN if that sum is infinite or NaN.
        positive[n][e] = chosen ? p + leaked_negative[n][e] + 0 * negative[n][e]
                                : negative[n][e] + leaked_positive[n][e] + 0 * p;
      }
    }
    typename Of::Vectors vectors;
    narrow_all<T>(positive, vectors);
    write(pieces, piece.update(), vectors);
  });
}

} // namespace

std::size_t gramian_memory(std::int32_t tasks) {
  return gramian_bytes(is_unrolled(tasks) ? tasks : 0, tasks);
}

GradientTiling gradient_tiling(DataType type) {
  return with_type(
      type, [](auto like) { return GradientTiling{kTile<decltype(like)>, kMostGradientTiles}; });
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
    const auto kernel = arguments.protected_task < 0 ? combine_kernel<decltype(like), false>
                                                     : combine_kernel<decltype(like), true>;
    return launch(kernel, arguments.gradients.item_count, kThreads, 0, stream, arguments);
  });
}

Status drop_signs(const DropLaunch& arguments, Stream stream) {
  return with_type(arguments.gradients.type, [&](auto like) {
    return launch(drop_signs_kernel<decltype(like)>, arguments.gradients.item_count, kThreads, 0,
                  stream, arguments);
  });
}

} // namespace cs_kernels::cuda
