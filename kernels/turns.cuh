// The loop over stages of columns for the sources of `w4a16_gemm` that multiply with `wgmma`. With COLUMNS, those of W,
// it is unrolled over a turn of stages, behind which the rings in shared memory begin anew, so that addresses in them are
// constants: a quarter fewer instructions a stage. They have before it: SPLIT, GROUP and KS (columns of a stage of W).
#ifndef TURNS_CUH
#define TURNS_CUH

#include "ptx.cuh"

#if COLUMNS  // copies are known numbers of bytes apart, and no columns lie behind the end
constexpr bool EVEN = true;
constexpr int SLABS = COLUMNS / KS;  // stages of all columns
static_assert(COLUMNS % KS == 0 && (GROUP <= KS || COLUMNS % (SPLIT * GROUP) == 0),
              "a stage does not divide the columns, or a thread block begins within a group");
using Stage = int;  // its sums with constants are offsets of addresses
#else
constexpr bool EVEN = false;
constexpr int SLABS = 0;
using Stage = u32;
#endif
constexpr int LEAST = SLABS / SPLIT;  // stages of a thread block; of some one more if they do not divide

// Stages of a turn for rings of a and b stages: 1, which leaves the loop as it is, if they would be more than `most`.
INLINE constexpr int stages_of_turn(int a, int b, int most) {
    int both = a;
    while (both % b) both += a;
    return EVEN && both <= most ? both : 1;
}

// Whether a thread block may be done before stage u of a turn.
INLINE constexpr bool may_end(int u, int turn) {
    return turn > 1 && u > 0 && (u == LEAST % turn || (SLABS % SPLIT && u == (LEAST + 1) % turn));
}

#endif
