// Linear sketches on a GPU.
#pragma once

#include <cstdint>

#include "cs_kernels/cuda/launch.h"

namespace cs_kernels::cuda {

// Adds a tensor's elements, with pseudorandom signs, to sketch [bins]. With an update, also writes
// weight * data to it or, with `add`, adds it. Reads every element once, reads and writes the
// sketch once, and writes the update once; with `add`, also reads it once.
struct SketchLaunch {
  DataType type;
  const void* data; // dense
  std::int64_t size;
  std::int64_t index; // the first element's index
  std::uint64_t key;
  float* sketch;
  std::int64_t bins;
  void* update; // null or dense; may be `data`
  const double* weight;
  bool add; // to `update`
};
Status sketch(const SketchLaunch& launch, Stream stream);

} // namespace cs_kernels::cuda
