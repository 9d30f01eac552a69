// All constants that affect only speed, each with its reason.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cs_kernels/host_device.h"

namespace cs_kernels::cuda {

// Threads per block.
constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

// Resident blocks per multiprocessor: for kernels that need few registers, for combine and sign
// dropping, and for Phase 2.
constexpr int kSmallBlocks = 8;
constexpr int kCombineBlocks = 5;
template <class T> constexpr int kPhase2Blocks = sizeof(T) < 4 ? 3 : 4;

// Lanes that share a segment in Phase 2: their vectors fill a cache line.
constexpr int kTeam = 8;
constexpr int kTeams = kThreads / kTeam;
// Vectors of a gradient that a thread has in flight in Phase 2, and the maximum per segment. Per
// multiprocessor, 36 KiB (16-bit types) or 48 KiB are in flight. Bandwidth times latency is about
// 25 KiB on an H100 and 36 KiB on an H200. A segment's fixed cost is about the cost of two vectors.
constexpr int kPieces = 6;

// Numbers that a thread loads at once to add up the products of a layer's items (at most 1024). The
// block that adds them up has no other loads in flight.
constexpr int kProductLoads = 8;

// Resident blocks per multiprocessor for the Gramian, whose threads keep K (K + 1) / 2 sums in
// registers.
constexpr int gramian_blocks(int tasks) {
  return tasks == 0 ? 4 : tasks <= 2 ? 6 : tasks <= 4 ? 4 : tasks <= 6 ? 3 : 2;
}

// 16-byte loads of a row that a thread has in flight, as many as for gradients.
constexpr int kEnergyLoads = 6;

// 16-byte vectors of a gradient per thread in a tile of combine, sign dropping and the Gramian.
constexpr int kGradientVectors = 8;
// Vectors that a thread has in registers at once: of one gradient or, in the Gramian, of each.
template <class T> constexpr int kCombineVectors = sizeof(T) < 4 ? 4 : 8;
template <class T> constexpr int kDropVectors = sizeof(T) < 4 ? 1 : 2;
constexpr int gramian_vectors(int tasks) { return tasks <= 4 ? 4 : 2; }

// Tasks whose strengths a thread computes at once: as many as fit in the registers. Other blocks
// wait while one block finds a layer's priorities, at a latency of about two memory accesses per
// round.
constexpr int kStrengthTasks = 4;

// Elements per task in the shared memory of the Gramian's general kernel: 33 KiB of doubles for 64
// tasks, 8 KiB for 16 tasks. With 16 tasks, four blocks have 16 KiB of float32 in flight.
constexpr int kGeneralColumns = 64;

// Elements that a thread of a sketch has in flight. For 65,536 bins, each of 128 multiprocessors
// has 16 warps, with 16 KiB of float32 in flight.
constexpr int kSketchLoads = 8;

// A weight's row is read by one team or, with at least kRowBytes per thread, by up to a warp; from
// kLongRow bytes on, by a whole block.
constexpr std::int64_t kRowBytes = 512;
constexpr std::int64_t kLongRow = 64 << 10;

// Maximum warps in UPGrad's block. The warps' matrices must fit in the shared memory that every GPU
// has (99 KiB from compute capability 8.6 on).
constexpr int kSolverWarps = 8;
constexpr std::size_t kSolverMemory = 96 << 10;

// Nanoseconds between polls of a flag: a wait takes a few microseconds at most.
constexpr unsigned kPause = 100;

// The Gramian's kernels are unrolled up to this number of tasks.
constexpr int kUnrolledTasks = 8;
constexpr bool is_unrolled(int tasks) { return tasks >= 2 && tasks <= kUnrolledTasks; }

// The plan of Phase 2's items: SUM items per PROJECT item.
constexpr int kProjectSums = 2;
// Vectors per thread in an ENERGY item: many, because it begins with dependent reads, as a SUM item
// does.
constexpr int kEnergyVectors = 36;
constexpr int kLeastEnergyRows = 4;
// SUM items per multiprocessor before items grow: a block runs six to eight of them in turn, so the
// idle tail takes less than a tenth of the time.
constexpr int kLeastItems = 24;
// SUM items per multiprocessor between a layer's last SUM item and its PROJECT items: one per
// resident block, which must finish first, and half as many again.
constexpr int kLag = 6;

// Maximum tiles per item in combine, sign dropping and the Gramian.
constexpr int kMostGradientTiles = 8;

} // namespace cs_kernels::cuda
