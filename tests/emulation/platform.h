// Replaces csrc/cuda/platform/platform.h on a CPU: the threads of a block are fibers, and several
// blocks run concurrently, in an order that is drawn from a seed. Addresses are plain pointers, so
// the address sanitizer checks every access.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define CS_DEVICE inline
#define CS_KERNEL(threads, blocks) void
#define CS_UNROLL(number)

namespace cs_kernels::cuda {

namespace emulation {

int thread_index();
int block_size();
std::int64_t block_index();
unsigned char* shared_memory();
void synchronize_block();
double exchanged(double value, int mask);
void pause();
std::int64_t resident_blocks();
int run(std::int64_t blocks, int threads, std::size_t shared_bytes,
        const std::function<void()>& thread);

// Every access must be aligned to its size.
template <class T> const T& aligned(const T* address) {
  if (reinterpret_cast<std::uintptr_t>(address) % sizeof(T) != 0)
    __builtin_trap();
  return *address;
}

} // namespace emulation

template <class Word> struct alignas(16) Words {
  Word x[4];
};

inline int thread_index() { return emulation::thread_index(); }
inline int block_size() { return emulation::block_size(); }
inline std::int64_t block_index() { return emulation::block_index(); }
inline unsigned char* shared_memory() { return emulation::shared_memory(); }
inline void synchronize_block() { emulation::synchronize_block(); }
inline void synchronize_warp() { emulation::exchanged(0, 0); }
template <class Number> Number exchanged(Number value, int mask) {
  return static_cast<Number>(emulation::exchanged(value, mask));
}
inline std::int32_t count(std::int32_t* counter) { return (*counter)++; }
inline std::int32_t count_in_order(std::int32_t* counter) { return (*counter)++; }
inline std::int32_t counted(const std::int32_t* counter) { return *counter; }
inline void pause(unsigned) { emulation::pause(); }

template <class T> T load(const T* address) { return emulation::aligned(address); }
inline std::uint64_t policy_to_evict() { return 0; }
template <class Word> Words<Word> load(const Words<Word>* address, std::uint64_t) {
  return emulation::aligned(address);
}
inline void* global_pointer(std::int64_t address) { return reinterpret_cast<void*>(address); }

inline float low_bfloat16(std::uint32_t word) {
  const std::uint32_t bits = word << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float high_bfloat16(std::uint32_t word) { return low_bfloat16(word >> 16); }
inline float float16_to_float(std::uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return value;
}
inline std::uint16_t float_to_float16(float value) {
  const auto rounded = static_cast<_Float16>(value);
  std::uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
inline std::uint16_t float_to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value))
    return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline const char* error_text(int) { return "the emulation stopped"; }

template <class Arguments> int loadable(void (*)(Arguments)) { return 0; }

template <class Arguments>
int resident_blocks(void (*)(Arguments), int, std::size_t, std::int64_t* blocks) {
  *blocks = emulation::resident_blocks();
  return 0;
}

template <class Arguments>
int launch(void (*kernel)(Arguments), std::int64_t blocks, int threads, std::size_t shared_bytes,
           void*, Arguments arguments) {
  return emulation::run(blocks, threads, shared_bytes, [&] { kernel(arguments); });
}

} // namespace cs_kernels::cuda
