// Stage 4: from a mel value to a feature.
#pragma once
#include "numbers.cuh"

enum class Log { none, ln, log10, db };

// What the logarithm of 2 is in the features' logarithm.
template <class Config>
__device__ constexpr float octave() {
  return Config::log == Log::ln ? 0.693147181f : Config::log == Log::log10 ? 0.301029996f : 3.01029996f;
}

// A mel value to a feature, but for the factors of its own filter.
template <class Config>
__device__ inline float feature(float m) {
  if constexpr (Config::log != Log::none) {
    m = Config::floor_is_added ? m + Config::floor : at_least(m, Config::floor);
    constexpr float per_octave = octave<Config>();
    // With such a floor m is a normal number, or NaN.
    m = per_octave * (Config::floor > 1e-30f ? log2_of_normal(m) : log2f(m));
  }
  if constexpr (Config::has_log_floor) m = at_least(m, Config::log_floor);
  if constexpr (Config::gain != 1.0f) m *= Config::gain;
  if constexpr (Config::bias != 0.0f) m += Config::bias;
  return m;
}
