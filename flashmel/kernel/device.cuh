// What C++ has no words for. tests/emulator has the same functions for a CPU.
#pragma once

// A barrier of `threads` threads of the block, for whole warps; `id` below 16.
__device__ inline void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// The same value, about which the compiler knows nothing. Without it, it computes every stage's addresses once before
// the loop over tiles and keeps them all in registers.
__device__ inline int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// threadIdx.x, read anew each time: a register less to keep.
__device__ inline int thread_index() {
  int value;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(value));
  return value;
}

// The value is computed before any barrier that follows. Without it, the compiler keeps what it is computed from instead.
__device__ inline void settle(float& value) { asm volatile("" : "+f"(value)); }

// Copy `bytes` (4, 8 or 16, at addresses that are multiples of it) from global to shared memory. They are there after
// wait_for_copies() in the same thread and a barrier.
template <int bytes>
__device__ inline void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(bytes) : "memory");
  }
#else
  struct alignas(bytes) Words {
    unsigned of[bytes / 4];
  };
  *static_cast<Words*>(shared) = *static_cast<const Words*>(global);
#endif
}

__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ inline float inverse_root(float x) { return rsqrtf(x); }  // to 2 ulp

// To 2 ulp, and to 2**-22 around 1; x is a normal number. log2f() of any x takes three times as long.
__device__ inline float log2_of_normal(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float half_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ inline unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ inline float float_of_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ inline unsigned bits_of_float(float value) { return __float_as_uint(value); }
