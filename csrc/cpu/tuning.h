// Every number of the CPU kernels that only speed depends on.
#pragma once

#include <cstdint>

namespace cs_kernels::cpu {

// Elements of a chunk: about 25 us of work on one core at 4 tasks, long against claiming it, short
// against a layer.
constexpr std::int64_t kChunkElements = 16384;
// A chunk of a layer with `outer` > 1 skips the other rows: long enough for the prefetcher.
constexpr std::int64_t kRunElements = 256;
// Elements of a piece for the Gramian: its products are few against the gradients.
constexpr std::int64_t kGramianElements = 4 * kChunkElements;

// A step that moves more than this leaves little in cache for whoever reads the update: it is
// written with streaming stores, which saves reading its lines first.
constexpr std::int64_t kStreamBytes = 64 << 20;

// A layer above this size is processed one channel group at a time, so that the second visit to a
// group in conflict finds it in a cache of some tens of megabytes.
constexpr std::int64_t kGroupwiseBytes = 8 << 20;

// A streamed update waits for its group's a_i in a scratch buffer of each thread, as far as that
// holds it; rows shorter than kStreamRow would leave many partial lines.
constexpr std::int64_t kScratchBytes = 4 << 20;
constexpr std::int64_t kStreamRow = 1024;

// Row kernels.
constexpr int kUnrolledTasks = 8;    // above, one task at a time over a panel that stays in L1
constexpr std::int64_t kPanel = 512; // elements
constexpr std::int64_t kProductPanel = 128; // elements: 16 KB of doubles at 16 tasks
constexpr std::int64_t kLine = 64;          // bytes

} // namespace cs_kernels::cpu
