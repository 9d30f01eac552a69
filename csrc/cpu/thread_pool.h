#pragma once

#include <functional>

namespace cs_kernels::cpu {

// Runs `work` on the calling thread and on up to `threads - 1` parked ones at the same time, and
// returns when all that began have ended. `work` claims its own pieces (an atomic counter), so the
// caller never waits for a thread that the system has not scheduled: with other pools spinning on
// the same cores, as PyTorch's does between its own operators, that wait would cost a time slice.
//
// A second caller at the same time, and a child after fork(), work alone or start anew.
void run_parallel(int threads, const std::function<void()>& work);

} // namespace cs_kernels::cpu
