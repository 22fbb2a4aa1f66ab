// Byte planes: the quantised rows as the tensor cores want them. Plane p of a row is byte p of its b-bit integers, the
// top plane signed, the others unsigned, so x^ = sum_p plane_p * 2^(8p) with no carries to fix.
#pragma once

#include "common.cuh"

namespace det_attn::cuda {

// Rows are laid out in core matrices: 8 rows x 16 bytes stored together, 128 bytes in a row. That is what one ldmatrix
// phase and one wgmma operand fetch read, so shared memory needs neither padding nor a swizzle, and any 8k rows of a
// plane are one contiguous copy.
DET_HD int64_t plane_offset(int64_t row, int byte, int row_bytes) {
  return (row >> 3) * 8 * row_bytes + (byte >> 4) * 128 + (row & 7) * 16 + (byte & 15);
}

// Whether pieces of 16 bytes hold every row whole and nothing else.
DET_HD bool in_pieces(const View& x, int head_dim) {
  const int count = 16 / element_size(x.dtype);
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && head_dim % count == 0 && x.stride_batch % count == 0 &&
         x.stride_head % count == 0 && x.stride_row % count == 0;
}

// A "head" here is one (batch, key head) pair. Its query rows are those of every query head of the group, one after the
// other (row = head_in_group * q_len + query), so grouped queries fill a tile together; its keys are [kv_lo, kv_hi).
struct Shape {
  int64_t heads;        // batch * kv_heads
  int64_t rows;         // group * q_len
  int64_t rows_pad;     // to kRowPad
  int64_t tile_blocks;  // 16-row blocks that a tile of kRowPad rows has distances for: fewer if there are fewer rows
  int64_t keys;         // kv_hi - kv_lo
  int64_t keys_pad;     // to kKeyPad
  int64_t span;         // no tile of kRowPad rows attends keys further apart than this; a multiple of kKeyPad
  int dims;             // head_dim
  int dims_pad;         // query and key planes: to kDimPad
  int value_dims_pad;   // value planes: to the dims of a sums tile
  int planes;           // bytes of an operand: 3 (highest) or 2 (high)
};

// A row of a head and a key relative to kv_lo, as the call counts them.
DET_HD Pair pair_in_call(const Problem& p, int64_t head, int64_t row, int64_t key) {
  return {head / p.kv_heads, head % p.kv_heads * (p.q_heads / p.kv_heads) + row / p.q_len, row % p.q_len,
          p.mask.kv_lo + key};
}

constexpr int kPoisonedInTile = 1 << 24;  // stands for kPoisonedExponent where exponents are added

// Everything the kernels derive from the inputs once. Exponents of padding rows are kMinExponent, of poisoned query and
// key rows kPoisonedInTile.
struct Prepared {
  uint8_t* query;  // [heads][planes][rows_pad x dims_pad]
  uint8_t* key;    // [heads][planes][keys_pad x dims_pad]
  uint8_t* value;  // [heads][planes][keys_pad / kSumKeys][value_dims_pad x kSumKeys], keys permuted: value_slot()
  int32_t* query_exponent;  // [heads][rows_pad]
  int32_t* key_exponent;    // [heads][keys_pad]
  int32_t* value_exponent;  // [heads][keys_pad]: of value rows, only while shifts are made
  uint8_t*
      value_shift;  // [heads][keys_pad], keys permuted as `value`: exponent above the head's least, 0 for rows of zeros
  int32_t*
      value_range;  // [heads][2]: least and greatest exponent of nonzero value rows, INT32_MAX and INT32_MIN if none
  int32_t* value_special;  // [heads]: nonzero if a value element is not finite
  uint8_t* special_key;    // [heads][keys_pad]: 1 where the key's value row has such an element
  int64_t* rowmax;         // [heads][rows_pad], M as an integer
  int2* row_keys;          // [heads][rows_pad]: begin and end of the attended keys, relative to kv_lo; 0, 0 if none
  int64_t* row_bias;       // [heads][rows_pad]: where a row's bias of key kv_lo lies; null without a bias
  int2* block_keys;        // [heads][rows_pad / kBlockRows]: from the least begin to the greatest end, no further than
                           // `span` from tile_first; INT32_MAX, 0 if none
  int32_t* tile_first;     // [heads][rows_pad / kRowPad]: a tile's first attended key, down to a multiple of kKeyPad
};

// The C fragment of m16n8k32 gives a thread columns 2t, 2t+1 of two neighbouring 8-key blocks; as an A fragment it
// needs bytes 4t .. 4t+3. So keys of a group of 16 are stored in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
DET_HD int value_slot(int key_in_16) {
  const int half = key_in_16 >> 3, column = key_in_16 & 7;
  return (column >> 1) * 4 + half * 2 + (column & 1);
}
// The key in a slot: its inverse.
DET_HD int value_key(int slot_in_16) {
  return (slot_in_16 >> 2) * 2 + (slot_in_16 & 1) + (slot_in_16 >> 1 & 1) * 8;
}

#if defined(__CUDACC__)
// The exponent of a row that is not scaled whose largest magnitude, finite, has these bits of a float32.
__device__ __forceinline__ int exponent_of_largest(int bits) { return (bits >> 23) - 126; }

// Section 1 for rows that are not scaled, in float32 alone: x * 2^n is exact or below 2^-126, where rne gives 0 either
// way. Two factors, since n reaches 149.
struct RowScale {
  float first, second;

  __device__ __forceinline__ RowScale(int exponent, int operand_bits) {
    const int n = operand_bits - 1 - exponent;
    first = float_of(static_cast<uint32_t>((n >> 1) + 127) << 23);
    second = float_of(static_cast<uint32_t>(n - (n >> 1) + 127) << 23);
  }
  // rne(x * 2^n), which may still be 2^(operand_bits - 1).
  __device__ __forceinline__ int round(float x) const { return __float2int_rn(mul_f32(mul_f32(x, first), second)); }
};

// Byte p of four integers, in order, as plane p.
__device__ __forceinline__ void byte_planes(const uint32_t (&w)[4], uint32_t (&planes)[4]) {
  const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);  // bytes 0, 1 interleaved
  const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);  // bytes 2, 3 interleaved
  planes[0] = __byte_perm(a, b, 0x5410);
  planes[1] = __byte_perm(a, b, 0x7632);
  planes[2] = __byte_perm(c, d, 0x5410);
  planes[3] = __byte_perm(c, d, 0x7632);
}
#endif

void prepare_queries(const Context&, const Problem&, const Shape&, const Prepared&);
void prepare_tiles(const Context&, const Shape&, const Prepared&);  // block_keys and tile_first, after the queries
void prepare_keys(const Context&, const Problem&, const Shape&, const Prepared&);
void reset_values(const Context&, const Shape&, const Prepared&);  // value_range and value_special, before any values
void prepare_values(const Context&, const Problem&, const Shape&, const Prepared&);

}  // namespace det_attn::cuda
