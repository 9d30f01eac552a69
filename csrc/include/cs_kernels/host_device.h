// Functions for the host and for a GPU thread alike.
#pragma once

#ifdef __CUDACC__
#define CS_HOST_DEVICE __host__ __device__
#define CS_HOST_DEVICE_INLINE __host__ __device__ __forceinline__
#else
#define CS_HOST_DEVICE
// Always: a function shared between files for different instruction sets could be the one that this
// processor cannot run.
#define CS_HOST_DEVICE_INLINE inline __attribute__((always_inline))
#endif
