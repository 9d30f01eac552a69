// Macros for functions that run on the host and on a GPU.
#pragma once

#ifdef __CUDACC__
#define CS_HOST_DEVICE __host__ __device__
#define CS_HOST_DEVICE_INLINE __host__ __device__ __forceinline__
#else
#define CS_HOST_DEVICE
// Always inlined: the linker could otherwise merge copies for several instruction sets into one
// that this CPU cannot run.
#define CS_HOST_DEVICE_INLINE inline __attribute__((always_inline))
#endif
