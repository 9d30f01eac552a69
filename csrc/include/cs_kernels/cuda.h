// The kernels on a GPU: structs of addresses there, a stream, and a status. No framework; all room
// is the caller's. Nothing waits for the device, so every call can be captured in a CUDA graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cs_kernels/data_type.h"

namespace cs_kernels::cuda {

using Stream = void*; // a cudaStream_t of the current device
using Status = int;   // a cudaError_t; 0 is success

const char* status_message(Status status);

// Whether the current device can run these kernels.
Status available();

// Elements of a tile, which the caller's plan has to count in.
std::int64_t phase2_tile(DataType type, std::int32_t tasks);
std::int64_t gradient_tile(DataType type);

// Bytes of shared memory of a block.
std::size_t phase2_memory(std::int32_t tasks);
std::size_t gramian_memory(std::int32_t tasks);
std::size_t solver_memory(std::int32_t tasks);

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
  std::int64_t tiles; // of a SUM or FIX item
  std::int64_t energy_items;
  std::int64_t energy_rows; // of an ENERGY item
};

// The row of a call's table of addresses: these, then the gradients of all tasks (0: zeros).
enum CallField : std::int32_t { kUpdate, kWeight, kPriority, kAligned, kGradients };

enum class ItemKind : std::int32_t { kEnergy = 0, kSum = 1, kFix = 2 };

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
  kFactorsReady,
  kLayerCounters
};

// Numbers of any type.
struct Numbers {
  DataType type;
  const void* data;
};

// Phase 2 (Algorithm 1) of all tensors of one type. An item waits for earlier items only.
struct Phase2Launch {
  DataType type;
  std::int32_t tasks;
  const Item* items;
  std::int64_t item_count;
  const PlannedTensor* tensors;
  const std::int64_t* table; // [tensors, kGradients + tasks]
  std::int32_t* ticket;      // zero
  std::int32_t* counters;    // [layers, kLayerCounters], zeros
  double* energy;            // [rows of all layers], room
  Numbers gamma;             // [tasks, rows] of one layer after the other
  Numbers variance;
  const double* epsilon; // [layers, tasks]
  double* products;      // [SUM items of all layers, tasks, tasks], room
  double* factors;       // [layers, tasks], room
};

// Reads every weight and gradient once and writes the update once; rows in conflict are visited
// again while they are in the L2 cache.
Status phase2(const Phase2Launch& launch, Stream stream);

// eq:eq1 of every row of one layer. Reads the weight once.
struct EnergyLaunch {
  DataType type;
  const PlannedTensor* tensor;
  std::int64_t items;
  const void* weight;
  bool aligned; // to 16 bytes
  double* energy;
};
Status energies(const EnergyLaunch& launch, Stream stream);

// eq:eq3 and, normalized, eq:eq5 of one layer.
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

// eq:eq6 of one layer; strength [tasks, rows].
Status task_priority(Numbers strength, std::int32_t tasks, std::int64_t rows,
                     std::int64_t* priority, Stream stream);

// A row of the table of tensors for what every method but Phase 2 does.
struct PlannedGradient {
  std::int64_t size; // in elements
  std::int64_t group;
  std::int64_t first_item; // of the group
  std::int64_t group_items;
  std::int64_t tiles;       // of an item
  std::int64_t first_place; // its elements, among those of all tensors
};

enum GradientCallField : std::int32_t {
  kGradientUpdate,
  kGradientAligned,
  kGradientGradients,
};

struct GradientItem {
  std::int32_t tensor;
  std::int32_t index;
};

struct GradientLaunch {
  DataType type;
  std::int32_t tasks;
  const GradientItem* items; // those of a group together
  std::int64_t item_count;
  const PlannedGradient* tensors;
  const std::int64_t* table; // [tensors, kGradientGradients + tasks]
};

// gramian [groups, tasks, tasks]. Reads every gradient once. counters [groups], zeros; products
// [items, tasks, tasks], room.
Status gramian(const GradientLaunch& launch, std::int32_t* counters, double* products,
               double* gramian, Stream stream);

// update = sum_j weights[group, j] * gradients[j]. Reads every gradient once, writes the update.
Status combine(const GradientLaunch& launch, const double* weights, Stream stream);

// GradDrop. Reads every gradient once, writes the update. keys: one for each 2^32 places.
Status drop_signs(const GradientLaunch& launch, const double* leaks, const std::uint64_t* keys,
                  Stream stream);

enum class Method : std::int32_t {
  kPcgrad,
  kCagrad,
  kMgda,
  kAlignedMtl,
  kNashMtl,
  kImtlG,
  kUpgrad,
};

struct SolverLaunch {
  Method method;
  const double* gramians; // [count, tasks, tasks]
  std::int64_t count;
  std::int32_t tasks;
  double* weights;      // [count, tasks]
  const void* argument; // PCGrad's key (uint64), CAGrad's c (double)
  std::int32_t scale;   // Aligned-MTL's
};
Status solve(const SolverLaunch& launch, Stream stream);

} // namespace cs_kernels::cuda
