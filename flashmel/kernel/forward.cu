// waveform -> load -> fft -> project -> epilogue -> mel.
//
// One block runs on each multiprocessor; its teams take tiles in turn. While a team transforms one tile, the samples of its
// next one are on their way to shared memory.
#include "team.cuh"

// Run-time arguments. driver.py packs the same fields in the same order.
struct Params {
  const void* waveform;   // (rows, n_samples), rows row_stride samples apart
  void* mel;              // (rows, n_mels, frames), contiguous
  const float4* factors;  // window, twiddle and separation factors: tables.py, kernel_tables
  const float4* filters;  // (n_filters,): places of the first bin and weights, rounds, row of mel; then the weights
  long long n_samples, row_stride, frames;
  unsigned tiles, all_tiles;    // of a row, of all rows; below 2^31
  unsigned magic, shift;        // to divide by tiles
  unsigned step;                // from a team's tile to its next one
  unsigned first_inner, inner;  // tiles of a row that touch no padding: the first, how many
  int aligned;                  // whether each of them starts at a multiple of a chunk's size in memory
  int n_mels, n_filters;        // n_filters: n_mels, up to a multiple of 4
  int filter_entries;           // of 16 bytes, with the weights
  const long long* lengths;  // (rows,): samples of each row, where it is `ragged`
  const float* affine;       // (2, n_mels): factors and summands of the features, where they are `affine`
  float2* summary;           // for normalize.cu, of valid features: if `extremes`, (rows, tiles, warps of a team), the largest and
                             // smallest; if `moments`, (rows, tiles, n_mels), the mean and the squared distances from it
};

// One of params.rows * params.tiles, row after row. One number, for it stays in a register throughout.
struct Tile {
  unsigned index;

  __device__ static Tile first(int team) { return {blockIdx.x + gridDim.x * team}; }
  __device__ Tile next(const Params& params) const { return {index + params.step}; }
  __device__ bool exists(const Params& params) const { return index < params.all_tiles; }
  __device__ unsigned row(const Params& params) const { return divide(index, params.magic, params.shift); }
  __device__ unsigned number(const Params& params) const { return index - row(params) * params.tiles; }  // in its row
  __device__ long long first_frame(const Params& params) const { return (long long)number(params) * Config::frames_per_tile; }
  __device__ bool is_inner(const Params& params) const { return number(params) - params.first_inner < params.inner; }
};

#include "load.cuh"
#include "dft.cuh"
#include "fft.cuh"
#include "project.cuh"
#include "power.cuh"

extern "C" __global__ void __launch_bounds__(Config::teams* Config::threads, 1)
    mel_spectrogram(const __grid_constant__ Params params) {
  extern __shared__ float4 shared_memory[];  // team after team; the tables
  using Input = Config::Input;
  const auto samples = [&] { return reinterpret_cast<Input*>(shared_memory + team<Config>() * Config::team_entries); };
  const auto spectra = [&] {
    return reinterpret_cast<float2*>(shared_memory + team<Config>() * Config::team_entries + Config::samples_entries);
  };
  float4* const tables = shared_memory + Config::teams * Config::team_entries;
  const float4* const factors = table_copy<Config::factors_in_shared>(params.factors, Config::factor_entries, tables);
  const float4* const filters = table_copy<Config::filters_in_shared>(
      params.filters, params.filter_entries, tables + (Config::factors_in_shared ? Config::factor_entries : 0));
  const auto sums = [&] {
    return reinterpret_cast<float*>(shared_memory + team<Config>() * Config::team_entries + Config::sums_begin);
  };

  Tile tile = Tile::first(team<Config>());
  const auto load_all = [&] {
    load<Config, false>(params, tile, samples());
    load<Config, true>(params, tile, samples());
  };
  if constexpr (Config::prefetch) load_all();
  wait_for_copies();
  __syncthreads();
  while (tile.exists(params)) {
    if constexpr (!Config::prefetch) {
      load_all();
      wait_for_copies();
      team_barrier<Config>();
    }
    fft<Config>(
        samples(), spectra(), factors, prologue_of<Config>(params, tile, samples(), sums()),
        [&] {
          if constexpr (Config::prefetch) load<Config, false>(params, tile.next(params), samples());
        },
        [&] {
          if constexpr (Config::prefetch) load<Config, true>(params, tile.next(params), samples());
        });
    wait_for_copies();  // of the next tile's samples
    team_barrier<Config>();
    project<Config>(params, tile, reinterpret_cast<const float*>(spectra()),
                    reinterpret_cast<const int4*>(filters));
    if constexpr (!Config::prefetch) team_barrier<Config>();
    tile = tile.next(params);
  }
}
