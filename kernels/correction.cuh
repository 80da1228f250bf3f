// What an error compensator adds to an output of `wna16_gemv` in its epilogue: a row of B, int8 [.., RANK], times the
// latent vector that the launch before it makes (compensated_gemv.cu). RANK is a multiple of 16.
#ifndef CORRECTION_CUH
#define CORRECTION_CUH

#include "ptx.cuh"

constexpr u32 NO_OUTPUT = ~0u; // of a thread that has none

struct Spans { // outputs from `first` to `end` have a compensator; up to three, one behind another in `up`
    u32 first[3], end[3];
};

struct Correction {
    const char *codes;
    const float *latent;
    uint4 words[RANK / 16];
    bool any = false;

    // Finds the row of B of an output, and asks for it to be brought to L2.
    INLINE Correction(const char *up, const float *latents, u32 row, const Spans &spans) : codes(up), latent(latents) {
        u32 before = 0;
        UNROLL for (int e = 0; e < 3; e++) {
            if (row >= spans.first[e] && row < spans.end[e]) {
                any = true;
                codes = up + (u64)(before + row - spans.first[e]) * RANK;
                latent = latents + e * RANK;
            }
            before += spans.end[e] - spans.first[e];
        }
        if (any) bring_to_l2(codes);
    }
    INLINE void load() {
        if (any) UNROLL for (int i = 0; i < RANK / 16; i++) words[i] = load_early(codes + i * 16);
    }
    // The sum, once the launch before has ended.
    INLINE float value() const {
        if (!any) return 0;
        float sum[4] = {};
        UNROLL for (int i = 0; i < RANK / 4; i++) {
            const float4 four = __ldcg((const float4 *)latent + i);
            const u32 word = (&words[i / 4].x)[i % 4];
            UNROLL for (int j = 0; j < 4; j++) sum[j] += (&four.x)[j] * (float)(signed char)(word >> 8 * j);
        }
        return (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
};

#endif
