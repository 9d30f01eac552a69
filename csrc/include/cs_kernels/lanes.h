// Linear algebra on small matrices for a team of lanes: one lane on the host, one or several warps
// on a GPU.
//
// Every lane runs the whole function. A number that decides a branch is equal in all lanes: every
// lane computes it, or it is a sum or a minimum over the lanes. An array element has one writer
// between two calls of `sync`. The host's team has no overhead.
#pragma once

#include <cmath>
#include <cstdint>

#include "cs_kernels/host_device.h"

namespace cs_kernels::solvers {

#define CS_INLINE_SOLVER CS_HOST_DEVICE inline

// The host's team.
struct OneLane {
  CS_HOST_DEVICE static constexpr int lane() { return 0; }
  CS_HOST_DEVICE static constexpr int lanes() { return 1; }
  // On a GPU, a part of a team is a warp; each part can solve a different problem.
  CS_HOST_DEVICE static constexpr int part() { return 0; }
  CS_HOST_DEVICE static constexpr int parts() { return 1; }
  CS_HOST_DEVICE static void sync() {}
  CS_HOST_DEVICE static void sync_parts() {}
  // Reductions over the lanes of the part; all these lanes get the result.
  CS_HOST_DEVICE static double sum(double x) { return x; }
  CS_HOST_DEVICE static double least(double x) { return x; }
};

// Memory for a solver's arrays, because a GPU thread has few registers. A workspace is passed by
// value, so a function's arrays are released when the function returns.
class Workspace {
public:
  CS_HOST_DEVICE explicit Workspace(double* memory) : next_(memory) {}
  CS_HOST_DEVICE double* numbers(int n) {
    double* taken = next_;
    next_ += n;
    return taken;
  }
  CS_HOST_DEVICE int* integers(int n) { return reinterpret_cast<int*>(numbers((n + 1) / 2)); }

private:
  double* next_;
};

// The row stride of a matrix: odd, so that the lanes of a warp read a column from different banks
// of shared memory.
CS_INLINE_SOLVER constexpr int row_stride(int n) { return n | 1; }

// The smallest number and its index: among equal numbers, the lowest index; -1 if there is none.
struct Least {
  int index = -1;
  double number = INFINITY;

  CS_HOST_DEVICE void compare(int i, double x) {
    if (index < 0 || x < number) {
      index = i;
      number = x;
    }
  }
  template <class Team> CS_HOST_DEVICE Least of_all(const Team& team) const {
    const double found = team.least(index < 0 ? INFINITY : number);
    const double first =
        team.least(index >= 0 && number == found ? static_cast<double>(index) : INFINITY);
    return {first < INFINITY ? static_cast<int>(first) : -1, found};
  }
};

template <class Team> CS_INLINE_SOLVER void fill(const Team& team, double* x, int n, double value) {
  for (int i = team.lane(); i < n; i += team.lanes())
    x[i] = value;
}

CS_INLINE_SOLVER double dot(const double* x, const double* y, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i)
    sum += x[i] * y[i];
  return sum;
}

template <class Team>
CS_INLINE_SOLVER double dot(const Team& team, const double* x, const double* y, int n) {
  double sum = 0;
  for (int i = team.lane(); i < n; i += team.lanes())
    sum += x[i] * y[i];
  return team.sum(sum);
}

CS_INLINE_SOLVER void rotate(double& x, double& y, double cosine, double sine) {
  const double before = x;
  x = cosine * before - sine * y;
  y = sine * before + cosine * y;
}

// A matrix [n, n] in the workspace.
struct Matrix {
  double* data;
  int stride;

  CS_HOST_DEVICE Matrix(int n, Workspace& workspace)
      : data(workspace.numbers(n * row_stride(n))), stride(row_stride(n)) {}
  CS_HOST_DEVICE double* row(int i) const { return data + static_cast<std::int64_t>(i) * stride; }
  CS_HOST_DEVICE double& operator()(int i, int j) const { return row(i)[j]; }
};

// Solves L y = b in place, for a lower triangular L. Lanes must be synchronized before the call,
// and are afterwards.
template <class Team>
CS_INLINE_SOLVER void solve_lower(const Team& team, const Matrix& factor, int n, double* x) {
  for (int j = 0; j < n; ++j) {
    const double found = x[j] / factor(j, j);
    team.sync();
    for (int i = j + team.lane(); i < n; i += team.lanes())
      x[i] = i == j ? found : x[i] - factor(i, j) * found;
    team.sync();
  }
}

// Solves L L' x = b in place.
template <class Team>
CS_INLINE_SOLVER void cholesky_solve(const Team& team, const Matrix& factor, int n, double* x) {
  solve_lower(team, factor, n, x);
  for (int j = n; j-- > 0;) {
    const double found = x[j] / factor(j, j);
    team.sync();
    for (int i = team.lane(); i <= j; i += team.lanes())
      x[i] = i == j ? found : x[i] - factor(j, i) * found;
    team.sync();
  }
}

// Replaces the lower triangle of a positive definite A [n, n] with its Cholesky factor.
template <class Team> CS_INLINE_SOLVER void cholesky(const Team& team, const Matrix& a, int n) {
  for (int j = 0; j < n; ++j) {
    const double* found = a.row(j);
    const double pivot = std::sqrt(std::fmax(a(j, j) - dot(found, found, j), 1e-300));
    team.sync();
    for (int i = j + team.lane(); i < n; i += team.lanes())
      a(i, j) = i == j ? pivot : (a(i, j) - dot(a.row(i), found, j)) / pivot;
    team.sync();
  }
}

// Computes the eigenvalues (the final diagonal of `a`) and eigenvectors (rows) of a symmetric
// matrix by Jacobi rotations. The rotations of a round share no row, like the games of a
// round-robin tournament with n players, or n + 1 if n is odd. Each group of lanes has a pair of
// rows.
template <class Team>
CS_INLINE_SOLVER void eigen(const Team& team, const Matrix& a, int n, const Matrix& vectors) {
  double trace = 0;
  for (int i = 0; i < n; ++i)
    trace += std::fabs(a(i, i));
  for (int i = team.lane(); i < n; i += team.lanes())
    for (int j = 0; j < n; ++j)
      vectors(i, j) = i == j ? 1 : 0;
  team.sync();
  const int players = n + n % 2;
  int groups = 1;
  while (groups < players / 2 && groups < team.lanes())
    groups *= 2;
  const int group = team.lane() % groups;
  const int first = team.lane() / groups;
  const int each = team.lanes() / groups;
  for (int sweep = 0; sweep < 40; ++sweep) {
    double rotated = 0;
    for (int round = 0; round + 1 < players; ++round)
      for (int start = 0; start < players / 2; start += groups) {
        const int k = start + group;
        const int p = k == 0 ? players - 1 : (round + k) % (players - 1);
        const int q = (round - k + players - 1) % (players - 1);
        const bool is_pair = k < players / 2 && p < n;
        const double off = is_pair ? a(p, q) : 0;
        double sine = 0;
        double cosine = 1;
        if (std::fabs(off) > 1e-18 * trace) {
          rotated = 1;
          const double theta = (a(q, q) - a(p, p)) / (2 * off);
          const double t = (theta < 0 ? -1 : 1) / (std::fabs(theta) + std::sqrt(theta * theta + 1));
          cosine = 1 / std::sqrt(t * t + 1);
          sine = t * cosine;
        }
        const int rows = sine != 0 ? n : 0;
        team.sync();
        for (int i = first; i < rows; i += each)
          rotate(a(i, p), a(i, q), cosine, sine);
        team.sync();
        for (int i = first; i < rows; i += each) {
          rotate(a(p, i), a(q, i), cosine, sine);
          rotate(vectors(p, i), vectors(q, i), cosine, sine);
        }
        team.sync();
        if (rows > 0 && first == 0)
          a(p, q) = a(q, p) = 0; // not read before the next call of sync
      }
    team.sync();
    if (team.sum(rotated) == 0)
      break;
  }
}

#undef CS_INLINE_SOLVER

} // namespace cs_kernels::solvers
