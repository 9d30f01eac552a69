// All constants of the CPU kernels that affect only speed.
#pragma once

#include <cstdint>

namespace cs_kernels::cpu {

// Elements per chunk. A chunk takes about 25 us on one core with 4 tasks: much longer than claiming
// it, and much shorter than a layer.
constexpr std::int64_t kChunkElements = 16384;
// Contiguous elements of a chunk in a layer with `outer` > 1: enough for the hardware prefetcher.
constexpr std::int64_t kRunElements = 256;
// Elements per piece of the Gramian: enough that the products are small compared to the gradients.
constexpr std::int64_t kGramianElements = 4 * kChunkElements;

// Above this memory traffic, little of the update stays in cache, so it is written with streaming
// stores, which do not read a cache line before writing it.
constexpr std::int64_t kStreamBytes = 64 << 20;

// A layer whose gradients and update take more bytes is processed one channel group at a time, so
// that a group in conflict is still in a cache of some tens of megabytes at its second visit.
constexpr std::int64_t kGroupwiseBytes = 8 << 20;

// The sums and the reference gradient of a channel group are still in cache at its second visit if
// they take at most 1 / kGroupPart of the last-level cache, because the other gradients are
// prefetched into this cache as well. kLastCacheBytes, the size on an AMD EPYC, is used if the
// system does not report a size.
constexpr std::int64_t kGroupPart = 4;
constexpr std::int64_t kLastCacheBytes = 32 << 20;

// A thread's scratch buffer for sums, which are streamed to the update once their a_i are known.
// Rows of fewer than kStreamRow bytes would leave many partial cache lines.
constexpr std::int64_t kScratchBytes = 4 << 20;
constexpr std::int64_t kStreamRow = 1024;

// Row kernels.
constexpr int kUnrolledTasks = 8;           // more tasks: one at a time, over a panel in L1
constexpr std::int64_t kPanel = 512;        // elements
constexpr std::int64_t kProductPanel = 128; // elements: 16 KB of doubles at 16 tasks
constexpr std::int64_t kLine = 64;          // bytes
// The prefetch distance of each of several streams in bytes: at 10 GB/s per stream, about twice the
// memory latency.
constexpr std::int64_t kAhead = 2048;

} // namespace cs_kernels::cpu
