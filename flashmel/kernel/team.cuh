// Threads: a block is teams, each of which takes tile after tile; a tile is up to frames_per_tile consecutive frames of a row.
#pragma once
#include "device.cuh"
#include "feature.cuh"

enum class PadMode { reflect, constant, replicate, circular, symmetric };

#include "config.h"

// A thread's place in its team. Not kept, but asked for where it is needed.
template <class Config>
struct Place {
  int thread = thread_index() % Config::threads;
  int frame = thread % Config::frames_per_tile;   // lanes of a warp are frames first
  int of_frame = thread / Config::frames_per_tile;
};
template <class Config>
__device__ inline int team() {
  return thread_index() / Config::threads;
}
template <class Config>
__device__ inline void team_barrier() {
  named_barrier(team<Config>(), Config::threads);
}

// index / divisor for index below 2^31; magic and shift by plan.py's division().
__device__ inline unsigned divide(unsigned index, unsigned magic, unsigned shift) { return (__umulhi(index, magic) + index) >> shift; }

// Where to read a table: its copy in shared memory, there after wait_for_copies() and __syncthreads(), or itself.
template <bool in_shared>
__device__ inline const float4* table_copy(const float4* table, int entries, float4* shared) {
  if constexpr (in_shared) {
#pragma unroll 1
    for (int i = threadIdx.x; i < entries; i += blockDim.x) copy_async<16>(shared + i, table + i);
    return shared;
  } else {
    return table;
  }
}
