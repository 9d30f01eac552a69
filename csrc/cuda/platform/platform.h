// All CUDA features that the kernels use. The tests' emulation replaces this file with its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#define CS_DEVICE __device__ __forceinline__
// Registers are allocated for this many threads per block and resident blocks per SM.
#define CS_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define CS_UNROLL(number) _Pragma(CS_STRING(unroll number))
#define CS_STRING(text) #text

namespace cs_kernels::cuda {

// 16 bytes; a word is a float or a std::uint32_t.
template <class Word> struct alignas(16) Words {
  Word x[4];
};

CS_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
CS_DEVICE int block_size() { return static_cast<int>(blockDim.x); }
CS_DEVICE std::int64_t block_index() { return blockIdx.x; }

// The block's dynamic shared memory.
CS_DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

// Waits for all threads of the block, and makes their writes visible.
CS_DEVICE void synchronize_block() { __syncthreads(); }
// Waits for all threads of the warp, and makes their writes visible.
CS_DEVICE void synchronize_warp() { __syncwarp(); }

// The value of the thread whose index in the warp differs in the bits of the mask. All threads of
// the warp must call this.
template <class Number> CS_DEVICE Number exchanged(Number value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
// Adds 1 to a counter shared by all blocks and returns its old value.
CS_DEVICE std::int32_t count(std::int32_t* counter) { return atomicAdd(counter, 1); }
// The same, with acquire-release ordering: prior writes of this thread are visible to later
// arrivals, and prior writes of earlier arrivals to this thread.
CS_DEVICE std::int32_t count_in_order(std::int32_t* counter) {
  std::int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
}
// Acquire load of a counter: writes made before a matching count_in_order() are visible.
CS_DEVICE std::int32_t counted(const std::int32_t* counter) {
  std::int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
               : "=r"(value)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return value;
}
CS_DEVICE void pause(unsigned nanoseconds) { __nanosleep(nanoseconds); }

CS_DEVICE void* global_pointer(std::int64_t address) {
  return __cvta_global_to_generic(static_cast<std::size_t>(address));
}

// Loads memory that is constant during the launch.
template <class T> CS_DEVICE T load(const T* address) {
  static_assert(sizeof(T) <= 8, "one access");
  if constexpr (sizeof(T) == 2) {
    const auto bits = __ldg(reinterpret_cast<const unsigned short*>(address));
    T value;
    memcpy(&value, &bits, sizeof(T));
    return value;
  } else {
    return __ldg(address);
  }
}
// An L2 cache policy that evicts the loaded lines first.
CS_DEVICE std::uint64_t policy_to_evict() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Loads memory that is constant during the launch, with a policy.
CS_DEVICE Words<std::uint32_t> load(const Words<std::uint32_t>* address, std::uint64_t policy) {
  Words<std::uint32_t> words;
  asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(words.x[0]), "=r"(words.x[1]), "=r"(words.x[2]), "=r"(words.x[3])
      : "l"(__cvta_generic_to_global(address)), "l"(policy));
  return words;
}
CS_DEVICE Words<float> load(const Words<float>* address, std::uint64_t policy) {
  Words<float> words;
  asm("ld.global.nc.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
      : "=f"(words.x[0]), "=f"(words.x[1]), "=f"(words.x[2]), "=f"(words.x[3])
      : "l"(__cvta_generic_to_global(address)), "l"(policy));
  return words;
}

// Converts the bfloat16 number in the low or high half of a word to float32.
CS_DEVICE float low_bfloat16(std::uint32_t word) {
  float value;
  asm("shl.b32 %0, %1, 16;" : "=f"(value) : "r"(word));
  return value;
}
CS_DEVICE float high_bfloat16(std::uint32_t word) {
  float value;
  asm("and.b32 %0, %1, 0xffff0000;" : "=f"(value) : "r"(word));
  return value;
}
CS_DEVICE float float16_to_float(std::uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
CS_DEVICE std::uint16_t float_to_float16(float value) {
  std::uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
CS_DEVICE std::uint16_t float_to_bfloat16(float value) {
  std::uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

inline const char* error_text(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

// The status of loading a kernel: 0 if the build has code that the driver can load on this device.
template <class Arguments> int loadable(void (*kernel)(Arguments)) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

// Dynamic shared memory above 48 KiB must be requested on each device.
template <class Arguments>
cudaError_t allow_shared_memory(void (*kernel)(Arguments), std::size_t bytes) {
  if (bytes <= (48u << 10))
    return cudaSuccess;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

// Sets `blocks` to the number of blocks that can be resident on the current device.
template <class Arguments>
int resident_blocks(void (*kernel)(Arguments), int threads, std::size_t shared_bytes,
                    std::int64_t* blocks) {
  int device = 0;
  int multiprocessors = 0;
  int per_multiprocessor = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess)
    status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status == cudaSuccess)
    status = allow_shared_memory(kernel, shared_bytes);
  if (status == cudaSuccess)
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads,
                                                           shared_bytes);
  *blocks = static_cast<std::int64_t>(multiprocessors) * per_multiprocessor;
  if (status == cudaSuccess && *blocks == 0)
    status = cudaErrorLaunchOutOfResources;
  return status;
}

template <class Arguments>
int launch(void (*kernel)(Arguments), std::int64_t blocks, int threads, std::size_t shared_bytes,
           void* stream, Arguments arguments) {
  if (blocks == 0)
    return cudaSuccess;
  const cudaError_t status = allow_shared_memory(kernel, shared_bytes);
  if (status != cudaSuccess)
    return status;
  void* packed[] = {&arguments};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                          dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)),
                          packed, shared_bytes, static_cast<cudaStream_t>(stream));
}

} // namespace cs_kernels::cuda
