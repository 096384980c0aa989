// Stage 4: from a mel value to a feature.
#pragma once
#include "numbers.cuh"

enum class Log { none, ln, log10, db };

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
