// gradient of mel -> gradient of the waveform: load -> fft -> gradient of the bins -> the same stages back -> waveform.
//
// Each team walks along a segment of a row, tile after tile. All but a row's first segment begin with the `overlap` frames that
// reach into their own slots from before. The spectra are computed anew: nothing but the waveform is kept from the forward pass.
#include "team.cuh"

// Run-time arguments. driver.py packs the same fields in the same order.
struct Params {
  const void* waveform;   // (rows, n_samples), rows row_stride samples apart
  const void* mel;        // gradient of mel: (rows, n_mels, frames), with the strides below
  void* gradient;         // of the waveform: (rows, n_samples), contiguous
  float* edges;           // (rows, edge_length): edges.cuh
  const float4* factors;  // window, twiddle and separation factors: tables.py, kernel_tables
  const float4* filters;  // (entries_per_bin, n_freqs): two weights, and where in a tile's mel gradients they belong
  long long n_samples, row_stride, frames;
  long long mel_row_stride, mel_stride, mel_frame_stride;
  long long emitted;             // slots from a segment to the next
  long long first_inner, inner;  // frames where a tile may start that touches no padding: the first, how many
  long long edge_length;
  unsigned segments, all_segments;  // of a row, of all rows; below 2^31
  unsigned magic, shift;            // to divide by segments
  unsigned stride;                  // from a team's segment to its next one
  int tiles;                        // of a segment
  int aligned;                      // whether tiles that touch no padding start at a multiple of a chunk's size in memory
  int filter_entries;               // of 16 bytes
  int fold;                         // whether the ends of a row are each within one segment, whose team then folds them
  unsigned rows;
  const float* features;     // what the forward pass made, contiguous, where there is a log
  const long long* lengths;  // (rows,): samples of each row, where it is `ragged`
  const float* affine;       // (2, n_mels): factors and summands of the features, where they are `affine`
};

struct Tile {
  unsigned segment;
  int step;  // of its tiles

  __device__ static Tile first(int team) { return {blockIdx.x + gridDim.x * team, 0}; }
  __device__ Tile next(const Params& params) const {
    return step + 1 < params.tiles ? Tile{segment, step + 1} : Tile{segment + params.stride, 0};
  }
  __device__ bool exists(const Params& params) const { return segment < params.all_segments; }
  __device__ unsigned row(const Params& params) const { return divide(segment, params.magic, params.shift); }
  __device__ long long first_frame(const Params& params) const {
    return number(params) * params.emitted + step * Config::frames_per_tile;
  }
  __device__ unsigned number(const Params& params) const { return segment - row(params) * params.segments; }  // of the segment
  __device__ bool is_inner(const Params& params) const {
    return (unsigned long long)(first_frame(params) - params.first_inner) < (unsigned long long)params.inner;
  }
};

#include "load.cuh"
#include "dft.cuh"
#include "fft.cuh"
#include "edges.cuh"
#include "backward.cuh"

extern "C" __global__ void __launch_bounds__(Config::teams* Config::threads, 1)
    mel_spectrogram_backward(const __grid_constant__ Params params) {
  extern __shared__ float4 shared_memory[];  // team after team: samples, spectra, mel gradient, carry; the tables
  const auto part = [&](int entry) { return shared_memory + team<Config>() * Config::team_entries + entry; };
  const auto samples = [&] { return reinterpret_cast<typename Config::Input*>(part(0)); };
  const auto spectra = [&] { return reinterpret_cast<float2*>(part(Config::samples_entries)); };
  const auto mel = [&] { return reinterpret_cast<float*>(part(Config::mel_begin)); };
  const auto carry = [&] { return reinterpret_cast<float*>(part(Config::carry_begin)); };
  const auto sums = [&] { return reinterpret_cast<float*>(part(Config::sums_begin)); };
  float4* const tables = shared_memory + Config::teams * Config::team_entries;
  const float4* const factors = table_copy<Config::factors_in_shared>(params.factors, Config::factor_entries, tables);
  const float4* const bins = table_copy<Config::filters_in_shared>(
      params.filters, params.filter_entries, tables + (Config::factors_in_shared ? Config::factor_entries : 0));

  Tile tile = Tile::first(team<Config>());
  load<Config, false>(params, tile, samples());
  load<Config, true>(params, tile, samples());
  load_mel<Config>(params, tile, mel());
  wait_for_copies();
  __syncthreads();
  while (tile.exists(params)) {
    columns_in_turn<Config>(samples(), spectra(), factors, prologue_of<Config>(params, tile, samples(), sums()));
    team_barrier<Config>();
    load<Config, false>(params, tile.next(params), samples());
    load<Config, true>(params, tile.next(params), samples());
    if constexpr (Config::r2 > 1) {
      middle<Config>(spectra(), factors);
      team_barrier<Config>();
    }
    rows_and_back<Config>(spectra(), factors, bins, mel());
    team_barrier<Config>();
    load_mel<Config>(params, tile.next(params), mel());
    if constexpr (Config::r2 > 1) {
      middle_back<Config>(spectra(), factors);
      team_barrier<Config>();
    }
    columns_back<Config>(spectra(), factors, sums());
    team_barrier<Config>();
    if constexpr (Config::remove_dc) mean_gradients<Config>(sums());
    if (touches_edge<Config>(params, tile)) {
      add_frames<Config, true>(params, tile, spectra(), sums(), carry());
    } else {
      add_frames<Config, false>(params, tile, spectra(), sums(), carry());
    }
    wait_for_copies();
    team_barrier<Config>();
    if (params.fold && tile.step + 1 == params.tiles) fold_ends<Config>(params, tile);
    tile = tile.next(params);
  }
}

// For launches with !params.fold, after the other kernel.
extern "C" __global__ void fold_edges(const __grid_constant__ Params params) {
#pragma unroll 1
  for (unsigned row = blockIdx.y; row < params.rows; row += gridDim.y) {
    fold_row<Config>(params, row);
  }
}
