// The tensor-core path's host side in pieces: workspace, the launches of its kernels, and what surrounds them.
// forward.cu strings them together.
#pragma once

#include "gradients.cuh"
#include "paths.h"
#include "sums.cuh"

namespace det_attn::cuda {

Shape shape_of(const Problem&, Engine);

// One file each in instances/, so that they build in parallel.
void launch_scores_highest(const Context&, const ScoresArgs&, int64_t tiles, bool given);
void launch_scores_high(const Context&, const ScoresArgs&, int64_t tiles, bool given);
// With score modifiers; the others know none.
void launch_scores_modified_highest(const Context&, const ScoresArgs&, int64_t tiles, bool given);
void launch_scores_modified_high(const Context&, const ScoresArgs&, int64_t tiles, bool given);
void launch_scores_wgmma_highest(const Context&, const ScoresArgs&, int64_t tiles, bool given);
void launch_scores_wgmma_high(const Context&, const ScoresArgs&, int64_t tiles, bool given);
void launch_scores_direct_highest(const Context&, const ScoresArgs&, int64_t tiles, bool given);
void launch_scores_direct_high(const Context&, const ScoresArgs&, int64_t tiles, bool given);
void launch_sums_highest(const Context&, const SumsArgs&, int64_t tiles);
void launch_sums_high(const Context&, const SumsArgs&, int64_t tiles);
// Under dropout; the others keep every weight.
void launch_sums_dropout_highest(const Context&, const SumsArgs&, int64_t tiles);
void launch_sums_dropout_high(const Context&, const SumsArgs&, int64_t tiles);
void launch_sums_hopper_highest(const Context&, const SumsArgs&, int64_t tiles);
void launch_sums_hopper_high(const Context&, const SumsArgs&, int64_t tiles);
void launch_sums_direct_highest(const Context&, const SumsArgs&, int64_t tiles);
void launch_sums_direct_high(const Context&, const SumsArgs&, int64_t tiles);
void launch_pairs_highest(const Context&, const PairsArgs&);
void launch_pairs_high(const Context&, const PairsArgs&);
void launch_pairs_wgmma_highest(const Context&, const PairsArgs&);
void launch_pairs_wgmma_high(const Context&, const PairsArgs&);
// With modifiers; the others know none.
void launch_pairs_modified_highest(const Context&, const PairsArgs&);
void launch_pairs_modified_high(const Context&, const PairsArgs&);
void launch_gradient_sums_highest(const Context&, const GradientSumsArgs&);
void launch_gradient_sums_high(const Context&, const GradientSumsArgs&);
void launch_gradient_sums_hopper_highest(const Context&, const GradientSumsArgs&);
void launch_gradient_sums_hopper_high(const Context&, const GradientSumsArgs&);

// ---- edges.cu: what is not a matrix product ----
// Public rowmax [heads * rows] <-> prepared.rowmax.
void export_rowmax(const Context&, const Shape&, const Prepared&, double* rowmax);
void import_rowmax(const Context&, const Shape&, const Prepared&, const double* rowmax);
// Rows of digits and den to the output. Rows are counted from `first_row` over heads * rows.
void finalize_rows(const Context&, const SumsArgs&, int64_t first_row, int64_t count);
// Section 7: the special counts of attended keys, into the output or (out.data == nullptr) into digit 11 of
// args.digits; then poisoned rows, and the normal form.
void patch_specials(const Context&, const SumsArgs&);
void finish_num(const Context&, const SumsArgs&);

}  // namespace det_attn::cuda
