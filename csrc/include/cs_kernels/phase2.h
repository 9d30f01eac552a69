// Connection strength, priority and Phase 2. The functions take plain pointers and sizes, and need
// no framework.
#pragma once

#include <cstdint>

#include "cs_kernels/data_type.h"

namespace cs_kernels {

// The memory of a dense tensor as an array [groups, outer, channels, inner], where `groups` are a
// convolution's groups. Channel p = group * channels + c owns [group, :, c, :]. A convolution is
// [1, 1, O, fan_in]; a transposed convolution is [groups, I / groups, O / groups, k * k].
struct ChannelLayout {
  std::int64_t groups = 1;
  std::int64_t outer = 1;
  std::int64_t channels = 1;
  std::int64_t inner = 1;

  std::int64_t rows() const { return groups * channels; }
  std::int64_t row_size() const { return outer * inner; }
  std::int64_t size() const { return rows() * row_size(); }
};

// Strength, Eq. (6), of every channel for every task; normalized by Eq. (7) if `normalize`.
struct StrengthArguments {
  const double* energy;   // [rows]
  const double* gamma;    // [tasks, rows]
  const double* variance; // [tasks, rows]
  const double* epsilon;  // [tasks]
  std::int64_t rows;
  std::int32_t tasks;
  bool normalize;
  double* strength; // [tasks, rows]; output
};

// One shared tensor of the trunk. Without `priority`, its update is the plain sum. With `weight`,
// the priority is computed and written first; otherwise, it is read.
struct Phase2Tensor {
  DataType type;
  ChannelLayout layout;
  const void* const* gradients;     // [tasks]; null for zeros
  void* update;                     // has the gradients' type and layout; aliases none of them
  std::int64_t* priority = nullptr; // [rows]
  const void* weight = nullptr;
  const double* gamma = nullptr;
  const double* variance = nullptr;
  const double* epsilon = nullptr;
  double* products = nullptr; // [tasks, tasks], d_ij of channel group i; null if not needed
};

struct Phase2Arguments {
  std::int32_t tasks;
  std::int64_t count;
  const Phase2Tensor* tensors;
};

namespace cpu {

// energy [rows]: the sum of squares of every channel's weights. Reads the weight once.
void channel_energies(DataType type, const ChannelLayout& layout, const void* weight,
                      double* energy, int threads);

void strengths(const StrengthArguments& arguments);

// nu_p = argmax_i, Eq. (10), of strength [tasks, rows]; ties go to the lowest task, NaN never wins.
void task_priority(const double* strength, std::int32_t tasks, std::int64_t rows,
                   std::int64_t* priority);

// Phase 2 (Algorithm 1) of all tensors. Reads each weight and gradient once and writes the update
// once; rows of channel groups in conflict are revisited, usually while in cache.
void phase2(const Phase2Arguments& arguments, int threads);

// Phase 2 in two calls, for given priorities. Between the calls, the products can be summed over
// devices that hold shards of the gradients. phase2_products reads the gradients once, and writes
// the plain sum and the products. phase2_apply adds a_i * G_i to the rows of channel groups in
// conflict, with two reads and a write.
void phase2_products(const Phase2Arguments& arguments, int threads);
void phase2_apply(const Phase2Arguments& arguments, int threads);

// "avx512", "avx2" or "baseline".
const char* instruction_set();

} // namespace cpu
} // namespace cs_kernels
