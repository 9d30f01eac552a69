#pragma once

#include <cfenv>

namespace cs_kernels::cpu {

// Runs `work` once on each of `threads` threads, which share the pieces out among themselves by an
// atomic counter. OpenMP's, because in a process with PyTorch they are PyTorch's own: already awake
// after its last operator, where threads of another pool would compete with them for the cores.
//
// Rounding and flush-to-zero are the caller's on every thread, so that the bits are.
template <class Work> void run_parallel(int threads, const Work& work) {
  if (threads <= 1) {
    work();
    return;
  }
  std::fenv_t caller;
  std::fegetenv(&caller);
#pragma omp parallel num_threads(threads)
  {
    std::fenv_t before;
    std::fegetenv(&before);
    std::fesetenv(&caller);
    work();
    std::fesetenv(&before);
  }
}

} // namespace cs_kernels::cpu
