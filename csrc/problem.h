// What one attention call is: views of the tensors, sizes, masks, modifiers and the precision. Plain structs for host
// and device; no torch types. Implements docs/contract.md's shapes (section 1), masks (2, 10), modifiers (10) and
// dropout (11).
#pragma once

#include "contract.h"

namespace det_attn {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

DET_HD int element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// A [batch, heads, length, head_dim] tensor in elements of `dtype`; the last dimension is dense.
// Strides are in elements, may be zero or negative, and may exceed 2^31.
struct View {
  const void* data;
  int64_t stride_batch, stride_head, stride_row;
  DType dtype;
};
struct MutableView {
  void* data;
  int64_t stride_batch, stride_head, stride_row;
  DType dtype;
};

DET_HD float bfloat16_to_float(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }

// Exact: every float16, denormals included, is a float32.
DET_HD float float16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // As the bits of a float32 the magnitude is too small by 2^112; multiplying is exact, denormals too.
  const float value = mul_f32(float_of(magnitude << 13), float_of(0x77800000u));
  return float_of(sign) + value == 0.0f ? float_of(sign) : (sign ? -value : value);
}

DET_HD float load_element(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  const uint16_t h = static_cast<const uint16_t*>(data)[index];
  return dtype == DType::kBFloat16 ? bfloat16_to_float(h) : float16_to_float(h);
}

// One rounding, to nearest even, of the float32 output to the output's dtype (section 6). NaN stays a quiet NaN.
DET_HD uint16_t float_to_bfloat16(float x) {
#if defined(__CUDA_ARCH__)
  const uint32_t u = __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
#endif
  if (x != x) return 0x7fc0u;
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
DET_HD uint16_t float_to_float16(float x) {
#if defined(__CUDA_ARCH__)
  const uint32_t u = __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
#endif
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and up round to infinity
  if (magnitude < 0x38800000u) {                         // below 2^-14: the result is a float16 denormal
    // |x| * 2^24 is exact and below 2^10, so rne gives the denormal's integer.
    return sign | static_cast<uint16_t>(rne(mul_f64(static_cast<double>(float_of(magnitude)), pow2(24))));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

DET_HD void store_element(void* data, int64_t index, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else {
    const bool bf16 = dtype == DType::kBFloat16;
    static_cast<uint16_t*>(data)[index] = bf16 ? float_to_bfloat16(value) : float_to_float16(value);
  }
}

// A query's keys are one interval of local key indices, so tiles outside it are skipped; the bias may mask single pairs
// within. Keys are counted locally (0 is the first row of K); global positions enter through `diagonal`.
struct Mask {
  int64_t kv_lo, kv_hi;   // the keys of this call, 0 <= kv_lo <= kv_hi <= kv_len
  int64_t diagonal;       // a query's own place among the local keys is query + diagonal  (q_offset - kv_offset)
  int64_t left, right;    // keys place - left .. place + right, causal: right <= 0; kUnlimited where there is no end
  const int32_t* ranges;  // section 10, or null: [batch or 1][q_len][range_columns], two or three columns
  int64_t ranges_batch;   // integers from batch to batch
  int range_columns;      // 2: begin, end; 3: the query's place too, instead of query + diagonal
  int64_t range_reach;    // what the caller says of `ranges`: n consecutive queries of a head attend keys of fewer than
                          // range_reach + n places, as under a window of left + right = range_reach; or kUnlimited
  int64_t first_key;      // what local key 0 is to `ranges`

  // |diagonal| <= 2^60 and left, right <= 2^61: no sum of them overflows, and no end that far is met.
  static constexpr int64_t kUnlimited = int64_t(1) << 61;
  static constexpr int64_t kFarthest = int64_t(1) << 60;

  DET_MEMBER int64_t clamped(int64_t key) const { return key < kv_lo ? kv_lo : (key < kv_hi ? key : kv_hi); }
  DET_MEMBER const int32_t* range(int64_t batch, int64_t query) const {
    return ranges + batch * ranges_batch + query * range_columns;
  }
  DET_MEMBER int64_t place(int64_t batch, int64_t query) const {
    return ranges != nullptr && range_columns == 3 ? range(batch, query)[2] - first_key : query + diagonal;
  }
  // Keys [begin, end) are attended, none where end <= begin; both lie within [kv_lo, kv_hi].
  DET_MEMBER int64_t begin(int64_t batch, int64_t query) const {
    const int64_t near = clamped(place(batch, query) - left);
    if (ranges == nullptr) return near;
    const int64_t given = clamped(range(batch, query)[0] - first_key);
    return given > near ? given : near;
  }
  DET_MEMBER int64_t end(int64_t batch, int64_t query) const {
    const int64_t near = clamped(place(batch, query) + right + 1);
    if (ranges == nullptr) return near;
    const int64_t given = clamped(range(batch, query)[1] - first_key);
    return given < near ? given : near;
  }
};

// One query and one key, which the query's interval holds. head is the query's.
struct Pair {
  int64_t batch, head, query, key;
};

// Section 10's bias as a view of [batch, q_heads, q_len, kv_len]; strides in elements, 0 where it is broadcast.
struct Bias {
  const void* data;  // null: none
  int64_t stride_batch, stride_head, stride_row, stride_key;
  DType dtype;
  bool boolean;      // one byte an element instead of dtype: 0 masks the pair, anything else leaves it

  DET_MEMBER int64_t offset(const Pair& at) const {
    return at.batch * stride_batch + at.head * stride_head + at.query * stride_row + at.key * stride_key;
  }
  DET_MEMBER float at(int64_t offset) const {
    if (!boolean) return load_element(data, offset, dtype);
    return static_cast<const uint8_t*>(data)[offset] != 0 ? 0.0f : float_of(0xff800000u);
  }
};

// Section 11. Ids are those of the whole, uncut call; they follow one another unless `rows` or `keys` lists them.
struct Dropout {
  bool on;
  uint32_t seed[2];     // low word, high word
  uint64_t threshold;
  float rescale;
  int64_t first_query, first_key, first_head;
  const int64_t* rows;  // [batch][q_len]: batch << 32 | query
  const int64_t* keys;  // [kv_len]

  DET_MEMBER int64_t row_id(int64_t batch, int64_t query, int64_t q_len) const {
    if (rows != nullptr) return rows[batch * q_len + query];
    return static_cast<int64_t>(static_cast<uint64_t>(batch) << 32 | static_cast<uint32_t>(query + first_query));
  }
  DET_MEMBER int64_t key_id(int64_t key) const { return keys != nullptr ? keys[key] : key + first_key; }
};

// What happens to a score between section 2 and section 3, and to a weight between sections 4 and 5.
struct Modifiers {
  double softcap;       // 0: none
  const float* slopes;  // ALiBi, [batch or 1][q_heads] by strides; null: none
  int64_t slopes_batch, slopes_head;
  Bias bias;
  Dropout dropout;

  DET_MEMBER bool of_scores() const { return softcap != 0.0 || slopes != nullptr || bias.data != nullptr; }
  DET_MEMBER bool any() const { return of_scores() || dropout.on; }
  DET_MEMBER double rescale() const { return dropout.on ? dropout.rescale : 1.0; }
};

struct Problem {
  int64_t batch, q_heads, kv_heads, q_len, kv_len, head_dim;
  View q, k, v;      // v is unused by rowmax
  Mask mask;
  Modifiers modifiers;
  double scale;
  Precision precision;

  DET_MEMBER int64_t kv_head(int64_t q_head) const { return q_head / (q_heads / kv_heads); }
};

// Section 10, first half: S after the softcap, which its gradient needs.
DET_HD int64_t capped_score(const Problem& p, int64_t s) {
  const double c = p.modifiers.softcap;
  return c == 0.0 ? s : static_cast<int64_t>(softcap_of(static_cast<double>(s), c));
}

// Section 10, second half: the final S of a capped one; kScoreMasked, or kScorePoisoned.
DET_HD int64_t shifted_score(const Problem& p, int64_t capped, const Pair& at) {
  const Modifiers& m = p.modifiers;
  double s = static_cast<double>(capped), bias = 0.0;
  if (m.bias.data != nullptr) {
    const double b = m.bias.at(m.bias.offset(at));
    if (b == double_of(0xfff0000000000000ull)) return kScoreMasked;
    if (!is_finite(b)) return kScorePoisoned;
    bias = score_from(b);
  }
  if (m.slopes != nullptr) {
    const double slope = m.slopes[at.batch * m.slopes_batch + at.head * m.slopes_head];
    if (!is_finite(slope)) return kScorePoisoned;
    const int64_t ahead = p.mask.place(at.batch, at.query) - at.key;
    s = add_score(s, alibi_of(slope, static_cast<double>(ahead < 0 ? -ahead : ahead)));
  }
  return static_cast<int64_t>(add_score(s, bias));
}

// Section 10: the final S of an attended pair from that of section 2.
DET_HD int64_t modified_score(const Problem& p, int64_t s, const Pair& at) {
  return p.modifiers.of_scores() ? shifted_score(p, capped_score(p, s), at) : s;
}

// Section 11: the four random words of keys id & ~3 to id | 3 under one query; is_kept() takes word id & 3.
// row_id is Dropout::row_id(), head the call's.
DET_HD void dropout_words(const Dropout& d, int64_t row_id, int64_t head, int64_t key_id, uint32_t (&words)[4]) {
  const uint64_t row = static_cast<uint64_t>(row_id);
  words[0] = static_cast<uint32_t>(static_cast<uint64_t>(key_id) >> 2);
  words[1] = static_cast<uint32_t>(row);
  words[2] = static_cast<uint32_t>(head + d.first_head);
  words[3] = static_cast<uint32_t>(row >> 32);
  philox4x32(words, d.seed[0], d.seed[1]);
}
DET_HD void dropout_words(const Problem& p, const Pair& at, int64_t key_id, uint32_t (&words)[4]) {
  const Dropout& d = p.modifiers.dropout;
  dropout_words(d, d.row_id(at.batch, at.query, p.q_len), at.head, key_id, words);
}

// Section 11: whether the pair's weight enters the sums. Only under dropout.
DET_HD bool is_kept(const Problem& p, const Pair& at) {
  const int64_t id = p.modifiers.dropout.key_id(at.key);
  uint32_t words[4];
  dropout_words(p, at, id, words);
  return words[id & 3] >= p.modifiers.dropout.threshold;
}

// What the backward stages see (section 8): the call, the gradient of its output, and what the forward pass kept.
struct Gradient {
  Problem problem;        // all of q, k, v
  View grad;              // dO [batch, q_heads, q_len, head_dim], any input dtype
  View out;               // the float32 output over all keys, before any further rounding; q's shape
  const double* rowmax;   // public form, over all keys, [batch, q_heads, q_len]
  const int64_t* den;     // over all keys, [batch, q_heads, q_len]
};

}  // namespace det_attn
