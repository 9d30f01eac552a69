// Phase 2, connection strength and priority on a GPU. Calls take a struct of device addresses and a
// stream, and return a status. The caller provides the workspace. No call synchronizes with the
// host, so every call can be captured in a CUDA graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cs_kernels/cuda/launch.h"

namespace cs_kernels::cuda {

// The constants for the caller's plan.
struct Phase2Tiling {
  std::int64_t tile_segments;
  std::int64_t unit;              // in elements; a segment is a whole number of units
  std::int64_t most_units;        // per segment
  std::int64_t energy_elements;   // per ENERGY item, approximately
  std::int64_t least_energy_rows; // per ENERGY item
  std::int64_t least_items;       // minimum per multiprocessor; SUM items grow only above it
  std::int64_t lag; // SUM items per multiprocessor from a layer's last SUM to first PROJECT item
  std::int64_t project_sums; // SUM items per PROJECT item
};
Phase2Tiling phase2_tiling(DataType type);

// Bytes of shared memory per block.
std::size_t phase2_memory(std::int32_t tasks);

// A row of the tensor table, which the caller makes once per trunk. Elements are in memory order;
// the dimensions are as in ChannelLayout.
struct PlannedTensor {
  std::int64_t rows;
  std::int64_t length;   // of a row
  std::int64_t channels; // rows per convolution group
  std::int64_t inner;
  std::int64_t segment;      // in elements
  std::int64_t row_segments; // per row; the last one may be shorter
  std::int64_t size;         // in segments
  std::int64_t kernel_size;
  std::int64_t layer;     // -1 for a tensor without prioritized channels
  std::int64_t first_row; // index of the layer's first row among all layers' rows
  std::int64_t first_sum; // index of the layer's first SUM item among all layers' SUM items
  std::int64_t sum_items;
  std::int64_t tiles; // per SUM item
  std::int64_t energy_items;
  std::int64_t energy_rows;  // per ENERGY item
  std::int64_t project_sums; // SUM items per PROJECT item
};

// A row of a call's address table. The tasks' gradients come last; null means a zero gradient.
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

// Phase 2 (Algorithm 1) of all tensors of one type. An item waits only for earlier items. A launch
// may have only SUM items, or only PROJECT items with kCoefficientsReady set.
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
  Numbers gamma;             // [tasks, rows] per layer, concatenated
  Numbers variance;
  const double* epsilon; // [layers, tasks]
  double* item_products; // [SUM items of all layers, tasks, tasks], workspace
  double* products;      // [layers, tasks, tasks]: d_ij of the channel groups; output
  double* coefficients;  // [layers, tasks]: a_i; input if there are only PROJECT items
};

// Reads every weight and gradient once and writes the update once, (K + 2) N elements. PROJECT
// items revisit rows in conflict, with two reads and a write.
Status phase2(const Phase2Launch& launch, Stream stream);

// Eq. (4) of every row of one layer. Reads the weight once.
struct EnergyLaunch {
  DataType type;
  const PlannedTensor* tensor;
  std::int64_t items;
  const void* weight;
  bool aligned; // whether `weight` is aligned to 16 bytes
  double* energy;
};
Status energies(const EnergyLaunch& launch, Stream stream);

// Eq. (6) of one layer, followed by Eq. (7) if `normalize`.
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

// Eq. (10) of one layer.
struct PriorityLaunch {
  Numbers strength; // [tasks, rows]
  std::int32_t tasks;
  std::int64_t rows;
  std::int64_t* priority; // [rows]
};
Status task_priority(const PriorityLaunch& launch, Stream stream);

} // namespace cs_kernels::cuda
