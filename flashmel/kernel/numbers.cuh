// Number types: from what is read to float32, and from float32 to what is stored.
#pragma once

// max() that keeps NaN: of x, and of either.
__device__ inline float at_least(float x, float floor) { return x < floor ? floor : x; }
__device__ inline float larger(float a, float b) { return b > a || b != b ? b : a; }

constexpr float highest = 3.402823466e38f, lowest = -highest;

struct Half {
  unsigned short bits;
};
struct Bfloat16 {  // the upper half of a float
  unsigned short bits;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(short x) { return float(x); }  // the scale is in the window table
__device__ inline float to_float(Half x) { return half_to_float(x.bits); }
__device__ inline float to_float(Bfloat16 x) { return float_of_bits(unsigned(x.bits) << 16); }

template <class Output>
__device__ inline Output from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline Half from_float<Half>(float x) {
  return {float_to_half(x)};
}
template <>
__device__ inline Bfloat16 from_float<Bfloat16>(float x) {  // to nearest, ties to even
  const unsigned bits = bits_of_float(x);
  if (x != x) return {0x7fff};
  return {(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
