#include "cs_kernels/cuda/copy.h"

#include "types.h"

namespace cs_kernels::cuda {
namespace {

template <class Unit> CS_DEVICE void copy_units(const Copy& copy) {
  const auto* source = pointer<const Unit>(copy.source);
  auto* target = pointer<Unit>(copy.target);
  const std::int64_t units = copy.bytes / static_cast<std::int64_t>(sizeof(Unit));
  for (std::int64_t i = thread_index(); i < units; i += kThreads)
    target[i] = source[i];
}

CS_KERNEL(kThreads, kSmallBlocks) copy_kernel(CopyLaunch launch) {
  const Copy copy = launch.copies[block_index()];
  const std::int64_t together = copy.source | copy.target | copy.bytes;
  if (together % 16 == 0)
    copy_units<Words>(copy);
  else if (together % 4 == 0)
    copy_units<std::uint32_t>(copy);
  else
    copy_units<std::uint8_t>(copy);
}

} // namespace

Status copy(const CopyLaunch& arguments, Stream stream) {
  return launch(copy_kernel, arguments.count, kThreads, 0, stream, arguments);
}

} // namespace cs_kernels::cuda
