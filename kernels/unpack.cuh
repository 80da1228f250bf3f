// Unpacks the codes of packed weights (packing.py) into tensor core operands of the activations' type.
//
// Compile-time constants: BITS 2, 4 or 8; SYMMETRIC; BF16 (else fp16).
//
// A lane's uint4 is its share of a packed block of 16 rows and KB columns: registers r = 4 * step + i, where i = 0 to 3
// are a0 to a3 of the A operand of `mma` (i % 2: row g or g + 8), PER_WORD of them in a word. Codes are masked in place
// and read as subnormal numbers: code * 2^-24 (fp16) or code * 2^-133 (bf16), times 2^2, 2^4 or 2^6 for fields that
// begin at bit 2, 4 or 6. One fma turns them into (code - zero) * 2^-DOWN, exactly unless the type rounds the zero;
// multiplying by scale * 2^DOWN gives the weight.
#ifndef UNPACK_CUH
#define UNPACK_CUH

#include "ptx.cuh"

#if BF16
constexpr u32 FIELD = 0x7F00, EXPONENT = 7, DOWN = 6;  // 2^127 lifts code * 2^-133 to code * 2^-6
#else
constexpr u32 FIELD = 0x7800, EXPONENT = 10, DOWN = 9;  // 2^15 lifts code * 2^-24 to code * 2^-9
#endif
constexpr u32 TWICE = 0x00010001;    // in both halves
constexpr int KB = 256 / BITS;       // columns of a packed block of 16 rows
constexpr int PER_WORD = 16 / BITS;  // registers of codes in a 32-bit word
constexpr int ZEROS = SYMMETRIC ? 1 : 2;

// Scale and zero of rows g and g + 8 of a row tile in one group; for symmetric weights one word with both scales.
// `row` is 0 for row g, 1 for row g + 8.
struct alignas(4 * ZEROS) Scales {
    u32 rows[ZEROS];
};
INLINE float scale(const Scales& s, int row) {
    return half_to_float(SYMMETRIC && row ? s.rows[0] >> 16 : s.rows[row * (ZEROS - 1)]);
}
INLINE float zero(const Scales& s, int row) {
    return SYMMETRIC ? 1 << (BITS - 1) : half_to_float(s.rows[row * (ZEROS - 1)] >> 16);
}

struct Factors {            // of one row in one group, in both halves
    u32 minus_zero, scale;  // times 2^-DOWN, times 2^DOWN
};
INLINE Factors factors(const Scales& s, int row) {
    const float z = zero(s, row) / -(1 << DOWN), f = scale(s, row) * (1 << DOWN);
    return {to_halves<BF16>(z, z), to_halves<BF16>(f, f)};
}

// Register r of a word: two neighbouring columns of one row.
INLINE u32 unpack(u32 word, int r, u32 minus_zero) {  // (code - zero) * 2^-DOWN
    const int shift = BITS * r, fine = shift & 7;
    const u32 codes = (word >> (shift - fine)) & (((1u << BITS) - 1) << fine) * TWICE;
    return multiply_add<BF16>(codes, (FIELD - (fine << EXPONENT)) * TWICE, minus_zero);
}
INLINE u32 unpack(u32 word, int r, Factors f) {  // (code - zero) * scale
    return multiply<BF16>(unpack(word, r, f.minus_zero), f.scale);
}

#endif
