// A product of many tokens as two launches: HEAD has most of them, TAIL the rest and begins when every thread block of
// HEAD has, on the SMs that its last wave leaves free (linear.py). Without these macros nothing is added.
#ifndef BESIDE_CUH
#define BESIDE_CUH

#include "ptx.cuh"

#if HEAD
constexpr bool READ_AGAIN = true;  // TAIL finds weights in L2
#else
constexpr bool READ_AGAIN = false;
#endif

INLINE void let_tail_begin() {
#if HEAD
    begin_next();
#endif
}

// What comes behind TAIL waits for TAIL alone, so TAIL does not end before HEAD. One thread block waits: the others
// leave their SMs to those of TAIL that have not begun.
INLINE void end_behind_head() {
#if TAIL
    if (blockIdx.x + 1 == gridDim.x) wait_for_launch_before();
#endif
}

#endif
