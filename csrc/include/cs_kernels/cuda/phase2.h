// Phase 2, connection strength and priority on a GPU: structs of addresses there, a stream, and a
// status. No framework; the caller provides the workspace. Nothing waits for the device, so every
// call can be captured in a CUDA graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cs_kernels/cuda/launch.h"

namespace cs_kernels::cuda {

// The numbers that the caller's plan of items is made of.
struct Phase2Tiling {
  std::int64_t elements;          // of a tile
  std::int64_t energy_elements;   // of an ENERGY item, about
  std::int64_t least_energy_rows; // of an ENERGY item
  std::int64_t most_tiles;        // of a SUM item
  std::int64_t least_items;       // SUM items of a multiprocessor, before they grow
  std::int64_t
      lag; // SUM items between a layer's last and its first PROJECT item, by multiprocessor
};
Phase2Tiling phase2_tiling(DataType type, std::int32_t tasks);

// Bytes of shared memory of a block.
std::size_t phase2_memory(std::int32_t tasks);

// A row of the table of tensors that the caller makes once for a trunk. Elements are counted along
// memory, which is an array [groups, outer, channels, inner] as in ChannelLayout.
struct PlannedTensor {
  std::int64_t rows;
  std::int64_t length;   // of a row
  std::int64_t channels; // of a group
  std::int64_t inner;
  std::int64_t row_segments;
  std::int64_t size; // in elements
  std::int64_t kernel_size;
  std::int64_t layer;     // -1 for a tensor without prioritized channels
  std::int64_t first_row; // of the layer, among those of all layers
  std::int64_t first_sum; // its SUM items, among those of all layers
  std::int64_t sum_items;
  std::int64_t tiles; // of a SUM or PROJECT item
  std::int64_t energy_items;
  std::int64_t energy_rows; // of an ENERGY item
};

// The row of a call's table of addresses: these, then the gradients of all tasks (0: zeros).
enum CallField : std::int32_t { kUpdate, kWeight, kPriority, kAligned, kGradients };

enum class ItemKind : std::int32_t { kEnergy = 0, kSum = 1, kProject = 2 };

struct Item {
  ItemKind kind;
  std::int32_t tensor;
  std::int32_t index; // among the tensor's items of this kind
};

// The counters of a layer.
enum Counter : std::int32_t {
  kEnergiesDone,
  kPriorityReady,
  kSumsDone,
  kCoefficientsReady,
  kLayerCounters
};

// Phase 2 (Algorithm 1) of all tensors of one type. An item waits for earlier items only. A launch
// may have ENERGY and SUM items alone, or PROJECT items alone, with kCoefficientsReady set.
struct Phase2Launch {
  DataType type;
  std::int32_t tasks;
  const Item* items;
  std::int64_t item_count;
  const PlannedTensor* tensors;
  const std::int64_t* table; // [tensors, kGradients + tasks]
  std::int32_t* ticket;      // zero
  std::int32_t* counters;    // [layers, kLayerCounters], zeros
  double* energy;            // [rows of all layers], workspace
  Numbers gamma;             // [tasks, rows] of one layer after the other
  Numbers variance;
  const double* epsilon; // [layers, tasks]
  double* item_products; // [SUM items of all layers, tasks, tasks], workspace
  double* products;      // [layers, tasks, tasks]: d_ij of the channel groups, written
  double* coefficients;  // [layers, tasks]: a_i; read where there are PROJECT items alone
};

// Reads every weight and gradient once and writes the update once; rows in conflict are visited
// again while they are in the L2 cache.
Status phase2(const Phase2Launch& launch, Stream stream);

// Eq. (4) of every row of one layer. Reads the weight once.
struct EnergyLaunch {
  DataType type;
  const PlannedTensor* tensor;
  std::int64_t items;
  const void* weight;
  bool aligned; // to 16 bytes
  double* energy;
};
Status energies(const EnergyLaunch& launch, Stream stream);

// Eq. (6) and, normalized, Eq. (7) of one layer.
struct StrengthLaunch {
  const double* energy; // [rows]
  Numbers gamma;        // [tasks, rows]
  Numbers variance;     // [tasks, rows]
  const double* epsilon;
  std::int64_t rows;
  std::int32_t tasks;
  bool normalize;
  double* strength; // [tasks, rows]
};
Status strengths(const StrengthLaunch& launch, Stream stream);

// Eq. (10) of one layer; strength [tasks, rows].
Status task_priority(Numbers strength, std::int32_t tasks, std::int64_t rows,
                     std::int64_t* priority, Stream stream);

} // namespace cs_kernels::cuda
