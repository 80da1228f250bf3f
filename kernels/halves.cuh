// 16-bit values as float16 operands: bytes of a word that are its halves, and bfloat16 inputs scaled to float16's range.
#ifndef HALVES_CUH
#define HALVES_CUH

#include "ptx.cuh"

INLINE u32 upper_bytes(u32 v) { return __byte_perm(v, 0, 0x4341); } // v >> 8 & 0x00FF00FF
INLINE u32 lower_bytes(u32 v) { return v & 0x00FF00FF; }

// The power of two that brings the largest bfloat16 value of a warp to 2^14 ... 2^15, and its inverse; only values of
// about 2^-29 of the largest or less are then rounded. most: the largest magnitudes of the lane, in both halves.
struct Power {
    float factor, inverse;
};
INLINE Power power_of(u32 most) {
    const u32 exponent = max(__reduce_max_sync(~0u, max(most >> 16, most & 0xFFFF)) >> 7, 15u);
    return {__uint_as_float(268 - exponent << 23), __uint_as_float(exponent - 14 << 23)};
}

#endif
