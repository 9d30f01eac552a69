// Every number that only speed depends on, with its reason.
#pragma once

namespace cs_kernels::cuda {

// Of a block. A thread keeps K * K products in shared memory: of 8 tasks, 64 KiB for a block, so
// that two to three blocks fit where there are 164 to 228 KiB; of 4, 16 KiB.
constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

// Blocks that run at once on a multiprocessor, of kernels that need few registers.
constexpr int kSmallBlocks = 8;

// The same of Phase 2: what its registers allow without spilling; 0 tasks is the general kernel.
constexpr int phase2_blocks(int tasks) {
  return tasks == 0 ? 4 : tasks <= 2 ? 6 : tasks <= 6 ? 4 : 3;
}

// Whether a SUM item reads its next tile before it works on this one. Of few tasks one tile is too
// little under way (see kEnergyLoads); of many, registers would cost a block.
constexpr bool reads_ahead(int tasks) { return tasks <= 4; }

// And of the Gramian, a thread of which keeps K (K + 1) / 2 sums in registers.
constexpr int gramian_blocks(int tasks) {
  return tasks == 0 ? 4 : tasks <= 2 ? 6 : tasks <= 4 ? 4 : tasks <= 6 ? 3 : 2;
}

// 16 bytes of a row that a thread reads before it works on the first: bandwidth times latency is
// about 25 KiB for each multiprocessor of an H100, and 4 blocks have 32 KiB under way.
constexpr int kEnergyLoads = 4;

// The same of combine and sign dropping, over tasks.
constexpr int kTaskLoads = 4;
// 16 bytes of each gradient that a thread works on in a tile of these and of the Gramian.
constexpr int kGradientVectors = 4;

// Elements that the general kernels keep of all tasks in shared memory: of 64 tasks and doubles,
// 16.5 KiB beside 32 KiB of products.
constexpr int kGeneralTile = 32;

// A row of more bytes is worked on by a whole block.
constexpr int kLongRow = 16 << 10;

// Nanoseconds between two looks at a flag: a wait is a few microseconds at most.
constexpr unsigned kPause = 100;

// The tasks up to which kernels are unrolled.
constexpr int kUnrolledTasks = 8;
constexpr bool is_unrolled(int tasks) { return tasks >= 2 && tasks <= kUnrolledTasks; }

} // namespace cs_kernels::cuda
