// Every constant that only speed depends on, with its reason.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cs_kernels/host_device.h"

namespace cs_kernels::cuda {

// Threads of a block.
constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

// Resident blocks of a multiprocessor, for kernels that need few registers.
constexpr int kSmallBlocks = 8;

// The same for Phase 2: as many as registers allow without spills; 0 is the general kernel.
constexpr int phase2_blocks(int tasks) {
  return tasks == 0 ? 4 : tasks <= 2 ? 5 : tasks <= 5 ? 4 : 3;
}

// Adjacent lanes of Phase 2 that keep their K * K products together: 16 KiB of shared memory a
// block for 8 tasks rather than 64, and as many accesses of it, shuffles included.
CS_HOST_DEVICE_INLINE constexpr int product_lanes(int tasks) { return tasks < 4 ? 1 : 4; }

// Tiles that a block of Phase 2 holds at most: on an H200 8 to 12 fit.
constexpr int kMostSlots = 16;
// Bytes of a multiprocessor that are left to its L1 cache, beside 28 KiB that it has anyway: the
// gradients in flight are 24 to 48 KiB.
constexpr std::int64_t kCacheBytes = 32 << 10;

// Numbers that a thread loads at once when it adds up the products of a layer's items, 1024 at
// most: the block that does so has no other loads in flight, and other blocks hold tiles until it
// ends.
constexpr int kProductLoads = 32;

// Whether a SUM item prefetches its next tile. With few tasks, one tile does not cover the memory
// latency (see kEnergyLoads); with many, prefetching costs occupancy.
constexpr bool prefetches(int tasks) { return tasks <= 4; }

// The same for the Gramian, whose threads keep K (K + 1) / 2 sums in registers.
constexpr int gramian_blocks(int tasks) {
  return tasks == 0 ? 4 : tasks <= 2 ? 6 : tasks <= 4 ? 4 : tasks <= 6 ? 3 : 2;
}

// 16-byte loads of a row that a thread has in flight: bandwidth times latency is about 25 KiB for
// each multiprocessor of an H100, and 4 blocks have 32 KiB in flight.
constexpr int kEnergyLoads = 4;

// The same for combine and sign dropping, over tasks.
constexpr int kTaskLoads = 4;
// 16-byte vectors of a gradient per thread in a tile of these and of the Gramian.
constexpr int kGradientVectors = 4;

// Tasks and rows whose strengths a thread computes at once, as many as registers hold: one block
// finds a layer's priorities, about two trips to memory at a time, while others wait for them.
CS_HOST_DEVICE_INLINE constexpr int strength_tasks(int tasks) {
  return tasks == 0 || tasks > 4 ? 8 : tasks > 2 ? 4 : 2;
}
CS_HOST_DEVICE_INLINE constexpr int strength_rows(int tasks) {
  return strength_tasks(tasks) > 4 ? 1 : 2;
}

// Elements of each task in the general kernels' shared memory: 33 KiB for 64 tasks in double, for
// 16 tasks 8 KiB, of which four blocks have 16 KiB of float32 in flight.
constexpr int kGeneralColumns = 64;
// Products in Phase 2's general kernel at most, as numbers: 32 KiB.
constexpr int kGeneralProducts = 4096;

// A whole block reads a row of more bytes.
constexpr int kLongRow = 16 << 10;

// Warps of UPGrad's block, as far as their matrices fit into the shared memory that every GPU has
// (99 KiB from compute capability 8.6 on).
constexpr int kSolverWarps = 8;
constexpr std::size_t kSolverMemory = 96 << 10;

// Nanoseconds between polls of a flag: a wait takes a few microseconds at most.
constexpr unsigned kPause = 100;

// Kernels are unrolled up to this number of tasks.
constexpr int kUnrolledTasks = 8;
constexpr bool is_unrolled(int tasks) { return tasks >= 2 && tasks <= kUnrolledTasks; }

// Rounds of a tile of Phase 2's general kernel.
constexpr int kGeneralRounds = 8;

// The plan of Phase 2's items.
// Tiles of a SUM item: it begins with three dependent reads, about two microseconds, the time of
// some tiles, in which other blocks work. With more tiles, what PROJECT items read again is likely
// to have left the L2 cache.
constexpr int kMostTiles = 4;
// The same for the general kernel, whose items leave K * K products each.
constexpr int kMostGeneralTiles = 16;
// SUM items of a PROJECT item: it mostly finds nothing left and returns after two microseconds.
constexpr int kProjectSums = 8;
// Tiles of an ENERGY item, which has no such limit.
constexpr int kEnergyTiles = 16;
constexpr int kLeastEnergyRows = 4;
// SUM items per multiprocessor before items grow: a block runs about six of them in turn, so a
// tenth of the time is idle tail.
constexpr int kLeastItems = 32;
// SUM items per multiprocessor before a layer's PROJECT items: the resident blocks', whose items
// have to end, and half as many.
constexpr int phase2_lag(int tasks) { return phase2_blocks(tasks) * 3 / 2; }

// Tiles of an item of the Gramian.
constexpr int kMostGramianTiles = 16;

} // namespace cs_kernels::cuda
