// Copies of many small tensors by one kernel.
#pragma once

#include <cstdint>

#include "cs_kernels/cuda/launch.h"

namespace cs_kernels::cuda {

struct Copy {
  std::int64_t source;
  std::int64_t target;
  std::int64_t bytes;
};

struct CopyLaunch {
  const Copy* copies;
  std::int64_t count;
};

// Reads and writes every byte once; a block for each copy.
Status copy(const CopyLaunch& launch, Stream stream);

} // namespace cs_kernels::cuda
