// Status, stream and operands of a GPU launch.
#pragma once

#include <cstdint>

#include "cs_kernels/data_type.h"

namespace cs_kernels::cuda {

using Stream = void*; // a cudaStream_t of the current device
using Status = int;   // a cudaError_t; 0 is success

const char* status_message(Status status);

// 0 if the current device can run these kernels, else an error.
Status available();

// An array of any type.
struct Numbers {
  DataType type;
  const void* data;
};

} // namespace cs_kernels::cuda
