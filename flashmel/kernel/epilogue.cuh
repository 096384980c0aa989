// Stage 4: from the float32 sum to what is stored.
#pragma once

template <class Output>
__device__ inline Output from_float(float x) {
  return Output(x);
}
#ifdef __CUDA_FP16_H__
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
#endif
#ifdef __CUDA_BF16_H__
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
#endif
