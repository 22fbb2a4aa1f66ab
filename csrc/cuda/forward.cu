// Forward on the tensor cores: rowmax, accumulate and the fused call, in terms of the kernels in tensor_core.cuh
// (docs/contract.md sections 1 to 7). Query rows go in chunks: scores of a chunk leave distances in a bounded
// workspace, the sums kernel turns them into outputs, the next chunk reuses the space.
#include <algorithm>

#include "direct.cuh"
#include "paths.h"
#include "tensor_core.cuh"

namespace det_attn::cuda {

namespace {

// The engine for this call: few query rows go straight to their keys and values, modifiers to the kernels that know
// them.
Engine engine_for(Engine engine, const Problem& p) {
  if (p.modifiers.any()) return Engine::kMma;
  return is_direct(p) ? Engine::kDirect : engine;
}

void launch_scores(const Context& ctx, Engine engine, const ScoresArgs& args, int64_t tiles, bool given) {
  if (args.shape.keys == 0) return;
  const bool highest = args.shape.planes == 3;
  if (args.problem.modifiers.of_scores()) {
    (highest ? launch_scores_modified_highest : launch_scores_modified_high)(ctx, args, tiles, given);
  } else if (engine == Engine::kDirect) {
    (highest ? launch_scores_direct_highest : launch_scores_direct_high)(ctx, args, tiles, given);
  } else if (engine == Engine::kWgmma) {
    (highest ? launch_scores_wgmma_highest : launch_scores_wgmma_high)(ctx, args, tiles, given);
  } else {
    (highest ? launch_scores_highest : launch_scores_high)(ctx, args, tiles, given);
  }
}

void launch_sums(const Context& ctx, Engine engine, const SumsArgs& args, int64_t tiles) {
  if (engine == Engine::kDirect) {
    if (args.shape.keys == 0) return;
    return (args.shape.planes == 3 ? launch_sums_direct_highest : launch_sums_direct_high)(ctx, args, tiles);
  }
  if (args.problem.modifiers.dropout.on)
    return (args.shape.planes == 3 ? launch_sums_dropout_highest : launch_sums_dropout_high)(ctx, args, tiles);
  if (engine == Engine::kWgmma)
    return (args.shape.planes == 3 ? launch_sums_hopper_highest : launch_sums_hopper_high)(ctx, args, tiles);
  (args.shape.planes == 3 ? launch_sums_highest : launch_sums_high)(ctx, args, tiles);
}

// Rows of one sums CTA; see SumsTile, SumsHopperTile and SumsDirectTile.
int64_t rows_of_sums(Engine engine, const Shape& s) {
  if (engine == Engine::kDirect) return kBlockRows;
  return (engine == Engine::kWgmma && s.planes == 2) || s.value_dims_pad == 64 ? 64 : 32;
}

// CTAs of the sums kernel side by side over head_dim.
int64_t dim_blocks(const Shape& s) { return std::max<int64_t>(1, s.value_dims_pad / 128); }

// How far apart the keys of a tile's rows may lie: a window bounds it, and what is known of ranges, where the rows are
// consecutive queries.
int64_t span_of(const Problem& p, const Shape& s) {
  const Mask& m = p.mask;
  if (p.q_heads != p.kv_heads && p.q_len % kRowPad != 0) return s.keys_pad;
  int64_t reach = m.range_reach;
  if (m.left != Mask::kUnlimited && m.right != Mask::kUnlimited && m.range_columns != 3)
    reach = std::min(reach, std::max<int64_t>(0, m.left + m.right));
  // The first key is rounded down and the last one up.
  return std::min(s.keys_pad, round_up(reach + kRowPad + kKeyPad, kKeyPad));
}

}  // namespace

Shape shape_of(const Problem& p, Engine engine) {
  Shape s;
  s.heads = p.batch * p.kv_heads;
  s.rows = p.kv_heads == 0 ? 0 : p.q_heads / p.kv_heads * p.q_len;
  s.rows_pad = round_up(s.rows, kRowPad);
  s.tile_blocks = std::min<int64_t>(kRowPad, round_up(s.rows, kBlockRows)) / kBlockRows;
  s.keys = p.mask.kv_hi - p.mask.kv_lo;
  s.keys_pad = round_up(s.keys, kKeyPad);
  s.span = span_of(p, s);
  s.dims = static_cast<int>(p.head_dim);
  s.dims_pad = static_cast<int>(round_up(p.head_dim, kDimPad));
  if (engine != Engine::kMma)
    s.dims_pad = s.dims_pad <= 64 ? 64 : (s.dims_pad <= 128 ? 128 : 256);  // the k-steps are compiled in
  s.value_dims_pad = static_cast<int>(p.head_dim <= 64 ? 64 : round_up(p.head_dim, 128));
  s.planes = (p.precision.operand_bits + 7) / 8;
  return s;
}

namespace {

// Workspace for what the kernels derive from the inputs, filled; `values` or without those.
Prepared prepare(const Context& ctx, Engine engine, const Problem& problem, const Shape& s, bool values) {
  const bool direct = engine == Engine::kDirect;  // no planes of keys and values
  Prepared p{};
  p.query = workspace<uint8_t>(ctx, s.heads * s.planes * s.rows_pad * s.dims_pad);
  p.query_exponent = workspace<int32_t>(ctx, s.heads * s.rows_pad);
  p.rowmax = workspace<int64_t>(ctx, s.heads * s.rows_pad);
  p.row_keys = workspace<int2>(ctx, s.heads * s.rows_pad);
  if (problem.modifiers.bias.data != nullptr) p.row_bias = workspace<int64_t>(ctx, s.heads * s.rows_pad);
  p.block_keys = workspace<int2>(ctx, s.heads * (s.rows_pad / kBlockRows));
  p.tile_first = workspace<int32_t>(ctx, s.heads * (s.rows_pad / kRowPad));
  prepare_queries(ctx, problem, s, p);
  prepare_tiles(ctx, s, p);
  if (!direct) {
    p.key = workspace<uint8_t>(ctx, s.heads * s.planes * s.keys_pad * s.dims_pad);
    p.key_exponent = workspace<int32_t>(ctx, s.heads * s.keys_pad);
    prepare_keys(ctx, problem, s, p);
  }
  if (!values) return p;
  p.value_range = workspace<int32_t>(ctx, s.heads * 2);
  p.value_special = workspace<int32_t>(ctx, s.heads);
  p.special_key = workspace<uint8_t>(ctx, s.heads * s.keys_pad);
  reset_values(ctx, s, p);
  if (!direct) {
    p.value = workspace<uint8_t>(ctx, s.heads * s.planes * s.value_dims_pad * s.keys_pad);
    p.value_exponent = workspace<int32_t>(ctx, s.heads * s.keys_pad);
    p.value_shift = workspace<uint8_t>(ctx, s.heads * s.keys_pad);
    prepare_values(ctx, problem, s, p);
  }
  return p;
}

// Rows may attend more or fewer keys.
bool is_uneven(const Mask& m) {
  return m.left != Mask::kUnlimited || m.right != Mask::kUnlimited || m.ranges != nullptr;
}

ScoresArgs scores_args(const Problem& p, const Shape& s, const Prepared& prepared) {
  int slab = is_uneven(p.mask) ? kUnevenScoreSlab : kScoreSlab;
  if (s.span < s.keys_pad)  // a window: rows attend about as many keys, so slabs are equal, a short window's is one
    slab = static_cast<int>(s.span <= kMostScoreSlab
                                ? s.span
                                : round_up(ceil_div(s.span, ceil_div(s.span, kScoreSlab)), kKeyPad));
  return ScoresArgs{p, s, prepared, Distances{nullptr, nullptr, s.span / kBlockKeys}, 0, slab};
}

// How many row tiles a chunk takes, and into how many parts its keys are split to fill the device.
struct Plan {
  int64_t tiles, chunk_tiles;
  int splits;
  int64_t split_keys;
};

Plan plan_of(const Context& ctx, Engine engine, const Problem& problem, const Shape& s) {
  Plan plan;
  plan.tiles = s.heads * (s.rows_pad / kRowPad);
  const int64_t tile_bytes = s.tile_blocks * (s.span / kBlockKeys) * kBlockBytes;
  const int64_t bytes = s.span < s.keys_pad ? kWindowChunkBytes : kChunkBytes;
  const int64_t fit = tile_bytes == 0 ? plan.tiles : bytes / tile_bytes;
  const int64_t most = engine == Engine::kWgmma ? kResidentChunkTiles : kChunkTiles;
  plan.chunk_tiles = std::max<int64_t>(1, std::min({fit, plan.tiles, most}));
  // CTAs of the sums kernel in one chunk that have rows.
  const int64_t per_tile = ceil_div(s.tile_blocks * kBlockRows, rows_of_sums(engine, s)) * dim_blocks(s);
  const int64_t sms = processors(ctx.device), ctas = plan.chunk_tiles * per_tile;
  int64_t splits = ctas >= sms ? 1 : ceil_div(2 * sms, ctas);
  const int64_t tiles_per_head = s.rows_pad / kRowPad;
  if (is_uneven(problem.mask) && plan.chunk_tiles > tiles_per_head) {  // whole heads: long and short rows even out
    plan.chunk_tiles -= plan.chunk_tiles % tiles_per_head;
  } else if (plan.chunk_tiles < plan.tiles) {  // whole waves of CTAs, where a chunk has at least one
    const int64_t wave = ceil_div(sms, per_tile);
    if (plan.chunk_tiles > wave) plan.chunk_tiles -= plan.chunk_tiles % wave;
  }
  splits = std::max<int64_t>(1, std::min(splits, std::min(s.keys, s.span) / kLeastSplitKeys));
  plan.split_keys = std::max<int64_t>(kKeyPad, round_up(ceil_div(s.span, splits), kKeyPad));
  plan.splits = static_cast<int>(std::max<int64_t>(1, ceil_div(s.span, plan.split_keys)));
  return plan;
}

// Runs scores and sums over every chunk. `args` says where sums go; `given` whether prepared.rowmax is an input.
void run_chunks(const Context& ctx, Engine engine, const Problem& problem, const Shape& s, SumsArgs args,
                const Plan& plan, bool given) {
  ScoresArgs scores = scores_args(problem, s, args.prepared);
  const int64_t blocks = plan.chunk_tiles * s.tile_blocks * (s.span / kBlockKeys);
  scores.distances.distance = workspace<uint4>(ctx, blocks * 4 * kWarpSize);
  scores.distances.block_max = workspace<int64_t>(ctx, blocks * kBlockRows);
  args.distances = scores.distances;
  if (engine == Engine::kWgmma) args.ticket = workspace<int>(ctx, 1);
  args.splits = plan.splits;
  args.into_digits = plan.splits > 1 || args.out.data == nullptr || engine == Engine::kDirect;
  args.split_keys = plan.split_keys;
  const bool into_num = args.out.data == nullptr;
  if (!into_num) {
    // Of the chunk's rows; resident CTAs have their own, unless several add to a row.
    int64_t rows = plan.chunk_tiles * s.tile_blocks * kBlockRows;
    if (engine == Engine::kWgmma && !args.into_digits) {
      const int64_t tile = rows_of_sums(engine, s), pieces = plan.chunk_tiles * (kRowPad / tile) * dim_blocks(s);
      rows = std::min<int64_t>(pieces, processors(ctx.device)) * tile;
    }
    args.digits = workspace<int64_t>(ctx, rows * s.dims * kDigits);
  }
  const int64_t tiles_per_head = s.rows_pad / kRowPad;
  for (int64_t first = 0; first < plan.tiles; first += plan.chunk_tiles) {
    const int64_t tiles = std::min(plan.chunk_tiles, plan.tiles - first);
    // The chunk's rows over heads * rows: padding rows are not counted there.
    const auto row_at = [&](int64_t tile) {
      return tile / tiles_per_head * s.rows + std::min(tile % tiles_per_head * kRowPad, s.rows);
    };
    const int64_t row = row_at(first), rows = row_at(first + tiles) - row;
    scores.first_tile = args.first_tile = first;
    launch_scores(ctx, engine, scores, tiles, given);
    if (!into_num) {
      args.digits_row = row;
      if (args.into_digits) {
        check(cudaMemsetAsync(args.digits, 0, rows * s.dims * kDigits * sizeof(int64_t), stream_of(ctx)),
              "cudaMemsetAsync");
        check(cudaMemsetAsync(args.den + row, 0, rows * sizeof(int64_t), stream_of(ctx)), "cudaMemsetAsync");
      }
    }
    launch_sums(ctx, engine, args, tiles);
    if (!into_num && args.into_digits) finalize_rows(ctx, args, row, rows);
  }
}

SumsArgs sums_args(const Problem& p, const Shape& s, const Prepared& prepared, int64_t* den) {
  SumsArgs args{};
  args.shape = s;
  args.prepared = prepared;
  args.problem = p;
  args.den = den;
  return args;
}

}  // namespace

namespace tensor_core {

void rowmax(const Context& ctx, Engine engine, const Problem& problem, double* rowmax) {
  engine = engine_for(engine, problem);
  const Shape s = shape_of(problem, engine);
  if (s.heads * s.rows == 0) return;
  const Prepared prepared = prepare(ctx, engine, problem, s, false);
  launch_scores(ctx, engine, scores_args(problem, s, prepared), s.heads * (s.rows_pad / kRowPad), false);
  export_rowmax(ctx, s, prepared, rowmax);
}

namespace {

// The sums under `given` row maxima; with `raised` these are a lower bound, and become the maxima of it and these keys.
void accumulate(const Context& ctx, Engine engine, const Problem& problem, const double* given, double* raised,
                int64_t* num, int64_t* den) {
  engine = engine_for(engine, problem);
  const Shape s = shape_of(problem, engine);
  if (s.heads * s.rows == 0) return;
  const Prepared prepared = prepare(ctx, engine, problem, s, true);
  import_rowmax(ctx, s, prepared, given);
  SumsArgs args = sums_args(problem, s, prepared, den);
  args.digits = num;
  check(cudaMemsetAsync(num, 0, s.heads * s.rows * s.dims * kDigits * sizeof(int64_t), stream_of(ctx)),
        "cudaMemsetAsync");
  check(cudaMemsetAsync(den, 0, s.heads * s.rows * sizeof(int64_t), stream_of(ctx)), "cudaMemsetAsync");
  run_chunks(ctx, engine, problem, s, args, plan_of(ctx, engine, problem, s), raised == nullptr);
  patch_specials(ctx, args);
  finish_num(ctx, args);
  if (raised != nullptr) export_rowmax(ctx, s, prepared, raised);
}

}  // namespace

void accumulate(const Context& ctx, Engine engine, const Problem& problem, const double* rowmax, int64_t* num,
                int64_t* den) {
  accumulate(ctx, engine, problem, rowmax, nullptr, num, den);
}

void accumulate_last(const Context& ctx, Engine engine, const Problem& problem, const double* others, double* rowmax,
                     int64_t* num, int64_t* den) {
  accumulate(ctx, engine, problem, others, rowmax, num, den);
}

void forward(const Context& ctx, Engine engine, const Problem& problem, const MutableView& out, double* rowmax,
             int64_t* den) {
  engine = engine_for(engine, problem);
  const Shape s = shape_of(problem, engine);
  if (s.heads * s.rows == 0) return;
  const Prepared prepared = prepare(ctx, engine, problem, s, true);
  SumsArgs args = sums_args(problem, s, prepared, den);
  args.out = out;
  run_chunks(ctx, engine, problem, s, args, plan_of(ctx, engine, problem, s), false);
  patch_specials(ctx, args);
  export_rowmax(ctx, s, prepared, rowmax);
}

}  // namespace tensor_core
}  // namespace det_attn::cuda
