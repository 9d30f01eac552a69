// The paper's equations, with the paper's numbering, for the CPU and the GPU.
#pragma once

#include <cstdint>

#include "cs_kernels/host_device.h"

namespace cs_kernels {

// Eq. (6), from the sum of Eq. (4) over a channel's inputs.
CS_HOST_DEVICE_INLINE double channel_strength(double gamma, double variance, double epsilon,
                                              double energy) {
  return gamma * gamma / (variance + epsilon) * energy;
}

// Eq. (7); `total` is the sum of the strengths over the layer's channels.
CS_HOST_DEVICE_INLINE double normalized_strength(double strength, double total) {
  return total == 0 ? 0 : strength / total;
}

// Eq. (10), for tasks in ascending order. Ties go to the lowest task; NaN never wins.
struct TopTask {
  std::int64_t task = 0;
  double strength = 0;

  CS_HOST_DEVICE_INLINE void compare(std::int64_t candidate, double of_candidate) {
    const bool wins =
        of_candidate > strength || (strength != strength && of_candidate == of_candidate);
    if (candidate == 0 || wins) {
      task = candidate;
      strength = of_candidate;
    }
  }
};

// The projection coefficient a_i = -sum_j d_ij / d_ii over j != i with d_ij < 0, if d_ii > 0, else
// 0; d_ij = <G_i, G_j> over channel group i. In a conflict, an infinite d_ii, i.e. an overflow,
// gives NaN even if d_ij is finite.
CS_HOST_DEVICE_INLINE double projection_coefficient(const double* d_i, int tasks, int i) {
  double coefficient = 0;
  for (int j = 0; j < tasks; ++j)
    if (j != i && d_i[j] < 0 && d_i[i] > 0)
      coefficient -= d_i[j] / d_i[i] + 0 * d_i[i];
  return coefficient;
}

} // namespace cs_kernels
