// Number types: from what is read to float32, and from float32 to what is stored; and stage 4, from a mel value to a feature.
#pragma once

enum class Log { none, ln, log10, db };

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

// A mel value to a feature, but for the factors of its own filter.
template <class Config>
__device__ inline float feature(float m) {
  if constexpr (Config::log != Log::none) {
    m = Config::floor_is_added ? m + Config::floor : at_least(m, Config::floor);
    m = Config::log == Log::ln ? logf(m) : Config::log == Log::log10 ? log10f(m) : 10.0f * log10f(m);
  }
  if constexpr (Config::has_log_floor) m = at_least(m, Config::log_floor);
  if constexpr (Config::gain != 1.0f) m *= Config::gain;
  if constexpr (Config::bias != 0.0f) m += Config::bias;
  return m;
}
