// Every constant of the CPU kernels that only speed depends on.
#pragma once

#include <cstdint>

namespace cs_kernels::cpu {

// Elements of a chunk: about 25 us of one core at 4 tasks, much longer than claiming it and much
// shorter than a layer.
constexpr std::int64_t kChunkElements = 16384;
// Contiguous elements of a chunk of a layer with `outer` > 1: enough for the hardware prefetcher.
constexpr std::int64_t kRunElements = 256;
// Elements of a piece for the Gramian, whose products are then small against the gradients.
constexpr std::int64_t kGramianElements = 4 * kChunkElements;

// Above this traffic, little of the update stays in cache: it is written with streaming stores,
// which do not read its lines first.
constexpr std::int64_t kStreamBytes = 64 << 20;

// A layer above this size is processed one channel group at a time, so that a group in conflict is
// still in a cache of some tens of megabytes at its second visit.
constexpr std::int64_t kGroupwiseBytes = 8 << 20;

// What the second visit to a channel group reads, its sums and its reference gradient, is still in
// cache up to this part of the last one: the processor's prefetching brings the other gradients
// there too. The size of the last one if the system does not tell it is that of one AMD EPYC.
constexpr std::int64_t kGroupPart = 4;
constexpr std::int64_t kLastCacheBytes = 32 << 20;

// A thread's scratch buffer for updates that are streamed once their a_i are known; rows shorter
// than kStreamRow would leave many partial lines.
constexpr std::int64_t kScratchBytes = 4 << 20;
constexpr std::int64_t kStreamRow = 1024;

// Row kernels.
constexpr int kUnrolledTasks = 8;    // above, one task at a time over a panel that stays in L1
constexpr std::int64_t kPanel = 512; // elements
constexpr std::int64_t kProductPanel = 128; // elements: 16 KB of doubles at 16 tasks
constexpr std::int64_t kLine = 64;          // bytes
// Bytes that each of several streams is prefetched ahead: at ten gigabytes a second a stream, about
// twice what memory takes to answer.
constexpr std::int64_t kAhead = 2048;

} // namespace cs_kernels::cpu
