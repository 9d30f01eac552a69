// Every constant of the CPU kernels that affects only speed.
#pragma once

#include <cstdint>

namespace cs_kernels::cpu {

// Elements per chunk: about 25 us on one core with 4 tasks, much longer than claiming it and much
// shorter than a layer.
constexpr std::int64_t kChunkElements = 16384;
// Contiguous elements of a chunk in a layer with `outer` > 1: enough for the hardware prefetcher.
constexpr std::int64_t kRunElements = 256;
// Elements per piece for the Gramian, so that the products are small beside the gradients.
constexpr std::int64_t kGramianElements = 4 * kChunkElements;

// Above this traffic, little of the update stays in cache: it is written with streaming stores,
// which do not read its lines first.
constexpr std::int64_t kStreamBytes = 64 << 20;

// A layer above this size is processed one channel group at a time, so that a group in conflict is
// still in a cache of some tens of megabytes at its second visit.
constexpr std::int64_t kGroupwiseBytes = 8 << 20;

// The sums and the reference gradient of a channel group are still in cache at its second visit if
// they take at most 1 / kGroupPart of the last-level cache: prefetching brings the other gradients
// there too. If the system does not report the cache's size, the default is an AMD EPYC's.
constexpr std::int64_t kGroupPart = 4;
constexpr std::int64_t kLastCacheBytes = 32 << 20;

// A thread's scratch buffer for updates that are streamed once their a_i are known. Rows shorter
// than kStreamRow would leave many partial lines.
constexpr std::int64_t kScratchBytes = 4 << 20;
constexpr std::int64_t kStreamRow = 1024;

// Row kernels.
constexpr int kUnrolledTasks = 8;    // above, one task at a time over a panel that stays in L1
constexpr std::int64_t kPanel = 512; // elements
constexpr std::int64_t kProductPanel = 128; // elements: 16 KB of doubles at 16 tasks
constexpr std::int64_t kLine = 64;          // bytes
// The prefetch distance of each of several streams in bytes: at 10 GB/s per stream, about twice the
// memory latency.
constexpr std::int64_t kAhead = 2048;

} // namespace cs_kernels::cpu
