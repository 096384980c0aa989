// kernel/dft.cuh for a CPU: dft(n, a) transforms n complex numbers. Built by tests/test_kernel_emulated.py.
#define __device__
#include "dft.cuh"

template <int n>
void transform(int size, Complex* a) {
  if constexpr (n > 0) size == n ? dft<n>(a) : transform<n - 1>(size, a);
}

extern "C" void run(int size, Complex* a) { transform<64>(size, a); }
